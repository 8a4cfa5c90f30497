"""Chancy."""

import logging
from typing import Any

from chancy import Chancy, Queue, Worker, job
from psycopg.rows import dict_row

from benchmarks.queue.drivers import PLACED, Stamper
from benchmarks.queue.drivers import Driver as Base

CONCURRENCY = 300
stamper = Stamper()


async def noop(*, n: int) -> None:
    """Nothing."""


async def stamp(*, n: int) -> None:
    """Say when it started."""
    stamper(n)


JOBS: dict[str, Any] = {"noop": job()(noop), "stamp": job()(stamp)}


class Driver(Base):
    """Jobs are rows that keep their state; completions are written once a second."""

    def _app(self) -> Any:
        # Its own logger draws every line with rich, which is two thirds of what a job costs.
        quiet = logging.getLogger("chancy-quiet")
        quiet.setLevel(logging.WARNING)
        return Chancy(self.url, min_connection_pool_size=1, max_connection_pool_size=self.callers, log=quiet)

    async def schema(self) -> None:
        async with self._app() as app:
            await app.migrate()
            queue = Queue(
                "default",
                concurrency=CONCURRENCY,
                executor=Chancy.Executor.Async,
                polling_interval=1,
                eager_polling=True,
            )
            await app.declare(queue, upsert=True)

    async def open(self) -> None:
        self._opened = self._app()
        await self._opened.__aenter__()

    async def close(self) -> None:
        await self._opened.__aexit__(None, None, None)

    def _job(self, n: int) -> Any:
        return JOBS[self.task].job.with_kwargs(n=n)

    async def one(self, n: int) -> None:
        await self._opened.push(self._job(n))

    async def many(self, ns: range) -> None:
        async for _ in self._opened.push_many([self._job(n) for n in ns], batch_size=len(ns)):
            pass

    async def inside(self, n: int) -> None:
        async with (
            self._opened.pool.connection() as connection,
            connection.cursor(row_factory=dict_row) as cursor,
            connection.transaction(),
        ):
            await cursor.execute(PLACED.format("%s"), (n,))
            await self._opened.push_ex(cursor, self._job(n))

    async def work(self) -> None:
        async with self._app() as app, Worker(app) as worker:
            await worker.wait_for_shutdown()
