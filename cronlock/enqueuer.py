"""Enqueueing in transactions of our own: what waits at one moment shares one.

So an enqueue costs a small part of a commit. One whose key another transaction has is waited for by the others for
50 ms, and by none that come later: it is tried again alone, as is everything in a message that was refused for the
fault of one.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import psycopg

from cronlock import jobs, wire
from cronlock.database import Database
from cronlock.enqueue import Enqueued, Order, fingerprint, order, refused, talk
from cronlock.errors import CronlockError, IdempotencyKeyInUse, Unavailable
from cronlock.link import Link
from cronlock.recording import HEAD
from cronlock.tasks import Registry

GROUP = 500
"""How many jobs share a message at most."""
TOGETHER_HEAD = HEAD + b"SET LOCAL lock_timeout = '50ms'; "
"""How long all wait for a key that another transaction has."""
ALONE_HEAD = HEAD + b"SET LOCAL lock_timeout = '2s'; "
"""How long a second use of a key waits for the first one's transaction."""
OF_ONE = (
    psycopg.DataError,
    psycopg.errors.LockNotAvailable,
    psycopg.errors.QueryCanceled,
    psycopg.errors.DeadlockDetected,
)
"""Errors of a message for which one of its jobs may be to blame."""


class Enqueuer:
    """Writes jobs, each durable when its caller goes on."""

    def __init__(self, database: Database, statements: jobs.Statements) -> None:
        self._database = database
        self._statements = statements
        self._plain = Group(database, statements, "enqueue")
        self._keyed = Group(database, statements, "enqueue_keyed")
        self._places = asyncio.Semaphore(database.settings.pool_size)
        self._free: list[Link] = []
        """Connections for what is written alone that nobody uses now."""
        self._apart: Counter[tuple[str, str]] = Counter()
        """The keys that are being tried alone: one that is waited for is to hold up no second message."""

    async def enqueue(self, wanted: Order) -> list[Enqueued]:
        """Enqueue in a transaction of its own, durable when this returns.

        Raises `Unavailable` if the database does not answer; whether a job was enqueued is then not known, which is
        what an idempotency key is for.
        """
        if len(wanted.payloads) == 1 and not wanted.is_later and not self._apart.keys() & names(wanted):
            job_id = await (self._keyed if wanted.keys else self._plain).write(wanted)
            if job_id is not None:
                return [Enqueued(job_id)]
        return await self._alone(wanted)

    async def _alone(self, wanted: Order) -> list[Enqueued]:
        """On a connection that nobody else has meanwhile: it may have to wait for the transaction that has its key."""
        link = await self._free_link()
        self._apart.update(names(wanted))
        try:
            return await self._talk(link, wanted)
        finally:
            self._apart -= Counter(names(wanted))
            self._free.append(link)
            self._places.release()

    async def _free_link(self) -> Link:
        try:
            async with asyncio.timeout(self._seconds):
                await self._places.acquire()
        except TimeoutError:
            raise Unavailable("no_connection", f"no database connection within {self._seconds:g} s") from None
        return self._free.pop() if self._free else Link(self._database, self._statements.prepare_named())

    async def _talk(self, link: Link, wanted: Order) -> list[Enqueued]:
        """Each statement in a transaction of its own; only where there are several keys, all in one."""
        is_one = len(wanted.payloads) == 1 or not wanted.keys
        talking = talk(wanted)
        rows: list[Any] | None = None
        begin, end = ALONE_HEAD, b"; COMMIT" if is_one else b""
        try:
            while True:
                statement, values = talking.send(rows)  # type: ignore[arg-type]  # None begins a generator
                results = await link.send(begin + self._message(statement, values) + end, self._seconds)
                rows = wire.rows(results[-2 if is_one else -1])
                begin = ALONE_HEAD if is_one else b""
        except StopIteration as done:
            if not is_one:
                await link.send(b"COMMIT", self._seconds)
            enqueued: list[Enqueued] = done.value
            return enqueued
        except psycopg.errors.LockNotAvailable:
            if not wanted.keys:
                raise Unavailable("database_unavailable", "the tables of jobs are locked; try again") from None
            raise IdempotencyKeyInUse(wanted.keys[0]) from None
        except psycopg.Error as error:
            raise refused(error) from error
        except CronlockError:
            if not is_one:
                await link.send(b"ROLLBACK", self._seconds)
            raise

    def _message(self, statement: str, values: Mapping[str, Any]) -> bytes:
        if statement is jobs.KEYED and self._database.keeps_records_apart:
            return self._statements.execute_named("keyed", values)
        return self._statements.fill(statement, values)

    @property
    def _seconds(self) -> float:
        return self._database.settings.acquire_timeout.total_seconds()

    async def close(self) -> None:
        """Let what waits be written, and close the connections."""
        for group in (self._plain, self._keyed):
            await group.close()
        for link in self._free:
            await link.close()


