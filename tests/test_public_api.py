"""What the package promises to keep: its names, their documentation, its types."""

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cronlock

NAMES = [
    "Cancel",
    "ConfigError",
    "Cronlock",
    "CronlockError",
    "Enqueued",
    "Failure",
    "Holder",
    "IdempotencyKeyInUse",
    "IdempotencyKeyReused",
    "Invalidation",
    "LockLost",
    "NotInTransaction",
    "Notify",
    "Outcome",
    "PayloadError",
    "PayloadInvalid",
    "RegistrationError",
    "Retry",
    "Run",
    "StatementRefused",
    "TransactionEnded",
    "TransactionRefused",
    "Unavailable",
    "UnknownTask",
    "VersionTable",
    "Webhook",
]
SIGNALS = {"Cancel", "Retry"}
FOR_OUR_OWN_PARTS = {"start_call", "start_queued", "start_enqueue", "start_work", "is_touched", "as_json"}
"""Called by the route, the runner and the command line, not by users."""


def members(kind: type) -> dict[str, Any]:
    """The public methods and properties of a class, and the attributes that its methods or its fields make."""
    made = dict(inspect.getmembers(kind, lambda member: callable(member) or isinstance(member, property)))
    if dataclasses.is_dataclass(kind):
        made |= {field.name: field for field in dataclasses.fields(kind)}
    else:
        made |= dict.fromkeys(re.findall(r"^        self\.([a-z]\w*) =", inspect.getsource(kind), re.MULTILINE))
    return {name: member for name, member in made.items() if not name.startswith("_")}


def test_the_exported_names_are_exactly_these() -> None:
    assert cronlock.__all__ == NAMES
    assert {name for name in dir(cronlock) if not name.startswith("_")} >= set(NAMES)


def test_every_exported_name_can_be_imported_by_star() -> None:
    found: dict[str, Any] = {}
    exec("from cronlock import *", found)
    assert {name for name in found if not name.startswith("__")} == set(NAMES)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Worker'"):
        _ = cronlock.Worker


def test_importing_the_package_loads_no_driver() -> None:
    code = (
        "import cronlock, sys; print([name for name in ('psycopg', 'sqlalchemy', 'starlette') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_error_but_the_signals_has_one_root() -> None:
    kinds = {name: getattr(cronlock, name) for name in NAMES}
    raised = {name for name, kind in kinds.items() if issubclass(kind, BaseException)}
    assert {name for name in raised if not issubclass(kinds[name], cronlock.CronlockError)} == SIGNALS


@pytest.mark.parametrize("name", NAMES)
def test_every_exported_name_says_what_it_is(name: str, project: Path) -> None:
    kind = getattr(cronlock, name)
    assert kind.__doc__
    assert not kind.__doc__.startswith(f"{name}("), "that is the docstring which a dataclass makes for itself"
    assert f"`{name}`" in (project / "docs/tasks.md").read_text()


@pytest.mark.parametrize("name", ["Cronlock", "Run", "Enqueued", "Outcome", "Failure", "Holder"])
def test_every_public_member_is_documented(name: str, project: Path) -> None:
    kind = getattr(cronlock, name)
    text = (project / "docs/tasks.md").read_text()
    told = set(re.findall(r"`(?:run\.)?(\w+)(?:\([^`]*\))?`", text)) | set(re.findall(r"`run\.(\w+)", text))
    found = members(kind)
    assert found
    assert set(found) - FOR_OUR_OWN_PARTS - told == set()
    called = {name: member for name, member in found.items() if callable(member) or isinstance(member, property)}
    undocumented = {name for name, member in called.items() if not member.__doc__}
    assert undocumented == set()


def test_the_types_are_part_of_the_package(project: Path) -> None:
    assert (Path(inspect.getfile(cronlock)).parent / "py.typed").is_file()


def test_the_version_is_that_of_the_changelog_and_of_the_project(project: Path) -> None:
    version = re.escape(cronlock.__version__)
    assert re.search(rf"^## \[{version}\]", (project / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert re.search(rf'^version = "{version}"', (project / "pyproject.toml").read_text(), re.MULTILINE)
