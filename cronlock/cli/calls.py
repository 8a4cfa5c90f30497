"""A call of a task, as `run` and `enqueue` are given it: the app, the task, its payload."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cronlock.cli.options import require_app

if TYPE_CHECKING:
    from cronlock.app import Cronlock

Task = Annotated[str | None, typer.Argument(metavar="TASK", help="The task's name.", show_default=False)]
Payload = Annotated[
    str | None,
    typer.Option(metavar="JSON", help="The payload, a JSON object; - reads it from stdin.", show_default=False),
]


def read(
    app: str | None, task: str | None, payload: str | None, example: str
) -> tuple["Cronlock", str, dict[str, Any]]:
    """The app, loaded, the name of its task, and the payload; with one argument, the task of CRONLOCK_APP.

    Raises `BadParameter` with the example of a command if no task is named, `UnknownTask` if the app has none of that
    name, `PayloadError` for a payload that is none, and what loading the app raises.
    """
    if task is None and app is not None and ":" not in app:  # which an app's name has, and a task's has not
        app, task = None, app
    if task is None and app is None:
        raise typer.BadParameter(f"name the app and the task, such as: {example}")
    reference = require_app(app)
    from cronlock import jsontext
    from cronlock.loading import load

    if task is None:
        known = ", ".join(sorted(each.name for each in load(reference).tasks)) or "none"
        raise typer.BadParameter(f"no task was given: name one of {reference}, after it; known: {known}")
    text = sys.stdin.buffer.read() if payload == "-" else (payload or "").encode()
    cron = load(reference)
    cron.tasks.get(task)
    return cron, task, jsontext.parse_object(text)
