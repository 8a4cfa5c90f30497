"""`cronlock jobs list | show | retry | cancel | workers`."""

from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from cronlock.cli import cancelling, connecting, exits, options, output
from cronlock.cli.cancelling import CANCEL_WAIT
from cronlock.cli.options import Json

if TYPE_CHECKING:
    from cronlock.config import Settings
    from cronlock.stats import Connection

COLUMNS = ("job", "task", "status", "queue", "attempts", "enqueued", "due", "what")
STATUSES = ("queued", "processing", "completed", "failed", "cancelled")

Id = Annotated[int, options.number("job")]

app = typer.Typer(no_args_is_help=True, help="List the jobs, look at one, retry or cancel; who works on them.")


@app.command("list")
def list_jobs(
    task: options.OfTask = None,
    queue: Annotated[
        str | None, typer.Option("--queue", "-q", metavar="QUEUE", help="Only in this queue.", show_default=False)
    ] = None,
    status: Annotated[str | None, options.status(STATUSES)] = None,
    before: Annotated[int | None, options.before("job")] = None,
    limit: options.Limit = 50,
    is_json: Json = False,
) -> None:
    """List the jobs, newest first; those that wait for their time are `queued`, failed ones are the dead letters.

    Of the jobs that ended, no more than the newest 100,000 are looked at, but for those that failed.

    Examples: `cronlock jobs list --status failed` · `cronlock jobs list -t generate-report -n 10 --json`
    """
    options.require_status(status, STATUSES)
    settings = connecting.settings()
    from cronlock import stats

    with connecting.connect(settings) as connection:
        rows = stats.list_jobs(
            connection, settings.schema_name, task=task, queue=queue, status=status, before=before, limit=limit
        )
    if is_json:
        output.document({"jobs": rows})
        return
    output.table(
        COLUMNS,
        [
            (
                row["job_id"],
                row["task"],
                row["status"],
                row["queue"],
                f"{row['attempts']} of {row['max_attempts']}",
                row["enqueued_at"],
                row["run_at"] if row["status"] == "queued" else None,
                what(row),
            )
            for row in rows
        ],
    )
    output.older(rows, limit, "job_id")


def what(row: dict[str, Any]) -> str | None:
    """The one thing to know of a job."""
    if row["has_no_worker"]:
        return "no handler: no worker that is there takes it"
    return f"{row['error_type']}: {row['error_message']}" if row["error_type"] else None


@app.command("show")
def show(job_id: Id, is_json: Json = False) -> None:
    """Show everything about a job, its attempts with their errors, and in one sentence what it waits for.

    Example: `cronlock jobs show 41`
    """
    row = require(connecting.settings(), job_id)
    from cronlock import documents
    from cronlock.explain import job_document

    told = job_document(row)
    if is_json:
        output.document(told)
        return
    print(output.cell(told.pop("explanation"), is_short=False))
    print()
    attempts = told.pop("attempted")
    output.facts(
        {
            **told,
            "payload": documents.dump(told["payload"]),
            "result": told["result"] and documents.dump(told["result"]),
        }
    )
    for attempt in attempts:
        print()
        output.facts(attempt)


@app.command("retry")
def retry(
    job_id: Annotated[int | None, options.number("job")] = None,
    task: Annotated[
        str | None,
        typer.Option("--task", "-t", metavar="TASK", help="All failed jobs of this task.", show_default=False),
    ] = None,
    is_all: Annotated[bool, typer.Option("--all", metavar="", help="All failed jobs.")] = False,
    is_json: Json = False,
) -> None:
    """Have a job that failed or was cancelled tried again; or all that failed, of a task or of all.

    It is the same job, with its number, its payload and its attempts, which are counted on: it gets as many more as its
    task has. Many are put back in small transactions; stop at any time, and what is put back stays so.

    Examples: `cronlock jobs retry 41` · `cronlock jobs retry --task generate-report`
    """
    if (job_id is not None) + (task is not None) + is_all != 1:
        raise typer.BadParameter("name one job, or --task, or --all")
    settings = connecting.settings()
    if job_id is None:
        retry_many(settings, task, is_json)
        return
    from cronlock import steering

    with connecting.connect(settings) as connection:
        is_retried, row = steering.retry_job(
            connection, settings.schema_name, job_id, max_attempts=settings.max_attempts
        )
    if row is None:
        missing(job_id)
    if is_json:
        output.document({"job_id": job_id, "task": row["task"], "status": row["status"], "is_retried": is_retried})
    elif is_retried:
        left = row["max_attempts"] - row["attempts"]
        print(f"job {job_id} is queued again, for {left:,} more attempt{'s' * (left != 1)}")
    if not is_retried:
        exits.stop(exits.FAILED, f"job {job_id} is {row['status']}; only one that failed or was cancelled is retried")


