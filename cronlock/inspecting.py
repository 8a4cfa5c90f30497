"""What the admin routes read and change, over a small pool of its own in threads of its own.

Somebody who looks must not be in the way of calls: there are two connections, a statement has a few seconds, and
what waits for one is bounded. No connection is open while nobody looks.
"""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg_pool import ConnectionPool, PoolTimeout, TooManyRequests

from cronlock.config import Settings
from cronlock.database import RECONNECT_TIMEOUT, network, unavailable
from cronlock.errors import Unavailable
from cronlock.stats import STATEMENT_TIMEOUT

T = TypeVar("T")
CONNECTIONS = 2
WAITING = 20
"""How many questions may wait for a connection."""
CONNECTION_WAIT = 2.0
LIMIT = "5s"
"""How long a statement may take."""
APPLICATION_NAME = "cronlock-admin"  # names that begin with "cronlock:" mark the holders of locks


class Inspector:
    """The connections of the admin routes of one process."""

    def __init__(self, settings: Settings) -> None:
        self._schema = settings.schema_name
        self.pool = ConnectionPool(
            make_conninfo(network(settings.database_url), application_name=APPLICATION_NAME),
            min_size=0,
            max_size=CONNECTIONS,
            max_idle=60.0,
            timeout=CONNECTION_WAIT,
            reconnect_timeout=RECONNECT_TIMEOUT,
            kwargs={"autocommit": True, "prepare_threshold": None},
            configure=read_committed,
            name="cronlock-admin",
            open=False,
        )
        self._threads: ThreadPoolExecutor | None = None
        self._asked = 0

    async def ask(self, question: Callable[..., T], *args: Any, **facts: Any) -> T:
        """The answer of a function of `stats` or `steering`, called with a connection and the schema first.

        Raises `Unavailable` if there are too many questions, no database, or no answer within a few seconds.
        """
        if self._asked >= CONNECTIONS + WAITING:
            raise Unavailable("admin_busy", "too many questions wait for the connections of the admin routes")
        self._asked += 1
        try:
            return await self.in_thread(self._answer, question, *args, **facts)
        finally:
            self._asked -= 1

    async def in_thread(self, call: Callable[..., T], *args: Any, **facts: Any) -> T:
        """Call something slow in one of the threads that are kept for those who look."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="cronlock-admin")
        context = contextvars.Context()  # nothing of the request's
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: context.run(call, *args, **facts)
        )

    def _answer(self, question: Callable[..., T], *args: Any, **facts: Any) -> T:
        STATEMENT_TIMEOUT.set(LIMIT)
        try:
            self.pool.open()
            with self.pool.connection() as connection:
                return question(connection, self._schema, *args, **facts)
        except (PoolTimeout, TooManyRequests):
            raise Unavailable("database_unavailable", "the database cannot be reached") from None
        except psycopg.errors.QueryCanceled:
            raise Unavailable("read_timed_out", f"the database did not answer within {LIMIT}") from None
        except psycopg.Error as error:
            raise unavailable(error) from error

    async def close(self) -> None:
        """Close the connections."""
        if self._threads is not None:
            await self.in_thread(self.pool.close, timeout=2)
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None


def read_committed(connection: "psycopg.Connection[Any]") -> None:
    """Whatever the role's default is: what is changed here waits for a row and then sees it as it is."""
    connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
