"""The worker: it claims jobs, runs them, and writes down how they ended.

One message to PostgreSQL does both: the jobs that have ended since the last one leave, and as many as there are free
places are claimed, in one transaction and one commit. So a job costs a small part of a commit. While PostgreSQL is at
one message, what the last one brought is started and reported.

- A claim names a random token; every later write about its jobs names it too, and a write that matches no row says
  that the lease is lost: the code is cancelled, nothing is committed, no hooks run.
- Leases are renewed on a connection of their own (`leases`), which is the last thing that stops.
- A job with a transaction is completed in it: its writes and its end are one commit (`transaction`).
- Where nothing is to be claimed the worker registers itself as idle, looks once more, and waits for a NOTIFY; it
  looks every second all the same, which is what counts where a NOTIFY is lost.
"""

import asyncio
import contextvars
import json
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any

import psycopg

from cronlock import wire
from cronlock.attempt import Attempt, End, Lease, after_failure, end_of
from cronlock.background import Background
from cronlock.claims import BURST, Claim, Claims
from cronlock.context import Run
from cronlock.database import Database
from cronlock.ends import Ends
from cronlock.enqueuer import Producer
from cronlock.errors import Unavailable
from cronlock.execution import Returned, Stop, do, heeded
from cronlock.invalidation import Outbox
from cronlock.lending import cut, is_gone
from cronlock.link import Link, Part
from cronlock.metrics import JobCounts, Metrics
from cronlock.outcome import failure
from cronlock.recording import HEAD
from cronlock.runs import Instance
from cronlock.seats import Seat, discard
from cronlock.transaction import Transaction
from cronlock.wire import Row

POLL = 1.0
"""Seconds after which an idle worker looks, with jitter, although nobody told it to."""
SEND_WITHIN = 15.0
STATEMENT_GRACE = 0.4
STOP_WAIT = 3.0
WRITE_WITHIN = 10.0
"""Seconds that a drained worker tries to write down what is left; then the leases decide."""
SEAT_PAUSE = 0.2
SEAT_KEEP = 1.0
"""Seconds after which a connection goes back to its pool, where others may wait for it."""
SHUTDOWN = Stop("shutdown", "the worker was shutting down", "ShuttingDown")
PAUSE = (0.1, 5.0)

