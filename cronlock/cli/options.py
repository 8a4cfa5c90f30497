"""The arguments and options that several commands share."""

import os
from datetime import timedelta
from typing import Annotated

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


def app_of(given: str | None) -> str | None:
    """The app that was given, else the one that CRONLOCK_APP names."""
    return given or os.environ.get("CRONLOCK_APP", "").strip() or None


def require_app(given: str | None) -> str:
    """The same; raises `ConfigError` if there is neither."""
    from cronlock.errors import ConfigError

    if app := app_of(given):
        return app
    raise ConfigError("no app was given: name it as module:attribute, such as main:cron, or set CRONLOCK_APP")


def duration(text: str, option: str) -> timedelta:
    """An option's duration; raises `ConfigError` with an example."""
    from cronlock.errors import ConfigError
    from cronlock.units import LONGEST_RETENTION, parse_duration

    try:
        return parse_duration(text, longest=LONGEST_RETENTION)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
