"""A worker for a while, in a process that serves: `/cron/cronlock.work`, for places where no process lives long.

It claims until nothing is due, so many jobs were taken or its time is over, and ends in order: what still runs then is
stopped and given back uncounted. A plain function that does not stop keeps its lease, which is renewed until it has
returned, also after the answer: nobody else gets a job whose code still runs.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from uuid import uuid4

import psycopg

from cronlock import jobs
from cronlock.background import Background
from cronlock.config import Settings
from cronlock.database import Database, unavailable
from cronlock.duties import Duties
from cronlock.enqueuer import Producer
from cronlock.errors import Unavailable
from cronlock.invalidation import Outbox
from cronlock.leases import Leases
from cronlock.metrics import JobCounts
from cronlock.presence import Presence
from cronlock.runs import Instance
from cronlock.worker import SHUTDOWN, STOP_WAIT, Worker

LOOK = 0.01

log = logging.getLogger("cronlock.worker")


@dataclass(frozen=True, slots=True)
class Done:
    """What a stint did: how many jobs it took, and what became of them."""

    taken: int
    completed: int
    failed: int
    cancelled: int
    retried: int
    lost: int
    given_back: int
    still_running: int
    is_empty: bool
    """Whether nothing was left that it could have taken."""
    duration_ms: int


class Tally:
    """Counts for one stint what the process counts, too."""

    def __init__(self, counts: JobCounts) -> None:
        self._counts = counts
        self.ends: Counter[str] = Counter()

    def job_started(self, task: str, due_ms: int) -> None:
        """See `Metrics`."""
        self._counts.job_started(task, due_ms)

    def job_ended(self, task: str, status: str, age_ms: int) -> None:
        """See `Metrics`."""
        self.ends[status] += 1
        self._counts.job_ended(task, status, age_ms)

    def jobs_recovered(self, number: int = 1) -> None:
        """See `Metrics`."""
        self._counts.jobs_recovered(number)

    def lease_lost(self) -> None:
        """See `Metrics`."""
        self.ends["lost"] += 1
        self._counts.lease_lost()


class Stints:
    """Those of one process. Each has a part of its connections for runs, so that calls have some left."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        producer: Producer,
        instance: Instance,
        outbox: Outbox,
        counts: JobCounts,
    ) -> None:
        self._settings = settings
        self._database = database
        self._producer = producer
        self._instance = instance
        self._outbox = outbox
        self._counts = counts
        self._background = Background()
        self._open: set[Stint] = set()
        self._is_draining = False

    async def work(self, most: int, seconds: float, queues: Sequence[str]) -> Done:
        """Work until nothing is due, `most` jobs were taken or `seconds` are over, and some 3 s more at most.

        Raises `Unavailable` without a database, or where all connections for runs are those of other stints.
        """
        if self._is_draining:
            raise Unavailable("shutting_down", "the server is shutting down")
        left = self._settings.pool_size - sum(stint.worker.concurrency for stint in self._open)
        if left <= 0:
            raise Unavailable("work_busy", "this server's connections for runs are those of other calls to work")
        instance, tally = replace(self._instance, id=uuid4()), Tally(self._counts)
        worker = Worker(
            self._database,
            self._producer,
            instance,
            self._settings.scrub,
            self._outbox,
            queues=queues,
            concurrency=min(most, self._settings.worker_concurrency, max(1, left // 2)),
            metrics=tally,
            most=most,
        )
        stint = Stint(self._database, self._producer.statements, worker, instance, tally, most)
        self._open.add(stint)
        self._background.spawn(self._live(stint, seconds))
        return await asyncio.shield(stint.done)  # a caller that goes ends nothing

    async def _live(self, stint: "Stint", seconds: float) -> None:
        try:
            await stint.live(seconds)
        except (psycopg.Error, Unavailable) as error:
            stint.fail(error if isinstance(error, Unavailable) else unavailable(error))
        except BaseException as error:
            log.exception("a stint broke off")
            stint.fail(Unavailable("internal", f"the work broke off ({type(error).__name__})"))
        finally:
            self._open.discard(stint)

    async def close(self) -> None:
        """Have every stint end now; what does not stop is given back, since the process ends with it."""
        self._is_draining = True
        for stint in self._open:
            stint.until = 0.0
        until = time.monotonic() + STOP_WAIT + 2
        while self._open and time.monotonic() < until:
            await asyncio.sleep(LOOK)
        for stint in list(self._open):
            await stint.worker.drain(0.0)
        until = time.monotonic() + 2
        while self._open and time.monotonic() < until:
            await asyncio.sleep(LOOK)


class Stint:
    """One of them: a worker, its leases and its duties."""

    def __init__(
        self, database: Database, statements: jobs.Statements, worker: Worker, instance: Instance, tally: Tally,
        most: int,
    ) -> None:  # fmt: skip
        self.worker = worker
        self.until = float("inf")
        self.done: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self._tally = tally
        self._most = most
        self._begun = time.monotonic()
        self._presence = Presence(database) if database.keeps_records_apart else None
        self._leases = Leases(database, statements, worker, instance, self._presence)
        self._duties = Duties(database, statements, worker)

    async def live(self, seconds: float) -> None:
        """Work, and answer as soon as nothing can be done any more; raises what the database does at the beginning."""
        self.until = min(self.until, self._begun + seconds)
        keepers: list[asyncio.Task[None]] = []
        spawn = asyncio.get_running_loop().create_task
        try:
            await self._leases.begin()
            await self._duties.begin()
            keepers += [spawn(self._leases.keep()), spawn(self._duties.keep())]
            if self._presence is not None:
                keepers.append(spawn(self._presence.keep()))
            working = spawn(self.worker.work())
            try:
                await self._work(working)
            finally:
                await asyncio.wait((working,))
        finally:
            for keeper in reversed(keepers):
                await ended(keeper)
            await self._duties.close()
            await self._leases.leave()
            await self.worker.close()
        self._answer()

    async def _work(self, working: "asyncio.Task[None]") -> None:
        worker = self.worker
        while not worker.is_out_of_work and time.monotonic() < self.until and not working.done():
            await asyncio.sleep(LOOK)
        worker.is_draining = True
        worker.wake()
        for attempt in list(worker.running.values()):
            worker.stop(attempt, SHUTDOWN)
        until = time.monotonic() + STOP_WAIT
        while worker.running and time.monotonic() < until:
            await asyncio.sleep(LOOK)
        if worker.running:
            self._answer()
        while worker.running:
            await asyncio.sleep(5 * LOOK)
        await worker.drain(0.0)  # which bounds how long the last ends are tried to be written

    def _answer(self) -> None:
        if self.done.done():
            return
        ends, running, taken = self._tally.ends, len(self.worker.running), self._most - (self.worker.left or 0)
        given_back = max(0, taken - ends.total() - running)
        done = Done(
            taken=taken,
            completed=ends["completed"],
            failed=ends["failed"],
            cancelled=ends["cancelled"],
            retried=ends["queued"],
            lost=ends["lost"],
            given_back=given_back,
            still_running=running,
            is_empty=self.worker.claims.is_said_idle and not running and not given_back,
            duration_ms=round((time.monotonic() - self._begun) * 1000),
        )
        self.done.set_result(done)

    def fail(self, error: Unavailable) -> None:
        """Nothing was done, or it is not known what."""
        if not self.done.done():
            self.done.set_exception(error)


async def ended(task: "asyncio.Task[None]") -> None:
    """Cancel a task and wait for its end."""
    while not task.done():  # Python 3.11 loses a cancellation that comes with what was waited for
        task.cancel()
        await asyncio.wait((task,), timeout=1)
    with suppress(asyncio.CancelledError):
        if (error := task.exception()) is not None:
            log.error("a part of a stint broke off", exc_info=error)
