"""The callers of one lock in one process share their attempts.

A caller joins the next attempt, never one already under way, so that no answer is older than its question.
The first caller of an attempt leads: if it gets the lock it runs, and the others are skipped with its run as
the holder; if not, all are skipped. While this process itself has every slot of a lock, further callers of it are
skipped from memory.

In a storm of calls the lock table says more cheaply what an attempt would: within a second of a refused attempt a
call is first put to the statement that records skips, which writes it only if it sees the lock held. A call that
it does not write makes an attempt. The lock is only ever given by an attempt.
"""

import asyncio
import contextvars
import os
import time
from dataclasses import dataclass, field
from itertools import count
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from cronlock.errors import PayloadInvalid
from cronlock.keys import wrong
from cronlock.outcome import Outcome, sqlstate
from cronlock.tasks import Task

if TYPE_CHECKING:
    from cronlock.execution import Execution


NOT_IN_ENCODING = ("22P05", "22021", "0A000")
CONTENDED = 1.0
"""Seconds after a refused attempt in which the lock table is asked first."""


def drawn() -> str:
    """The process's part of a nonce: the random half of a UUID."""
    digits = token_hex(8)
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:]}-"


ours = drawn()
counted = count()


def draw() -> None:
    """Draw the process's part of its nonces anew: a fork has the memory of its parent."""
    global ours
    ours = drawn()


os.register_at_fork(after_in_child=draw)


def new_nonce() -> str:
    """A UUID that no other call has: random for the process, counted within it (a third of uuid4's price)."""
    number = next(counted)
    return f"{ours}{number >> 48:04x}-{number & 0xFFFFFFFFFFFF:012x}"


@dataclass(slots=True, eq=False)
class Call:
    """One call for a task, until it is decided.

    `decided` gives the outcome of a skip, the execution that this call began, or None for "ask again".
    """

    task: Task
    payload: Any
    trigger: str
    caller: str | None
    context: contextvars.Context
    key: str | None = None
    occurrence: str | None = None
    scheduled_for: str | None = None
    received: float = field(default_factory=time.monotonic)
    nonce: str = ""
    is_checked: bool = field(init=False)
    """Whether more is to be said of this call than its task and one lock that all runs of its task share."""
    is_asked_first: bool = field(init=False)
    """Whether the records may forbid this call although its lock is free."""
    decided: "asyncio.Future[Outcome | Execution | None]" = field(init=False, repr=False)

    def __post_init__(self) -> None:
        has_occurrence, task = self.occurrence is not None, self.task
        self.is_checked = has_occurrence or not task.is_plain
        self.is_asked_first = has_occurrence or task.min_interval is not None

    def renew(self) -> None:
        """A call that asks again is a new record."""
        self.nonce = new_nonce()

    def is_alike(self, other: "Call") -> bool:
        """Whether a transaction that was opened for the other will do for this one."""
        return self.task is other.task and self.occurrence == other.occurrence

    def row(self, lock_key: int | None, facts: dict[str, Any] | None = None) -> dict[str, Any]:
        """The record of this call, with what its decision adds."""
        task = self.task
        row = {
            "nonce": self.nonce,
            "task": task.name,
            "lock_name": task.lock.name,
            "lock_key": lock_key,
            "trigger": self.trigger,
            "caller": self.caller,
        }
        if self.is_checked:
            row["key"] = self.key
            row["occurrence"] = self.occurrence
            row["scheduled_for"] = self.scheduled_for
            if task.min_interval is not None:
                row["min_interval"] = f"{task.min_interval.total_seconds()} seconds"
            if task.is_guarded:
                row["mode"] = task.mode
        if facts:
            row.update(facts)
        return row

    def not_held(self, error: BaseException | None) -> PayloadInvalid | None:
        """The 422 for a text of this call that the database's encoding does not have; None for any other error."""
        if error is None or sqlstate(error) not in NOT_IN_ENCODING:
            return None
        if self.task.key is not None and self.key is not None and not self.key.isascii():
            return self.task.key.not_held(self.payload)
        if self.occurrence is not None and not self.occurrence.isascii():
            return wrong("idempotency_key", "has characters that the database cannot hold")
        return None

    @property
    def is_waiting(self) -> bool:
        """Whether somebody still wants this decision."""
        return not self.decided.done()

    def decide(self, decision: "Outcome | Execution | None") -> None:
        """Give the decision, if it is still wanted."""
        if not self.decided.done():
            self.decided.set_result(decision)

    def fail(self, error: Exception) -> None:
        """Nothing could be decided."""
        if not self.decided.done():
            self.decided.set_exception(error)

    def elapsed_ms(self) -> int:
        """Milliseconds since the call arrived."""
        return round((time.monotonic() - self.received) * 1000)


class Gate:
    """One lock as this process sees it."""

    def __init__(self, slots: int, lock_keys: tuple[int, ...] = ()) -> None:
        self.slots = slots
        self.lock_keys = lock_keys
        """The keys of the slots, as the server computed them; empty until it has."""
        self.running: list[Execution] = []
        """The runs of this process that have a slot, oldest first."""
        self.waiting: list[Call] = []
        self.attempts: asyncio.Task[None] | None = None
        self._contended_until = 0.0

    @property
    def is_full(self) -> bool:
        """Whether this process has every slot itself."""
        return len(self.running) >= self.slots

    @property
    def is_idle(self) -> bool:
        """Whether nothing would be lost with this gate."""
        return not self.running and self.attempts is None

    def refused(self) -> None:
        """An attempt was refused by a holder that could be seen."""
        self._contended_until = time.monotonic() + CONTENDED

    @property
    def is_contended(self) -> bool:
        """Whether an attempt was refused a moment ago."""
        return time.monotonic() < self._contended_until

    def join(self, call: Call) -> None:
        """Wait for the next attempt."""
        call.decided = asyncio.get_running_loop().create_future()
        self.waiting.append(call)

    def take_group(self) -> list[Call]:
        """The calls that the next attempt answers."""
        group, self.waiting = [call for call in self.waiting if call.is_waiting], []
        return group

    def put_back(self, calls: list[Call]) -> None:
        """Let calls of an attempt that says nothing about them have the next one."""
        self.waiting = calls + self.waiting
