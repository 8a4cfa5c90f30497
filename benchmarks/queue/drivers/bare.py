"""No queue: one NOTIFY and two commits, which is the least that a job costs which starts in another process."""

import psycopg

from benchmarks.queue.drivers import Driver as Base
from benchmarks.queue.drivers import Stamper

SCHEMA = "CREATE TABLE bare_job (n bigint PRIMARY KEY, taken timestamptz)"
ENQUEUE = "WITH made AS (INSERT INTO bare_job (n) VALUES (%s) RETURNING n) SELECT pg_notify('bare', n::text) FROM made"
TAKE = "UPDATE bare_job SET taken = clock_timestamp() WHERE n = %s"


class Driver(Base):
    """One row, told of; it is taken and committed, then the job starts."""

    async def schema(self) -> None:
        await self.open()
        await self._connection.execute(SCHEMA)
        await self.close()

    async def open(self) -> None:
        self._connection = await psycopg.AsyncConnection.connect(self.url, autocommit=True)

    async def close(self) -> None:
        await self._connection.close()

    async def one(self, n: int) -> None:
        await self._connection.execute(ENQUEUE, (n,))

    async def many(self, ns: range) -> None:
        raise NotImplementedError

    async def inside(self, n: int) -> None:
        raise NotImplementedError

    async def work(self) -> None:
        stamper = Stamper()
        await self.open()
        listening = await psycopg.AsyncConnection.connect(self.url, autocommit=True)
        await listening.execute("LISTEN bare")
        async for told in listening.notifies():
            await self._connection.execute(TAKE, (told.payload,))
            stamper(int(told.payload))