def names(wanted: Order) -> set[tuple[str, str]]:
    """The keys of an order, each with its task."""
    return {(wanted.task.name, key) for key in wanted.keys}


Key = tuple[str, str | int]
"""A task and an idempotency key of it; for a job without one, a number in the order in which they came."""


class Waiting(NamedTuple):
    """A job that is to be written, and who waits for its id."""

    key: Key
    row: str
    """What the statement takes of it, as JSON."""
    future: asyncio.Future[int | None]


class Group:
    """Single jobs that wait at one moment, written by the statement `name`."""

    def __init__(self, database: Database, statements: jobs.Statements, name: str) -> None:
        self._statements = statements
        self._name = name
        self._link = Link(database, statements.prepare())
        self._seconds = database.settings.acquire_timeout.total_seconds()
        self._waiting: list[Waiting] = []
        self._numbers = itertools.count()
        self._writing: asyncio.Task[None] | None = None

    def write(self, wanted: Order) -> "asyncio.Future[int | None]":
        """The id of the job, durable; None if it has to be tried alone. Raises `Unavailable`."""
        row = {name: value for name, value in wanted.options.items() if name not in ("run_at", "delay")}
        key: Key = ("", next(self._numbers))
        if wanted.keys:
            row["key"] = wanted.keys[0]
            row["fingerprint"] = fingerprint(wanted.payloads[0])
            row["ttl"] = wanted.task.idempotency_ttl.total_seconds()
            key = (wanted.task.name, wanted.keys[0])
        text = f'{jobs.encode(row)[:-1]},"payload":{wanted.payloads[0]}}}'
        future: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(Waiting(key, text, future))
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write())
        return future

    async def _write(self) -> None:
        try:
            await asyncio.sleep(0)
            while self._waiting:
                group, self._waiting = self._waiting[:GROUP], self._waiting[GROUP:]
                await self._send(group)
        finally:
            self._writing = None

    async def _send(self, group: list[Waiting]) -> None:
        # In the order of their keys, in which no two such messages wait for each other; all but the first one of a key
        # are tried alone, when it is known what came of that.
        first = {one.key: one for one in reversed(group)}
        sent = [first[key] for key in sorted(first)]
        made: dict[Key, int | None] = {}
        try:
            rows = "[" + ",".join([one.row for one in sent]) + "]"
            message = TOGETHER_HEAD + self._statements.execute(self._name, rows) + b"; COMMIT"
            results = await self._link.send(message, self._seconds)
            made = {one.key: row[0] for one, row in zip(sent, wire.rows(results[3]), strict=True)}
        except OF_ONE:
            pass
        except Exception as error:  # a fault of ours, too: nobody may wait for ever
            refusal = refused(error) if isinstance(error, psycopg.Error) else error
            for one in group:
                if not one.future.done():
                    one.future.set_exception(refusal)
            return
        for one in group:
            if not one.future.done():
                one.future.set_result(made.pop(one.key, None))

    async def close(self) -> None:
        """Let what waits be written, and close the connection."""
        if self._writing is not None:
            await asyncio.wait((self._writing,), timeout=self._seconds)
        await self._link.close()


@dataclass(frozen=True, slots=True)
class Producer:
    """What a task needs to enqueue: the tasks there are, and the ways to write."""

    tasks: Registry
    statements: jobs.Statements
    enqueuer: Enqueuer

    def order(self, name: str, payload: Any, idempotency_key: str | None, options: Mapping[str, Any]) -> Order:
        """One job of the task `name`, checked; raises what `order` raises, and `UnknownTask`."""
        keys = None if idempotency_key is None else [idempotency_key]
        return order(self.tasks.get(name), [payload], trigger="job", keys=keys, **options)
