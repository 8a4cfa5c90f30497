"""`cronlock pause` and `cronlock resume`."""

from typing import Annotated, NoReturn

import typer

from cronlock.cli import connecting, exits, output
from cronlock.cli.options import Json

Task = Annotated[str, typer.Argument(metavar="TASK", help="The task's name.", show_default=False)]


def pause(
    task: Task,
    reason: Annotated[str | None, typer.Option(help="Why, for whoever looks.", show_default=False)] = None,
    is_json: Json = False,
) -> None:
    """Have calls of TASK answered as skipped (`paused`) from now on, by every server.

    A run that is under way goes on; see `cronlock runs cancel`.

    Example: `cronlock pause sync-inventory --reason "supplier is down"`
    """
    settings = connecting.settings()
    from cronlock import stats, steering

    with connecting.connect(settings) as connection:
        schema = settings.schema_name
        row = steering.pause(connection, schema, task, by=connecting.operator(), reason=reason)
        if row is None:
            refuse(task, stats.task_names(connection, schema))
    if is_json:
        output.document(row)
    else:
        print(f"{task} is paused: its calls are skipped. Undo: cronlock resume {task}")


def resume(task: Task, is_json: Json = False) -> None:
    """Let calls of TASK run again.

    Example: `cronlock resume sync-inventory`
    """
    settings = connecting.settings()
    from cronlock import stats, steering

    with connecting.connect(settings) as connection:
        row = steering.resume(connection, settings.schema_name, task)
        if row is None:
            refuse(task, stats.task_names(connection, settings.schema_name))
    if is_json:
        output.document(row)
    elif row["was_paused_at"] is None:
        print(f"{task} was not paused")
    else:
        print(f"{task} runs again (it was paused {output.when(row['was_paused_at'])} by {row['was_paused_by']})")


def refuse(task: str, known: list[str]) -> NoReturn:
    """End with 3, naming the tasks there are."""
    names = ", ".join(known) or "none; a task is known once a server with it was started"
    exits.stop(exits.NOT_FOUND, f"there is no task {task!r} in this database; known: {names}")
