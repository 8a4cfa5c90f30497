"""Enqueueing: a task and a payload become a job, in the caller's transaction or in one of its own.

What is said to the database is the same over every kind of connection, so it is written once, as a generator that
gives statements and is sent their rows (`talk`); who has the connection drives it.

An idempotency key names an enqueue. Its first use wins, whoever else comes at the same moment: a second one waits for
the first to commit, and is given its job, or wins itself if the first one rolls back.
"""

import asyncio
import hashlib
import json
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
from psycopg.rows import tuple_row
from pydantic import BaseModel
from sqlalchemy import Connection, CursorResult, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from cronlock import jobs, jsontext, wire
from cronlock.database import Database, unavailable
from cronlock.errors import CronlockError, IdempotencyKeyInUse, IdempotencyKeyReused, PayloadError, Unavailable
from cronlock.keys import occurrence_fault
from cronlock.link import Link
from cronlock.recording import HEAD
from cronlock.tasks import MOST_ATTEMPTS, MOST_PRIORITY, Registry, Task, queue_name, whole
from cronlock.units import parse_duration

TRIES = 3
LONGEST_DELAY = timedelta(days=3660)
KEYED_HEAD = HEAD + b"SELECT pg_catalog.set_config('lock_timeout', '2s', true); "
"""How long a second use of a key waits for the first one's transaction, where the transaction is ours."""
GROUP = 500
ESCAPED = re.compile(r"\\u(?:0000|d[89a-f])", re.IGNORECASE)
SHALLOW = 20

Talk = Generator[tuple[str, dict[str, Any]], list[Any], "list[Enqueued]"]
canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


@dataclass(frozen=True, slots=True)
class Enqueued:
    """What an enqueue came to: the job's id, and whether an earlier enqueue with the same key had made it."""

    job_id: int
    is_duplicate: bool = False


@dataclass(frozen=True, slots=True)
class Order:
    """Jobs of one task, checked; `keys` is empty, or has as many as `payloads`, whose JSON texts are in their order."""

    task: Task
    payloads: list[str]
    keys: list[str]
    options: dict[str, Any]
    is_later: bool

    @property
    def values(self) -> dict[str, Any]:
        """What the statement without keys takes."""
        return {**self.options, "payloads": self.payloads}


def order(
    task: Task,
    payloads: Sequence[Any],
    *,
    trigger: str = "manual",
    occurrence: str | None = None,
    run_at: datetime | None = None,
    delay: str | float | timedelta | None = None,
    priority: int | None = None,
    queue: str | None = None,
    max_attempts: int | None = None,
    keys: Sequence[str] | None = None,
) -> Order:
    """Check what was given for jobs of `task`.

    Raises `PayloadError` for a payload that JSON or the database cannot hold, or an option that is wrong, and
    `PayloadInvalid` for one that does not fit the task's model.
    """
    plain = [plain_payload(task, payload) for payload in payloads]
    try:
        options: dict[str, Any] = {
            "task": task.name,
            "queue": task.queue if queue is None else queue_name(queue),
            "priority": whole(
                "priority", task.priority if priority is None else priority, -MOST_PRIORITY, MOST_PRIORITY
            ),
            "max_attempts": whole(
                "max_attempts", task.max_attempts if max_attempts is None else max_attempts, 1, MOST_ATTEMPTS
            ),
            "trigger": trigger,
            "occurrence": occurrence,
            "run_at": run_at,
            "delay": None if delay is None else parse_duration(delay, longest=LONGEST_DELAY),
        }
    except ValueError as error:
        raise PayloadError(str(error)) from None
    if run_at is not None:
        if delay is not None or run_at.tzinfo is None:
            raise PayloadError("run_at is a time with its time zone, and excludes delay")
        if not 1970 < run_at.year < 9999 or run_at > datetime.now(UTC) + LONGEST_DELAY:
            raise PayloadError(f"run_at is at most {LONGEST_DELAY.days} days from now")
    if keys is None and task.dedupe is not None:
        keys = [derived_key(task, payload) for payload in plain]
    if keys is not None and len(keys) != len(plain):
        raise PayloadError(f"there must be as many idempotency keys as payloads, not {len(keys)} for {len(plain)}")
    for key in keys or ():
        if fault := occurrence_fault(key):
            raise PayloadError(f"the idempotency key {fault}")
    is_later = run_at is not None or delay is not None
    return Order(task, [canonical(one) for one in plain], list(keys or ()), options, is_later)


def plain_payload(task: Task, payload: Any) -> dict[str, Any]:
    """A payload as a JSON object that the database can hold and the task accepts."""
    if isinstance(payload, BaseModel):
        payload = payload.model_dump(mode="json")
    if payload is None:
        payload = {}
    if not isinstance(payload, dict):
        raise PayloadError(f"a payload is a JSON object (a dict or a pydantic model), not {type(payload).__name__}")
    try:
        written = canonical(payload)
    except (TypeError, ValueError, RecursionError) as error:
        raise PayloadError(f"the payload cannot be written as JSON: {error}") from None
    if ESCAPED.search(written) or written.count("{") + written.count("[") > SHALLOW:
        jsontext.parse_object(written.encode())
    task.validate(payload)
    return payload


