"""A connection that one duty of a worker has for itself: opened when it is needed, and again after every outage."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import psycopg
from psycopg.pq.abc import PGresult

from cronlock import wire
from cronlock.database import Database, ask, unavailable, within
from cronlock.errors import Unavailable
from cronlock.lending import is_gone
from cronlock.wire import Row


def ignored(_: list[Row]) -> None:
    """Nothing is to be made of these rows."""


class Part(NamedTuple):
    """A statement of a message, and what takes its rows once the message is committed."""

    text: bytes
    take: Callable[[list[Row]], None] = ignored


class Link:
    """Sends messages, one at a time; `preparing` is sent first on every new connection that is a session of our own."""

    def __init__(self, database: Database, preparing: bytes) -> None:
        self._database = database
        self._preparing = preparing
        self._connection: psycopg.AsyncConnection[Any] | None = None
        self._lock = asyncio.Lock()

    async def send(self, message: bytes, seconds: float) -> list[PGresult]:
        """The results of a message's statements; raises `psycopg.Error`, or `Unavailable` if there is no server."""
        async with self._lock:
            connection = await self._open(seconds)
            try:
                return await within(seconds, connection, wire.send(connection, message))
            except psycopg.errors.ReadOnlySqlTransaction:
                await self.close()  # a session stays as it was made, though the server may be written to again
                raise
            except psycopg.Error:
                await self._mend(connection, seconds)
                raise
            except BaseException:
                await self.close()  # it is in the middle of its message
                raise

    async def _open(self, seconds: float) -> "psycopg.AsyncConnection[Any]":
        connection, self._connection = self._connection, None
        if connection is not None and not connection.closed and not is_gone(connection):
            self._connection = connection
            return connection
        if connection is not None:
            await connection.close()
        try:
            connection = await self._database.connect(seconds)
        except (psycopg.Error, TimeoutError) as error:
            raise (
                unavailable(error)
                if isinstance(error, psycopg.Error)
                else Unavailable("database_unavailable", "the database did not answer in time")
            ) from error
        try:
            if self._database.keeps_records_apart:
                await within(seconds, connection, wire.send(connection, self._preparing))
        except BaseException:
            await connection.close()
            raise
        self._connection = connection
        return connection

    async def _mend(self, connection: "psycopg.AsyncConnection[Any]", seconds: float) -> None:
        """After an error: end the transaction that it left open, or let the connection go."""
        try:
            if connection.closed:
                raise psycopg.OperationalError("closed")
            await within(seconds, connection, ask(connection, b"ROLLBACK"))
        except psycopg.Error:
            await self.close()

    async def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(psycopg.Error):
                await connection.close()
