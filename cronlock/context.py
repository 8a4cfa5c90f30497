"""What a task sees: one object, `run`."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid5

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from cronlock import enqueue
from cronlock.enqueue import Enqueued
from cronlock.enqueuer import Producer
from cronlock.errors import LockLost, NotInTransaction, StatementRefused
from cronlock.invalidation import Outbox, Said
from cronlock.lending import is_gone
from cronlock.lines import Lines, TaskLog
from cronlock.targets import said
from cronlock.tasks import INT64

if TYPE_CHECKING:
    from cronlock.attempt import Attempt
    from cronlock.execution import Execution
    from cronlock.seats import Seat

EFFECTS = UUID("5b1d2c4e-6f0a-5d8b-9c37-2a41e0f7c6d9")
"""The namespace of effect keys (RFC 9562, section 5.5)."""


MAKING = threading.Lock()


class Run:
    """One run, as its task sees it.

    An `async def` task finds asynchronous objects here, a plain function synchronous ones.

    `connection`, `session` and `driver` all speak in the one transaction that holds the run's lock. It is
    ended by cronlock: committed together with `completed` when the task returns, rolled back when it raises.
    A task in guard mode has none of them: it opens its own.
    """

    def __init__(
        self,
        execution: "Execution | Attempt",
        scrub: Callable[[str], str],
        report: Callable[[dict[str, Any] | None], None],
        producer: Producer,
        outbox: Outbox,
    ) -> None:
        call = execution.call
        self._execution = execution
        self._session: AsyncSession | Session | None = None
        self._scrub = scrub
        self._report = report
        self._outbox = outbox
        self._producer = producer
        self._loop = asyncio.get_running_loop()
        self.is_touched = False
        self.id = execution.run_id
        """The run's number; it grows in the order in which the lock was taken: a fencing number for what is outside."""
        self.task = call.task.name
        """The task's name."""
        self.key = call.key
        """The value of the task's `key` that this run's lock is for, or None."""
        self.payload = call.payload
        """The payload, validated against the task's annotation if there is one."""
        self.attempt = execution.attempt
        """How many times this occurrence was tried, from 1; 1 where there is no occurrence."""
        self.occurrence = call.occurrence
        """The tick or delivery that this run belongs to, if it is known."""

    @property
    def _seat(self) -> "Seat":
        seat = self._execution.seat
        assert seat is not None, "only a task in guard mode has none"
        return seat

    @cached_property
    def log(self) -> TaskLog:
        """A logger whose lines carry the task and the run, and are kept with it (500 of them, without secrets)."""
        execution = self._execution
        with MAKING:  # threads of the task may ask for it at one moment
            lines = execution.lines = execution.lines or Lines(self._scrub)
        facts = {"task": self.task, "runId": self.id, "instance": execution.instance}
        return TaskLog(facts, lines, self._logged)

    def _logged(self) -> None:
        if not self._execution.has_logged:
            self._execution.has_logged = True
            self._report(None)

    def effect_key(self, name: str) -> str:
        """An idempotency key for what the run does outside, as a UUID: send it with the request named `name`.

        It is the same in every run of the same occurrence, so that a retry is known for what it is. A run without an
        occurrence has its own. `name` tells the effects of one run apart, such as `f"charge:{invoice}"`. Two
        installations that send to one account elsewhere need a namespace each, which is part of it.
        """
        execution = self._execution
        return str(uuid5(EFFECTS, "\x1f".join((execution.task.full_name, *execution.effects_of, name))))

    @property
    def connection(self) -> Any:
        """SQLAlchemy: an `AsyncConnection`, or a `Connection` for a plain function.

        `commit`, `rollback` and `close` are refused and fail the run; `begin_nested()` gives a savepoint.

        Raises `NotInTransaction` in guard mode.
        """
        self._touch("connection")
        return self._seat.face()

    @property
    def session(self) -> Any:
        """SQLAlchemy's ORM: an `AsyncSession` or a `Session`, joined to the transaction with savepoints.

        Its `commit()` ends only a savepoint. What is pending is flushed when the task returns.
        """
        if self._session is None:
            connection = self.connection
            kind = AsyncSession if isinstance(connection, AsyncConnection) else Session
            self._session = kind(bind=connection, join_transaction_mode="create_savepoint", expire_on_commit=False)
        return self._session

    @property
    def driver(self) -> Any:
        """psycopg: an `AsyncConnection` or a `Connection`, for COPY and all else that SQLAlchemy hides."""
        self._touch("driver")
        return self._seat.connection

    def _touch(self, name: str) -> None:
        if self._execution.task.is_guarded:
            raise NotInTransaction(
                f"run.{name} is for tasks in transaction mode; the task {self.task!r} is in guard mode, where the lock"
                " has a transaction of its own: open a connection of your own, and commit on it"
            )
        self.is_touched = True

    def invalidate(self, *keys: str, tags: Iterable[str] = (), paths: Iterable[str] = ()) -> None:
        """Say that keys, tags and paths are stale, to every target of the `Cronlock`: after the commit, never before.

        It is part of the run's transaction: a run that fails, or a savepoint that is rolled back, has said nothing. A
        task in guard mode has said it when the run completes. Sends nothing itself, and may be called from any thread
        of the task. What the task returns as `{"cacheKeys": [..]}` is said in the same way.

        Each is a text of 1 to 1,000 characters (2,000 bytes), and there are at most 1,000 of them in a call.

        Raises `PayloadError` for anything else, and `StatementRefused` once the run has ended.
        """
        lending = self._execution.lending
        if lending.is_over:
            raise StatementRefused("the run has ended; what it invalidates now would never be told")
        self._say(said(keys, tags, paths))

    def _say(self, change: Any) -> None:
        execution = self._execution
        with MAKING:
            if execution.lending.said is None:
                execution.lending.said = Said(self._outbox, self.task, self.id, is_job=execution.is_job)
        execution.lending.said.add(change)

    def enqueue(self, name: str, payload: Any = None, *, idempotency_key: str | None = None, **options: Any) -> Any:
        """Write a job of the task `name`, in the run's transaction; in guard mode in one of its own, at once.

        To be awaited in an `async def` task; in a plain function it returns the `Enqueued` itself. Takes the options of
        `Cronlock.enqueue` and raises the same.
        """
        producer = self._producer
        wanted = producer.order(name, payload, idempotency_key, options)
        task = self._execution.task
        if task.is_guarded:
            writing = first(producer.enqueuer.enqueue(wanted))
            return writing if task.is_async else asyncio.run_coroutine_threadsafe(writing, self._loop).result()
        if task.is_async:
            return first(enqueue.on_async(self.driver, producer.statements, wanted))
        return enqueue.on_sync(self.driver, producer.statements, wanted)[0]

    def progress(self, done: int, total: int | None = None) -> None:
        """Say how far the run is; shown on its row while it runs. Never waits and never fails the run."""
        try:
            said = int(done), None if total is None else int(total)
            if not all(number is None or number in INT64 for number in said):
                raise OverflowError
        except (TypeError, ValueError, OverflowError):
            self.log.warning("progress is given as whole numbers; %s of them was left out", type(done).__name__)
        else:
            self._report({"done": said[0], "total": said[1]})

    def check(self) -> None:
        """Raise `LockLost` if the lock is no longer surely this run's, and `StatementRefused` if it is being stopped.

        To be asked before an effect outside. Sends nothing, and may be called from any thread.
        """
        if stopped := self._execution.lending.stopped:
            raise StatementRefused(f"the run is being stopped: {stopped}")
        if self._execution.seat is not None and is_gone(self._seat.connection):
            raise LockLost("the connection that held the lock is gone")
        if (guard := self._execution.guard) is not None:
            guard.check()