def derived_key(task: Task, payload: Mapping[str, Any]) -> str:
    """The key of a job where the task says how to find one."""
    dedupe = task.dedupe
    if callable(dedupe):
        try:
            key: str = dedupe(payload)
        except Exception as error:
            raise PayloadError(
                f"dedupe of the task {task.name!r} made no key of this payload ({type(error).__name__})"
            ) from error
        return key
    part = payload if dedupe == "payload" else {name: payload.get(name) for name in dedupe or ()}
    return hashlib.sha256(canonical([task.name, part]).encode()).hexdigest()


def fingerprint(payload: str) -> str:
    """By which another payload under the same key is found out."""
    return hashlib.sha256(payload.encode()).hexdigest()


def talk(wanted: Order) -> Talk:
    """Enqueue: gives (statement, values), is sent the rows, returns what came of each payload.

    Raises `IdempotencyKeyReused` for a key that named another payload, and `IdempotencyKeyInUse` if it could not be
    decided whose a key is.
    """
    if not wanted.keys:
        rows = yield jobs.ENQUEUE_LATER if wanted.is_later else jobs.ENQUEUE, wanted.values
        return [Enqueued(int(row[0])) for row in rows]
    payload_of = dict(zip(reversed(wanted.keys), reversed(wanted.payloads), strict=True))
    prints = {key: fingerprint(payload) for key, payload in payload_of.items()}
    for key, payload in zip(wanted.keys, wanted.payloads, strict=True):
        if payload != payload_of[key]:
            raise PayloadError(f"the idempotency key {key!r} is given twice, for different payloads")
    made: dict[str, int] = {}
    first: dict[str, int] = {}
    left = sorted(payload_of)
    task = wanted.task.name
    for _ in range(TRIES):
        values = {
            **wanted.options,
            "keys": left,
            "fingerprints": [prints[key] for key in left],
            "payloads": [payload_of[key] for key in left],
            "ttl": wanted.task.idempotency_ttl,
        }
        rows = yield jobs.KEYED_LATER if wanted.is_later else jobs.KEYED, values
        made |= {row[1]: int(row[0]) for row in rows}
        left = [key for key in left if key not in made]
        if not left:
            break
        expired = []
        for key, job_id, other, is_expired in (yield jobs.FIRST, {"task": task, "keys": left}):
            if is_expired:
                expired.append(key)
            elif other != prints[key]:
                raise IdempotencyKeyReused(key, int(job_id))
            else:
                first[key] = int(job_id)
        left = [key for key in left if key not in first]
        if not left:
            break
        if expired:
            yield jobs.EXPIRE, {"task": task, "keys": expired}
    else:
        raise IdempotencyKeyInUse(left[0])
    enqueued, seen = [], set()
    for key in wanted.keys:
        is_new = key in made and key not in seen
        seen.add(key)
        enqueued.append(Enqueued(made[key] if key in made else first[key], not is_new))
    return enqueued


async def on_async(connection: Any, statements: jobs.Statements, wanted: Order) -> list[Enqueued]:
    """Enqueue on a caller's connection, which is async; raises TypeError for what is none."""
    talking = talk(wanted)
    rows: list[Any] | None = None
    try:
        while True:
            statement, values = talking.send(rows)  # type: ignore[arg-type]  # None begins a generator
            if isinstance(connection, psycopg.AsyncConnection):
                cursor = psycopg.AsyncCursor(connection, row_factory=tuple_row)  # whatever the connection's own are
                await cursor.execute(statements.text(statement, "%({})s"), values)
                rows = await cursor.fetchall() if cursor.description else []
            elif isinstance(connection, (AsyncConnection, AsyncSession)):
                result = await connection.execute(text(statements.text(statement, ":{}")), values)
                rows = list(result) if isinstance(result, CursorResult) and result.returns_rows else []
            else:
                raise TypeError(
                    "enqueue() takes an async connection of SQLAlchemy or psycopg, or None for a transaction of its"
                    f" own, not {type(connection).__name__}; for a synchronous one there is enqueue_sync()"
                )
    except StopIteration as done:
        enqueued: list[Enqueued] = done.value
        return enqueued


