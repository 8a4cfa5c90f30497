"""Connections: one pool for runs, one for plain functions, a small one of its own for recording.

Coordination talks psycopg; `seats` has what a run is given of it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolTimeout, TooManyRequests
from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from cronlock.config import Settings
from cronlock.errors import Unavailable
from cronlock.lending import (
    CONTEXT,
    OWN,
    AsyncTaskConnection,
    ThreadTaskConnection,
    cut,
    is_gone,
)
from cronlock.seats import AsyncSeat, Seat, ThreadSeat, creating, discard, given
from cronlock.wire import Row

T = TypeVar("T")
log = logging.getLogger("cronlock.database")
PASSING = ("08", "40", "53", "57", "58")
"""SQLSTATE classes of what passes: connections, conflicts, resources, an operator's doing, the system."""
RECONNECT_TIMEOUT = 4.0
"""Seconds after which a pool begins anew to connect: its pauses double, and a server may have come back in one."""

ROLLBACK_WAIT = 2.0
GIVE_UP_WITHIN = 1.0

NETWORK = {
    "connect_timeout": "5",
    "keepalives": "1",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
    "client_encoding": "UTF8",
    "application_name": "cronlock",
}

BETWEEN_RUNS = "cronlock:idle"
"""The session's own name on connections for runs, whatever name the URL gives.

A transaction is named after its task, but its session's name comes back a moment before or after the lock is
free. Were it not one of ours as well, whoever looks in that moment would see a foreign holder.
"""


@dataclass(frozen=True, slots=True)
class Server:
    """What the messages need to know of the server."""

    version: int
    has_check_interval: bool
    encoding: str
    database: int
    """The oid of our database, by which pg_locks tells its locks from those of others."""


def network(url: str) -> str:
    """A connection string with cronlock's network settings under the user's own."""
    return make_conninfo("", **{**NETWORK, **conninfo_to_dict(url)})


def unavailable(error: psycopg.Error) -> Unavailable:
    """The 503 that a database error means for a call that has not begun to run."""
    state = error.sqlstate or ""
    if state == "53200":
        return Unavailable("lock_table_full", "PostgreSQL has no room for another lock (53200)")
    if state in ("25006", "55000"):
        return Unavailable("read_only", "the server is read-only or a standby")
    if state in ("42P01", "3F000", "42703"):
        return Unavailable("schema_unknown", "cronlock's tables are not there; run: cronlock migrate")
    if state == "42501":
        return Unavailable("not_permitted", "the role lacks a privilege on cronlock's tables; see the docs on roles")
    if state == "55P03":
        return Unavailable("database_unavailable", "a table or a row of cronlock's was locked for too long; try again")
    if state and state[:2] not in PASSING:
        log.error("the database refused cronlock's own statement: %s", error, extra={"sqlstate": state})
    return Unavailable("database_unavailable", f"the database cannot be used now ({type(error).__name__})")


