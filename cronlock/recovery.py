"""The timer of every server: close lost runs, prune old rows, look whether the schema is still ours.

A lost run is a `running` row whose backend does not hold its lock. It is found by one statement over rows
and pg_locks together, never by trying the lock, which would skip a caller for nothing.
"""

import asyncio
import logging
import random

import psycopg

from cronlock import runs
from cronlock.database import Database, ask, unavailable, within
from cronlock.errors import CronlockError, Unavailable
from cronlock.readiness import Readiness
from cronlock.runner import Runner
from cronlock.wire import Row

PRUNE_EVERY = 4
PRUNE_BATCH = 1000
BEGIN = (
    b"BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL synchronous_commit = on; SET LOCAL search_path = pg_catalog;"
    b" SET LOCAL statement_timeout = 10000; SET LOCAL lock_timeout = 2000; "
)

log = logging.getLogger("cronlock.recovery")


async def recover(database: Database, statements: runs.Statements) -> list[Row]:
    """Close every lost run; gives (id, task, host, pid, started_at, finished_at) of each."""
    rows = await transact(database, statements.fill(runs.RECOVER))
    for run_id, task, host, pid, *_ in rows:
        log.error(
            "%s was lost: process %s on %s was gone before it said how the run ended", task, pid, host,
            extra={"event": "run.lost", "task": task, "runId": run_id, "status": "lost"},
        )  # fmt: skip
    return rows


async def prune(database: Database, statements: runs.Statements) -> int:
    """Delete one batch of rows older than their retention, oldest first; how many it deleted."""
    settings = database.settings
    message = statements.fill(
        runs.PRUNE,
        skipped=settings.retention_skipped.total_seconds(),
        completed=settings.retention_completed.total_seconds(),
        failed=settings.retention_failed.total_seconds(),
        limit=PRUNE_BATCH,
    )
    return len(await transact(database, message))


async def transact(database: Database, message: bytes) -> list[Row]:
    """Send one statement in a transaction of its own on a recording connection; its rows."""
    limit = database.settings.acquire_timeout.total_seconds() + 10
    async with database.recording() as connection:
        try:
            replies = await within(limit, connection, ask(connection, BEGIN + message + b"; COMMIT"))
        except psycopg.Error as error:
            if not connection.closed and not connection.broken:
                await within(limit, connection, ask(connection, b"ROLLBACK"))
            raise unavailable(error) from error
    return replies[0] if replies else []


class Timer:
    """Runs the duties above every `recover_interval`, with jitter, as long as the server lives."""

    def __init__(self, database: Database, runner: Runner, readiness: Readiness) -> None:
        self._database = database
        self._runner = runner
        self._readiness = readiness

    async def run(self) -> None:
        """Forever, until cancelled."""
        interval = self._database.settings.recover_interval.total_seconds()
        ticks = 0
        while True:
            try:
                await self._tick(ticks)
            except Unavailable as error:
                log.warning("%s", error, extra={"event": "database.unavailable", "reason": error.reason})
            except CronlockError as error:
                log.error("%s", error, extra={"event": "database.unfit"})
            except Exception:
                log.exception("the timer's duties broke off")
            ticks += 1
            await asyncio.sleep(interval * random.uniform(0.8, 1.2))  # noqa: S311 - jitter, not a secret

    async def _tick(self, ticks: int) -> None:
        statements = self._runner.statements
        await self._readiness.look()
        await recover(self._database, statements)
        names = list(self._runner.attempts.lock_keys)
        usual = await transact(self._database, statements.fill(runs.USUAL, names=names)) if names else []
        self._runner.attempts.skips.usual_seconds = {name: seconds for name, seconds in usual if seconds is not None}
        if ticks % PRUNE_EVERY == 0:
            while await prune(self._database, statements) == PRUNE_BATCH:
                await asyncio.sleep(0.2)