def on_sync(connection: Any, statements: jobs.Statements, wanted: Order) -> list[Enqueued]:
    """Enqueue on a caller's connection, which is not async; raises TypeError for what is none."""
    talking = talk(wanted)
    rows: list[Any] | None = None
    try:
        while True:
            statement, values = talking.send(rows)  # type: ignore[arg-type]  # None begins a generator
            if isinstance(connection, psycopg.Connection):
                cursor = psycopg.Cursor(connection, row_factory=tuple_row)
                cursor.execute(statements.text(statement, "%({})s"), values)
                rows = cursor.fetchall() if cursor.description else []
            elif isinstance(connection, (Connection, Session)):
                result = connection.execute(text(statements.text(statement, ":{}")), values)
                rows = list(result) if isinstance(result, CursorResult) and result.returns_rows else []
            else:
                raise TypeError(
                    f"enqueue_sync() takes a connection of SQLAlchemy or psycopg, not {type(connection).__name__}"
                )
    except StopIteration as done:
        enqueued: list[Enqueued] = done.value
        return enqueued


@dataclass(frozen=True, slots=True)
class Producer:
    """What a task needs to enqueue: the tasks there are, and the ways to write."""

    tasks: Registry
    statements: jobs.Statements
    enqueuer: "Enqueuer"

    def order(self, name: str, payload: Any, idempotency_key: str | None, options: Mapping[str, Any]) -> Order:
        """One job of the task `name`, checked; raises what `order` raises, and `UnknownTask`."""
        keys = None if idempotency_key is None else [idempotency_key]
        return order(self.tasks.get(name), [payload], trigger="job", keys=keys, **options)


def refused(error: psycopg.Error) -> Unavailable | PayloadError:
    """What a database's error means for an enqueue: the fault of what was given, or of the moment."""
    if isinstance(error, psycopg.DataError):
        return PayloadError(f"the database cannot hold this payload or key ({type(error).__name__})")
    return unavailable(error)


class Enqueuer:
    """Enqueues in transactions of its own: what waits at one moment shares one, but for what has a key."""

    def __init__(self, database: Database, statements: jobs.Statements) -> None:
        self._database = database
        self._statements = statements
        self._link = Link(database, statements.prepare())
        self._places = asyncio.Semaphore(database.settings.pool_size)
        self._free: list[Link] = []
        """Connections for enqueues with a key that nobody uses now."""
        self._waiting: list[tuple[dict[str, Any], asyncio.Future[int]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def enqueue(self, wanted: Order) -> list[Enqueued]:
        """Enqueue in a transaction of its own, durable when this returns.

        Raises `Unavailable` if the database does not answer; whether a job was enqueued is then not known, which is
        what an idempotency key is for.
        """
        if not wanted.keys and not wanted.is_later and len(wanted.payloads) == 1:
            return [Enqueued(await self._together(wanted))]
        return await self._alone(wanted)

    def _together(self, wanted: Order) -> "asyncio.Future[int]":
        options = {name: value for name, value in wanted.options.items() if name not in ("run_at", "delay")}
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(({**options, "payload": json.loads(wanted.payloads[0])}, future))
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write())
        return future

    async def _write(self) -> None:
        try:
            await asyncio.sleep(0)
            while self._waiting:
                group, self._waiting = self._waiting[:GROUP], self._waiting[GROUP:]
                await self._write_group(group)
        finally:
            self._writing = None

    async def _write_group(self, group: "list[tuple[dict[str, Any], asyncio.Future[int]]]") -> None:
        try:
            message = HEAD + self._statements.execute("enqueue", [row for row, _ in group]) + b"; COMMIT"
            results = await self._link.send(message, self._seconds)
            ids = [row[0] for row in wire.rows(results[2])]
        except (psycopg.Error, Unavailable) as error:
            if isinstance(error, psycopg.DataError) and len(group) > 1:  # for the fault of one of them
                for one in group:
                    await self._write_group([one])
                return
            refusal = error if isinstance(error, Unavailable) else refused(error)
            for _, future in group:
                if not future.done():
                    future.set_exception(refusal)
            return
        for (_, future), job_id in zip(group, ids, strict=True):
            if not future.done():
                future.set_result(job_id)

    async def _alone(self, wanted: Order) -> list[Enqueued]:
        """On a connection that nobody else has meanwhile: it may have to wait for the transaction that has its key."""
        link = await self._free_link()
        try:
            return await self._talk(link, wanted)
        finally:
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
        begin, end = KEYED_HEAD, b"; COMMIT" if is_one else b""
        try:
            while True:
                statement, values = talking.send(rows)  # type: ignore[arg-type]  # None begins a generator
                results = await link.send(begin + self._message(statement, values) + end, self._seconds)
                rows = wire.rows(results[-2 if is_one else -1])
                begin = KEYED_HEAD if is_one else b""
        except StopIteration as done:
            if not is_one:
                await link.send(b"COMMIT", self._seconds)
            enqueued: list[Enqueued] = done.value
            return enqueued
        except psycopg.errors.LockNotAvailable:
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
        """Let what waits be written, and close the connection."""
        if self._writing is not None:
            await asyncio.wait((self._writing,), timeout=self._seconds)
        for link in (self._link, *self._free):
            await link.close()
