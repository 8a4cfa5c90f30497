"""PgQueuer over asyncpg."""

import asyncio
from abc import abstractmethod
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import Any

import asyncpg
from pgqueuer import PgQueuer, Queries
from pgqueuer.db import AsyncpgDriver

from benchmarks.queue.drivers import PLACED, Stamper
from benchmarks.queue.drivers import Driver as Base

BATCH = 500


async def noop(_: Any) -> None:
    """Nothing."""


class PgQueuerDriver(Base):
    """Whichever of its drivers is below."""

    async def open(self) -> None:
        # A driver of PgQueuer's works on one connection, one statement after another; each caller has its own.
        self._free: asyncio.Queue[tuple[Any, Any]] = asyncio.Queue()
        for _ in range(self.callers):
            connection = await self._connect()
            self._free.put_nowait((connection, Queries(self._over(connection))))

    async def close(self) -> None:
        while not self._free.empty():
            await self._free.get_nowait()[0].close()

    async def schema(self) -> None:
        connection = await self._connect()
        queries = Queries(self._over(connection))
        await queries.install()
        await queries.optimize_autovacuum()
        await connection.close()

    async def one(self, n: int) -> None:
        connection, queries = await self._free.get()
        await queries.enqueue(self.task, b"%d" % n)
        self._free.put_nowait((connection, queries))

    async def many(self, ns: range) -> None:
        connection, queries = await self._free.get()
        await queries.enqueue([self.task] * len(ns), [b"%d" % n for n in ns], [0] * len(ns))
        self._free.put_nowait((connection, queries))

    async def inside(self, n: int) -> None:
        connection, queries = await self._free.get()
        async with self._transaction(connection):
            await connection.execute(*self._placed(n))
            await queries.enqueue(self.task, b"%d" % n)
        self._free.put_nowait((connection, queries))

    async def work(self) -> None:
        queue = PgQueuer(self._over(await self._connect()))
        stamper = Stamper()

        async def stamp(job: Any) -> None:
            stamper(int(job.payload))

        queue.entrypoint("noop")(noop)
        queue.entrypoint("stamp")(stamp)
        await queue.run(batch_size=BATCH, dequeue_timeout=timedelta(seconds=10))

    @abstractmethod
    async def _connect(self) -> Any:
        """A connection of the driver's library."""

    @abstractmethod
    def _over(self, connection: Any) -> Any:
        """PgQueuer's driver for it."""

    def _transaction(self, connection: Any) -> AbstractAsyncContextManager[Any]:
        transaction: AbstractAsyncContextManager[Any] = connection.transaction()
        return transaction

    @abstractmethod
    def _placed(self, n: int) -> tuple[Any, ...]:
        """The user's statement and its values."""


class Driver(PgQueuerDriver):
    """asyncpg."""

    async def _connect(self) -> Any:
        return await asyncpg.connect(self.url)

    def _over(self, connection: Any) -> Any:
        return AsyncpgDriver(connection)

    def _placed(self, n: int) -> tuple[Any, ...]:
        return PLACED.format("$1"), n
