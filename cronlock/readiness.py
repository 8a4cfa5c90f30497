"""Is the database there, is its schema one this code works with, and do its tasks' locks not collide?

Looked at before the first call and again by the timer; until it is well every call is answered 503 with a
reason. Two tasks of one app whose different lock names give one key stop the start: PostgreSQL's hashtext
has 32 bits, and a collision would skip a task that is not running.
"""

import asyncio
import logging
from collections import defaultdict
from datetime import timedelta
from typing import Any

import psycopg
from psycopg import sql

from cronlock import revision, runs, stats
from cronlock.database import Database, ask, unavailable, within
from cronlock.errors import RegistrationError, Unavailable
from cronlock.locks import slot_names
from cronlock.models import REVISION
from cronlock.runner import Runner
from cronlock.tasks import Registry, Task

log = logging.getLogger("cronlock.database")


class Readiness:
    """What one process knows of its database."""

    def __init__(self, database: Database, runner: Runner, registry: Registry) -> None:
        self._database = database
        self._runner = runner
        self._registry = registry
        self._looking: asyncio.Task[None] | None = None
        self._told: set[tuple[object, ...]] = set()
        self._is_next = False
        self.is_ready = False

    async def require(self) -> None:
        """Return when the database is ready for calls; raises `Unavailable` with the reason if it is not."""
        if self.is_ready:
            return
        if self._looking is None or self._looking.done():
            self._looking = self._runner.spawn(self.look())
        await asyncio.shield(self._looking)

    async def look(self) -> None:
        """Look now; raises `Unavailable`, or `RegistrationError` for locks that collide.

        What was well before stays so meanwhile: calls do not wait for a look that the timer takes.
        """
        try:
            await self._look_within_time()
        except BaseException:
            self.is_ready = False
            raise
        self.is_ready = True

    async def _look_within_time(self) -> None:
        try:
            async with asyncio.timeout(self._database.settings.acquire_timeout.total_seconds() + 1):
                async with self._database.recording() as connection:
                    await self._look(connection)
        except psycopg.Error as error:
            raise unavailable(error) from error
        except TimeoutError:
            raise Unavailable("database_unavailable", "the database did not answer in time") from None

    async def _look(self, connection: "psycopg.AsyncConnection[tuple[object, ...]]") -> None:
        limit = self._database.settings.acquire_timeout.total_seconds()
        await self._check_revision(connection, limit)
        await self._database.learn(connection)
        tasks = list(self._registry)
        if not tasks:
            return
        keys = await self._keys(connection, tasks, limit)
        refuse_collisions(self._registry, keys)
        rows = [
            {
                "name": task.name,
                "schedule": task.schedule,
                "timezone": task.timezone if task.schedule else None,
                "mode": task.mode,
                "lock_name": task.lock.name,
                "lock_key": next(iter(keys[task.name]), None),
                "options": options(task),
            }
            for task in tasks
        ]
        statements = self._runner.statements
        message = b"; ".join(
            (
                b"BEGIN ISOLATION LEVEL READ COMMITTED",
                b"SET LOCAL search_path = pg_catalog; SET LOCAL lock_timeout = 2000",
                statements.rows(runs.FOREIGN_COLLISIONS, rows),
                statements.fill(runs.PAUSED),
                statements.rows(runs.REGISTER, rows),
                b"COMMIT",
            )
        )
        try:
            colliding, paused = await within(limit, connection, ask(connection, message))
        except psycopg.Error:
            await ask(connection, b"ROLLBACK")
            raise
        new = set(colliding) - self._told
        self._told |= new
        for other, other_lock, name, lock in sorted(new):
            log.warning(
                "the lock %r of task %r and the lock %r of task %r, which another app registered, have one key;"
                " they exclude each other. Give one of them another lock=...",
                lock, name, other_lock, other,
                extra={"event": "lock.collision"},
            )  # fmt: skip
        self._runner.attempts.skips.paused = {name for (name,) in paused}
        self._runner.attempts.lock_keys = keys

    async def _keys(
        self, connection: "psycopg.AsyncConnection[tuple[object, ...]]", tasks: list[Task], limit: float
    ) -> dict[str, tuple[int, ...]]:
        """The keys of each task's slots. They never change, so those that are known are not asked for again."""
        known = self._runner.attempts.lock_keys
        keys = {task.name: known.get(task.name, ()) for task in tasks}
        if new := [task for task in tasks if task.name not in known]:
            (keyed,) = await within(limit, connection, ask(connection, runs.lock_keys(new)))
            for name, key in keyed:
                keys[name] += (key,)
        return keys

    async def _check_revision(self, connection: "psycopg.AsyncConnection[tuple[object, ...]]", limit: float) -> None:
        schema = self._database.settings.schema_name
        table = sql.Identifier(schema, "alembic_version")
        query = sql.SQL(stats.REVISIONS).format(alembic_version=table).as_bytes(None)
        try:
            (rows,) = await within(limit, connection, ask(connection, query))
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
            raise revision.missing(schema) from None
        found = [str(row[0]) for row in rows]
        if revision.require(found, REVISION, schema) and not self._is_next:
            self._is_next = True
            log.warning(
                "the schema %r is at revision %s, one after that of this cronlock (%s), which works with it;"
                " deploy the newer cronlock here before the next migration",
                schema, found[0], REVISION,
                extra={"event": "schema.next"},
            )  # fmt: skip


def options(task: Task) -> dict[str, Any]:
    """What the row of a task says of its options; those that it does not have are left out."""
    options = {
        "skipStatus": task.skip_status,
        "timeoutSeconds": seconds(task.timeout),
        "minIntervalSeconds": seconds(task.min_interval),
        "maxConcurrent": task.max_concurrent if task.max_concurrent > 1 else None,
        "key": task.key.template if task.key else None,
        "queue": task.queue,
        "maxAttempts": task.max_attempts,
    }
    return {name: value for name, value in options.items() if value is not None}


def seconds(span: timedelta | None) -> float | None:
    """A span as a number."""
    return None if span is None else span.total_seconds()


def refuse_collisions(registry: Registry, keys: dict[str, tuple[int, ...]]) -> None:
    """Raise `RegistrationError` if two tasks name different locks that have the same key."""
    by_key: defaultdict[int | str, dict[str, str]] = defaultdict(dict)
    for task in registry:
        for key in keys[task.name] or slot_names(task):  # those of a `key` begin with the slot's name
            by_key[key].setdefault(str(task.lock), task.name)
    for key, found in by_key.items():
        if len(found) > 1:
            (lock, name), (other_lock, other) = list(found.items())[:2]
            raise RegistrationError(
                f"the tasks {name!r} (lock {lock}) and {other!r} (lock {other_lock}) have the same lock key {key}:"
                ' one would be skipped while the other runs. Give one of them another name with lock="...",'
                " or both the same on purpose."
            )
