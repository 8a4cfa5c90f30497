"""`cronlock runs list | show | why | cancel`."""

from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from cronlock.cli import cancelling, connecting, exits, options, output
from cronlock.cli.cancelling import CANCEL_WAIT
from cronlock.cli.options import Json, duration

if TYPE_CHECKING:
    from cronlock.stats import Connection

FORCE_WAIT = 5.0
COLUMNS = ("run", "task", "status", "started", "took", "caller", "host", "what")
STATUSES = ("running", "completed", "failed", "timed_out", "cancelled", "lost", "skipped")

Id = Annotated[int, options.number("run")]

app = typer.Typer(no_args_is_help=True, help="List the runs, look at one, ask why, cancel one.")


@app.command("list")
def list_runs(
    task: options.OfTask = None,
    status: Annotated[str | None, options.status(STATUSES)] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Only those that started in the last 30m, 24h, 7d.", show_default=False),
    ] = None,
    before: Annotated[int | None, options.before("run")] = None,
    limit: options.Limit = 50,
    is_json: Json = False,
) -> None:
    """List the runs, newest first; skipped calls are runs too.

    Examples: `cronlock runs list --task sync-inventory --since 24h` · `cronlock runs list -s failed -n 10 --json`
    """
    options.require_status(status, STATUSES)
    span_since = duration(since, "--since") if since is not None else None
    settings = connecting.settings()
    from cronlock import stats
    from cronlock.explain import listed, span

    with connecting.connect(settings) as connection:
        schema = settings.schema_name
        rows = stats.runs(connection, schema, task=task, status=status, since=span_since, before=before, limit=limit)
        if not rows and task is not None and task not in (known := stats.task_names(connection, schema)):
            output.note(f"there is no task {task!r} in this database; known: {', '.join(known) or 'none'}")
    if is_json:
        output.document({"runs": [listed(row) for row in rows]})
        return
    output.table(
        COLUMNS,
        [
            (
                row["run_id"],
                row["task"],
                row["status"],
                row["started_at"],
                span(row["duration_ms"]),
                row["caller"],
                row["host"],
                what(row),
            )
            for row in rows
        ],
    )
    output.older(rows, limit, "run_id")


def what(row: dict[str, Any]) -> str | None:
    """The one thing to know of a run that did not complete."""
    if row["status"] == "skipped":
        return f"{row['reason']} (run {row['blocked_by']})" if row["blocked_by"] else str(row["reason"])
    return f"{row['error_type']}: {row['error_message']}" if row["error_type"] else None


@app.command("show")
def show(run_id: Id, is_json: Json = False) -> None:
    """Show everything about a run, and in one sentence how it ended and why.

    Example: `cronlock runs show 41`
    """
    settings = connecting.settings()
    from cronlock.documents import result_of
    from cronlock.explain import document, span

    with connecting.connect(settings) as connection:
        row = document(run(connection, settings.schema_name, run_id))
    if is_json:
        output.document({**row, "result": result_of(row["result"])})
        return
    print(output.cell(row.pop("explanation"), is_short=False))
    print()
    told = {name: value for name, value in row.items() if name != "holder" and not name.endswith("_ms")}
    output.facts({**told, "took": span(row["duration_ms"])})


@app.command("why")
def why(run_id: Id, is_json: Json = False) -> None:
    """Say in one sentence why a run was skipped, failed, was lost or began late.

    For a skip: who held the lock, since when and where, how long it went on, and whether the same holder has been in
    the way for long. The codes in `--json` are those of the HTTP answer.

    Example: `cronlock runs why 42`
    """
    settings = connecting.settings()
    from cronlock.explain import explain

    with connecting.connect(settings) as connection:
        row = run(connection, settings.schema_name, run_id)
    found = explain(row)
    if is_json:
        output.document({"run_id": run_id, "task": row["task"], "code": found.code, "explanation": found.sentence})
        return
    print(f"run {run_id} of {row['task']} [{found.code}]: {output.cell(found.sentence, is_short=False)}")


@app.command("cancel")
def cancel(
    run_id: Id,
    is_forced: Annotated[
        bool,
        typer.Option(
            "--force",
            metavar="",
            help="If its code has not stopped after 5 seconds, end its database connection, and with it the lock.",
        ),
    ] = False,
    is_json: Json = False,
) -> None:
    """Cancel a run: its process stops it within a second, and rolls back what it wrote (in guard mode that stays).

    Waits 5 seconds and says what became of it; exits with 1 if it still runs.

    Example: `cronlock runs cancel 41`
    """
    settings = connecting.settings()
    from cronlock import steering
    from cronlock.explain import explain

    schema = settings.schema_name
    with connecting.connect(settings) as connection:

        def look() -> dict[str, Any]:
            return run(connection, schema, run_id)

        was_running = steering.cancel(connection, schema, run_id, by=connecting.operator())
        row = look()
        if was_running:
            row = cancelling.wait(look, CANCEL_WAIT)
            if row["status"] == "running" and is_forced and steering.terminate(connection, schema, run_id):
                output.note("its code has not stopped; its database connection was ended")
                row = cancelling.wait(look, FORCE_WAIT)
            if row["status"] == "running":
                steering.recover(connection, schema)  # nobody is there any more to say how it ended
                row = look()
    cancelling.tell("run", run_id, row["status"], explain(row), is_late=not was_running, is_json=is_json)
    if row["status"] == "running":
        advice = "end its process" if is_forced else "end its connection with --force"
        exits.stop(exits.FAILED, f"run {run_id} still holds its lock; {advice}, or wait")
    if row["status"] not in ("cancelled", "lost"):
        raise typer.Exit(exits.FAILED)


def run(connection: "Connection", schema: str, run_id: int) -> dict[str, Any]:
    """The run; ends with 3 if there is none."""
    from cronlock import stats

    return stats.run(connection, schema, run_id) or missing(run_id)


def missing(run_id: int) -> NoReturn:
    """End with 3."""
    exits.stop(exits.NOT_FOUND, f"there is no run {run_id}; see: cronlock runs list")
