"""One run while it runs: its code, what may stop it, and what its caller waits for."""

import asyncio
import contextvars
import inspect
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from cronlock.context import Run, take_cache_keys
from cronlock.gate import Call
from cronlock.guard import Guard
from cronlock.lending import CONTEXT, Lending
from cronlock.lines import Lines
from cronlock.outcome import Failure, Holder, Outcome
from cronlock.seats import Seat
from cronlock.tasks import Task

if TYPE_CHECKING:
    from cronlock.attempt import Attempt

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a run is stopped before its code returned: the status it ends with, a sentence, and who says so."""

    status: str
    message: str
    type: str = ""

    def failure(self) -> Failure:
        """As what it is recorded and answered."""
        types = {"timed_out": "TimeoutError", "cancelled": "CancelAsked", "lost": "LockLost"}
        return Failure(self.type or types.get(self.status, "TransactionEnded"), self.message)


class Returned(NamedTuple):
    """What the task's code came to: a value, or an exception of any kind."""

    value: Any = None
    error: BaseException | None = None


class Execution:
    """A run from the moment its `running` row is durable."""

    is_job = False

    def __init__(
        self,
        call: Call,
        seat: Seat,
        *,
        run_id: int,
        started_at: str,
        opened: float,
        opened_us: int,
        lock_key: int,
        instance: str,
        attempt: int = 1,
    ) -> None:
        self.call = call
        self.seat = seat
        self.run_id = run_id
        self.started_at = started_at
        self.opened = opened
        """When the opening was sent, in monotonic seconds; the server counts from no earlier than that."""
        self.opened_us = opened_us
        self.lock_key = lock_key
        self.instance = instance
        self.attempt = attempt
        self.guard: Guard | None = None
        self.lines: Lines | None = None
        self.started = time.monotonic()
        self.lending = Lending()
        self.run: Run | None = None
        self._holder: Holder | None = None
        self.is_doing = False
        self.progress: dict[str, Any] | None = None
        """What the run said last of how far it is, until it is written."""
        self.is_writing_progress = False
        self.is_writing_log = False
        self.has_logged = False
        """Whether a line was logged since the log was last written."""
        loop = asyncio.get_running_loop()
        self.stop: asyncio.Future[Stop] = loop.create_future()
        self.turned: asyncio.Future[None] = loop.create_future()
        """Done as soon as the code has returned or the run is to stop."""
        self.answer: asyncio.Future[Outcome] = loop.create_future()

    @property
    def task(self) -> Task:
        """The task that runs."""
        return self.call.task

    @property
    def effects_of(self) -> tuple[str, str]:
        """What its effect keys are for: its occurrence, whichever run of it this is, or this run."""
        return ("run", self.call.nonce) if self.call.occurrence is None else ("occurrence", self.call.occurrence)

    def elapsed_ms(self) -> int:
        """Milliseconds since the run began."""
        return round((time.monotonic() - self.started) * 1000)

    def outcome(self, status: str, **facts: Any) -> Outcome:
        """This run as it ended with `status`."""
        return Outcome(status=status, task=self.task.name, run_id=self.run_id, duration_ms=self.elapsed_ms(), **facts)

    def log(self) -> str | None:
        """What the task has logged so far, as the database can hold it."""
        text = None if self.lines is None else self.lines.text()
        if text is None or self.seat.database.is_unicode:
            return text
        return text.encode("ascii", "backslashreplace").decode()

    def holder(self) -> Holder:
        """This run as the holder of its lock."""
        elapsed_ms = self.elapsed_ms()
        if self._holder is None or self._holder.elapsed_ms != elapsed_ms:
            self._holder = Holder(self.run_id, self.started_at, elapsed_ms, self.instance)
        return self._holder

    def ask_to_stop(self, stop: Stop) -> None:
        """Stop the run; the first reason counts."""
        if not self.stop.done():
            self.stop.set_result(stop)
            self.turn()

    def turn(self, _: object = None) -> None:
        """There is something to do about this run."""
        if not self.turned.done():
            self.turned.set_result(None)

    def reply(self, outcome: Outcome) -> None:
        """Answer the caller, once."""
        if not self.answer.done():
            self.answer.set_result(outcome)


def awaited(value: T) -> T:
    """The value a task returned; raises TypeError for a coroutine, whose work nobody has done."""
    if inspect.iscoroutine(value):
        value.close()
        raise TypeError(
            "the task returned a coroutine that was not awaited; a decorator around an async task must be async too"
        )
    return value


def do(execution: "Execution | Attempt", run: Run, context: contextvars.Context) -> "asyncio.Future[Returned]":
    """Call the task's function in `context`; the only place that calls one."""
    context.run(CONTEXT.set, execution.lending)
    if execution.task.is_async:
        return asyncio.get_running_loop().create_task(contain(execution.task, run), context=context)
    return in_thread(execution.task, run, context.run)


def heeded(run: Run, returned: Returned) -> Returned:
    """What the code came to, once the `cacheKeys` in what it returned are said; wrong ones are its error."""
    if isinstance(returned.value, Mapping):
        try:
            take_cache_keys(run, returned.value)
        except Exception as error:
            return Returned(error=error)
    return returned


async def contain(task: Task, run: Run) -> Returned:
    """Run an `async def` task; whatever it raises comes back as a value, SystemExit too."""
    try:
        return Returned(value=awaited(await task.call(run)))
    except BaseException as error:
        return Returned(error=error)


def in_thread(task: Task, run: Run, start: Callable[[Callable[[], None]], None]) -> "asyncio.Future[Returned]":
    """Run a plain function in a daemon thread of its own, which cannot keep the process from ending.

    `start` wraps the thread's body, to run it in the caller's context.
    """
    loop = asyncio.get_running_loop()
    returned: asyncio.Future[Returned] = loop.create_future()

    def tell(result: Returned) -> None:
        if not returned.done():
            returned.set_result(result)

    def body() -> None:
        try:
            result = Returned(value=awaited(task.call(run)))
        except BaseException as error:
            result = Returned(error=error)
        try:
            loop.call_soon_threadsafe(tell, result)
        except RuntimeError:
            pass  # the loop is closed: the process is ending and nobody waits

    threading.Thread(target=start, args=(body,), name=f"cronlock-{task.name}", daemon=True).start()
    return returned
