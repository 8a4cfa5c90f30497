"""The timer of every server: close lost runs, prune old rows, say who is in the way, look at the schema.

A lost run is a `running` row whose backend does not hold its lock. It is found by one statement over rows
and pg_locks together, never by trying the lock, which would skip a caller for nothing.
"""

import asyncio
import json
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import psycopg

from cronlock import explain, invalidation, jobs, runs, stats
from cronlock.database import Database, ask, unavailable, within
from cronlock.errors import CronlockError, Unavailable
from cronlock.readiness import Readiness
from cronlock.runner import Runner
from cronlock.wire import Row

BLOCKED_AFTER = 60.0
"""Seconds of skips by one holder after which it is said, and again each time they have doubled."""
PRUNE_WINDOWS = 20
"""How many windows of rows are pruned before the other duties are looked after again."""
PRUNE_PAUSE = 0.1
PRUNE_REST = 3600.0
"""Seconds from one walk through the old rows to the next, if the shortest retention is not shorter still."""
BEGIN = (
    b"BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL synchronous_commit = on; SET LOCAL search_path = pg_catalog;"
    b" SET LOCAL statement_timeout = 10000; SET LOCAL lock_timeout = 2000; "
)

log = logging.getLogger("cronlock.recovery")


async def recover(database: Database, statements: runs.Statements) -> list[Row]:
    """Close every lost run; gives (id, task, host, pid, started_at, finished_at) of each."""
    rows = await transact(database, statements.fill(runs.RECOVER))
    for run_id, task, host, pid, *_ in rows:
        tell_lost(run_id, task, host, pid)
    return rows


def tell_lost(run_id: int, task: str, host: str, pid: int) -> None:
    """The line of a run that was found lost."""
    log.error(
        "%s was lost: process %s on %s was gone before it said how the run ended", task, pid, host,
        extra={"event": "run.lost", "task": task, "runId": run_id, "status": "lost", "code": "process_gone"},
    )  # fmt: skip


async def prune(database: Database, statements: runs.Statements, after: int = 0) -> tuple[int, int | None]:
    """Delete what is older than its retention in one window of ids: how many rows, and where the next begins."""
    message = statements.fill(runs.PRUNE, after=after, window=runs.WINDOW, **database.settings.retentions())
    ((numbers, following),) = await transact(database, message)
    return sum(json.loads(numbers).values()), following


async def prune_jobs(database: Database, after: int = 0) -> tuple[int, int | None]:
    """As `prune`, for jobs that have ended."""
    of_jobs = jobs.statements(database.settings.schema_name)
    message = of_jobs.compose(jobs.PRUNE, after=after, window=jobs.WINDOW, **database.settings.retentions())
    ((numbers, following),) = await transact(database, message)
    return sum(json.loads(numbers).values()), following


