"""PgQueuer over psycopg."""

from typing import Any

import psycopg
from pgqueuer.db import PsycopgDriver

from benchmarks.queue.drivers import PLACED
from benchmarks.queue.drivers.pgqueuer import PgQueuerDriver


class Driver(PgQueuerDriver):
    """psycopg."""

    async def _connect(self) -> Any:
        return await psycopg.AsyncConnection.connect(self.url, autocommit=True)

    def _over(self, connection: Any) -> Any:
        return PsycopgDriver(connection)

    def _placed(self, n: int) -> tuple[Any, ...]:
        return PLACED.format("%s"), (n,)
