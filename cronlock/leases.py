"""The leases of a worker's jobs: renewed together, on a connection of their own, until the last one has ended.

A lease that could not be renewed in time may be another worker's by now: its code is cancelled, and nothing of it is
written. The same look tells of jobs that an operator wants cancelled, and ends those that are over their timeout.
"""

import asyncio
import logging
import time
from typing import Any

import psycopg

from cronlock import jobs, wire
from cronlock.attempt import Attempt, Lease
from cronlock.database import Database, unavailable
from cronlock.errors import Unavailable
from cronlock.execution import Stop
from cronlock.link import Link
from cronlock.presence import Presence
from cronlock.recording import HEAD
from cronlock.runs import Instance
from cronlock.worker import Worker

TICK = 0.25
LOOK = 1.0
"""Seconds between two looks for jobs to be cancelled, among those that have run for as long."""

log = logging.getLogger("cronlock.worker")


class Leases:
    """Renews what `worker` has, and says that it is there."""

    def __init__(
        self,
        database: Database,
        statements: jobs.Statements,
        worker: Worker,
        instance: Instance,
        presence: Presence | None,
    ) -> None:
        self._statements = statements
        self._worker = worker
        self._instance = instance
        self._presence = presence
        self._grace = database.settings.presence_grace.total_seconds()
        self._ttl = database.settings.lease
        self._interval = self._ttl.total_seconds() / 3
        self._link = Link(database, statements.prepare())
        self._renew_at = 0.0
        self._look_at = 0.0

    async def begin(self) -> None:
        """Say that the worker is there, before it takes anything; raises `Unavailable`."""
        try:
            await self._renew()
        except psycopg.Error as error:
            raise unavailable(error) from error
        self._renew_at = time.monotonic() + self._interval

    async def keep(self) -> None:
        """Until cancelled, which is to come last."""
        watching = asyncio.get_running_loop().create_task(self._watch())
        try:
            await self._keep()
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        """End what is overdue; beside the renewals, since one that hangs must not keep a lost job's code going."""
        while True:
            self._end_overdue()
            await asyncio.sleep(TICK)

    async def _keep(self) -> None:
        while True:
            now = time.monotonic()
            has_changed = self._presence is not None and self._presence.changed.is_set()
            try:
                if now >= self._renew_at or has_changed:
                    await self._renew()
                    self._renew_at = now + self._interval
                elif now >= self._look_at:
                    await self._look()
                    self._look_at = now + LOOK
            except (psycopg.Error, Unavailable) as error:
                log.warning("leases cannot be renewed now: %s", type(error).__name__, extra={"event": "worker.away"})
            await asyncio.sleep(TICK)

    def _end_overdue(self) -> None:
        now = time.monotonic()
        is_unseen = (
            self._presence is not None
            and not self._presence.is_held
            and self._presence.changed.is_set()
            and self._presence.heard > 0
            and now - self._presence.heard > self._grace - TICK
        )
        for attempt in list(self._worker.running.values()):
            timeout = attempt.task.timeout
            if attempt.lease.until <= now + TICK or is_unseen:
                self._worker.stop(attempt, Stop("lost", "the lease of the job could not be renewed"))
            elif timeout is not None and attempt.code and now - attempt.started > timeout.total_seconds():
                seconds = timeout.total_seconds()
                self._worker.stop(attempt, Stop("timed_out", f"the task ran over its timeout of {seconds:g} s"))

    async def _renew(self) -> None:
        presence = self._presence
        if presence is not None:
            presence.changed.clear()
        instance = self._instance
        row = {
            "id": self._worker.id,
            "host": instance.host,
            "pid": instance.pid,
            "release": instance.release,
            "queues": self._worker.queues,
            "tasks": self._worker.registered,
            "concurrency": self._worker.concurrency,
            "presence_key": presence.key if presence else 0,
            "has_presence": bool(presence and presence.is_held),
            "is_idle": self._worker.claims.is_said_idle,
            "is_draining": self._worker.is_draining,
        }
        held = self._worker.held
        sent = time.monotonic()
        message = [self._statements.execute("seen", row, self._ttl)]
        if held:
            ids, tokens = [one.run_id for one in held], [one.token for one in held]
            message.append(self._statements.execute("renew", ids, tokens, self._ttl))
        try:
            results = await self._link.send(HEAD + b"; ".join((*message, b"COMMIT")), self._interval)
        except BaseException:
            if presence is not None:
                presence.changed.set()  # others still have to be told
            raise
        told = {row[0]: row for row in wire.rows(results[3])} if held else {}
        for one in held:
            if (said := told.get(one.run_id)) is not None and not said[2]:
                one.lease = Lease(one.lease.until)  # of its own now: what is renewed for others of its claim is not its
        for one in held:
            self._take(one, told.get(one.run_id), sent)

    def _take(self, one: Attempt, told: tuple[Any, ...] | None, sent: float) -> None:
        """Believe in a lease for as long as the database does, which renewed no row that somebody has locked."""
        _, is_lost, is_renewed, by = told or (one.run_id, False, True, None)
        if is_renewed:
            one.lease.until = max(one.lease.until, sent + self._ttl.total_seconds())
        if self._worker.running.get(one.run_id) is not one:
            return
        if is_lost:
            self._worker.stop(one, Stop("lost", "the lease of the job is another worker's now"))
        elif by is not None:
            self._worker.stop(one, Stop("cancelled", f"cancelled by {by}" if by else "cancelled by an operator"))

    async def _look(self) -> None:
        """Renew nothing; only ask who is to be cancelled, and write how far the others are."""
        since = time.monotonic() - LOOK
        old = [one for one in self._worker.running.values() if one.started < since]
        if not old:
            return
        said = [{"id": one.run_id, "token": one.token, **one.progress} for one in old if one.progress is not None]
        texts = [self._statements.execute("cancelled", [one.run_id for one in old])]
        if said:
            texts.append(self._statements.execute("progress", said))
        written = {id(one): one.progress for one in old}
        results = await self._link.send(HEAD + b"; ".join((*texts, b"COMMIT")), self._interval)
        for one in old:
            if one.progress is written[id(one)]:
                one.progress = None
        asked = {row[0]: row[1] for row in wire.rows(results[2])}
        for one in old:
            if (by := asked.get(one.run_id)) is not None:
                self._worker.stop(one, Stop("cancelled", f"cancelled by {by}" if by else "cancelled by an operator"))

    async def leave(self) -> None:
        """Take the worker's row away: nothing is left for others to look after."""
        try:
            await self._link.send(HEAD + self._statements.execute("leave", self._worker.id) + b"; COMMIT", 5.0)
        except (psycopg.Error, Unavailable):
            pass  # others will find that it has nothing
        await self._link.close()