def take_cache_keys(run: Run, value: Any) -> None:
    """Invalidate the `cacheKeys` of what the task returned, if it is a dict that has some; raises `PayloadError`."""
    if isinstance(value, Mapping) and (keys := value.get("cacheKeys")) is not None:
        run._say(said(keys, (), ()))


async def first(writing: Coroutine[Any, Any, list[Enqueued]]) -> Enqueued:
    """The only one of a list."""
    return (await writing)[0]


def is_pending(run: Run) -> bool:
    """Whether the task's session has something that is not flushed."""
    session = run._session
    return session is not None and bool(session.new or session.dirty or session.deleted)


async def settle(run: Run) -> None:
    """Flush what the task's session has pending, and close what it was handed; raises what a flush raises."""
    session, run._session = run._session, None
    try:
        if isinstance(session, AsyncSession):
            await session.commit()
        elif session is not None:
            await run._seat.database.in_thread(session.commit)
    finally:
        await close(run, session)


async def close(run: Run, session: AsyncSession | Session | None = None) -> None:
    """Close what the task was handed, without a word to the server."""
    session = session or run._session
    run._session = None
    run._seat.connection.closing = True
    try:
        if isinstance(session, AsyncSession):
            await session.close()
        elif session is not None:
            await run._seat.database.in_thread(session.close)
    finally:
        run._seat.connection.closing = False
        await run._seat.close_face()
