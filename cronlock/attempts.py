"""Guard and open: how a call comes to run, or to be skipped.

One attempt takes the lock in a transaction of its own (`locks.opening`), for all callers that wait for this lock
in this process (`gate`). Once the lock is held, `running` is recorded on another connection, so that the run can
be seen from outside and its id grows in the order of the locks; only then is the task started.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import psycopg

from cronlock import locks, runs
from cronlock.background import Background
from cronlock.closing import Closer
from cronlock.database import Database, unavailable, within
from cronlock.errors import CronlockError, PayloadInvalid, Unavailable
from cronlock.execution import Execution
from cronlock.gate import Call, Gate
from cronlock.lending import cut, is_gone
from cronlock.outcome import Failure, Outcome
from cronlock.recording import Recorder, expire
from cronlock.reporting import Report
from cronlock.seats import Seat, discard
from cronlock.skips import Skips, before
from cronlock.tasks import Task

ASKS = 40
"""How often a call asks again when the lock was held but no run could be seen behind it."""
ASK_PAUSE = 0.025
DECISION_MARGIN = 0.5
ENDED_BY_SERVER = (None, "57P01", "57P02", "57P05", "25P03")
RECORD_WAIT = 5.0
GATES = 1000
"""How many gates there may be before those that nobody uses are looked for."""

log = logging.getLogger("cronlock.run")
T = TypeVar("T")


class Opened(NamedTuple):
    """What the message that opened a transaction came to; see `locks.Opening`."""

    seat: Seat
    sent: float
    """When the message was sent, in monotonic seconds."""
    slot: int
    backend_pid: int
    opened_us: int
    lock_keys: tuple[int, ...]


class Attempts:
    """Decides the calls of one process; `start` is called for each that has the lock and its row."""

    def __init__(
        self,
        database: Database,
        recorder: Recorder,
        closer: Closer,
        background: Background,
        report: Report,
        instance: str,
        start: Callable[[Gate, Execution], None],
    ) -> None:
        self._database = database
        self._recorder = recorder
        self._closer = closer
        self._background = background
        self._report = report
        self._instance = instance
        self._start = start
        self._openings: dict[str, locks.Opening] = {}
        self.skips = Skips(recorder, report)
        self.gates: dict[Hashable, Gate] = {}
        """By the name of a lock, or by its number, and the key where there is one."""
        self._gate_limit = GATES
        self.lock_keys: dict[str, tuple[int, ...]] = {}
        """The keys of each task's slots, as the server computed them; none for a task whose calls have a `key`."""
        self.is_draining = False

    async def call(self, call: Call) -> Outcome:
        """Run the task of `call`, or skip it; raises `Unavailable` if neither can be decided in time.

        Raises `PayloadInvalid` for a key that the database cannot hold.
        """
        until = call.received + call.task.acquire_timeout.total_seconds() + DECISION_MARGIN
        for _ in range(ASKS):
            if self.is_draining:
                raise Unavailable("shutting_down", "the server is shutting down")
            call.renew()
            gate = self.gate_of(call.task, call.key)
            if gate.is_full and not call.is_asked_first:
                return await self.skips.by_memory(call, gate.running[0], until)
            # A task that was registered late has no keys yet; an attempt finds them.
            can_be_seen = call.is_checked or bool(gate.lock_keys)
            is_asked = gate.is_contended or call.is_asked_first or call.task.name in self.skips.paused
            if can_be_seen and is_asked:
                if (outcome := await self.skips.ask(call, gate.lock_keys, until)) is not None:
                    return outcome
                gate = self.gate_of(call.task, call.key)  # it may have been let go meanwhile
            gate.join(call)
            if gate.attempts is None:
                gate.attempts = self._background.spawn(self._attempts(gate))
            decision = await in_time(call.decided, until)
            if isinstance(decision, Execution):
                return await decision.answer  # a caller that goes cancels no more than this
            if decision is not None:
                return decision
            await asyncio.sleep(ASK_PAUSE)
        raise Unavailable("undecided", "the lock is held, but by no run that can be seen yet", retry_after=1)

    def gate_of(self, task: Task, key: str | None) -> Gate:
        """The gate of a lock; there are as many as keys, and those that nobody uses are let go."""
        lock = task.lock.name if task.lock.number is None else task.lock.number
        name = lock if key is None else (lock, key)
        if (gate := self.gates.get(name)) is None:
            if len(self.gates) >= self._gate_limit:
                self.gates = {name: gate for name, gate in self.gates.items() if not gate.is_idle}
                self._gate_limit = max(GATES, 2 * len(self.gates))
            gate = self.gates[name] = Gate(task.max_concurrent, self.lock_keys.get(task.name, ()))
        return gate

    async def _attempts(self, gate: Gate) -> None:
        """Make attempts for a lock until nobody waits for it."""
        try:
            while group := gate.take_group():
                if gate.is_full:
                    await self.skips.group_by_memory(group, gate.running[0])
                else:
                    await self._attempt(gate, group)
        except BaseException as error:
            log.exception("an attempt broke off")
            for call in [*group, *gate.waiting]:
                call.fail(Unavailable("internal", f"an attempt broke off ({type(error).__name__})"))
            gate.waiting.clear()
            raise
        finally:
            gate.attempts = None

    async def _attempt(self, gate: Gate, group: list[Call]) -> None:
        first = group[0]
        try:
            opened = await self._open(first)
        except PayloadInvalid as error:
            first.fail(error)
            gate.put_back(group[1:])
            return
        except CronlockError as error:
            for call in group:
                call.fail(error)
            return
        gate.lock_keys = opened.lock_keys
        if opened.slot < 1:
            self._background.spawn(self._let_go(opened.seat))
        if opened.slot == -1:  # which says nothing about other occurrences
            gate.put_back([call for call in group if not call.is_alike(first)])
            await self.skips.ask_group([call for call in group if call.is_alike(first)], gate.lock_keys)
        elif opened.slot == 0:
            if await self.skips.ask_group(group, gate.lock_keys):
                gate.refused()
        else:
            # It was opened as the first of them asked: for its task, its connection, its occurrence.
            leader = next((call for call in group if call.is_waiting and call.is_alike(first)), None)
            others = [call for call in group if call is not leader]
            if leader is None:
                gate.put_back(others)
                await self._let_go(opened.seat)
            else:
                try:
                    await self._begin(gate, leader, others, opened)
                except BaseException:  # a fault of ours: the lock must not be kept by nobody
                    if all(execution.seat is not opened.seat for execution in gate.running):
                        cut(opened.seat.connection)
                        self._background.spawn(discard(opened.seat))
                    raise

    async def _open(self, call: Call) -> Opened:
        """Open a transaction and try the lock in it; a connection that proves dead is replaced."""
        task = call.task
        limit = task.acquire_timeout.total_seconds()
        until = time.monotonic() + limit
        opening = self._opening(task)
        message = opening.message(call.key, call.occurrence)
        while True:
            seat = await self._database.acquire(task.is_async or task.is_guarded, limit)
            sent = time.monotonic()
            try:
                reply = await within(limit, seat.connection, seat.send(message, opening.row_at))
            except psycopg.Error as error:
                is_dead = seat.connection.closed or is_gone(seat.connection)
                await discard(seat)
                if is_dead and error.sqlstate in ENDED_BY_SERVER and time.monotonic() < until:
                    continue
                raise call.not_held(error) or unavailable(error) from error
            if is_gone(seat.connection):  # the answer came in the moment in which it was given up and cut
                await discard(seat)
                if time.monotonic() < until:
                    continue
                raise Unavailable("database_unavailable", "the database did not answer in time")
            (row,) = reply.rows
            if row[0] is None:
                await discard(seat)
                raise Unavailable("read_only", "the server is read-only or a standby; no lock was taken")
            slot, backend_pid, opened_us, *lock_keys = row
            return Opened(seat, sent, slot, backend_pid, opened_us, tuple(lock_keys))

    def _opening(self, task: Task) -> locks.Opening:
        if (opening := self._openings.get(task.name)) is None:
            assert self._database.server is not None, "prepare() comes before the first call"
            opening = locks.Opening(task, self._database.server, self._database.settings.guard_ping)
            self._openings[task.name] = opening
        return opening

    async def _let_go(self, seat: Seat) -> None:
        """End a transaction that did nothing."""
        try:
            await within(RECORD_WAIT, seat.connection, seat.send(locks.REFUSED))
        except psycopg.Error:
            await discard(seat)
        else:
            await seat.give_back()

    async def _begin(self, gate: Gate, leader: Call, others: list[Call], opened: Opened) -> None:
        """With the lock held: record `running`, start the leader's task, and let the others skip or try a free slot."""
        seat, lock_key = opened.seat, opened.lock_keys[opened.slot - 1]
        row = leader.row(lock_key, {"backend_pid": opened.backend_pid})
        try:
            written = await self._recorder.put(runs.BEGIN_CHECKED if leader.is_checked else runs.BEGIN, row)
            assert written is not None, "the statement gives a row for every nonce"
        except Unavailable as error:
            await self._let_go(seat)
            # The row may have been written all the same, if only the answer was lost.
            self._closer.end_row(
                leader.nonce, "cancelled", Failure("Unavailable", "it was not started: no answer in time")
            )
            leader.fail(error)
            ask_again(others)
            return
        _, run_id, status, started_at, has_predecessor, *checked = written
        reason, blocked_by, wait, attempt = checked or ("paused", None, None, 1)
        if has_predecessor:
            await self._free(row)
        if status != "running":
            await self._let_go(seat)
            if status == "skipped":
                leader.decide(self.skips.outcome(leader, lock_key, run_id, reason, before(blocked_by), wait))
            else:  # the answer to its record was lost with both connections, and somebody has closed it meanwhile
                leader.fail(Unavailable("database_unavailable", "it was not started: its connections broke"))
            ask_again(others)
            return
        if not leader.is_waiting:
            self._closer.end_row(
                leader.nonce, "cancelled", Failure("Unavailable", "it was not started: its caller had gone")
            )
            await self._let_go(seat)
            ask_again(others)
            return
        execution = Execution(
            leader,
            seat,
            run_id=run_id,
            started_at=started_at,
            opened=opened.sent,
            opened_us=opened.opened_us,
            lock_key=lock_key,
            attempt=attempt,
            instance=self._instance,
        )
        leader.decide(execution)
        self._start(gate, execution)
        if joined := [call for call in others if call.is_waiting]:
            if gate.is_full:
                await self.skips.group_by_memory(joined, execution)
            else:
                gate.put_back(joined)

    async def _free(self, row: dict[str, Any]) -> None:
        """Close the runs that had this lock before us and never ended; if that cannot be, a timer will."""
        try:
            freed = await self._recorder.put(runs.FREE, row)
        except Unavailable:
            return
        for lost_id, lost_task in json.loads(freed[1]) if freed else ():
            self._report.lost(lost_task, lost_id, row["lock_key"])


def ask_again(calls: list[Call]) -> None:
    """An attempt that began nothing decides nothing."""
    for call in calls:
        call.decide(None)


async def in_time(future: "asyncio.Future[T]", until: float) -> T:
    """Await what the database is to say; raises `Unavailable` when `until` (monotonic seconds) has come."""
    timer = asyncio.get_running_loop().call_later(until - time.monotonic(), expire, future)
    try:
        return await future
    finally:
        timer.cancel()