async def prune_keys(database: Database, _: int = 0) -> tuple[int, int | None]:
    """Delete so many idempotency keys that have expired; 0 as where the next begins, if there may be more."""
    message = jobs.statements(database.settings.schema_name).compose(jobs.PRUNE_KEYS, window=jobs.WINDOW)
    ((number,),) = await transact(database, message)
    return number, 0 if number == jobs.WINDOW else None


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
        self._told: dict[tuple[str, int], float] = {}
        """Of a task and the first skip of a row of them: how many milliseconds when it was last said."""
        self._prunes = {"runs": Walk(), "jobs": Walk(), "keys": Walk()}
        self._forget_at = 0.0

    async def run(self) -> None:
        """Forever, until cancelled."""
        interval = self._database.settings.recover_interval.total_seconds()
        while True:
            try:
                await self._tick()
            except Unavailable as error:
                log.warning("%s", error, extra={"event": "database.unavailable", "reason": error.reason})
            except CronlockError as error:
                log.error("%s", error, extra={"event": "database.unfit"})
            except Exception:
                log.exception("the timer's duties broke off")
            await asyncio.sleep(interval * random.uniform(0.8, 1.2))  # noqa: S311 - jitter, not a secret

    async def _tick(self) -> None:
        statements = self._runner.statements
        await self._readiness.look()
        lost = await recover(self._database, statements)
        self._runner.metrics.recovered(len(lost))
        names = list(self._runner.attempts.lock_keys)
        usual = await transact(self._database, statements.fill(runs.USUAL, names=names)) if names else []
        self._runner.attempts.skips.usual_seconds = {name: seconds for name, seconds in usual if seconds is not None}
        await self._prune()
        await self._prune_invalidations()
        await self._tell_blocked()

    async def _tell_blocked(self) -> None:
        """Say which tasks one and the same holder keeps from running, as far as they are this process's."""
        rows = await transact(self._database, self._runner.statements.fill(stats.BLOCKED))
        found = [dict(zip(stats.BLOCKED_COLUMNS, row, strict=True)) for row in rows]
        ours = [row for row in found if row["task"] in self._runner.attempts.lock_keys]
        told, self._told = self._told, {}
        for row in ours:
            place = row["task"], row["first_skip"]
            self._told[place] = told.get(place, 0.0)
            if row["skipped_ms"] >= max(BLOCKED_AFTER * 1000, 2 * self._told[place]):
                self._told[place] = row["skipped_ms"]
                log.warning(
                    "%s", explain.blocked(row),
                    extra={
                        "event": "task.blocked", "task": row["task"], "code": "already_running",
                        "blockedBy": row["blocked_by"], "holderPid": row["holder_pid"], "skippedMs": row["skipped_ms"],
                    },
                )  # fmt: skip

    async def _prune(self) -> None:
        """Go on with the walks through old rows, each a little at a time; at its end one rests, then begins anew."""
        database, statements = self._database, self._runner.statements
        pruning: dict[str, Callable[[int], Awaitable[tuple[int, int | None]]]] = {
            "runs": partial(prune, database, statements),
            "jobs": partial(prune_jobs, database),
            "keys": partial(prune_keys, database),
        }
        for name, walk in self._prunes.items():
            if time.monotonic() >= walk.at:
                await self._walk(walk, pruning[name])

    async def _walk(self, walk: "Walk", pruning: Callable[[int], Awaitable[tuple[int, int | None]]]) -> None:
        for _ in range(PRUNE_WINDOWS):
            deleted, following = await pruning(walk.after)
            self._runner.metrics.pruned(deleted)
            walk.after = following or 0
            if following is None:
                rest = min(PRUNE_REST, self._database.settings.retentions()["shortest"] / 10)
                walk.at = time.monotonic() + rest
                return
            await asyncio.sleep(PRUNE_PAUSE)

    async def _prune_invalidations(self) -> None:
        """Delete what is over its retention, and say what no process will ever deliver; once an hour."""
        if time.monotonic() < self._forget_at:
            return
        settings = self._database.settings
        statements = invalidation.statements(settings.schema_name)
        kept = settings.retention_invalidated.total_seconds()
        after = 0
        for _ in range(PRUNE_WINDOWS):
            window = invalidation.PRUNE_WINDOW
            message = statements.fill(invalidation.PRUNE, after=after, window=window, kept=kept)
            ((numbers, following),) = await transact(self._database, message)
            found = json.loads(numbers)
            self._runner.metrics.pruned(sum(number for number, _ in found.values()))
            for target, (_, given_up) in found.items():
                if given_up:
                    log.error(
                        "%s invalidations are given up: the target %s has not taken them for %g days",
                        given_up, target, kept / 86400,
                        extra={"event": "invalidation.given_up", "target": target, "rows": given_up},
                    )  # fmt: skip
            if following is None:
                break
            after = following
            await asyncio.sleep(PRUNE_PAUSE)
        else:
            return
        self._forget_at = time.monotonic() + min(PRUNE_REST, kept / 10)
        await transact(self._database, statements.fill(invalidation.FORGET, kept=kept))
        for target, unseen, oldest in await transact(self._database, statements.fill(invalidation.LEFT)):
            log.warning(
                "invalidations wait for the target %s, the oldest for %s s, but no process has had it for %s s:"
                " register it again, or delete its rows of invalidation and invalidation_target",
                target, oldest, unseen,
                extra={"event": "invalidation.no_process", "target": target},
            )  # fmt: skip


@dataclass(slots=True)
class Walk:
    """How far a walk through old rows has come, and when (in monotonic seconds) the next step is due."""

    after: int = 0
    at: float = 0.0
