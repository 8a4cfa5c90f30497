"""cronlock, to enqueue; its worker is `cronlock worker`."""

import asyncio

import psycopg
from psycopg_pool import AsyncConnectionPool

from benchmarks.queue.drivers import PLACED
from benchmarks.queue.drivers import Driver as Base
from benchmarks.queue.jobs import cron


class Driver(Base):
    """In the caller's transaction over psycopg, or in cronlock's own."""

    async def open(self) -> None:
        await cron.open()
        self._pool: AsyncConnectionPool[psycopg.AsyncConnection] = AsyncConnectionPool(
            self.url, min_size=self.callers, max_size=self.callers, open=False
        )
        await self._pool.open(wait=True)

    async def close(self) -> None:
        await self._pool.close()
        await cron.close()

    async def one(self, n: int) -> None:
        await cron.enqueue(None, self.task, {"n": n})

    async def many(self, ns: range) -> None:
        async with self._pool.connection() as connection:
            await cron.enqueue_many(connection, self.task, [{"n": n} for n in ns])

    async def inside(self, n: int) -> None:
        async with self._pool.connection() as connection:
            await connection.execute(PLACED.format("%s"), (n,))
            await cron.enqueue(connection, self.task, {"n": n})

    async def work(self) -> None:
        await asyncio.sleep(0)
        raise NotImplementedError("cronlock worker benchmarks.queue.jobs:cron")
