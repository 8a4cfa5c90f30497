"""`module:attribute` -> the `Cronlock` it names, with a message for each way in which it may not."""

import importlib
import inspect
import os
import re
import sys
import traceback
from types import ModuleType

from cronlock.app import Cronlock
from cronlock.errors import ConfigError, CronlockError

REFERENCE = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)", re.ASCII)
EXAMPLE = "write module:attribute, such as main:cron for `cron = Cronlock()` in main.py"


def load(reference: str) -> Cronlock:
    """Import the module and give the `Cronlock`; the current directory is looked in first.

    The attribute may be dotted, and may be a function without arguments that gives the `Cronlock`.

    Raises `ConfigError` if the reference is malformed, if there is no such module, if the module itself breaks
    (its traceback is in the message), and if the attribute is missing or is something else.
    """
    match = REFERENCE.fullmatch(reference)
    if match is None or match[1].endswith(".py"):
        raise ConfigError(f"{reference!r} does not name an app: {EXAMPLE}{path_hint(reference)}")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    module = import_module(match[1], here)
    return find(module, match[1], match[2])


def path_hint(reference: str) -> str:
    """What was probably meant by a file's path."""
    path, _, attribute = reference.partition(":")
    if not path.endswith(".py"):
        return ""
    module = path.removesuffix(".py").strip("./").replace("/", ".")
    return f"; did you mean {module}:{attribute or 'cron'}?"


def import_module(name: str, here: str) -> ModuleType:
    """Import a module of the user's; raises `ConfigError`."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"there is no module {error.name!r} in {here}, nor installed; start where it is, or set PYTHONPATH"
            ) from None
        told = broken(name, error)
    except CronlockError as error:
        told = ConfigError(f"while importing {name}: {error}")
    except Exception as error:
        told = broken(name, error)
    raise told


def broken(name: str, error: Exception) -> ConfigError:
    """The error for a module that cannot be imported, with the part of the traceback that is the user's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    return ConfigError(f"{text.rstrip()}\n\nthe module {name!r} was found, but cannot be imported (see above)")


def is_ours(filename: str) -> bool:
    """Whether a frame belongs to importing, not to what is imported."""
    return filename == __file__ or filename.startswith("<frozen ") or os.path.dirname(filename) == IMPORTLIB


IMPORTLIB = os.path.dirname(importlib.__file__)


def find(module: ModuleType, name: str, attribute: str) -> Cronlock:
    """The `Cronlock` that an attribute is, or gives when it is called; raises `ConfigError`."""
    found: object = module
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise ConfigError(f"the module {name!r} has no attribute {attribute!r}{others(module, name)}") from None
    if not isinstance(found, Cronlock) and is_factory(found):
        found = found()  # type: ignore[operator]  # is_factory looked
    if isinstance(found, Cronlock):
        return found
    raise ConfigError(
        f"{name}:{attribute} is a {type(found).__name__}, not a Cronlock{others(module, name)}."
        f" (An application that mounts one is served by its own server: uvicorn {name}:{attribute})"
    )


def is_factory(found: object) -> bool:
    """Whether it can be called with no arguments (an ASGI application cannot)."""
    if not callable(found):
        return False
    try:
        inspect.signature(found).bind()
    except (TypeError, ValueError):
        return False
    return True


def others(module: ModuleType, name: str) -> str:
    """The Cronlocks that the module does have, as a hint."""
    known = [f"{name}:{key}" for key, value in vars(module).items() if isinstance(value, Cronlock)]
    return f"; it has {', '.join(known)}" if known else ""
