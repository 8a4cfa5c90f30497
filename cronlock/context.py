"""What a task sees: one object, `run`."""

import logging
from collections.abc import Callable
from functools import cached_property
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from cronlock.errors import LockLost
from cronlock.lending import is_gone
from cronlock.seats import Seat


class Run:
    """One run, as its task sees it.

    An `async def` task finds asynchronous objects here, a plain function synchronous ones.

    `connection`, `session` and `driver` all speak in the one transaction that holds the run's lock. It is
    ended by cronlock: committed together with `completed` when the task returns, rolled back when it raises.
    """

    def __init__(
        self,
        seat: Seat,
        *,
        id: int,
        task: str,
        payload: Any,
        instance: str,
        report: Callable[[int, int | None], None],
    ) -> None:
        self._seat = seat
        self._session: AsyncSession | Session | None = None
        self._report = report
        self._instance = instance
        self.is_touched = False
        self.id = id
        """The run's number; it grows in the order in which the lock was taken."""
        self.task = task
        """The task's name."""
        self.payload = payload
        """The payload, validated against the task's annotation if there is one."""
        self.attempt = 1
        """How many times this was tried, from 1."""
        self.occurrence: str | None = None
        """The tick or delivery that this run belongs to, if it is known."""

    @cached_property
    def log(self) -> "logging.LoggerAdapter[logging.Logger]":
        """A logger whose lines carry the task and the run."""
        facts = {"task": self.task, "runId": self.id, "instance": self._instance}
        return logging.LoggerAdapter(logging.getLogger("cronlock.task"), facts)

    @property
    def connection(self) -> Any:
        """SQLAlchemy: an `AsyncConnection`, or a `Connection` for a plain function.

        `commit`, `rollback` and `close` are refused and fail the run; `begin_nested()` gives a savepoint.
        """
        self.is_touched = True
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
        self.is_touched = True
        return self._seat.connection

    def progress(self, done: int, total: int | None = None) -> None:
        """Say how far the run is; shown on its row while it runs. Never waits and never fails the run."""
        try:
            said = int(done), None if total is None else int(total)
        except (TypeError, ValueError, OverflowError):
            self.log.warning("progress is given as whole numbers; %s of them was left out", type(done).__name__)
        else:
            self._report(*said)

    def check(self) -> None:
        """Raise `LockLost` if the connection that holds the lock is gone."""
        if is_gone(self._seat.connection):
            raise LockLost("the connection that held the lock is gone; what the run wrote is rolled back")


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
