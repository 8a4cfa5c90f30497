"""The arguments and options that several commands share."""

import os
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON document instead of a table.")]
App = Annotated[
    str | None,
    typer.Argument(
        metavar="APP",
        help="Where your tasks are: module:attribute of a Cronlock, such as main:cron. [env var: CRONLOCK_APP]",
        show_default=False,
    ),
]

OfTask = Annotated[
    str | None, typer.Option("--task", "-t", metavar="TASK", help="Only of this task.", show_default=False)
]
Limit = Annotated[int, typer.Option("--limit", "-n", metavar="N", min=1, max=10_000, help="How many at most.")]


def number(what: str) -> Any:
    """The argument that names a `run` or a `job`."""
    return typer.Argument(metavar="ID", help=f"The {what}'s number.", min=1, show_default=False)


def before(what: str) -> Any:
    """The option that continues a list of runs or of jobs."""
    return typer.Option(metavar="ID", help=f"Only those older than this {what}.", show_default=False)


def status(statuses: Sequence[str]) -> Any:
    """The option that chooses one of these, which `require_status` checks."""
    return typer.Option("--status", "-s", metavar="STATUS", help=f"Only {', '.join(statuses)}.", show_default=False)


def require_status(given: str | None, statuses: Sequence[str]) -> None:
    """Raise `BadParameter` for a status that is none of these."""
    if given is not None and given not in statuses:
        raise typer.BadParameter(f"{given!r} is none of {', '.join(statuses)}", param_hint="--status")


def app_of(given: str | None) -> str | None:
    """The app that was given, else the one that CRONLOCK_APP names."""
    return given or os.environ.get("CRONLOCK_APP", "").strip() or None


def require_app(given: str | None) -> str:
    """The same; raises `ConfigError` if there is neither."""
    from cronlock.errors import ConfigError

    if app := app_of(given):
        return app
    raise ConfigError("no app was given: name it as module:attribute, such as main:cron, or set CRONLOCK_APP")


def duration(text: str, option: str, *, longest: timedelta | None = None) -> timedelta:
    """An option's duration; raises `ConfigError` with an example."""
    from cronlock.errors import ConfigError
    from cronlock.units import LONGEST_RETENTION, parse_duration

    try:
        return parse_duration(text, longest=longest or LONGEST_RETENTION)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


def moment(text: str, option: str) -> datetime:
    """An option's time, with its zone; raises `ConfigError` with an example."""
    from cronlock.errors import ConfigError
    from cronlock.units import parse_moment

    try:
        return parse_moment(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
