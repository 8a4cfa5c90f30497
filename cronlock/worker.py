"""The worker: it claims jobs, runs them, and writes down how they ended.

One message to PostgreSQL does both: the jobs that have ended since the last one leave, and as many as there are free
places are claimed, in one transaction and one commit. So a job costs a small part of a commit, and a place is free
again only when the end of the job that had it is durable.

- A claim names a random token; every later write about its jobs names it too, and a write that matches no row says
  that the lease is lost: the code is cancelled, nothing is committed, no hooks run.
- Leases are renewed on a connection of their own (`leases`), which is the last thing that stops.
- A job with a transaction is completed in it: its writes and its end are one commit (`closing_jobs`).
- Where nothing is to be claimed the worker registers itself as idle, looks once more, and waits for a NOTIFY; it
  looks every second all the same, which is what counts where a NOTIFY is lost.
"""

import asyncio
import contextvars
import json
import logging
import random
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import uuid4

import psycopg

from cronlock import wire
from cronlock.attempt import Attempt, End, Lease, after_failure, end_of
from cronlock.background import Background
from cronlock.context import Run
from cronlock.database import Database
from cronlock.enqueue import Producer
from cronlock.errors import Unavailable
from cronlock.execution import Returned, Stop, do
from cronlock.link import Link
from cronlock.outcome import Failure, failure
from cronlock.recording import HEAD, UNRECORDABLE
from cronlock.reporting import JobReport
from cronlock.runs import Instance
from cronlock.transaction import Transaction

BATCH = 1000
"""How many ends one message has at most."""
CHUNK = 50
"""How many places at least one claim fills, if so many are free."""
BURST = 10
"""So many jobs found at once are a stream of them, for which nobody has to be told of each."""
POLL = 1.0
"""Seconds after which an idle worker looks, with jitter, although nobody told it to."""
RESCAN = 1.0
"""Seconds after which a claim begins at the front again."""
SEND_WITHIN = 15.0
STATEMENT_GRACE = 0.4
STOP_WAIT = 3.0
SHUTDOWN = Stop("shutdown", "the worker was shutting down", "ShuttingDown")
PAUSE = (0.1, 5.0)
REFUSED = ("0A", "22", "23", "54")
"""SQLSTATE classes of a message that is refused for what one of its rows says."""