class Database:
    """The pools of one process, in one event loop."""

    def __init__(self, settings: Settings, *, has_threads: bool) -> None:
        self.settings = settings
        self.has_threads = has_threads
        self.server: Server | None = None
        conninfo = network(settings.database_url)
        lending = make_conninfo(conninfo, application_name=BETWEEN_RUNS)
        is_pooled = settings.pooler == "transaction"
        # The end of a run must not wait for a slot of the pooler, all of which may be kept by open runs.
        self.past_pooler = past_pooler = network(settings.direct_url) if is_pooled and settings.direct_url else conninfo
        self.prepare_threshold = None if is_pooled else 5
        self.keeps_records_apart = not is_pooled or past_pooler != conninfo
        """Whether a recording connection is a server session of our own, on which statements stay prepared."""
        kwargs = {"autocommit": True, "prepare_threshold": self.prepare_threshold}
        wait = settings.acquire_timeout.total_seconds()
        common: dict[str, Any] = {
            "timeout": wait,
            "open": False,
            "kwargs": kwargs,
            "reconnect_timeout": RECONNECT_TIMEOUT,
        }
        self.runs = AsyncConnectionPool(
            lending,
            connection_class=AsyncTaskConnection,
            min_size=1,
            max_size=settings.pool_size,
            name="cronlock-runs",
            **common,
        )
        self.threads = ConnectionPool(
            lending,
            connection_class=ThreadTaskConnection,
            min_size=0,
            max_size=settings.pool_size,
            name="cronlock-threads",
            **common,
        )
        self.records = AsyncConnectionPool(
            past_pooler, min_size=1, max_size=settings.record_pool_size, name="cronlock-records", **common
        )
        self.engine = create_async_engine(
            "postgresql+psycopg://", async_creator=given, poolclass=NullPool, pool_reset_on_return=None
        )
        self.sync_engine = create_engine(
            "postgresql+psycopg://", creator=creating.get, poolclass=NullPool, pool_reset_on_return=None
        )
        self._thread_seats = asyncio.Semaphore(settings.pool_size)
        self._executor = ThreadPoolExecutor(
            settings.pool_size, thread_name_prefix="cronlock", initializer=CONTEXT.set, initargs=(OWN,)
        )

    @property
    def is_unicode(self) -> bool:
        """Whether the database holds every text but the NUL character."""
        return self.server is not None and self.server.encoding == "UTF8"

    async def open(self) -> None:
        """Start the pools; they connect in the background and again after every outage."""
        await self.records.open(wait=False)
        await self.runs.open(wait=False)
        if self.has_threads:
            self.threads.open(wait=False)

    async def close(self) -> None:
        """Close every connection; a lock still held goes with its connection."""
        await self.runs.close(timeout=2)
        if self.has_threads:
            await self.in_thread(lambda: self.threads.close(timeout=2))
        await self.records.close(timeout=2)
        self._executor.shutdown(wait=False, cancel_futures=True)
        await self.engine.dispose()
        self.sync_engine.dispose()

    def free_thread_seat(self) -> None:
        """One connection for plain functions was given back."""
        self._thread_seats.release()

    async def in_thread(self, call: Callable[..., T], *args: Any) -> T:
        """Run a blocking call of the synchronous driver in a thread of its own pool."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, call, *args)

    async def acquire(self, is_async: bool, timeout: float) -> Seat:
        """A connection for a run within `timeout` seconds; raises `Unavailable`."""
        try:
            while True:
                if is_async:
                    seat: Seat = AsyncSeat(self, await self.runs.getconn(timeout))
                else:
                    seat = await self._thread_seat(timeout)
                if not is_gone(seat.connection):
                    return seat
                cut(seat.connection)
                await discard(seat)
        except (PoolTimeout, TooManyRequests):
            raise Unavailable("no_connection", f"no database connection within {timeout:g} s") from None
        except psycopg.Error as error:
            raise unavailable(error) from error

    async def _thread_seat(self, timeout: float) -> ThreadSeat:
        """Wait for a free seat in the loop: the executor's threads are for those who will give one back."""
        try:
            await asyncio.wait_for(self._thread_seats.acquire(), timeout)
        except TimeoutError:
            raise PoolTimeout("every connection for plain functions is taken") from None
        try:
            return ThreadSeat(self, await self.in_thread(self.threads.getconn, timeout))
        except BaseException:
            self._thread_seats.release()
            raise

    @asynccontextmanager
    async def recording(self) -> AsyncIterator["psycopg.AsyncConnection[Any]"]:
        """A connection of the recording pool; raises `Unavailable`."""
        try:
            while is_gone(connection := await self.records.getconn()):
                await connection.close()
                await self.records.putconn(connection)
        except (PoolTimeout, TooManyRequests):
            raise Unavailable("database_unavailable", "the database cannot be reached") from None
        try:
            yield connection
        except psycopg.errors.ReadOnlySqlTransaction:
            await connection.close()  # a session stays as it was made, though the server may be written to again
            raise
        except asyncio.CancelledError:
            with suppress(psycopg.Error):  # the pool would do it too, and warn
                await within(ROLLBACK_WAIT, connection, connection.rollback())
            raise
        finally:
            await self.records.putconn(connection)

    async def connect(self, seconds: float) -> "psycopg.AsyncConnection[Any]":
        """A connection of the caller's own, past the pooler if there is a way; raises psycopg's errors, TimeoutError.

        One that is given up half way is first let come to its end: the server would keep it for its
        `authentication_timeout`, and with it whoever waits for all backends, such as DROP DATABASE.
        """
        threshold = None if self.prepare_threshold is None else 5
        connecting = asyncio.ensure_future(
            psycopg.AsyncConnection.connect(self.past_pooler, autocommit=True, prepare_threshold=threshold)
        )
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(connecting)
        except (asyncio.CancelledError, TimeoutError):
            await asyncio.wait((connecting,), timeout=GIVE_UP_WITHIN)
            connecting.cancel()
            if not connecting.cancelled() and connecting.done() and connecting.exception() is None:
                await connecting.result().close()
            raise

    async def learn(self, connection: "psycopg.AsyncConnection[Any]") -> Server:
        """Find out what the server can do, and let SQLAlchemy's dialects look at it, once."""
        if self.server is not None:
            return self.server
        version = connection.info.server_version
        try:
            await ask(connection, b"BEGIN; SET LOCAL client_connection_check_interval = 500; COMMIT")
            has_check = True
        except psycopg.Error:
            await ask(connection, b"ROLLBACK")
            has_check = False
        ((row,),) = await ask(
            connection,
            b"SELECT oid::pg_catalog.int8, pg_catalog.current_setting('server_encoding') FROM pg_catalog.pg_database"
            b" WHERE datname OPERATOR(pg_catalog.=) pg_catalog.current_database()",
        )
        await self._introduce()
        self.server = Server(version, has_check, row[1], row[0])
        return self.server

    async def _introduce(self) -> None:
        limit = self.settings.acquire_timeout.total_seconds()
        for is_async in (True, False) if self.has_threads else (True,):
            seat = await self.acquire(is_async, limit)
            try:
                await within(limit, seat.connection, self._introduce_on(seat))
            except (DBAPIError, psycopg.Error) as error:
                await discard(seat)
                raise Unavailable("database_unavailable", "the connection broke off at its first use") from error
            await seat.give_back()

    async def _introduce_on(self, seat: Seat) -> None:
        """Let SQLAlchemy look around, but not by the names of a `search_path` that may be led by any schema."""
        asked = await seat.send(b"SELECT pg_catalog.current_schema(); BEGIN; SET LOCAL search_path = pg_catalog", 0)
        creating.set(seat.connection)
        seat.connection.closing = True
        try:
            if isinstance(seat, AsyncSeat):
                async with self.engine.connect():
                    pass
                self.engine.dialect.default_schema_name = asked.rows[0][0]
            else:
                await self.in_thread(self._introduce_sync, seat.connection)
                self.sync_engine.dialect.default_schema_name = asked.rows[0][0]
        finally:
            seat.connection.closing = False
        await seat.send(b"COMMIT")

    def _introduce_sync(self, connection: ThreadTaskConnection) -> None:
        creating.set(connection)
        self.sync_engine.connect().close()


async def ask(connection: "psycopg.AsyncConnection[Any]", message: bytes) -> list[list[Row]]:
    """Send one message on a recording connection; the rows of each statement that gives any."""
    cursor = psycopg.AsyncClientCursor(connection)
    await cursor.execute(message)
    replies: list[list[Row]] = []
    while True:
        if cursor.pgresult is not None and cursor.pgresult.nfields:
            replies.append(await cursor.fetchall())
        if not cursor.nextset():
            return replies


async def within(seconds: float, connection: "psycopg.BaseConnection[Any]", talk: Coroutine[Any, Any, T]) -> T:
    """Await what talks on `connection`; after `seconds` its socket is cut, and the error of that is raised."""
    timer = asyncio.get_running_loop().call_later(seconds, cut, connection)
    try:
        return await talk
    finally:
        timer.cancel()
