"""`cronlock worker`."""

import asyncio
from typing import Annotated

import typer

from cronlock.cli import connecting
from cronlock.cli.options import App, require_app


def worker(
    app: App = None,
    queues: Annotated[
        str, typer.Option(metavar="NAMES", help="The queues to serve, with commas between; the first one first.")
    ] = "default",
    concurrency: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=10000, help="Jobs at once. [default: CRONLOCK_WORKER_CONCURRENCY, 10]"),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port",
            metavar="PORT",
            min=0,
            max=65535,
            help="Answer Prometheus there, with what this worker counted; 0 finds a free port.",
            show_default=False,
        ),
    ] = None,
    metrics_host: Annotated[
        str, typer.Option("--metrics-host", metavar="HOST", help="The address for that.")
    ] = "127.0.0.1",
) -> None:
    """Run the jobs of APP's tasks, for production; start as many of these processes as you like.

    Takes jobs of the tasks that APP registers, and leaves all others alone. On SIGTERM or Ctrl-C it takes no more,
    gives what runs CRONLOCK_DRAIN_TIMEOUT (25s) to finish, gives the rest back uncounted, and exits with 0; a second
    signal gives back at once. Log lines go to stderr, in JSON unless CRONLOCK_LOG_FORMAT=text.

    Example: `cronlock worker main:cron --queues urgent,default --concurrency 50`
    """
    reference = require_app(app)
    from cronlock import logs, serving, working
    from cronlock.loading import load

    cron = load(reference)
    names = working.require_queues(queues)
    connecting.require(cron.settings)
    logs.configure(cron.settings.log_format, cron.settings.scrub)

    def started() -> None:
        working.log.info(
            "working for %s on %s", reference, ", ".join(names), extra={"event": "worker.started", "queues": names}
        )

    async def live() -> None:
        async with serving.unbound_threads():
            if metrics_port is not None:
                working.answer_prometheus(cron.metrics.registry, metrics_host, metrics_port)
            await working.live(cron, names, concurrency or cron.settings.worker_concurrency, started)

    with asyncio.Runner(loop_factory=serving.loop_factory()) as runner:
        runner.run(live())
    working.log.info("stopped", extra={"event": "worker.stopped"})
    serving.end_process()
