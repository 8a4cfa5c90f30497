"""What a command ends with, and which error means which."""

import os
import sys
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

OK = 0
FAILED = 1
USAGE = 2
NOT_FOUND = 3
UNREACHABLE = 4
SCHEMA = 5
SKIPPED = 6
INTERRUPTED = 130

CODES = """
**Exit codes:** 0 ok · 1 what was asked for failed (the run failed, timed out, was cancelled or lost; the migration
failed) · 2 wrong usage or setting · 3 not found (task, run) · 4 database unreachable · 5 schema missing or of another
version · 6 skipped, with `run --fail-on-skip` · 130 interrupted.
"""


def stop(code: int, message: str) -> NoReturn:
    """End the command with a sentence on stderr."""
    print(f"cronlock: {message}", file=sys.stderr)
    raise typer.Exit(code)


class Commands(TyperGroup):
    """The commands; an expected error of any of them is one sentence and an exit code, never a traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        texts = [readable(each, before) for before, each in zip(["", *args], args, strict=False)]
        return super().parse_args(ctx, texts)

    def invoke(self, ctx: Any) -> Any:
        from cronlock.errors import CronlockError

        try:
            return super().invoke(ctx)
        except CronlockError as error:
            stop(code(error), told(error))
        except KeyboardInterrupt:
            stop(INTERRUPTED, "interrupted")


def readable(argument: str, before: str) -> str:
    """An argument as the text that it is in UTF-8, whatever the locale says; ends with 2 if it is none.

    `before` is the argument before it, by which it is named if that is an option.
    """
    if argument.isprintable() or argument.isascii():
        return argument
    try:
        return os.fsencode(argument).decode()
    except UnicodeError:
        told = argument.encode(errors="surrogateescape").decode(errors="backslashreplace")
    given, is_one, _ = told.partition("=")
    option = given if is_one and given.startswith("--") else before
    of = f" of {option}" if option.startswith("-") else ""
    stop(USAGE, f"the argument{of} is not UTF-8: {told[:60]}")


def code(error: Exception) -> int:
    """The exit code that an error means."""
    from cronlock.errors import ConfigError, PayloadError, PayloadInvalid, RegistrationError, Unavailable, UnknownTask

    match error:
        case UnknownTask():
            return NOT_FOUND
        case Unavailable():
            return SCHEMA if error.reason.startswith("schema_") else UNREACHABLE
        case ConfigError() | RegistrationError() | PayloadError() | PayloadInvalid():
            return USAGE
    return FAILED


def told(error: Exception) -> str:
    """An error as people are told it."""
    from cronlock.errors import PayloadInvalid

    if isinstance(error, PayloadInvalid):
        return "\n".join([f"{error}:", *(f"  {wrong['field']}: {wrong['message']}" for wrong in error.fields)])
    return str(error)
