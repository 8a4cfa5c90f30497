"""`cronlock enqueue`."""

import asyncio
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cronlock.cli import calls, connecting, options
from cronlock.cli.options import App

if TYPE_CHECKING:
    from cronlock.app import Cronlock
    from cronlock.enqueue import Enqueued


def enqueue(
    app: App = None,
    task: calls.Task = None,
    payload: calls.Payload = None,
    delay: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Not before so long: 90s, 15m, 7d.", show_default=False)
    ] = None,
    run_at: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Not before this time, with its zone: 2026-12-24T18:00:00Z.", show_default=False
        ),
    ] = None,
    priority: Annotated[
        int | None, typer.Option(metavar="N", help="In place of the task's; the higher goes first.", show_default=False)
    ] = None,
    queue: Annotated[
        str | None, typer.Option(metavar="QUEUE", help="In place of the task's.", show_default=False)
    ] = None,
    max_attempts: Annotated[
        int | None, typer.Option("--max-attempts", metavar="N", help="In place of the task's.", show_default=False)
    ] = None,
    idempotency_key: Annotated[
        str | None,
        typer.Option(
            "--idempotency-key",
            metavar="KEY",
            help="Names this enqueue: a second one with it gives the first job.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a job of a task, which a worker runs; prints what `POST /jobs/TASK` would be answered.

    Examples: `cronlock enqueue main:cron generate-report --payload '{"reportId": 7}'` ·
    `cronlock enqueue main:cron clean-up --delay 15m`
    """
    cron, name, given = calls.read(app, task, payload, "cronlock enqueue main:cron generate-report")
    from cronlock.enqueue import LONGEST_DELAY

    wanted = {
        "delay": None if delay is None else options.duration(delay, "--delay", longest=LONGEST_DELAY),
        "run_at": None if run_at is None else options.moment(run_at, "--run-at"),
        "priority": priority,
        "queue": queue,
        "max_attempts": max_attempts,
        "idempotency_key": idempotency_key,
    }
    connecting.require(cron.settings)
    made = asyncio.run(write(cron, name, given, wanted))
    print(json.dumps({"status": "queued", "jobId": made.job_id, "duplicate": made.is_duplicate}))


async def write(cron: "Cronlock", task: str, payload: dict[str, Any], options: dict[str, Any]) -> "Enqueued":
    """Enqueue it in a transaction of its own."""
    async with cron:
        await (await cron.open()).readiness.require()
        return await cron.enqueue(None, task, payload, **options)
