"""Real lock transactions, as many as the callers of one process can make: the server's own event loop makes them.

No HTTP, no decision that is shared: 32 callers, each with a key of its own that nobody else wants, take their lock,
do nothing, and let go of it, again and again.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import psycopg
from sqlalchemy.ext.asyncio import create_async_engine
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from benchmarks import names
from cronlock import Cronlock, locks
from cronlock.database import within
from cronlock.process import Process

LIMIT = 5.0
WARM_UPS = 6
"""More than the five times after which psycopg prepares a statement."""


class Locking:
    """`/-/locking/{what}/{seconds}`: answers how many lock transactions there were, in how many seconds, and how many
    there were before to warm up.

    - `opening`: cronlock's first message of a run (BEGIN, its settings, the lock, SAVEPOINT) on a connection of its
      pool, and COMMIT, as for a call that got the lock and then runs nothing. No row is written.
    - `run`: `cron.run` of a task that does nothing, with its records and its log lines.
    - `dlock-xact`: sqlalchemy-dlock's transaction-level lock (`xact=True`) in `engine.begin()`, tried without waiting.
      There is nothing to release: its documentation says that the commit does it.
    - `dlock`: its default, a session-level lock, as the first lines of its documentation show it.
    """

    def __init__(self, cron: Cronlock) -> None:
        self._cron = cron
        self._openings: dict[str, locks.Opening] = {}
        settings = cron.settings
        self._engine = create_async_engine(
            "postgresql+psycopg://",
            async_creator=lambda: psycopg.AsyncConnection.connect(settings.database_url),
            pool_size=settings.pool_size,
            max_overflow=0,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        process = await self._cron.open()
        ways: dict[str, Callable[[Process, str], Coroutine[Any, Any, None]]] = {
            "opening": self._opening,
            "run": self._run,
            "dlock-xact": self._dlock_xact,
            "dlock": self._dlock,
        }
        once = ways[scope["path_params"]["what"]]
        # Connections, prepared statements and compiled SQL are there before the clock starts.
        for _ in range(WARM_UPS):
            await asyncio.gather(*(process.runner.spawn(once(process, name)) for name in names.EMPTY))
        started = time.monotonic()
        until = started + scope["path_params"]["seconds"]

        async def caller(name: str) -> int:
            number = 0
            while time.monotonic() < until:
                await once(process, name)
                number += 1
            return number

        numbers = await asyncio.gather(*(process.runner.spawn(caller(name)) for name in names.EMPTY))
        elapsed = time.monotonic() - started
        await JSONResponse([sum(numbers), elapsed, WARM_UPS * len(names.EMPTY)])(scope, receive, send)

    async def _opening(self, process: Process, name: str) -> None:
        database = process.database
        if (opening := self._openings.get(name)) is None:
            assert database.server is not None, "the process is ready"
            opening = locks.Opening(self._cron.tasks.get(name), database.server, database.settings.guard_ping)
            self._openings[name] = opening
        seat = await database.acquire(True, LIMIT)
        reply = await within(LIMIT, seat.connection, seat.send(opening.message(None, None), opening.row_at))
        assert reply.rows[0][0] == 1, f"the lock {name} is not free"
        await within(LIMIT, seat.connection, seat.send(locks.REFUSED))
        await seat.give_back()

    async def _run(self, process: Process, name: str) -> None:
        outcome = await self._cron.run(name)
        assert outcome.status == "completed", f"{name}: {outcome.status}"

    async def _dlock_xact(self, process: Process, name: str) -> None:
        create_async_sadlock = dlock()
        async with self._engine.begin() as connection:
            is_ours = await create_async_sadlock(connection, name, xact=True).acquire(block=False)
            assert is_ours, f"the lock {name} is not free"

    async def _dlock(self, process: Process, name: str) -> None:
        create_async_sadlock = dlock()
        async with self._engine.connect() as connection, create_async_sadlock(connection, name) as lock:
            assert lock.locked


def dlock() -> Callable[..., Any]:
    """What makes a lock of sqlalchemy-dlock; raises ImportError where it is not installed."""
    import sqlalchemy_dlock

    made: Callable[..., Any] = sqlalchemy_dlock.create_async_sadlock  # type: ignore[attr-defined]  # not in an __all__
    return made
