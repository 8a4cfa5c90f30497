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
from math import inf
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
from cronlock.execution import Returned, Stop, do, heeded
from cronlock.invalidation import Outbox
from cronlock.lending import cut
from cronlock.link import Link
from cronlock.metrics import JobCounts, Metrics
from cronlock.outcome import Failure, failure
from cronlock.recording import HEAD
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
WRITE_WITHIN = 10.0
"""Seconds that a drained worker tries to write down what is left; then the leases decide."""
SEAT_PAUSE = 0.2
DISOWN_FOR = 20.0
"""Seconds after which a message of which no answer came has surely ended: its statements have less."""
DISOWN_EVERY = 1.0
SHUTDOWN = Stop("shutdown", "the worker was shutting down", "ShuttingDown")
PAUSE = (0.1, 5.0)
REFUSED = ("0A", "22", "23", "54")
"""SQLSTATE classes of an end that cannot be written as it is, however often it is sent."""
SOON = b"SET LOCAL lock_timeout = '200ms'"
ASIDE_FOR = 1.0
BLOCKED = ("55P03", "57014")
"""SQLSTATEs of an end whose row somebody has locked for too long."""
UNRECORDABLE = Failure("Unrecordable", "the database refused to keep how the attempt ended; see the worker's log")

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
    """One process's worker. `queues` are served in their order; `concurrency` jobs at most run at once.

    It takes `most` jobs at most, where that is given.
    """

    def __init__(
        self,
        database: Database,
        producer: Producer,
        instance: Instance,
        scrub: Callable[[str], str],
        outbox: Outbox,
        *,
        queues: Sequence[str],
        concurrency: int,
        metrics: JobCounts | None = None,
        most: int | None = None,
    ) -> None:
        self.id = str(instance.id)
        self.metrics: JobCounts = metrics or Metrics(producer.tasks)
        self.left = most
        """How many jobs it may still take; None for any number."""
        self.queues = list(queues)
        self.concurrency = concurrency
        self.running: dict[int, Attempt] = {}
        self.ended = 0
        """How many attempts have ended here, and are written down."""
        self._database = database
        self._producer = producer
        self._statements = producer.statements
        self._tasks = {task.name: task for task in producer.tasks}
        self.names = list(self._tasks)
        self._scrub = scrub
        self._outbox = outbox
        self._report = JobReport(self.id)
        self._lease = database.settings.lease
        self._link = Link(database, producer.statements.prepare())
        self._background = Background()
        self._context = contextvars.Context()
        self._done: list[Attempt] = []
        self._ends: list[tuple[Attempt, End]] = []
        self._given_back: list[Attempt] = []
        self._places: dict[str, tuple[int, int]] = {}
        """Of a queue: the priority and the id that were claimed last."""
        self._at = 0
        """The queue that is claimed from."""
        self._rescan_at = 0.0
        self._sending: list[Attempt] = []
        self._missing: list[tuple[Attempt, End | None]] = []
        """Ends that matched no row; an earlier message, of which no answer came, may have written them."""
        self._is_careful = False
        """Whether ends are sent one by one: one of them was refused."""
        self._aside: list[tuple[float, Attempt, End]] = []
        """Ends of rows that somebody has locked, and when they are tried again."""
        self._doubted: dict[str, float] = {}
        """Tokens of claims of which no answer came, and when that was."""
        self._disown_at = 0.0
        self._suspect: Attempt | None = None
        self.has_suspects = False
        """Whether one was seen to wait; asked for on another connection, so that no claim is late for it."""
        self._end_by = inf
        self._wake = asyncio.Event()
        self._is_idle = self.is_said_idle = False
        """Whether nothing is to be claimed, and whether the worker's row says so."""
        self.is_draining = False

    async def close(self) -> None:
        """Close the connection, after the last end is written."""
        await self._link.close()

    @property
    def registered(self) -> list[str]:
        """The tasks that it has, paused ones too."""
        return list(self._tasks)

    def paused(self, names: AbstractSet[str]) -> None:
        """Claim no job of these tasks, and those of all others."""
        self.names = [name for name in self._tasks if name not in names]

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
                if time.monotonic() >= self._end_by:
                    log.error("the last ends could not be written", extra={"event": "worker.ends_lost"})
                    return
                await asyncio.sleep(pause * random.uniform(0.5, 1))  # noqa: S311 - jitter, not a secret
                pause = min(2 * pause, PAUSE[1])
                self._rescan_at, self._is_idle, self.is_said_idle = 0.0, False, False
                continue
            pause = PAUSE[0]
            if not is_more:
                await self._rest()

    @property
    def is_out_of_work(self) -> bool:
        """Whether nothing runs, and nothing is left that it may take; another look may find more."""
        return not self.running and (self.is_said_idle or self.left == 0)

    @property
    def _has_ends(self) -> bool:
        return bool(self._done or self._ends or self._given_back or self._missing or self._aside)

    @property
    def held(self) -> list[Attempt]:
        """Everything whose lease is ours: what runs, and what has ended and is not written down."""
        ended = [*(attempt for attempt, _ in self._ends), *(attempt for _, attempt, _ in self._aside)]
        return [*self.running.values(), *self._done, *ended, *self._given_back, *self._sending]

    async def _rest(self) -> None:
        """Wait to be told, or for a while."""
        try:
            async with asyncio.timeout(POLL * random.uniform(0.75, 1.25)):  # noqa: S311 - jitter, not a secret
                await self._wake.wait()
        except TimeoutError:
            self._rescan_at = 0.0

    async def _turn(self) -> bool:
        """Write down what has ended and claim what there is room for; whether to go on at once."""
        self._take_up()
        is_careful = self._is_careful
        most = 1 if is_careful else BATCH
        ends, self._ends = self._ends[:most], self._ends[most:]
        plain = 0 if is_careful and ends else most
        done, self._done = self._done[:plain], self._done[plain:]
        back, self._given_back = self._given_back, []
        missing, self._missing = self._missing, []
        doubted = self._disown()
        suspect = self._claim_suspect()
        claim = None if is_careful else suspect or self._claim()
        texts: list[bytes] = [SOON] if is_careful and (done or ends) else []
        if done:
            texts.append(self._execute("done", [one.run_id for one in done], [one.token for one in done]))
        said = [row for one, end in ends if end.status == "completed" and one.lending.said for row in one.said]
        if said:
            texts.append(self._outbox.of_jobs(said))
        if ends:
            texts.append(self._execute("end", [end.row(one) for one, end in ends]))
        if back:
            texts.append(self._execute("release", [one.run_id for one in back], [one.token for one in back]))
        if missing:
            ids, numbers = [one.run_id for one, _ in missing], [one.attempt for one, _ in missing]
            texts.append(self._execute("fates", ids, numbers, self.id))
        if doubted:
            texts.append(self._execute("disown", self.id, doubted))
        if claim is not None:
            texts.append(claim.text)
        if is_telling := self._is_idle != self.is_said_idle:
            texts.append(self._execute("idle", self.id, self._is_idle))
        if not texts:
            return False
        sent, is_idle = time.monotonic(), self._is_idle
        self._sending = [*done, *(one for one, _ in ends), *back]
        try:
            results = await self._link.send(HEAD + b"; ".join((*texts, b"COMMIT")), SEND_WITHIN)
        except BaseException as error:
            # Whether it was committed is not known. Sent again, what was matches no row any more.
            self._done, self._ends, self._given_back = done + self._done, ends + self._ends, back + self._given_back
            self._missing = missing + self._missing
            if claim is not None:
                self._doubted[claim.token] = time.monotonic()
            if isinstance(error, psycopg.Error):
                self._refused(error)
            raise
        finally:
            self._sending = []
        self._is_careful = is_careful and bool(self._done or self._ends)
        replies = results[2 + (texts[0] is SOON) :]
        if done:
            self._left(done, wire.rows(replies.pop(0)))
        if said:
            replies.pop(0)
        if ends:
            self._told(ends, wire.rows(replies.pop(0)))
        if back:
            replies.pop(0)
        if missing:
            self._found_out(missing, dict(wire.rows(replies.pop(0))))
        if doubted:
            replies.pop(0)
        if is_telling:
            self.is_said_idle = is_idle
        if claim is None:
            return self._has_ends
        rows = wire.rows(replies.pop(0))
        if suspect is not None:
            lease = Lease(sent + self._lease.total_seconds())
            self._suspect = self._start(rows[0], suspect.token, lease) if rows else None
            return True
        return self._start_all(claim, rows, sent) or self._has_ends

    def _refused(self, error: psycopg.Error) -> None:
        """One of the ends may be to blame: find out which, write less of it, and in the end nothing."""
        state = error.sqlstate or ""
        if state[:2] not in REFUSED and state not in BLOCKED:
            return
        if not self._is_careful:
            self._is_careful = bool(self._done or self._ends)
        elif state in BLOCKED:
            again_at = time.monotonic() + ASIDE_FOR
            if self._ends:
                self._aside.append((again_at, *self._ends.pop(0)))
            elif self._done:
                self._aside.append((again_at, self._done.pop(0), End("completed")))
        elif self._ends and self._ends[0][1].failure is not UNRECORDABLE:
            attempt, end = self._ends[0]
            log.error("how job %s ended was refused", attempt.run_id, extra={"event": "job.refused", "sqlstate": state})
            self._ends[0] = (attempt, replace(end, result=None, failure=UNRECORDABLE))
        elif self._ends:
            self._missed(self._ends.pop(0)[0])
        elif self._done:
            self._missed(self._done.pop(0))

    def _take_up(self) -> None:
        """Try again to write the ends that were put aside, with care."""
        now = time.monotonic()
        due = [(one, end) for at, one, end in self._aside if at <= now]
        if due:
            self._aside = [aside for aside in self._aside if aside[0] > now]
            self._ends = due + self._ends
            self._is_careful = True

    def _disown(self) -> list[str]:
        """The claims that are to be given back: again and again, since their message may still be under way."""
        now = time.monotonic()
        self._doubted = {token: since for token, since in self._doubted.items() if now - since < DISOWN_FOR}
        if not self._doubted or now < self._disown_at:
            return []
        self._disown_at = now + DISOWN_EVERY
        return list(self._doubted)

    def _claim_suspect(self) -> "Claim | None":
        """One of the jobs that were lost with their workers before, if there are any; not beside another such one."""
        if not self.has_suspects or self.is_draining or len(self.running) >= self.concurrency or self._is_careful:
            return None
        self.has_suspects = False
        if self._suspect is not None and self.running.get(self._suspect.run_id) is self._suspect:
            return None
        token = str(uuid4())
        text = self._execute("claim_suspect", token, self._lease, self.id, self.queues, self.names)
        return Claim(text, token, "", 1, is_from_front=True)

    def _execute(self, name: str, *values: Any) -> bytes:
        return self._statements.execute(name, *values)

    def _claim(self) -> "Claim | None":
        """The next claim, if there is a free place: behind the last one, or from the front."""
        free = 0 if self.is_draining else self.concurrency - len(self.running)
        free = free if self.left is None else min(free, self.left)
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
        lease = (token, self._lease, self.id, queue, self.names)
        if (place := self._places.get(queue)) is None:
            return Claim(self._execute("claim", *lease, free), token, queue, free, is_from_front=True)
        return Claim(self._execute("claim_next", *lease, free, *place), token, queue, free, is_from_front=False)

    def _start_all(self, claim: "Claim", rows: list[tuple[Any, ...]], sent: float) -> bool:
        """Start what was claimed; whether to claim again at once."""
        lease = Lease(sent + self._lease.total_seconds())
        rows.sort(key=lambda row: (-row[7], row[0]))
        if self.left is not None:
            self.left -= len(rows)
        for row in rows:
            self._start(row, claim.token, lease)
        if self.is_draining:
            return True
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
        was_said, self._is_idle = self.is_said_idle, True
        return not was_said  # once more, after others can see that it is idle

    def _start(self, row: tuple[Any, ...], token: str, lease: Lease) -> Attempt:
        job_id, name, payload, number, most, trigger, occurrence, priority, due_ms, age_ms = row
        task = self._tasks[name]
        attempt = Attempt(job_id, token, task, None, number, most, trigger, occurrence, priority, self.id, lease)
        if self.is_draining:  # since the claim was sent
            self._given_back.append(attempt)
            return attempt
        attempt.is_unicode = self._database.is_unicode
        attempt.age_ms = age_ms
        self.running[job_id] = attempt
        self.metrics.job_started(name, due_ms)
        try:
            attempt.payload = task.validate(json.loads(payload))
        except BaseException as error:  # a model's own code, and pydantic-core's panics are no Exception
            self._end(attempt, End("failed", attempt_status="failed", failure=failure(error, self._scrub)))
            return attempt
        if task.is_guarded:
            self._do(attempt)
        else:
            self._background.spawn(self._seat(attempt))
        return attempt

    async def _seat(self, attempt: Attempt) -> None:
        """Start an attempt that may have a transaction: on a connection of its own, in which nothing is begun yet."""
        task = attempt.task
        try:
            while attempt.seat is None and attempt.stop is None:
                try:
                    attempt.seat = await self._database.acquire(task.is_async, task.acquire_timeout.total_seconds())
                except Unavailable:  # nothing has begun: the lease is kept, and no attempt is used up
                    await asyncio.sleep(SEAT_PAUSE)
            if attempt.seat is None:
                self._returned(attempt, Returned())
                return
            attempt.transaction = Transaction(attempt, attempt.seat, self._statements)
            if attempt.stop is not None:
                await attempt.transaction.undo()
                self._returned(attempt, Returned())
                return
        except Exception as error:
            log.exception("a job could not be started", extra={"jobId": attempt.run_id})
            self._returned(attempt, Returned(error=error))
            return
        attempt.started = time.monotonic()
        self._do(attempt)

    def _do(self, attempt: Attempt) -> None:
        run = attempt.run = Run(attempt, self._scrub, partial(self._say, attempt), self._producer, self._outbox)
        attempt.code = do(attempt, run, self._context.copy())
        attempt.code.add_done_callback(partial(self._code_returned, attempt))

    def _code_returned(self, attempt: Attempt, code: "asyncio.Future[Returned]") -> None:
        returned = Returned(error=asyncio.CancelledError()) if code.cancelled() else code.result()
        if attempt.run is not None:
            returned = heeded(attempt.run, returned)
        if attempt.seat is None:
            self._returned(attempt, returned)
        else:
            self._background.spawn(self._close(attempt, returned))

    def _returned(self, attempt: Attempt, returned: Returned) -> None:
        """Decide what becomes of an attempt whose code has returned and that has nothing open."""
        stop = attempt.stop
        is_open = attempt.transaction is not None and attempt.transaction.opened_us is not None
        if stop is not None and stop.status in ("lost", "shutdown") and not is_open and attempt.has_returned(returned):
            stop = attempt.stop = None  # it had done what it should; the token decides whether that counts
        if stop is not None and stop.status == "lost":
            # If nobody has taken it yet, it is given back; the token decides.
            self._end(attempt, after_failure(attempt, "lost", stop.failure(), 0.0, is_transient=True))
        elif stop is SHUTDOWN:
            self._drop(attempt)
            self._given_back.append(attempt)
        else:
            self._end(attempt, end_of(attempt, returned, self._scrub))

    def _end(self, attempt: Attempt, end: End) -> None:
        self._drop(attempt)
        is_plain = end.status == "completed" and end.result is None and attempt.lines is None
        if is_plain and attempt.lending.said is None:
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
                self._missing.append((one, None))

    def _told(self, ends: list[tuple[Attempt, End]], rows: list[tuple[Any, ...]]) -> None:
        """What the statement of all other ends said: a row for each whose lease was held."""
        statuses = dict(rows)
        for one, end in ends:
            if one.run_id not in statuses:
                self._missing.append((one, end))
            elif end.status == "completed":
                self._completed(one)
            else:
                self._failed(one, end, statuses[one.run_id])

    def _found_out(self, missing: list[tuple[Attempt, End | None]], fates: dict[int, str]) -> None:
        """What became of those whose end matched no row: written by an earlier message, or lost."""
        for one, end in missing:
            status = fates.get(one.run_id)
            if status is None:
                self._missed(one)
            elif status == "completed" or end is None:
                self._completed(one)
            else:
                self._failed(one, end, status)

    def _completed(self, attempt: Attempt) -> None:
        self.ended += 1
        self.metrics.job_ended(attempt.task.name, "completed", attempt.age_ms + attempt.elapsed_ms())
        if attempt.lending.said is not None:
            attempt.lending.said.committed()
        self._report.completed(attempt.task.name, attempt.run_id, attempt.attempt, attempt.elapsed_ms())

    def _failed(self, attempt: Attempt, end: End, status: str) -> None:
        self.ended += 1
        self.metrics.job_ended(attempt.task.name, status, attempt.age_ms + attempt.elapsed_ms())
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
        """The lease was lost before the end could be written."""
        self.ended += 1
        self.metrics.lease_lost()
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
        if attempt.seat is not None and attempt.lending.in_flight:
            if stop.status == "lost":
                cut(attempt.seat.connection)
            else:
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
        self._end_by = time.monotonic() + WRITE_WITHIN
        for attempt in list(self.running.values()):  # threads that do not return: the process ends with them
            self._drop(attempt)
            self._given_back.append(attempt)
