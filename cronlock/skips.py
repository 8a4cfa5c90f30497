"""Skips: the calls that run nothing, each a record, an answer and a log line.

A call is skipped by what can be seen: a run of this process, from memory; a holder in the lock table; or what the
records say of its task and its occurrence. Whoever holds the lock but cannot be named yet skips nobody.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from functools import lru_cache
from typing import Any

from cronlock import runs
from cronlock.errors import Unavailable
from cronlock.execution import Execution
from cronlock.gate import Call
from cronlock.outcome import Holder, Outcome
from cronlock.recording import Recorder
from cronlock.reporting import Report
from cronlock.tasks import Task

USUAL = 30.0
"""Seconds after which to come again where nothing is known of a task's runs."""


class Skips:
    """Records and answers the skips of one process."""

    def __init__(self, recorder: Recorder, report: Report) -> None:
        self._recorder = recorder
        self._report = report
        self.paused: set[str] = set()
        """Tasks that were paused when last seen: a hint which question to ask first, never an answer."""
        self.usual_seconds: dict[str, float] = {}
        """How long a task's runs usually take, for Retry-After."""

    async def by_memory(self, call: Call, execution: Execution, until: float) -> Outcome:
        """Skip a call by a run of this process; raises `Unavailable` when `until` (monotonic seconds) has come."""
        holder = execution.holder()
        row = await self._recorder.put(runs.SKIP, call.row(execution.lock_key, by_run(holder)), until)
        assert row is not None, "the statement gives a row for every nonce"
        return self.outcome(call, execution.lock_key, row[1], "already_running", holder)

    async def group_by_memory(self, group: Sequence[Call], execution: Execution) -> None:
        """Decide these calls by a run of this process."""
        holder = execution.holder()
        facts = by_run(holder)
        puts = [(runs.SKIP, call.row(execution.lock_key, facts), call) for call in group]
        async for call, row in self._together(puts):
            call.decide(self.outcome(call, execution.lock_key, row[1], "already_running", holder))

    async def ask(self, call: Call, lock_keys: Sequence[int], until: float) -> Outcome | None:
        """Skip a call if a holder can be seen, or if the records forbid it; None if it is to be tried."""
        kind, row = question(call, lock_keys)
        try:
            seen = await self._recorder.put(kind, row, until)
        except Unavailable as error:
            raise call.not_held(error.__cause__) or error from error.__cause__
        return self._seen(call, lock_keys, seen)

    async def ask_group(self, group: Sequence[Call], lock_keys: Sequence[int]) -> bool:
        """Decide these calls after a refused attempt, with None where nobody can be seen; whether anybody was."""
        is_any = False
        async for call, row in self._together([(*question(call, lock_keys), call) for call in group]):
            outcome = self._seen(call, lock_keys, row)
            is_any = is_any or outcome is not None
            call.decide(outcome)
        return is_any

    async def _together(self, puts: Sequence[tuple[str, dict[str, Any], Call]]) -> AsyncIterator[tuple[Call, Any]]:
        """Write the records of a group together; a call whose record fails is told so."""
        writing: list[tuple[Call, asyncio.Future[Any]]] = []
        for kind, row, call in puts:
            try:
                writing.append((call, self._recorder.put(kind, row)))
            except Unavailable as error:
                call.fail(error)
        for call, written in writing:
            try:
                yield call, await written
            except Unavailable as error:
                call.fail(error)

    def _seen(self, call: Call, lock_keys: Sequence[int], row: Any) -> Outcome | None:
        """The outcome of a record that a question made; None if it made none."""
        if row is None:
            self.paused.discard(call.task.name)
            return None
        if not call.is_checked:
            _, skip_id, reason, told = row
            return self.outcome(call, lock_keys[0], skip_id, reason, holder_of(told) if told else None)
        _, skip_id, reason, told, blocked_by, wait, lock_key = row
        holder = holder_of(told) if told else before(blocked_by)
        return self.outcome(call, lock_key, skip_id, reason, holder, wait)

    def outcome(
        self, call: Call, lock_key: int, run_id: int, reason: str, holder: Holder | None, wait: int | None = None
    ) -> Outcome:
        """A skip; `wait` is in how many seconds to come again, where that is known."""
        if reason == "paused":
            self.paused.add(call.task.name)
        outcome = Outcome(
            status="skipped",
            task=call.task.name,
            run_id=run_id,
            duration_ms=call.elapsed_ms(),
            reason=reason,
            holder=holder,
            retry_after=self._retry_after(call.task, holder) if wait is None else max(1, wait),
        )
        self._report.skipped(outcome, lock_key)
        return outcome

    def _retry_after(self, task: Task, holder: Holder | None) -> int:
        """Whole seconds after which the lock is probably free, from the task's usual duration."""
        if (usual := self.usual_seconds.get(task.name)) is None:
            usual = USUAL if task.timeout is None else min(task.timeout.total_seconds(), USUAL)
        elapsed = (holder.elapsed_ms or 0) / 1000 if holder else 0.0
        return max(1, round(usual - elapsed) if elapsed < usual else round(usual / 2))


def question(call: Call, lock_keys: Sequence[int]) -> tuple[str, dict[str, Any]]:
    """The statement that skips a call if it must be, and its row."""
    if call.is_checked:
        return runs.SKIP_CHECKED, call.row(None, {"slots": lock_keys})
    return runs.SKIP_SEEN, call.row(lock_keys[0])


def by_run(holder: Holder) -> dict[str, Any]:
    """What a record says of a skip by one of our runs."""
    return {"reason": "already_running", "blocked_by": holder.run_id}


def before(run_id: int | None) -> Holder | None:
    """A run that completed before, as what a call was skipped by."""
    return None if run_id is None else Holder(run_id)


@lru_cache(maxsize=64)
def holder_of(told: str) -> Holder:
    """The holder that a record of a skip was told of; the same text comes with all skips of one message."""
    run_id, started_at, elapsed_ms, instance, pid, application_name = json.loads(told)
    if run_id is None:
        return Holder(pid=pid, application_name=application_name)
    return Holder(run_id, started_at, elapsed_ms, instance)
