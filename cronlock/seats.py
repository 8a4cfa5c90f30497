"""A seat: the connection of one run, for an `async def` task or for a plain function.

Both kinds speak the same few words to the runner: send a message, show SQLAlchemy's face, cancel, give back.
What a task is handed as `run.connection` is SQLAlchemy over the very driver connection whose transaction holds
the lock, made when the task first asks for it.
"""

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import psycopg
from sqlalchemy import Connection as SqlConnection
from sqlalchemy.ext.asyncio import AsyncConnection as AsyncSqlConnection

from cronlock import wire
from cronlock.lending import OVER, AsyncTaskConnection, TaskConnection, ThreadTaskConnection, cut, is_gone
from cronlock.wire import Row

if TYPE_CHECKING:
    from cronlock.database import Database

T = TypeVar("T")
CANCEL_TIMEOUT = 2.0
BUSY_WAIT = 2.0
"""Seconds to wait for what a task's code still does on its connection; psycopg's streams keep it until they end."""

creating: ContextVar[TaskConnection] = ContextVar("cronlock_creating")
"""The driver connection that SQLAlchemy's pool is to wrap next."""


class Reply(NamedTuple):
    """What a message brought back: the rows of its last statement that had any, and its last command tag."""

    rows: list[Row]
    tag: str


class AsyncSeat:
    """A run's connection for an `async def` task."""

    def __init__(self, database: "Database", connection: AsyncTaskConnection) -> None:
        self.database = database
        self.connection = connection
        self.sql: AsyncSqlConnection | None = None

    async def send(self, message: bytes, rows_at: int | None = None) -> Reply:
        """Send one message of several statements; raises the `psycopg.Error` of the first that fails.

        `rows_at` is the statement whose rows are wanted, as an index into the message; None for none.
        """
        if (lock := self.connection.lock).locked():
            try:
                await asyncio.wait_for(lock.acquire(), 0 if is_gone(self.connection) else BUSY_WAIT)
            except TimeoutError:
                raise busy() from None
            lock.release()
        async with lock:
            results = await wire.send(self.connection, message)
        tag = (results[-1].command_status or b"").decode()
        return Reply([] if rows_at is None else wire.rows(results[rows_at]), tag)

    def face(self) -> AsyncSqlConnection:
        """SQLAlchemy over this connection, in the transaction that is open on it."""
        if self.sql is None:
            creating.set(self.connection)
            self.sql = immediately(begun(self.database.engine.connect()))
        return self.sql

    async def close_face(self) -> None:
        """Let SQLAlchemy go without a word to the server."""
        if self.sql is not None:
            self.connection.closing = True
            try:
                await self.sql.close()
            finally:
                self.connection.closing = False
                self.sql = None

    async def cancel(self) -> None:
        """Cancel the statement that is running, if one is."""
        try:
            await self.connection.cancel_safe(timeout=CANCEL_TIMEOUT)
        except psycopg.Error:
            cut(self.connection)

    def renew(self) -> None:
        """Make the connection as it was before a task had it."""
        self.connection.renew(self.database.prepare_threshold)

    async def give_back(self) -> None:
        """Return the connection to its pool; one that is not idle is thrown away there."""
        self.connection.lending = OVER
        await self.database.runs.putconn(self.connection)


class ThreadSeat:
    """A run's connection for a plain function; everything that may block is done in a thread."""

    def __init__(self, database: "Database", connection: ThreadTaskConnection) -> None:
        self.database = database
        self.connection = connection
        self.sql: SqlConnection | None = None

    async def send(self, message: bytes, rows_at: int | None = None) -> Reply:
        """As `AsyncSeat.send`."""
        return await self.database.in_thread(self._send, message, rows_at)

    def _send(self, message: bytes, rows_at: int | None) -> Reply:
        if not self.connection.lock.acquire(timeout=0 if is_gone(self.connection) else BUSY_WAIT):
            raise busy()
        self.connection.lock.release()
        cursor = self.connection.cursor_of_ours()
        cursor.execute(message)
        cursor.set_result(-1)
        tag = cursor.statusmessage or ""
        if rows_at is None:
            return Reply([], tag)
        cursor.set_result(rows_at)
        return Reply(cursor.fetchall(), tag)

    def face(self) -> SqlConnection:
        """As `AsyncSeat.face`."""
        if self.sql is None:
            creating.set(self.connection)
            self.sql = self.database.sync_engine.connect()
            self.sql.begin()
        return self.sql

    async def close_face(self) -> None:
        """As `AsyncSeat.close_face`."""
        if self.sql is not None:
            self.connection.closing = True
            try:
                await self.database.in_thread(self.sql.close)
            finally:
                self.connection.closing = False
                self.sql = None

    async def cancel(self) -> None:
        """As `AsyncSeat.cancel`."""
        try:
            await self.database.in_thread(lambda: self.connection.cancel_safe(timeout=CANCEL_TIMEOUT))
        except psycopg.Error:
            cut(self.connection)

    def renew(self) -> None:
        """As `AsyncSeat.renew`."""
        self.connection.renew(self.database.prepare_threshold)

    async def give_back(self) -> None:
        """As `AsyncSeat.give_back`."""
        self.connection.lending = OVER
        try:
            await self.database.in_thread(self.database.threads.putconn, self.connection)
        finally:
            self.database.free_thread_seat()


Seat = AsyncSeat | ThreadSeat


class Busy(psycopg.OperationalError):
    """The task still uses the connection: a statement, or a stream of rows that it has not finished."""


def busy() -> Busy:
    return Busy("the task left a statement or a stream of rows unfinished on its connection")


async def begun(connection: AsyncSqlConnection) -> AsyncSqlConnection:
    """A started SQLAlchemy connection that knows it is in a transaction; nothing is sent for that."""
    await connection.start()
    assert connection.sync_connection is not None, "it was started"
    connection.sync_connection.begin()  # has nothing to wait for, and no greenlet to make for that
    return connection


def immediately(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise RuntimeError("SQLAlchemy wanted to wait while it wrapped an open connection")


async def given(*_: Any, **__: Any) -> Any:
    """SQLAlchemy's `async_creator`: the connection that is being wrapped."""
    return creating.get()


async def discard(seat: Seat) -> None:
    """Close a broken connection and tell its pool."""
    seat.connection.lending = None
    if isinstance(seat, AsyncSeat):
        await seat.connection.close()
    else:
        seat.connection.close()
    await seat.give_back()
