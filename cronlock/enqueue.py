"""Enqueueing: a task and a payload become a job, in the caller's transaction or in one of its own.

What is said to the database is the same over every kind of connection, so it is written once, as a generator that
gives statements and is sent their rows (`talk`); who has the connection drives it.

An idempotency key names an enqueue. Its first use wins, whoever else comes at the same moment: a second one waits for
the first to commit, and is given its job, or wins itself if the first one rolls back.
"""

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
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from cronlock import jobs, jsontext
from cronlock.database import unavailable
from cronlock.errors import IdempotencyKeyInUse, IdempotencyKeyReused, PayloadError, Unavailable
from cronlock.keys import occurrence_fault
from cronlock.tasks import MOST_ATTEMPTS, MOST_PRIORITY, Task, queue_name, whole
from cronlock.units import parse_duration

TRIES = 3
LONGEST_DELAY = timedelta(days=3660)
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
        return {**self.options, "payloads": jobs.array(self.payloads)}


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
    plain = [checked(task, payload) for payload in payloads]
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
    is_derived = keys is None and task.dedupe is not None
    if is_derived:
        keys = [derived_key(task, payload) for payload, _ in plain]
    if keys is not None and len(keys) != len(plain):
        raise PayloadError(f"there must be as many idempotency keys as payloads, not {len(keys)} for {len(plain)}")
    for key in keys or ():
        if fault := occurrence_fault(key):
            made = f"that dedupe of the task {task.name!r} makes of this payload " if is_derived else ""
            raise PayloadError(f"the idempotency key {made}{fault}")
    is_later = run_at is not None or delay is not None
    return Order(task, [text for _, text in plain], list(keys or ()), options, is_later)


def checked(task: Task, payload: Any) -> tuple[dict[str, Any], str]:
    """A payload as an object that the database can hold and the task accepts, and as JSON text in ASCII."""
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
    return payload, written


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
            "keys": jobs.array(left),
            "fingerprints": jobs.array([prints[key] for key in left]),
            "payloads": jobs.array([payload_of[key] for key in left]),
            "ttl": wanted.task.idempotency_ttl,
        }
        rows = yield jobs.KEYED_LATER if wanted.is_later else jobs.KEYED, values
        made |= {row[1]: int(row[0]) for row in rows}
        left = [key for key in left if key not in made]
        if not left:
            break
        expired = []
        for key, job_id, other, is_expired in (yield jobs.FIRST, {"task": task, "keys": jobs.array(left)}):
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
            yield jobs.EXPIRE, {"task": task, "keys": jobs.array(expired)}
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
            elif isinstance(connection, (AsyncConnection, AsyncSession, async_scoped_session)):
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
            elif isinstance(connection, (Connection, Session, scoped_session)):
                result = connection.execute(text(statements.text(statement, ":{}")), values)
                rows = list(result) if isinstance(result, CursorResult) and result.returns_rows else []
            else:
                raise TypeError(
                    f"enqueue_sync() takes a connection of SQLAlchemy or psycopg, not {type(connection).__name__}"
                )
    except StopIteration as done:
        enqueued: list[Enqueued] = done.value
        return enqueued


def refused(error: psycopg.Error) -> Unavailable | PayloadError:
    """What a database's error means for an enqueue: the fault of what was given, or of the moment."""
    if isinstance(error, psycopg.DataError):
        return PayloadError(f"the database cannot hold this payload or key ({type(error).__name__})")
    return unavailable(error)