log = logging.getLogger("cronlock.worker")


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
        self.is_draining = False
        self._database = database
        self._producer = producer
        self._statements = producer.statements
        self._tasks = {task.name: task for task in producer.tasks}
        self._scrub = scrub
        self._outbox = outbox
        self._lease = database.settings.lease
        self.ends = Ends(self._statements, outbox, self.id, self.metrics)
        self.claims = Claims(self._statements, self.queues, self.registered, self.id, self._lease, concurrency)
        self._link = Link(database, self._statements.prepare())
        self._background = Background()
        self._context = contextvars.Context()
        self._heard: deque[Callable[[], None]] = deque()
        """What the last message brought, until it is made something of."""
        self._arriving = 0
        """How many of the jobs that were claimed are in that."""
        self._is_more = False
        self._unseated: dict[bool, dict[int, Attempt]] = {True: {}, False: {}}
        """Those that wait for a connection: of `async def` tasks, and of plain functions."""
        self._serving = {True: 0, False: 0}
        """How many connections run such ones, or are awaited."""
        self._suspect: Attempt | None = None
        self._end_by = inf
        self._wake = asyncio.Event()

    async def close(self) -> None:
        """Close the connection, after the last end is written."""
        await self._link.close()

    @property
    def registered(self) -> list[str]:
        """The tasks that it has, paused ones too."""
        return list(self._tasks)

    def wake(self) -> None:
        """There may be something to claim or to write down."""
        self._wake.set()

    async def work(self) -> None:
        """Claim and run until drained."""
        pause = PAUSE[0]
        while not (self.is_draining and not self.running and not self._heard and not self.ends):
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
                continue
            pause = PAUSE[0]
            if not is_more:
                await self._rest()

    @property
    def is_out_of_work(self) -> bool:
        """Whether nothing runs, and nothing is left that it may take; another look may find more."""
        return not self.running and not self._heard and (self.claims.is_said_idle or self.left == 0)

    @property
    def held(self) -> list[Attempt]:
        """Everything whose lease is ours: what runs, and what has ended and is not written down."""
        return [*self.running.values(), *self.ends.held]

    async def _rest(self) -> None:
        """Wait to be told, or for a while."""
        try:
            async with asyncio.timeout(self.ends.due_in(POLL * random.uniform(0.75, 1.25))):  # noqa: S311 - as above
                await self._wake.wait()
        except TimeoutError:
            self.claims.rescan()

    async def _turn(self) -> bool:
        """Write down what has ended and claim what there is room for; whether to go on at once."""
        ends = self.ends.parts()
        claim = (
            None
            if self.ends.is_careful
            else self.claims.next(self._free(), is_suspect_running=self._suspect is not None)
        )
        parts = [] if claim is None else self.claims.timed(claim, Part(claim.text, partial(self._claimed, claim)))
        parts += self.claims.parts()
        if not ends and not parts:
            self._settle()
            return self.ends.is_waiting
        message = HEAD + b"; ".join((*(part.text for part in (*ends, *parts)), b"COMMIT"))
        asyncio.get_running_loop().call_soon(self._settle)  # as soon as the message is on its way
        try:
            results = await self._link.send(message, SEND_WITHIN)
        except BaseException as error:
            self.ends.unsent(error)
            self.claims.lost(claim)
            raise
        self.ends.sent()
        replies = iter(results[2:])
        self._heard += [partial(part.take, wire.rows(next(replies))) for part in ends]
        self._is_more = False
        for part in parts:
            part.take(wire.rows(next(replies)))
        if not self._is_more:
            self._settle()
        return self._is_more or self.ends.is_waiting

    def _settle(self) -> None:
        while self._heard:
            self._heard.popleft()()

    def _free(self) -> int:
        """How many jobs may be claimed."""
        free = 0 if self.is_draining else self.concurrency - len(self.running) - self._arriving
        return free if self.left is None else min(free, self.left)

    def _claimed(self, claim: Claim, rows: list[Row]) -> None:
        """Jobs are ours: they are started when the next message is on its way."""
        rows.sort(key=lambda row: (-row[7], row[0]))
        if self.left is not None:
            self.left -= len(rows)
        self._arriving += len(rows)
        self._is_more = self.claims.took(claim, rows) and self._free() > 0
        if len(rows) < BURST:  # few, which are not to wait for the next message to be made
            self._start_all(claim, rows)
        else:
            self._heard.append(partial(self._start_all, claim, rows))

    def _start_all(self, claim: Claim, rows: list[Row]) -> None:
        lease = Lease(claim.at + self._lease.total_seconds())
        self._arriving -= len(rows)
        for row in rows:
            self._start(row, claim.token, lease, is_suspect=claim.queue is None)

    def _start(self, row: Row, token: str, lease: Lease, *, is_suspect: bool) -> None:
        job_id, name, payload, number, most, trigger, occurrence, priority, due_ms, age_ms = row
        task = self._tasks[name]
        attempt = Attempt(job_id, token, task, None, number, most, trigger, occurrence, priority, self.id, lease)
        if self.is_draining:  # since the claim was sent
            self.ends.give_back(attempt)
            return
        attempt.is_unicode = self._database.is_unicode
        attempt.age_ms = age_ms
        self.running[job_id] = attempt
        if is_suspect:
            self._suspect = attempt
        self.metrics.job_started(name, due_ms)
        try:
            attempt.payload = task.validate(json.loads(payload))
        except BaseException as error:  # a model's own code, and pydantic-core's panics are no Exception
            self._end(attempt, End("failed", attempt_status="failed", failure=failure(error, self._scrub)))
            return
        if task.is_guarded:
            self._do(attempt).add_done_callback(partial(self._code_returned, attempt))
            return
        self._unseated[task.is_async][job_id] = attempt
        if self._serving[task.is_async] < self._database.settings.pool_size:
            self._serving[task.is_async] += 1
            self._background.spawn(self._serve(task.is_async))

    async def _serve(self, is_async: bool) -> None:
        """Run attempts that may have a transaction, one after the other on a connection, as long as any wait.

        Nothing is begun before the task's first statement; an attempt that waits here keeps its lease, and is used up
        only when it is started.
        """
        waiting, seat, keep_until = self._unseated[is_async], None, 0.0
        try:
            while waiting:
                first = next(iter(waiting))
                if seat is None:
                    seat = await self._acquire(waiting[first])
                    keep_until = time.monotonic() + SEAT_KEEP
                elif time.monotonic() >= keep_until or is_gone(seat.connection):
                    await seat.give_back()
                    seat = None
                else:
                    seat = await self._run(waiting.pop(first), seat)
        finally:
            self._serving[is_async] -= 1
            if seat is not None:
                await seat.give_back()

    async def _acquire(self, attempt: Attempt) -> Seat | None:
        """A connection for the attempt that is next, if there is one now."""
        task = attempt.task
        try:
            return await self._database.acquire(task.is_async, task.acquire_timeout.total_seconds())
        except Unavailable:
            await asyncio.sleep(SEAT_PAUSE)
        except Exception as error:
            log.exception("a job could not be started", extra={"jobId": attempt.run_id})
            if self._unseated[task.is_async].pop(attempt.run_id, None) is not None:
                self._returned(attempt, Returned(error=error))
        return None

    async def _run(self, attempt: Attempt, seat: Seat) -> Seat | None:
        """Run an attempt to its end; its seat, if that can be used again."""
        attempt.seat, attempt.started = seat, time.monotonic()
        transaction = attempt.transaction = Transaction(attempt, seat, self._statements)
        try:
            returned = await self._do(attempt)
        except asyncio.CancelledError as error:  # before its first step
            returned = Returned(error=error)
        assert attempt.run is not None
        await self._close(attempt, transaction, heeded(attempt.run, returned))
        if transaction.is_seat_good:
            return seat
        await discard(seat)
        return None

    def _do(self, attempt: Attempt) -> "asyncio.Future[Returned]":
        run = attempt.run = Run(attempt, self._scrub, partial(self._say, attempt), self._producer, self._outbox)
        try:
            code = do(attempt, run, self._context.copy())
        except RuntimeError as error:  # there is no room for another thread now
            code = asyncio.get_running_loop().create_future()
            code.set_result(Returned(error=Unavailable("internal", f"the task could not be started: {error}")))
        attempt.code = code
        return code

    def _code_returned(self, attempt: Attempt, code: "asyncio.Future[Returned]") -> None:
        returned = Returned(error=asyncio.CancelledError()) if code.cancelled() else code.result()
        self._returned(attempt, returned if attempt.run is None else heeded(attempt.run, returned))

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
            self.ends.give_back(attempt)
        else:
            self._end(attempt, end_of(attempt, returned, self._scrub))

    def _end(self, attempt: Attempt, end: End) -> None:
        self._drop(attempt)
        self.ends.add(attempt, end)

    def _drop(self, attempt: Attempt) -> None:
        if self.running.get(attempt.run_id) is attempt:
            del self.running[attempt.run_id]
        if self._suspect is attempt:
            self._suspect = None
        attempt.run = attempt.code = None  # which refer to it: nothing is left for the garbage collector
        self._wake.set()

    async def _close(self, attempt: Attempt, transaction: Transaction, returned: Returned) -> None:
        """End what an attempt has open; if it completed, its writes and its end are one commit."""
        try:
            if attempt.stop is None:
                returned, is_committed = await transaction.commit(returned)
                if is_committed:
                    self._drop(attempt)
                    self.ends.completed(attempt)
                    return
            await transaction.undo()
        except BaseException as error:
            log.exception("a job broke off", extra={"jobId": attempt.run_id})
            returned = Returned(error=error)
        self._returned(attempt, returned)

    def stop(self, attempt: Attempt, stop: Stop) -> None:
        """Stop an attempt whose code has not returned; the first reason counts, but for a lost lease."""
        if attempt.stop is None or stop.status == "lost":
            is_first = attempt.stop is None
            attempt.stop = stop
            if self._unseated[attempt.task.is_async].pop(attempt.run_id, None) is not None:
                self._returned(attempt, Returned())
            elif is_first:
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
            self.ends.give_back(attempt)