def retry_many(settings: "Settings", task: str | None, is_json: bool) -> None:
    """Put failed jobs back, some hundred in a transaction."""
    from cronlock import steering

    number = 0
    after: int | None = 0
    with connecting.connect(settings) as connection, output.progress("jobs queued again") as tell:
        while after is not None:
            ids, after = steering.retry_failed(
                connection,
                settings.schema_name,
                task=task,
                max_attempts=settings.max_attempts,
                limit=steering.RETRIED_AT_ONCE,
                after=after,
            )
            number += len(ids)
            tell(number, queued_again(number))
        if not number and task is not None:
            require_task(connection, settings.schema_name, task)
    if is_json:
        output.document({"task": task, "retried": number})
    else:
        print(queued_again(number) if number else "no job has failed")


def queued_again(number: int) -> str:
    """So many jobs were put back."""
    return "1 job is queued again" if number == 1 else f"{number:,} jobs are queued again"


def require_task(connection: "Connection", schema: str, task: str) -> None:
    """End with 3 if neither a task nor a job has this name."""
    from cronlock import stats

    if not stats.has_task(connection, schema, task):
        names = ", ".join(stats.task_names(connection, schema)) or "none"
        exits.stop(exits.NOT_FOUND, f"there is no task {task!r} in this database, and no job of it; known: {names}")


@app.command("cancel")
def cancel(job_id: Id, is_json: Json = False) -> None:
    """Cancel a job: at once if nobody works on it, else its worker stops it within a second or so.

    What it wrote is rolled back, but for a task in guard mode. Waits 5 seconds and says what became of it; exits with 1
    if it had ended otherwise, or is still at work.

    Example: `cronlock jobs cancel 41`
    """
    settings = connecting.settings()
    from cronlock import steering
    from cronlock.explain import explain_job

    with connecting.connect(settings) as connection:
        outcome, row = steering.cancel_job(connection, settings.schema_name, job_id, by=connecting.operator())
        if outcome == "asked":
            row = cancelling.wait(lambda: job(connection, settings.schema_name, job_id), CANCEL_WAIT)
    if row is None:
        missing(job_id)
    is_late = outcome == "ended"
    cancelling.tell("job", job_id, row["status"], explain_job(row), is_late=is_late, is_json=is_json)
    if row["status"] != "cancelled":
        raise typer.Exit(exits.FAILED)


@app.command("workers")
def workers(is_json: Json = False) -> None:
    """Show the workers: where they are, which queues they serve, which tasks they have.

    Example: `cronlock jobs workers`
    """
    settings = connecting.settings()
    from cronlock import stats

    with connecting.connect(settings) as connection:
        rows = stats.workers(connection, settings.schema_name)
    if is_json:
        output.document({"workers": rows})
        return
    output.table(
        ("worker", "host", "pid", "release", "queues", "tasks", "places", "state", "started"),
        [
            (
                str(row["worker"])[:8],
                row["host"],
                row["pid"],
                row["release"],
                ", ".join(row["queues"]),
                ", ".join(row["tasks"]),
                row["concurrency"],
                state(row),
                row["started_at"],
            )
            for row in rows
        ],
    )
    if not rows:
        output.note("no worker is there; start one with: cronlock worker main:cron")


def state(row: dict[str, Any]) -> str:
    """What a worker is at."""
    if not row["is_there"]:
        return "gone"
    return "draining" if row["is_draining"] else "idle" if row["is_idle"] else "working"


def require(settings: "Settings", job_id: int) -> dict[str, Any]:
    """The job, over a connection of its own; ends with 3 if there is none."""
    with connecting.connect(settings) as connection:
        return job(connection, settings.schema_name, job_id)


def job(connection: "Connection", schema: str, job_id: int) -> dict[str, Any]:
    """The job; ends with 3 if there is none."""
    from cronlock import stats

    return stats.job(connection, schema, job_id) or missing(job_id)


def missing(job_id: int) -> NoReturn:
    """End with 3."""
    exits.stop(exits.NOT_FOUND, f"there is no job {job_id}, or it has been pruned; see: cronlock jobs list")
