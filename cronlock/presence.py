"""A worker's presence: a lock of its own by which others see that it is there.

The lock sits in a transaction that does nothing else (as a guard's, see `guard`), and goes with its connection: when
the process is killed, at once. Others take a worker for gone only if one of them has seen the lock free twice,
`presence_grace` apart. So a worker that loses it has that long to take it again or to say in its row that it has
none; then its leases alone decide.
"""

import asyncio
import contextlib
import random
import time
from datetime import timedelta
from typing import Any

import psycopg
from psycopg import sql

from cronlock import locks, wire
from cronlock.database import Database, within
from cronlock.lending import is_gone

PING = 1.0
LOOK = 0.1
"""Seconds between two looks whether the server has closed the connection: others may see that the lock is free."""
PAUSE = 0.2


class Presence:
    """One worker's."""

    def __init__(self, database: Database) -> None:
        self._database = database
        server = database.server
        self._has_transaction_timeout = server is not None and server.version >= 170000
        self.key = random.getrandbits(63)
        self.is_held = False
        self.heard = 0.0
        """When the server last said that the lock is held, in monotonic seconds."""
        self.changed = asyncio.Event()
        """Set when `is_held` has changed, for who tells others."""

    async def keep(self) -> None:
        """Take the lock, and again whenever it is lost, until cancelled."""
        while True:
            try:
                connection = await self._database.connect(PING * 3)
            except (psycopg.Error, TimeoutError):
                await asyncio.sleep(PAUSE)
                continue
            try:
                await self._hold(connection)
            except psycopg.Error:
                pass
            finally:
                self._set(False)
                with contextlib.suppress(psycopg.Error):
                    await connection.close()
            await asyncio.sleep(PAUSE)

    async def _hold(self, connection: "psycopg.AsyncConnection[Any]") -> None:
        opening = locks.join(
            [
                sql.SQL("BEGIN ISOLATION LEVEL READ COMMITTED"),
                *([sql.SQL("SET LOCAL transaction_timeout = 0")] if self._has_transaction_timeout else []),
                locks.set_local(
                    {
                        "statement_timeout": 30000,
                        "lock_timeout": 30000,
                        "idle_in_transaction_session_timeout": locks.milliseconds(timedelta(seconds=3 * PING)),
                        "application_name": "cronlock:worker",
                    }
                ),
                sql.SQL("SELECT pg_catalog.pg_try_advisory_xact_lock({}::pg_catalog.int8)").format(self.key),
            ]
        )
        sent = time.monotonic()
        results = await within(PING * 3, connection, wire.send(connection, opening))
        if not wire.rows(results[-1])[0][0]:
            raise psycopg.OperationalError("the presence lock is another session's")
        self.heard = sent
        self._set(True)
        while True:
            ping_at = time.monotonic() + PING
            while time.monotonic() < ping_at:
                if is_gone(connection):
                    raise psycopg.OperationalError("the server has closed the connection")
                await asyncio.sleep(LOOK)
            sent = time.monotonic()
            await within(PING, connection, wire.send(connection, locks.PING))
            self.heard = sent

    def _set(self, is_held: bool) -> None:
        if is_held != self.is_held:
            self.is_held = is_held
            self.changed.set()
