"""Procrastinate."""

from typing import Any

from procrastinate import App, PsycopgConnector

from benchmarks.queue.drivers import PLACED, Stamper
from benchmarks.queue.drivers import Driver as Base

CONCURRENCY = 10


async def noop(n: int) -> None:
    """Nothing."""


class Driver(Base):
    """Jobs are rows that keep their state; each is fetched and finished by itself."""

    async def schema(self) -> None:
        async with self._app().open_async() as app:
            await app.schema_manager.apply_schema_async()

    def _app(self) -> Any:
        self._connector = PsycopgConnector(conninfo=self.url, min_size=self.callers, max_size=self.callers)
        app = App(connector=self._connector)
        stamper = Stamper()

        async def stamp(n: int) -> None:
            stamper(n)

        self._tasks = {"noop": app.task(name="noop")(noop), "stamp": app.task(name="stamp")(stamp)}
        return app

    async def open(self) -> None:
        self._opened = self._app()
        await self._opened.open_async()
        self._enqueued = self._tasks[self.task]

    async def close(self) -> None:
        await self._opened.close_async()

    async def one(self, n: int) -> None:
        await self._enqueued.defer_async(n=n)

    async def many(self, ns: range) -> None:
        await self._enqueued.batch_defer_async(*[{"n": n} for n in ns])

    async def inside(self, n: int) -> None:
        async with self._connector.pool.connection() as connection, connection.transaction():
            await connection.execute(PLACED.format("%s"), (n,))
            await self._enqueued.configure(connection=connection).defer_async(n=n)

    async def work(self) -> None:
        self.callers = CONCURRENCY + 2
        async with self._app().open_async() as app:
            await app.run_worker_async(concurrency=CONCURRENCY)
