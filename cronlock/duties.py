"""What every worker does for all: put jobs that are due into their queue, and take back those of workers that are gone.

No worker leads. Each of these statements takes what no other one has locked, at most so much at once, and decides by
the row itself.
"""

import asyncio
import logging
import random
import time

import psycopg

from cronlock import jobs, wire
from cronlock.database import Database
from cronlock.errors import Unavailable
from cronlock.link import Link
from cronlock.recording import HEAD
from cronlock.worker import Worker

PROMOTE_EVERY = 0.5
PROMOTED_AT_ONCE = 1000
LOOK_EVERY = 1.0
SEND_WITHIN = 15.0

SWEEP_SHARE = 20
"""Before the next look for leases that ran out, so many times as long as the last one took have to pass."""

log = logging.getLogger("cronlock.recovery")


class Duties:
    """One worker's part of them."""

    def __init__(self, database: Database, statements: jobs.Statements, worker: Worker) -> None:
        self._statements = statements
        self._worker = worker
        self._grace = database.settings.presence_grace
        self._link = Link(database, statements.prepare())
        self._sweep_every = max(LOOK_EVERY, database.settings.lease.total_seconds() / 2)
        self._sweep_at = 0.0
        """When leases that ran out are looked for although no worker is missing: it may have dropped a job."""
        self._missed: dict[str, float] = {}
        """When a worker's presence was first seen to be gone, in monotonic seconds."""
        self.recovered = 0

    async def begin(self) -> None:
        """Put all that is due into its queue, so that a claim finds it; raises what the database does."""
        while await self._promote() == 0.0:
            pass

    async def keep(self) -> None:
        """Until cancelled."""
        look_at = 0.0
        while True:
            rest = PROMOTE_EVERY
            try:
                rest = await self._promote()
                if (now := time.monotonic()) >= look_at:
                    await self._look()
                    look_at = now + LOOK_EVERY * random.uniform(0.8, 1.0)  # noqa: S311 - jitter, not a secret
            except (psycopg.Error, Unavailable) as error:
                self._missed.clear()
                log.debug("the duties of a worker broke off", exc_info=error)
            await asyncio.sleep(rest)

    async def _promote(self) -> float:
        """Put what is due into its queue; how many seconds to wait until there may be more."""
        rest = PROMOTE_EVERY
        for queue in self._worker.queues:
            message = HEAD + self._statements.execute("promote", queue, PROMOTED_AT_ONCE) + b"; COMMIT"
            results = await self._link.send(message, SEND_WITHIN)
            count, seconds = wire.rows(results[2])[0]
            if count:
                self._worker.wake()
                rest = 0.0 if count >= PROMOTED_AT_ONCE else rest
            if seconds is not None:
                rest = min(rest, max(0.02, float(seconds)))
        return rest

    async def _look(self) -> None:
        """Whose lease ran out, whose presence was seen to be gone twice, and which tasks are paused?"""
        worker = self._worker
        missing = self._statements.execute("missing", worker.id, self._grace)
        suspects = self._statements.execute("suspects", worker.queues, worker.claims.names)
        sent = time.monotonic()
        paused = self._statements.execute("paused")
        results = await self._link.send(b"; ".join((HEAD + missing, suspects, paused, b"COMMIT")), SEND_WITHIN)
        rows, seen = wire.rows(results[2]), time.monotonic()
        if wire.rows(results[3])[0][0]:
            worker.claims.has_suspects = True
            worker.wake()
        worker.claims.pause({row[0] for row in wire.rows(results[4])})
        self._missed = {one: self._missed.get(one, seen) for one, _, is_absent in rows if is_absent}
        gone = [one for one, since in self._missed.items() if sent - since >= self._grace.total_seconds()]
        late = [one for one, is_late, _ in rows if is_late]
        if gone or late or sent >= self._sweep_at:
            await self._recover(gone, sorted({*gone, *late}))
            # It walks through the rows of ended jobs too, where an open transaction keeps them from being removed.
            rest = max(self._sweep_every, SWEEP_SHARE * (time.monotonic() - seen))
            self._sweep_at = sent + rest * random.uniform(0.8, 1.0)  # noqa: S311 - jitter, not a secret

    async def _recover(self, gone: list[str], missing: list[str]) -> None:
        while True:
            results = await self._link.send(HEAD + self._statements.execute("recover", gone) + b"; COMMIT", SEND_WITHIN)
            rows = wire.rows(results[2])
            for job_id, task, attempt, most, worker, status, backend_pid in rows:
                self.recovered += 1
                self._worker.metrics.jobs_recovered()
                log.error(
                    "%s: job %s was lost with its worker in attempt %s of %s",
                    task, job_id, attempt, most,
                    extra={"event": "job.lost", "task": task, "jobId": job_id, "attempt": attempt, "status": status,
                           "workerId": worker},
                )  # fmt: skip
                if backend_pid is not None:
                    await self._end(backend_pid, job_id)
            if rows:
                self._worker.wake()
            if len(rows) < jobs.RECOVER_WINDOW:
                break
        if missing:
            await self._link.send(HEAD + self._statements.execute("forget", missing) + b"; COMMIT", SEND_WITHIN)

    async def _end(self, backend_pid: int, job_id: int) -> None:
        """End the backend that may still have a lost job's transaction open; its token is another one's already."""
        name = f"cronlock:job {job_id}"
        try:
            await self._link.send(
                HEAD + self._statements.execute("end_backend", backend_pid, name) + b"; COMMIT", SEND_WITHIN
            )
        except psycopg.errors.InsufficientPrivilege:
            log.warning("the backend %s of a lost job is another role's and cannot be ended", backend_pid)

    async def close(self) -> None:
        """Close the connection."""
        await self._link.close()