log = logging.getLogger("cronlock.worker")


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement that claims, and what was asked for."""

    text: bytes
    token: str
    queue: str
    asked: int
    is_from_front: bool


class Worker:
    """One process's worker. `queues` are served in their order; `concurrency` jobs at most run at once."""

    def __init__(
        self,
        database: Database,
        producer: Producer,
        instance: Instance,
        scrub: Callable[[str], str],
        *,
        queues: Sequence[str],
        concurrency: int,
    ) -> None:
        self.id = str(instance.id)
        self.queues = list(queues)
        self.concurrency = concurrency
        self.running: dict[int, Attempt] = {}
        self.ended = 0
        """How many attempts have ended here, and are written down."""
        self._database = database
        self._producer = producer
        self._statements = producer.statements
        self._tasks = {task.name: task for task in producer.tasks}
        self._names = list(self._tasks)
        self._scrub = scrub
        self._report = JobReport(self.id)
        self._lease = database.settings.lease
        self._link = Link(database, producer.statements.prepare())
        self._background = Background()
        self._context = contextvars.Context()
        self._done: list[Attempt] = []
        self._ends: list[tuple[Attempt, End]] = []
        self._given_back: list[Attempt] = []
        self._ends_at_once = BATCH
        self._places: dict[str, tuple[int, int]] = {}
        """Of a queue: the priority and the id that were claimed last."""
        self._at = 0
        """The queue that is claimed from."""
        self._rescan_at = 0.0
        self._doubted: list[str] = []
        """Tokens of claims of which no answer came."""
        self._wake = asyncio.Event()
        self._is_idle = self._is_said_idle = False
        self.is_draining = False

    async def close(self) -> None:
        """Close the connection, after the last end is written."""
        await self._link.close()

    def paused(self, names: AbstractSet[str]) -> None:
        """Claim no job of these tasks, and those of all others."""
        self._names = [name for name in self._tasks if name not in names]

    def wake(self) -> None:
        """There may be something to claim or to write down."""
        self._wake.set()

    async def work(self) -> None:
        """Claim and run until drained."""
        pause = PAUSE[0]
        while not (self.is_draining and not self.running and not self._has_ends):
            self._wake.clear()
            try:
                is_more = await self._turn()
            except (psycopg.Error, Unavailable) as error:
                log.warning("jobs cannot be claimed now: %s", type(error).__name__, extra={"event": "worker.away"})
                await asyncio.sleep(pause * random.uniform(0.5, 1))  # noqa: S311 - jitter, not a secret
                pause = min(2 * pause, PAUSE[1])
                self._rescan_at, self._is_idle, self._is_said_idle = 0.0, False, False
                continue
            pause = PAUSE[0]
            if not is_more:
                await self._rest()

    @property
    def _has_ends(self) -> bool:
        return bool(self._done or self._ends or self._given_back)

    async def _rest(self) -> None:
        """Wait to be told, or for a while."""
        try:
            async with asyncio.timeout(POLL * random.uniform(0.75, 1.25)):  # noqa: S311 - jitter, not a secret
                await self._wake.wait()
        except TimeoutError:
            self._rescan_at = 0.0

    async def _turn(self) -> bool:
        """Write down what has ended and claim what there is room for; whether to go on at once."""
        done, self._done = self._done[:BATCH], self._done[BATCH:]
        ends, self._ends = self._ends[: self._ends_at_once], self._ends[self._ends_at_once :]
        back, self._given_back = self._given_back, []
        claim = None if self._doubted else self._claim()
        texts: list[bytes] = []
        if done:
            texts.append(self._execute("done", [one.run_id for one in done], [one.token for one in done]))
        if ends:
            texts.append(self._execute("end", [end.row(one) for one, end in ends]))
        if back:
            texts.append(self._execute("release", [one.run_id for one in back], [one.token for one in back]))
        if doubted := self._doubted:
            texts.append(self._execute("disown", self.id, doubted))
        if claim is not None:
            texts.append(claim.text)
        if is_telling := self._is_idle != self._is_said_idle:
            texts.append(self._execute("idle", self.id, self._is_idle))
        if not texts:
            return False
        sent, is_idle = time.monotonic(), self._is_idle
        try:
            results = await self._link.send(HEAD + b"; ".join((*texts, b"COMMIT")), SEND_WITHIN)
        except BaseException as error:
            # Whether it was committed is not known. Sent again, what was matches no row any more.
            if ends and isinstance(error, psycopg.Error) and (error.sqlstate or "")[:2] in REFUSED:
                ends = self._alone(ends, error)
            self._done, self._ends, self._given_back = done + self._done, ends + self._ends, back + self._given_back
            if claim is not None:
                self._doubted.append(claim.token)
            raise
        if not self._ends:
            self._ends_at_once = BATCH
        replies = results[2:]
        if done:
            self._left(done, wire.rows(replies.pop(0)))
        if ends:
            self._told(ends, wire.rows(replies.pop(0)))
        if back:
            replies.pop(0)
        if doubted:
            self._doubted = []
            return True
        if is_telling:
            self._is_said_idle = is_idle
        if claim is None:
            return self._has_ends
        return self._start_all(claim, wire.rows(replies.pop(0)), sent) or self._has_ends

    def _alone(self, ends: list[tuple[Attempt, End]], error: psycopg.Error) -> list[tuple[Attempt, End]]:
        """One of these ends cannot be written as it is: each is sent by itself, and that one without its texts."""
        self._ends_at_once = 1
        if len(ends) > 1:
            return ends
        ((attempt, end),) = ends
        log.error("the end of job %s was refused", attempt.run_id, extra={"sqlstate": error.sqlstate})
        attempt.lines = None
        return [(attempt, replace(end, result=None, failure=end.failure and Failure(UNRECORDABLE, "")))]

    def _execute(self, name: str, *values: Any) -> bytes:
        return self._statements.execute(name, *values)

    def _claim(self) -> "Claim | None":
        """The next claim, if there is a free place: behind the last one, or from the front."""
        free = 0 if self.is_draining else self.concurrency - len(self.running)
        if free <= 0:
            return None
        # Half of the places at once, if there are many: while some jobs run, others are claimed.
        free = min(free, max(CHUNK, self.concurrency // 2))
        now = time.monotonic()
        if now >= self._rescan_at:
            self._rescan_at = now + RESCAN
            self._places.clear()
            self._at = 0
        queue, token = self.queues[self._at], str(uuid4())
        lease = (token, self._lease, self.id, queue, self._names)
        if (place := self._places.get(queue)) is None:
            return Claim(self._execute("claim", *lease, free), token, queue, free, is_from_front=True)
        return Claim(self._execute("claim_next", *lease, free, *place), token, queue, free, is_from_front=False)

    def _start_all(self, claim: "Claim", rows: list[tuple[Any, ...]], sent: float) -> bool:
        """Start what was claimed; whether to claim again at once."""
        lease = Lease(sent + self._lease.total_seconds())
        rows.sort(key=lambda row: (-row[7], row[0]))
        for row in rows:
            self._start(row, claim.token, lease)
        if rows:
            self._places[claim.queue] = (rows[-1][7], rows[-1][0])
        if len(rows) >= min(claim.asked, BURST):
            self._is_idle = False
        if len(rows) == claim.asked:
            return len(self.running) < self.concurrency
        self._places.pop(claim.queue, None)
        if not claim.is_from_front:
            return True
        self._at += 1
        if self._at < len(self.queues):
            return True
        self._at = 0
        if len(rows) >= BURST:
            return True
        was_said, self._is_idle = self._is_said_idle, True
        return not was_said  # once more, after others can see that it is idle

    def _start(self, row: tuple[Any, ...], token: str, lease: Lease) -> None:
        job_id, name, payload, number, most, trigger, occurrence, priority = row
        task = self._tasks[name]
        attempt = Attempt(job_id, token, task, None, number, most, trigger, occurrence, priority, self.id, lease)
        attempt.is_unicode = self._database.is_unicode
        self.running[job_id] = attempt
        try:
            attempt.payload = task.validate(json.loads(payload))
        except Exception as error:  # of the task's model, too: it would fail again, and must not end the worker
            self._end(attempt, End("failed", attempt_status="failed", failure=failure(error, self._scrub)))
            return
        if task.is_guarded:
            self._do(attempt)
        else:
            self._background.spawn(self._seat(attempt))

    async def _seat(self, attempt: Attempt) -> None:
        """Start an attempt that may have a transaction: on a connection of its own, in which nothing is begun yet."""
        task = attempt.task
        try:
            attempt.seat = await self._database.acquire(task.is_async, task.acquire_timeout.total_seconds())
        except Unavailable as error:
            why = Failure("Unavailable", str(error))
            self._end(attempt, after_failure(attempt, "failed", why, 1.0, is_transient=True))
            return
        attempt.transaction = Transaction(attempt, attempt.seat, self._statements)
        if attempt.stop is not None:
            await attempt.transaction.undo()
            self._returned(attempt, Returned())
        else:
            self._do(attempt)

    def _do(self, attempt: Attempt) -> None:
        run = attempt.run = Run(attempt, self._scrub, partial(self._say, attempt), self._producer)
        attempt.code = do(attempt, run, self._context.copy())
        attempt.code.add_done_callback(partial(self._code_returned, attempt))

    def _code_returned(self, attempt: Attempt, code: "asyncio.Future[Returned]") -> None:
        returned = Returned(error=asyncio.CancelledError()) if code.cancelled() else code.result()
        if attempt.seat is None:
            self._returned(attempt, returned)
        else:
            self._background.spawn(self._close(attempt, returned))

    def _returned(self, attempt: Attempt, returned: Returned) -> None:
        """Decide what becomes of an attempt whose code has returned and that has nothing open."""
        stop = attempt.stop
        if stop is not None and stop.status == "lost":
            self._drop(attempt)
        elif stop is SHUTDOWN:
            self._drop(attempt)
            self._given_back.append(attempt)
        else:
            self._end(attempt, end_of(attempt, returned, self._scrub))

    def _end(self, attempt: Attempt, end: End) -> None:
        self._drop(attempt)
        if end.status == "completed" and end.result is None and attempt.lines is None:
            self._done.append(attempt)
        else:
            self._ends.append((attempt, end))

    def _drop(self, attempt: Attempt) -> None:
        if self.running.get(attempt.run_id) is attempt:
            del self.running[attempt.run_id]
        attempt.run = attempt.code = None  # which refer to it: nothing is left for the garbage collector
        self._wake.set()

    async def _close(self, attempt: Attempt, returned: Returned) -> None:
        """End what an attempt has open; if it completed, its writes and its end are one commit."""
        transaction = attempt.transaction
        assert transaction is not None
        try:
            if attempt.stop is None:
                returned, is_committed = await transaction.commit(returned)
                if is_committed:
                    self._drop(attempt)
                    self._completed(attempt)
                    return
            await transaction.undo()
        except BaseException as error:
            log.exception("a job broke off", extra={"jobId": attempt.run_id})
            returned = Returned(error=error)
        self._returned(attempt, returned)

    def _left(self, done: list[Attempt], rows: list[tuple[Any, ...]]) -> None:
        """What the statement of plain ends said: how many there were, and which if these are not all."""
        count, ids = rows[0]
        kept = {one.run_id for one in done} if count == len(done) else set(json.loads(ids or "[]"))
        for one in done:
            if one.run_id in kept:
                self._completed(one)
            else:
                self._missed(one)

    def _told(self, ends: list[tuple[Attempt, End]], rows: list[tuple[Any, ...]]) -> None:
        """What the statement of all other ends said: a row for each whose lease was held."""
        statuses = dict(rows)
        for one, end in ends:
            if one.run_id not in statuses:
                self._missed(one)
            elif end.status == "completed":
                self._completed(one)
            else:
                self._failed(one, end, statuses[one.run_id])

    def _completed(self, attempt: Attempt) -> None:
        self.ended += 1
        self._report.completed(attempt.task.name, attempt.run_id, attempt.attempt, attempt.elapsed_ms())

    def _failed(self, attempt: Attempt, end: End, status: str) -> None:
        self.ended += 1
        self._report.ended(
            status,
            end.attempt_status or status,
            end.failure,
            attempt.task.name,
            attempt.run_id,
            attempt.attempt,
            attempt.elapsed_ms(),
            end.delay,
        )

    def _missed(self, attempt: Attempt) -> None:
        """The lease was lost before the end could be written, or the end was written by a message without answer."""
        self.ended += 1
        self._report.lease_lost(attempt.task.name, attempt.run_id, attempt.attempt, attempt.elapsed_ms())

    def stop(self, attempt: Attempt, stop: Stop) -> None:
        """Stop an attempt whose code has not returned; the first reason counts, but for a lost lease."""
        if attempt.stop is None or stop.status == "lost":
            is_first = attempt.stop is None
            attempt.stop = stop
            if is_first:
                self._background.spawn(self._stop(attempt, stop))

    async def _stop(self, attempt: Attempt, stop: Stop) -> None:
        """The running statement is cancelled first, and the coroutine only outside of one; see `stopping`."""
        attempt.lending.stopped = stop.message
        if attempt.seat is not None and attempt.lending.in_flight and stop.status != "lost":
            await attempt.seat.cancel()
            until = time.monotonic() + STATEMENT_GRACE
            while attempt.lending.in_flight and time.monotonic() < until:
                await asyncio.sleep(0.005)
        if attempt.code is not None and attempt.task.is_async:
            attempt.code.cancel()

    def _say(self, attempt: Attempt, progress: dict[str, Any] | None) -> None:
        """Take what a run says of itself, from any thread."""
        if progress is not None:
            attempt.progress = progress

    async def drain(self, timeout: float) -> None:
        """Claim no more, wait `timeout` seconds for what runs, then give it back; `work` ends after that."""
        self.is_draining = True
        self._wake.set()
        until = time.monotonic() + timeout
        while self.running and time.monotonic() < until:
            await asyncio.sleep(0.02)
        for attempt in list(self.running.values()):
            self.stop(attempt, SHUTDOWN)
        until = time.monotonic() + STOP_WAIT
        while self.running and time.monotonic() < until:
            await asyncio.sleep(0.02)
        for attempt in list(self.running.values()):  # threads that do not return: the process ends with them
            self._drop(attempt)
            self._given_back.append(attempt)
