"""Guard and open: how a call comes to run, or to be skipped.

One attempt takes the lock in a transaction of its own (`locks.opening`), for all callers that wait for this lock
in this process (`gate`). Once the lock is held, `running` is recorded on another connection, so that the run can
be seen from outside and its id grows in the order of the locks; only then is the task started.
"""

import asyncio
import json
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from functools import lru_cache
from typing import Any, TypeVar

import psycopg

from cronlock import locks, runs
from cronlock.background import Background
from cronlock.closing import Closer
from cronlock.database import Database, unavailable, within
from cronlock.errors import Unavailable
from cronlock.execution import Execution
from cronlock.gate import Call, Gate
from cronlock.lending import is_gone
from cronlock.outcome import Failure, Holder, Outcome
from cronlock.recording import Recorder, expire
from cronlock.reporting import Report
from cronlock.seats import Seat, discard
from cronlock.tasks import Task

ASKS = 40
"""How often a call asks again when the lock was held but no run could be seen behind it."""
ASK_PAUSE = 0.025
DECISION_MARGIN = 0.5
ENDED_BY_SERVER = (None, "57P01", "57P02", "57P05", "25P03")
RECORD_WAIT = 5.0

log = logging.getLogger("cronlock.run")
T = TypeVar("T")


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
        self._openings: dict[str, bytes] = {}
        self.gates: defaultdict[str | int | None, Gate] = defaultdict(Gate)
        """By the name of a lock, or by its number."""
        self.paused: set[str] = set()
        """Tasks that were paused when last seen: a hint which question to ask first, never an answer."""
        self.usual_seconds: dict[str, float] = {}
        """How long a task's runs usually take, for Retry-After."""
        self.lock_keys: dict[str, int] = {}
        """The keys of the tasks' locks, as the server computed them."""
        self.is_draining = False

    async def call(self, call: Call) -> Outcome:
        """Run the task of `call`, or skip it; raises `Unavailable` if neither can be decided in time."""
        lock = call.task.lock
        gate = self.gates[lock.name if lock.number is None else lock.number]
        until = call.received + call.task.acquire_timeout.total_seconds() + DECISION_MARGIN
        for _ in range(ASKS):
            if self.is_draining:
                raise Unavailable("shutting_down", "the server is shutting down")
            call.renew()
            if gate.running is not None:
                return await self._skip_running(call, gate.running, until)
            if gate.is_contended or call.task.name in self.paused:
                lock_key = gate.lock_key or self.lock_keys[call.task.name]
                row = await self._recorder.put(runs.SKIP_CHECKED, call.row(lock_key), until)
                if (outcome := self._skipped_seen(call, lock_key, row)) is not None:
                    return outcome
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

    async def _skip_running(self, call: Call, execution: Execution, until: float) -> Outcome:
        """Skip a call from memory: this process runs its lock's task itself."""
        holder = execution.holder()
        facts = {"reason": "already_running", "blocked_by": holder.run_id}
        row = await self._recorder.put(runs.SKIP, call.row(execution.lock_key, facts), until)
        assert row is not None, "the statement gives a row for every nonce"
        return self._skipped(call, execution.lock_key, row[1], holder)

    async def _attempts(self, gate: Gate) -> None:
        """Make attempts for a lock until nobody waits for it."""
        try:
            while group := gate.take_group():
                if gate.running is not None:
                    await self._skip(group, gate.running.lock_key, gate.running.holder())
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
        task = group[0].task
        try:
            seat, row = await self._open(task)
        except Unavailable as error:
            for call in group:
                call.fail(error)
            return
        acquired, backend_pid, opened_us, lock_key = row
        if not acquired:
            await self._refused(gate, group, seat, lock_key)
            return
        await self._begin(gate, group, seat, backend_pid, opened_us, lock_key)

    async def _open(self, task: Task) -> tuple[Seat, tuple[Any, ...]]:
        """Open a transaction and try the lock in it; a connection that proves dead is replaced."""
        limit = task.acquire_timeout.total_seconds()
        until = time.monotonic() + limit
        while True:
            seat = await self._database.acquire(task.is_async, limit)
            try:
                reply = await within(limit, seat.connection, seat.send(self._opening(task), locks.LOCK_AT))
            except psycopg.Error as error:
                is_dead = seat.connection.closed or is_gone(seat.connection)
                await discard(seat)
                if is_dead and error.sqlstate in ENDED_BY_SERVER and time.monotonic() < until:
                    continue
                raise unavailable(error) from error
            if is_gone(seat.connection):  # the answer came in the moment in which it was given up and cut
                await discard(seat)
                if time.monotonic() < until:
                    continue
                raise Unavailable("database_unavailable", "the database did not answer in time")
            (row,) = reply.rows
            if row[0] is None:
                await discard(seat)
                raise Unavailable("read_only", "the server is read-only or a standby; no lock was taken")
            return seat, row

    def _opening(self, task: Task) -> bytes:
        if (message := self._openings.get(task.name)) is None:
            assert self._database.server is not None, "prepare() comes before the first call"
            message = self._openings[task.name] = locks.opening(task, self._database.server)
        return message

    async def _let_go(self, seat: Seat) -> None:
        """End a transaction that did nothing."""
        try:
            await within(RECORD_WAIT, seat.connection, seat.send(locks.REFUSED))
        except psycopg.Error:
            await discard(seat)
        else:
            await seat.give_back()

    async def _refused(self, gate: Gate, group: list[Call], seat: Seat, lock_key: int) -> None:
        """Somebody else holds the lock: end the attempt, see who, and skip; or ask again if nobody can be seen."""
        self._background.spawn(self._let_go(seat))
        async for call, row in self._record(runs.SKIP_CHECKED, group, lock_key):
            outcome = self._skipped_seen(call, lock_key, row)
            if outcome is not None:
                gate.refused(lock_key)
            call.decide(outcome)

    async def _record(
        self, kind: str, group: list[Call], lock_key: int, facts: dict[str, Any] | None = None
    ) -> AsyncIterator[tuple[Call, Any]]:
        """Write the records of a group of skips together; a call whose record fails is told so."""
        writing: list[tuple[Call, asyncio.Future[Any]]] = []
        for call in group:
            try:
                writing.append((call, self._recorder.put(kind, call.row(lock_key, facts))))
            except Unavailable as error:
                call.fail(error)
        for call, written in writing:
            try:
                yield call, await written
            except Unavailable as error:
                call.fail(error)

    def _skipped_seen(self, call: Call, lock_key: int, row: Any) -> Outcome | None:
        """The outcome of a record that `runs.SKIP_CHECKED` made; None if it made none."""
        if row is None:
            self.paused.discard(call.task.name)
            return None
        _, skip_id, told = row
        if told is None:
            self.paused.add(call.task.name)
        return self._skipped(call, lock_key, skip_id, holder_of(told) if told else None)

    async def _skip(self, group: list[Call], lock_key: int, holder: Holder) -> None:
        """Record that these calls met a run of this process, which `holder` is, and answer them."""
        facts = {"reason": "already_running", "blocked_by": holder.run_id}
        async for call, row in self._record(runs.SKIP, group, lock_key, facts):
            call.decide(self._skipped(call, lock_key, row[1], holder))

    def _skipped(self, call: Call, lock_key: int, run_id: int, holder: Holder | None) -> Outcome:
        """A skip by `holder`, or by a pause where there is none."""
        outcome = Outcome(
            status="skipped",
            task=call.task.name,
            run_id=run_id,
            duration_ms=call.elapsed_ms(),
            reason="paused" if holder is None else "already_running",
            holder=holder,
            retry_after=self._retry_after(call.task, holder),
        )
        self._report.skipped(outcome, lock_key)
        return outcome

    def _retry_after(self, task: Task, holder: Holder | None) -> int:
        """Whole seconds after which the lock is probably free, from the task's usual duration."""
        if (usual := self.usual_seconds.get(task.name)) is None:
            usual = min(task.timeout.total_seconds(), 30.0)
        elapsed = (holder.elapsed_ms or 0) / 1000 if holder else 0.0
        return max(1, round(usual - elapsed) if elapsed < usual else round(usual / 2))

    async def _begin(
        self, gate: Gate, group: list[Call], seat: Seat, backend_pid: int, opened_us: int, lock_key: int
    ) -> None:
        """With the lock held: record `running`, start the first caller's task, skip the others."""
        leader = next((call for call in group if call.is_waiting), None)
        if leader is None:
            await self._let_go(seat)
            return
        row = {
            "nonce": leader.nonce,
            "task": leader.task.name,
            "lock_name": leader.task.lock.name,
            "lock_key": lock_key,
            "backend_pid": backend_pid,
            "trigger": leader.trigger,
            "caller": leader.caller,
        }
        try:
            written = await self._recorder.put(runs.BEGIN, row)
            assert written is not None, "the statement gives a row for every nonce"
        except Unavailable as error:
            await self._let_go(seat)
            # The row may have been written all the same, if only the answer was lost.
            self._closer.end_row(
                leader.nonce, "cancelled", Failure("Unavailable", "it was not started: no answer in time")
            )
            leader.fail(error)
            for call in group:
                call.decide(None)
            return
        _, run_id, status, started_at, has_predecessor = written
        if has_predecessor:
            await self._free(row)
        if status != "running":
            await self._let_go(seat)
            self.paused.add(leader.task.name)
            leader.decide(self._skipped(leader, lock_key, run_id, None))
            for call in group:
                call.decide(None)
            return
        if not leader.is_waiting:
            self._closer.end_row(
                leader.nonce, "cancelled", Failure("Unavailable", "it was not started: its caller had gone")
            )
            await self._let_go(seat)
            for call in group:
                call.decide(None)
            return
        execution = Execution(
            leader,
            seat,
            run_id=run_id,
            started_at=started_at,
            opened_us=opened_us,
            lock_key=lock_key,
            instance=self._instance,
        )
        leader.decide(execution)
        self._start(gate, execution)
        if joined := [call for call in group if call.is_waiting]:
            await self._skip(joined, lock_key, execution.holder())

    async def _free(self, row: dict[str, Any]) -> None:
        """Close the runs that had this lock before us and never ended; if that cannot be, a timer will."""
        try:
            freed = await self._recorder.put(runs.FREE, row)
        except Unavailable:
            return
        for lost_id, lost_task in json.loads(freed[1]) if freed else ():
            self._report.lost(lost_task, lost_id, row["lock_key"])


@lru_cache(maxsize=64)
def holder_of(told: str) -> Holder:
    """The holder that a record of a skip was told of; the same text comes with all skips of one message."""
    run_id, started_at, elapsed_ms, instance, pid, application_name = json.loads(told)
    if run_id is None:
        return Holder(pid=pid, application_name=application_name)
    return Holder(run_id, started_at, elapsed_ms, instance)


async def in_time(future: "asyncio.Future[T]", until: float) -> T:
    """Await what the database is to say; raises `Unavailable` when `until` (monotonic seconds) has come."""
    timer = asyncio.get_running_loop().call_later(until - time.monotonic(), expire, future)
    try:
        return await future
    finally:
        timer.cancel()
