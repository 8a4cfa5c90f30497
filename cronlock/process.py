"""What a `Cronlock` has open in one process and one event loop: it is put together, opened, drained and closed here."""

import asyncio
import logging
import os
import socket
from uuid import uuid4

from cronlock import invalidation, jobs, runs
from cronlock.config import Settings
from cronlock.database import Database
from cronlock.delivery import Deliverer
from cronlock.enqueue import Enqueued
from cronlock.enqueuer import Enqueuer, Producer
from cronlock.errors import CronlockError
from cronlock.inspecting import Inspector
from cronlock.metrics import Metrics
from cronlock.polling import Polls
from cronlock.queueing import Queueing
from cronlock.readiness import Readiness
from cronlock.recording import Recorder
from cronlock.recovery import Timer
from cronlock.runner import Runner
from cronlock.stint import Stints
from cronlock.targets import Targets
from cronlock.tasks import Registry, Task

log = logging.getLogger("cronlock.job")


class Process:
    """The pools, the runner, the timer and all else that runs tasks; `open` it in the loop in which it is used."""

    loop: asyncio.AbstractEventLoop

    def __init__(
        self, settings: Settings, tasks: Registry, metrics: Metrics | None = None, targets: Targets | None = None
    ) -> None:
        self.settings = settings
        targets = Targets() if targets is None else targets
        self.metrics = metrics or Metrics(tasks, targets)
        self.instance = runs.Instance(uuid4(), socket.gethostname(), os.getpid(), settings.release)
        self.database = Database(settings, has_threads=any(not task.is_async and not task.is_guarded for task in tasks))
        statements = runs.Statements(settings.schema_name, self.instance)
        self.recorder = Recorder(self.database, statements)
        outbox = invalidation.statements(settings.schema_name)
        self.deliverer = Deliverer(self.database, outbox, targets, self.metrics)
        self.outbox = invalidation.Outbox(outbox, targets, self.deliverer)
        written = jobs.statements(settings.schema_name, is_prepared=self.database.keeps_records_apart)
        self.enqueuer = Enqueuer(self.database, written)
        self.producer = Producer(tasks, written, self.enqueuer)
        self.polls = Polls(self.database, written)
        self.runner = Runner(
            self.database,
            self.recorder,
            statements,
            self.instance,
            settings.scrub,
            self.metrics,
            self.producer,
            self.outbox,
        )
        self.queueing = Queueing(self.database, self.recorder, self.runner.attempts.skips, written)
        self.stints = Stints(settings, self.database, self.producer, self.instance, self.outbox, self.metrics)
        self.readiness = Readiness(self.database, self.runner, tasks)
        self.inspector = Inspector(settings)
        self._timer: asyncio.Task[None] | None = None
        self._delivering: asyncio.Task[None] | None = None
        self.joined = 0
        """How many calls of other threads `run_sync` has in this process's loop."""

    async def open(self) -> None:
        """Start the pools and the timer; an unreachable database is no error here."""
        self.metrics.pools = self._pools
        self.loop = asyncio.get_running_loop()
        await self.runner.spawn(self.database.open())
        timer = Timer(self.database, self.runner, self.readiness)
        self._timer = self.runner.spawn(timer.run())
        self._delivering = self.runner.spawn(self.deliverer.run())

    def require_loop(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Raise `CronlockError` if the loop that this is open in has ended, or is another one than `loop`."""
        if self.loop is loop:
            return
        if self.loop.is_closed():
            raise CronlockError(
                "this Cronlock was opened in an event loop that has ended, and was not closed in it: run the"
                " application's lifespan (in tests `with TestClient(app) as client`), or write `async with cron:`"
            )
        if loop is not None:
            raise CronlockError(
                "this Cronlock is open in another event loop; from a thread, call cron.run_sync(..), which runs there"
            )

    async def drain(self, timeout: float | None = None) -> None:
        """Let what runs end within `timeout` seconds (CRONLOCK_DRAIN_TIMEOUT), then cancel and record it."""
        seconds = self.settings.drain_timeout.total_seconds() if timeout is None else timeout
        await self.stints.close()
        await self.runner.spawn(self.runner.drain(seconds))
        await self.recorder.drain(5.0)

    async def close(self, timeout: float | None = None) -> None:
        """Drain, then close everything."""
        await self.drain(timeout)
        for task in (self._timer, self._delivering):
            while task is not None and not task.done():
                task.cancel()  # Python 3.11 loses a cancellation that comes with what was waited for
                await asyncio.wait((task,), timeout=1)
        await self.deliverer.close()
        await self.inspector.close()
        await self.enqueuer.close()
        await self.polls.close()
        await self.runner.spawn(self.database.close())

    def told(self, task: Task, made: Enqueued, key: str | None) -> None:
        """Count and log what a call was given."""
        self.metrics.enqueued(task.name, made.is_duplicate)
        if log.isEnabledFor(logging.INFO):
            facts = {
                "event": "job.enqueued", "task": task.name, "jobId": made.job_id, "idempotencyKey": key,
                "duplicate": made.is_duplicate,
            }  # fmt: skip
            log.info("%s %s", task.name, "enqueued before" if made.is_duplicate else "enqueued", extra=facts)

    def _pools(self) -> dict[str, dict[str, int]]:
        database = self.database
        pools = {"runs": database.runs, "records": database.records, "admin": self.inspector.pool}
        found = {name: pool.get_stats() for name, pool in pools.items()}
        return {**found, "threads": database.threads.get_stats()} if database.has_threads else found
