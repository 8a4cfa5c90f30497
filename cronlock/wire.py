"""One message on a connection of cronlock's own, and what comes back: psycopg's libpq wrapper, awaited.

A cursor takes several times as long for the same message, and a run is little else than three of them. Only
messages of several statements in the simple protocol are sent here, whose values are their own text.
(psycopg: "pq - libpq wrapper module"; PostgreSQL manual: "Asynchronous Command Processing".)
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg
from psycopg import errors
from psycopg.pq import DiagnosticField, ExecStatus
from psycopg.pq.abc import PGconn, PGresult

Row = tuple[Any, ...]

LOOK = 0.2
"""Seconds after which a socket is read although the event loop has not said that there is something to read."""

TYPES: dict[int, Callable[[bytes], Any]] = {16: lambda value: value == b"t", 20: int, 21: int, 23: int}
"""How the values of a type are read, by its oid: booleans and whole numbers; all else is text."""


async def send(connection: "psycopg.AsyncConnection[Any]", message: bytes) -> list[PGresult]:
    """The results of the statements of one message, all of them good; raises the `psycopg.Error` of the first bad one.

    The connection is the caller's alone. A cancelled call leaves it in the middle of its message, to be thrown away.
    """
    results = await Exchange(connection.pgconn).run(message)
    for result in results:
        if result.status == ExecStatus.FATAL_ERROR:
            raise refusal(result)
    return results


class Exchange:
    """One message under way: the event loop calls `read` and `write` when its socket is ready."""

    def __init__(self, pgconn: PGconn) -> None:
        self._pgconn = pgconn
        self._loop = asyncio.get_running_loop()
        self._results: list[PGresult] = []
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._socket = -1
        self._is_writing = False

    async def run(self, message: bytes) -> list[PGresult]:
        """Send it and wait for the last result."""
        self._pgconn.send_query(message)
        self._socket = self._pgconn.socket
        self._loop.add_reader(self._socket, self._read)
        self._timer = self._loop.call_later(LOOK, self._look)
        try:
            if self._pgconn.flush():
                self._is_writing = True
                self._loop.add_writer(self._socket, self._write)
            await self._ended
        finally:
            self._end()
        return self._results

    def _read(self) -> None:
        pgconn = self._pgconn
        try:
            pgconn.consume_input()
            while not pgconn.is_busy():
                if (result := pgconn.get_result()) is None:
                    while pgconn.notifies():
                        pass  # of a task that listened; they are nobody's any more
                    self._end()
                    return
                self._results.append(result)
        except psycopg.Error as error:
            # The server may have said why before it went.
            self._end(None if any(result.status == ExecStatus.FATAL_ERROR for result in self._results) else error)

    def _look(self) -> None:
        """Read without being called: uvloop tells once of a socket that was reset, and forgets it."""
        self._timer = self._loop.call_later(LOOK, self._look)
        self._read()

    def _write(self) -> None:
        try:
            if not self._pgconn.flush():
                self._is_writing = False
                self._loop.remove_writer(self._socket)
        except psycopg.Error as error:
            self._end(error)

    def _end(self, error: psycopg.Error | None = None) -> None:
        """Leave the socket alone at once: a closed one's number may be another's in the next moment."""
        if self._socket < 0:
            return
        self._timer.cancel()
        with suppress(OSError):  # libpq may have closed it, on which the loop forgets both
            self._loop.remove_reader(self._socket)
            if self._is_writing:
                self._loop.remove_writer(self._socket)
        self._socket = -1
        if not self._ended.done():
            if error is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(error)


def refusal(result: PGresult) -> psycopg.Error:
    """The error that the server answered a statement with: its class, its code and its text."""
    state = (result.error_field(DiagnosticField.SQLSTATE) or b"").decode()
    text = result.get_error_message()
    try:
        return errors.lookup(state)(text)
    except KeyError:
        error = psycopg.DatabaseError(text)
        error.sqlstate = state or None
        return error


def rows(result: PGresult) -> list[Row]:
    """The rows of a result, each value as `TYPES` says."""
    value = result.get_value
    columns = []
    for column in range(result.nfields):
        kind = TYPES.get(result.ftype(column), bytes.decode)
        found = [value(row, column) for row in range(result.ntuples)]
        columns.append([None if one is None else kind(one) for one in found])
    return list(zip(*columns, strict=True))
