"""Enqueueing: in whose transaction, what is accepted, what a key names, in which order ids are."""

import asyncio
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row
from pydantic import BaseModel
from sqlalchemy import create_engine, make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

from cronlock import Cronlock, PayloadError, PayloadInvalid, Run, UnknownTask
from cronlock.enqueue import Enqueued
from cronlock.errors import IdempotencyKeyInUse, IdempotencyKeyReused, RegistrationError
from cronlock.migrate import migrate
from tests import Db, Make, until, value
from tests.working import all_ended, live, working

pytestmark = pytest.mark.anyio


class Report(BaseModel):
    user: int
    tags: list[str] = []


@pytest.fixture
def cron(make_cron: Make) -> Cronlock:
    made = make_cron()

    @made.task("note", mode="guard")
    async def note(run: Run, payload: dict[str, Any]) -> Any:
        return payload

    @made.task("report", mode="guard", queue="slow", priority=3, max_attempts=7)
    async def report(run: Run, payload: Report) -> None:
        pass

    return made


def driver(url: str, name: str) -> Any:
    """The database for SQLAlchemy, over this driver."""
    return make_url(url).set(drivername=f"postgresql+{name}")


# -- in whose transaction -----------------------------------------------------------------------------------------


@asynccontextmanager
async def of_psycopg(url: str) -> AsyncIterator[Any]:
    async with await psycopg.AsyncConnection.connect(url, row_factory=dict_row) as connection:
        yield connection


def of_sqlalchemy(name: str, *, is_session: bool) -> Callable[[str], Any]:
    @asynccontextmanager
    async def opened(url: str) -> AsyncIterator[Any]:
        engine = create_async_engine(driver(url, name), poolclass=NullPool)
        try:
            async with AsyncSession(engine) if is_session else engine.connect() as connection:
                yield connection
        finally:
            await engine.dispose()

    return opened


@asynccontextmanager
async def of_a_scope(url: str) -> AsyncIterator[Any]:
    engine = create_async_engine(driver(url, "psycopg"), poolclass=NullPool)
    scope = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
    try:
        yield scope
    finally:
        await scope.remove()
        await engine.dispose()


ASYNC = {
    "psycopg": of_psycopg,
    "async_scoped_session": of_a_scope,
    "AsyncConnection": of_sqlalchemy("psycopg", is_session=False),
    "AsyncSession": of_sqlalchemy("psycopg", is_session=True),
    "AsyncConnection of asyncpg": of_sqlalchemy("asyncpg", is_session=False),
    "AsyncSession of asyncpg": of_sqlalchemy("asyncpg", is_session=True),
}


@pytest.mark.parametrize("kind", ASYNC)
async def test_an_enqueue_is_a_part_of_the_callers_transaction(
    cron: Cronlock, database_url: str, db: Db, kind: str
) -> None:
    async with ASYNC[kind](database_url) as connection:
        first = await cron.enqueue(connection, "note", {"n": 1})
        assert live(db) == 0
        await connection.commit()
        assert live(db) == 1
        await cron.enqueue(connection, "note", {"n": 2})
        await cron.enqueue(connection, "note", {"n": 3}, idempotency_key="gone")
        await connection.rollback()
        assert live(db) == 1
        kept = await cron.enqueue(connection, "note", {"n": 4}, idempotency_key="gone")
        try:
            async with connection.transaction() if kind == "psycopg" else connection.begin_nested():
                await cron.enqueue(connection, "note", {"n": 5}, idempotency_key="undone")
                raise KeyError
        except KeyError:
            pass
        later = await cron.enqueue(connection, "note", {"n": 6}, idempotency_key="undone", delay="1h")
        many = await cron.enqueue_many(connection, "note", [{"n": n} for n in range(7, 10)])
        await connection.commit()
    found: dict[int, int] = dict(db.execute("SELECT id, (payload->>'n')::int FROM cronlock.job_status").fetchall())
    assert found == {
        first.job_id: 1, kept.job_id: 4, later.job_id: 6, **{one.job_id: 7 + n for n, one in enumerate(many)},
    }  # fmt: skip
    assert value(db, "SELECT count(*) FROM cronlock.idempotency_key") == 2
    assert value(db, "SELECT run_at > now() + interval '59 min' FROM cronlock.job_waiting") is True


@contextmanager
def sync_psycopg(url: str) -> Iterator[Any]:
    with psycopg.connect(url, row_factory=dict_row) as connection:
        yield connection


def sync_sqlalchemy(*, is_session: bool) -> Callable[[str], Any]:
    @contextmanager
    def opened(url: str) -> Iterator[Any]:
        engine = create_engine(driver(url, "psycopg"), poolclass=NullPool)
        with Session(engine) if is_session else engine.connect() as connection:
            yield connection

    return opened


@contextmanager
def sync_scope(url: str) -> Iterator[Any]:
    scope = scoped_session(sessionmaker(create_engine(driver(url, "psycopg"), poolclass=NullPool)))
    try:
        yield scope
    finally:
        scope.remove()


SYNC = {
    "psycopg": sync_psycopg,
    "scoped_session": sync_scope,
    "Connection": sync_sqlalchemy(is_session=False),
    "Session": sync_sqlalchemy(is_session=True),
}


@pytest.mark.parametrize("kind", SYNC)
def test_an_enqueue_is_a_part_of_a_synchronous_callers_transaction(
    cron: Cronlock, database_url: str, db: Db, kind: str
) -> None:
    with SYNC[kind](database_url) as connection:
        first = cron.enqueue_sync(connection, "note", {"n": 1})
        assert live(db) == 0
        connection.commit()
        assert live(db) == 1
        cron.enqueue_sync(connection, "note", {"n": 2}, idempotency_key="gone")
        connection.rollback()
        assert live(db) == 1
        kept = cron.enqueue_sync(connection, "note", {"n": 4}, idempotency_key="gone")
        try:
            with connection.transaction() if kind == "psycopg" else connection.begin_nested():
                cron.enqueue_sync(connection, "note", {"n": 5})
                raise KeyError
        except KeyError:
            pass
        connection.commit()
    found: dict[int, int] = dict(db.execute("SELECT id, (payload->>'n')::int FROM cronlock.job_status").fetchall())
    assert found == {first.job_id: 1, kept.job_id: 4}


@pytest.mark.parametrize("kind", ["AsyncConnection", "AsyncConnection of asyncpg", "psycopg"])
async def test_a_worker_claims_nothing_before_the_callers_commit_and_starts_at_once_after_it(
    cron: Cronlock, database_url: str, db: Db, kind: str
) -> None:
    async with working(cron):
        await until(lambda: value(db, "SELECT is_idle FROM cronlock.worker"), "it is idle")
        async with ASYNC[kind](database_url) as connection:
            await cron.enqueue(connection, "note", {"n": 1})
            await asyncio.sleep(1.5)
            assert value(db, "SELECT count(*) FROM cronlock.job_status") == 0
            await connection.commit()
            await until(lambda: live(db) == 0 and value(db, "SELECT count(*) FROM cronlock.job_history"), "it ran", 1)
            await cron.enqueue(connection, "note", {"n": 2})
            await connection.rollback()
        await asyncio.sleep(0.3)
        assert value(db, "SELECT count(*) FROM cronlock.job_status") == 1


async def test_what_is_no_connection_is_refused_with_what_to_use(cron: Cronlock, database_url: str) -> None:
    with psycopg.connect(database_url) as connection, pytest.raises(TypeError, match=r"enqueue_sync\(\)"):
        await cron.enqueue(connection, "note")
    async with await psycopg.AsyncConnection.connect(database_url) as other:
        with pytest.raises(TypeError, match="takes a connection of SQLAlchemy or psycopg"):
            cron.enqueue_sync(other, "note")


@pytest.mark.parametrize("schema", ['Cron "Ops"', "100%", "a: b"])
async def test_any_name_of_a_schema_will_do(make_cron: Make, empty_url: str, schema: str) -> None:
    migrate(empty_url, schema)
    cron = make_cron(database_url=empty_url, schema_name=schema)

    @cron.task("note", mode="guard")
    async def note(run: Run, payload: dict[str, Any]) -> None:
        pass

    for kind in ("AsyncConnection", "psycopg"):
        async with ASYNC[kind](empty_url) as connection:
            await cron.enqueue(connection, "note", {"n": "%s :a"}, idempotency_key=kind)
            await connection.commit()
    async with working(cron):
        await cron.enqueue(None, "note")
        quoted = schema.replace('"', '""')
        with psycopg.connect(empty_url, autocommit=True) as db:
            ended = f'SELECT count(*) FROM "{quoted}".job_history'.encode()
            await until(lambda: (db.execute(ended).fetchone() or (0,))[0] == 3, "all have ended")


# -- what is accepted -----------------------------------------------------------------------------------------------


async def test_thousands_are_one_statement_and_their_ids_are_in_their_order(
    cron: Cronlock, database_url: str, db: Db
) -> None:
    async with cron, await psycopg.AsyncConnection.connect(database_url) as connection:
        made = await cron.enqueue_many(connection, "note", [{"n": n} for n in range(5000)])
        made += await cron.enqueue_many(None, "note", [{"n": n} for n in range(5000, 10_000)])
        keys = [str(n) for n in range(3000)]
        keyed = await cron.enqueue_many(connection, "note", [{"n": n} for n in range(3000)], idempotency_keys=keys)
        again = await cron.enqueue_many(connection, "note", [{"n": n} for n in range(3000)], idempotency_keys=keys)
    assert [one.job_id for one in again] == [one.job_id for one in keyed]
    assert {one.is_duplicate for one in again} == {True}
    ids = [one.job_id for one in made]
    assert sorted(ids[:5000]) == ids[:5000]
    assert sorted(ids[5000:]) == ids[5000:]
    found: dict[int, int] = dict(db.execute("SELECT id, (payload->>'n')::int FROM cronlock.job").fetchall())
    assert [found[job_id] for job_id in ids] == list(range(10_000))
    assert [found[one.job_id] for one in keyed] == list(range(3000))


async def test_what_waits_at_one_moment_is_written_together_and_each_caller_gets_its_own(
    cron: Cronlock, db: Db
) -> None:
    async with cron:
        made = await asyncio.gather(*(cron.enqueue(None, "note", {"n": n}) for n in range(1200)))
    found: dict[int, int] = dict(db.execute("SELECT id, (payload->>'n')::int FROM cronlock.job").fetchall())
    assert [found[one.job_id] for one in made] == list(range(1200))
    assert value(db, "SELECT count(DISTINCT xmin::text) FROM cronlock.job") < 100


async def test_what_has_a_key_is_written_together_too_and_each_key_makes_one_job(cron: Cronlock, db: Db) -> None:
    numbers = [n % 400 for n in range(1200)]
    async with cron:
        await cron.enqueue(None, "note", {"n": 7}, idempotency_key="key 7")
        made = await asyncio.gather(
            *(cron.enqueue(None, "note", {"n": n}, idempotency_key=f"key {n}") for n in numbers)
        )
    rows = "SELECT id, (payload->>'n')::int, idempotency_key FROM cronlock.job"
    found = {job_id: (n, key) for job_id, n, key in db.execute(rows)}
    assert [found[one.job_id] for one in made] == [(n, f"key {n}") for n in numbers]
    assert sum(not one.is_duplicate for one in made) == 399
    assert len(found) == value(db, "SELECT count(*) FROM cronlock.idempotency_key") == 400
    assert value(db, "SELECT count(DISTINCT xmin::text) FROM cronlock.job") < 50


@pytest.mark.parametrize("key", ["ключ", "é", "🔑" * 255, 'a"\\{},b', "it's"])
async def test_any_printable_text_is_a_key_in_a_transaction_of_its_own(cron: Cronlock, db: Db, key: str) -> None:
    async with cron:
        made = await cron.enqueue(None, "note", {"n": 1}, idempotency_key=key)
        assert await cron.enqueue(None, "note", {"n": 1}, idempotency_key=key) == Enqueued(made.job_id, True)
        with pytest.raises(IdempotencyKeyReused):
            await cron.enqueue(None, "note", {"n": 2}, idempotency_key=key)
        later = await cron.enqueue(None, "note", {"n": 3}, idempotency_key=key[:-1] + "ö", delay=60)
        many = await cron.enqueue_many(None, "note", [{"n": 1}, {"n": 4}], idempotency_keys=[key, "other"])
    rows = "SELECT id, idempotency_key FROM cronlock.job ORDER BY id LIMIT 1"
    assert db.execute(rows).fetchone() == (made.job_id, key)
    assert [one.is_duplicate for one in (later, *many)] == [False, True, False]


async def test_the_first_enqueue_after_all_connections_were_ended_is_written(cron: Cronlock, db: Db) -> None:
    async with cron:
        for key in (None, "k"):
            await cron.enqueue(None, "note", {"n": 1}, idempotency_key=key)
        ours = (
            "SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        pids = [pid for pid, _ in db.execute(ours)]
        left = "SELECT count(*) FROM pg_stat_activity WHERE pid = ANY (%s)"
        await until(lambda: not value(db, left, pids), "they are gone")
        for key in (None, "l"):
            await cron.enqueue(None, "note", {"n": 1}, idempotency_key=key)
    assert value(db, "SELECT count(*) FROM cronlock.job") == 4


async def test_a_key_that_an_open_transaction_has_holds_up_no_other_one(
    cron: Cronlock, database_url: str, db: Db
) -> None:
    async with cron:
        with psycopg.connect(database_url) as other:
            held = cron.enqueue_sync(other, "note", {"n": 3}, idempotency_key="key 3")
            calls = [asyncio.create_task(cron.enqueue(None, "note", {"n": n}, idempotency_key=f"key {n}"))
                     for n in range(8)]  # fmt: skip
            done, waiting = await asyncio.wait(calls, timeout=1.0)
            assert waiting == {calls[3]}
            assert not any(one.result().is_duplicate for one in done)
            began = time.monotonic()
            for n in range(20, 40):
                again = asyncio.create_task(cron.enqueue(None, "note", {"n": 3}, idempotency_key="key 3"))
                await cron.enqueue(None, "note", {"n": n}, idempotency_key=f"key {n}")
                calls.append(again)
            assert time.monotonic() - began < 0.6, "nor do others of that key hold up anybody"
        assert await calls[3] == Enqueued(held.job_id, is_duplicate=True)
        assert {await one for one in calls[8:]} == {Enqueued(held.job_id, is_duplicate=True)}
    assert value(db, "SELECT count(*) FROM cronlock.job") == 28


async def test_the_tasks_options_hold_and_an_enqueues_own_come_first(cron: Cronlock, db: Db) -> None:
    at = datetime(2030, 1, 1, tzinfo=UTC)
    async with cron:
        plain = await cron.enqueue(None, "report", Report(user=1))
        own = await cron.enqueue(
            None, "report", {"user": 2}, queue="fast", priority=-5, max_attempts=1, run_at=at, idempotency_key="k"
        )
    query = "SELECT queue, priority, max_attempts, trigger, idempotency_key FROM cronlock.job_status WHERE id = %s"
    assert db.execute(query, (plain.job_id,)).fetchone() == ("slow", 3, 7, "manual", None)
    assert db.execute(query, (own.job_id,)).fetchone() == ("fast", -5, 1, "manual", "k")
    assert value(db, "SELECT run_at = '2030-01-01 00:00+00' FROM cronlock.job_waiting") is True


def nested(depth: int) -> dict[str, Any]:
    """Lists within lists."""
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return {"a": found}


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a list": ([1], {}, "a payload is a JSON object"),
    "NaN": ({"a": float("nan")}, {}, "JSON"),
    "infinity": ({"a": [float("inf")]}, {}, "JSON"),
    "half a pair": ({"a": "\ud83d"}, {}, "surrogate"),
    "half a pair in a name": ({"\ude00": 1}, {}, "surrogate"),
    "NUL": ({"a": "x\0"}, {}, "NUL"),
    "deep": ({"a": json.loads("[" * 70 + "]" * 70)}, {}, "nested deeper"),
    "very deep": (nested(100_000), {}, "JSON"),
    "a huge integer": ({"a": 10**5000}, {}, "JSON"),
    "a set": ({"a": {1}}, {}, "JSON"),
    "names of two types": ({"a": 1, 2: 2}, {}, "JSON"),
    "naive": ({}, {"run_at": datetime(2030, 1, 1)}, "time zone"),
    "both times": ({}, {"run_at": datetime(2030, 1, 1, tzinfo=UTC), "delay": 1}, "excludes delay"),
    "negative delay": ({}, {"delay": -1}, "not a duration"),
    "no delay": ({}, {"delay": "soon"}, "not a duration"),
    "priority": ({}, {"priority": 1001}, "priority must be a whole number"),
    "true priority": ({}, {"priority": True}, "priority must be a whole number"),
    "attempts": ({}, {"max_attempts": 0}, "max_attempts must be a whole number"),
    "queue": ({}, {"queue": "Fast Lane"}, "queue must be"),
    "empty key": ({}, {"idempotency_key": ""}, "idempotency key"),
    "long key": ({}, {"idempotency_key": "x" * 256}, "idempotency key"),
    "key with NUL": ({}, {"idempotency_key": "x\0"}, "idempotency key"),
    "key with half a pair": ({}, {"idempotency_key": "\ud800"}, "idempotency key"),
    "key that is no text": ({}, {"idempotency_key": 5}, "idempotency key"),
}


@pytest.mark.parametrize("what", WRONG)
async def test_what_cannot_be_held_is_refused_before_anything_is_written(
    cron: Cronlock, database_url: str, db: Db, what: str
) -> None:
    payload, options, reason = WRONG[what]
    async with cron, await psycopg.AsyncConnection.connect(database_url) as connection:
        for where in (None, connection):
            with pytest.raises(PayloadError, match=reason):
                await cron.enqueue(where, "note", payload, **options)
    assert value(db, "SELECT count(*) FROM cronlock.job_status") == 0


async def test_a_payload_that_does_not_fit_and_a_task_that_is_not_there_are_refused(cron: Cronlock, db: Db) -> None:
    async with cron:
        with pytest.raises(PayloadInvalid) as refused:
            await cron.enqueue(None, "report", {"user": "x"})
        assert refused.value.fields[0]["field"] == "user"
        with pytest.raises(UnknownTask, match="reprot"):
            await cron.enqueue(None, "reprot", {"user": 1})
        with pytest.raises(PayloadInvalid):
            await cron.enqueue_many(None, "report", [{"user": 1}, {"user": None}])
    assert value(db, "SELECT count(*) FROM cronlock.job_status") == 0


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=10,
)


async def test_whatever_is_accepted_arrives_as_it_was(cron: Cronlock, database_url: str, db: Db) -> None:
    sent: list[dict[str, Any]] = [{"pair": "\ud83d\ude00"}, {"n": 2**53 + 1}, {"f": 0.1}, {"x": "'; DROP TABLE a; --"}]

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.dictionaries(TEXTS, VALUES, max_size=4))
    def collect(payload: dict[str, Any]) -> None:
        sent.append(payload)

    collect()
    async with cron:
        made = await cron.enqueue_many(None, "note", sent)
        made += await asyncio.gather(*(cron.enqueue(None, "note", payload) for payload in sent))
        async with await psycopg.AsyncConnection.connect(database_url) as connection:
            made += [await cron.enqueue(connection, "note", payload) for payload in sent]
    found: dict[int, str] = dict(db.execute("SELECT id, payload::text FROM cronlock.job").fetchall())
    for one, payload in zip(made, sent * 3, strict=True):
        assert exactly(found[one.job_id]) == exactly(json.dumps(payload)), payload


def exactly(text: str) -> Any:
    """JSON with its numbers as they are written, however they are: jsonb keeps 1e3 as 1000."""
    return json.loads(text, parse_int=Decimal, parse_float=Decimal)


async def test_payloads_of_any_size_are_told_without_their_bytes(cron: Cronlock, db: Db) -> None:
    payloads = [{"a": "x" * 7900}, {"a": "x" * 8100}, {"a": "x" * 900_000}, {"a": "é" * 4000}, {"a": "😀" * 2000}]
    async with working(cron):
        await until(lambda: value(db, "SELECT is_idle FROM cronlock.worker"), "it is idle")
        for payload in payloads:
            await cron.enqueue(None, "note", payload)
        assert await all_ended(db) == {"completed": 5}


async def test_a_payload_that_this_database_cannot_hold_is_refused_alone(server_url: str, make_cron: Make) -> None:
    name = f"latin_enqueue_{os.getpid()}"
    with psycopg.connect(server_url, autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C'".encode())
        try:
            url = make_conninfo(server_url, dbname=name)
            migrate(url, "cronlock")
            cron = make_cron(database_url=url)

            @cron.task("note", mode="guard")
            async def note(run: Run, payload: dict[str, Any]) -> None:
                pass

            async with cron:
                payloads = [{"n": n, "a": "€" if n == 3 else "ü"} for n in range(8)]
                for keys in ([None] * 8, [f"key {n}" for n in range(8)]):
                    calls = (
                        cron.enqueue(None, "note", payload, idempotency_key=key)
                        for payload, key in zip(payloads, keys, strict=True)
                    )
                    made = await asyncio.gather(*calls, return_exceptions=True)
                    assert [type(one) for one in made] == [PayloadError if n == 3 else Enqueued for n in range(8)]
        finally:
            server.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


# -- what a key names -----------------------------------------------------------------------------------------------


async def test_a_second_enqueue_with_a_key_gives_the_first_job_in_whatever_state_it_is(cron: Cronlock, db: Db) -> None:
    async with cron:
        first = await cron.enqueue(None, "note", {"a": 1, "b": 2}, idempotency_key="k")
        assert first.is_duplicate is False
    for state in ("queued", "ended", "pruned"):
        if state == "ended":
            async with working(cron):
                assert await all_ended(db) == {"completed": 1}
        if state == "pruned":
            db.execute("DELETE FROM cronlock.job_history")
        async with cron:
            again = await cron.enqueue(None, "note", {"b": 2, "a": 1}, idempotency_key="k")
            assert (again.job_id, again.is_duplicate) == (first.job_id, True)
            for other in ({"a": 1}, {"a": 1, "b": 2, "c": None}, {"a": "1", "b": 2}, {"a": 1, "b": 2.0}):
                with pytest.raises(IdempotencyKeyReused, match=f"job {first.job_id}") as refused:
                    await cron.enqueue(None, "note", other, idempotency_key="k")
                assert refused.value.job_id == first.job_id
    assert live(db) == 0
    async with cron:
        elsewhere = await cron.enqueue(None, "report", {"user": 1}, idempotency_key="k")
        assert not elsewhere.is_duplicate


async def test_a_key_is_free_again_when_its_time_is_over(cron: Cronlock, db: Db) -> None:
    async with cron:
        first = await cron.enqueue(None, "note", {"a": 1}, idempotency_key="k")
        assert value(db, "SELECT expires_at BETWEEN now() + interval '59 min' AND now() + interval '1 h'"
                         " FROM cronlock.idempotency_key") is True  # fmt: skip
        db.execute("UPDATE cronlock.idempotency_key SET expires_at = clock_timestamp()")
        second = await cron.enqueue(None, "note", {"a": 2}, idempotency_key="k")
    assert second.is_duplicate is False
    assert second.job_id != first.job_id


async def test_the_same_key_twice_in_one_call_is_one_job_and_for_two_payloads_is_refused(
    cron: Cronlock, db: Db
) -> None:
    async with cron:
        made = await cron.enqueue_many(None, "note", [{"a": 1}, {"a": 2}, {"a": 1}], idempotency_keys=["x", "y", "x"])
        assert [one.is_duplicate for one in made] == [False, False, True]
        assert made[2].job_id == made[0].job_id
        with pytest.raises(PayloadError, match="given twice, for different payloads"):
            await cron.enqueue_many(None, "note", [{"a": 1}, {"a": 2}], idempotency_keys=["z", "z"])
        with pytest.raises(PayloadError, match="as many"):
            await cron.enqueue_many(None, "note", [{"a": 1}, {"a": 2}], idempotency_keys=["z"])
    assert live(db) == 2


async def test_twice_in_one_transaction_is_one_job(cron: Cronlock, database_url: str, db: Db) -> None:
    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        first = await cron.enqueue(connection, "note", {"a": 1}, idempotency_key="k")
        again = await cron.enqueue(connection, "note", {"a": 1}, idempotency_key="k")
        assert (again.job_id, again.is_duplicate) == (first.job_id, True)
        with pytest.raises(IdempotencyKeyReused):
            await cron.enqueue(connection, "note", {"a": 2}, idempotency_key="k")
    assert live(db) == 1


DEDUPE: dict[str, Any] = {
    "payload": "payload",
    "fields": ("user", "report"),
    "callable": lambda payload: f"{payload['user']}/{payload['report']}",
}


@pytest.mark.parametrize("how", DEDUPE)
async def test_a_task_says_which_of_its_jobs_are_the_same(make_cron: Make, db: Db, how: str) -> None:
    cron = make_cron()

    @cron.task("report", mode="guard", dedupe=DEDUPE[how])
    async def report(run: Run, payload: dict[str, Any]) -> None:
        pass

    async with cron:
        first = await cron.enqueue(None, "report", {"user": 1, "report": 2})
        again = await cron.enqueue(None, "report", {"report": 2, "user": 1})
        other = await cron.enqueue(None, "report", {"user": 1, "report": 3})
        own = await cron.enqueue(None, "report", {"user": 1, "report": 2}, idempotency_key="own")
        many = await cron.enqueue_many(None, "report", [{"user": 1, "report": n} for n in (2, 3, 4)])
    assert (again.job_id, again.is_duplicate) == (first.job_id, True)
    assert not other.is_duplicate
    assert not own.is_duplicate
    assert [one.is_duplicate for one in many] == [True, True, False]
    assert live(db) == 4


@pytest.mark.parametrize("wrong", ["user", (), ("a", ""), (1,), 5])
def test_a_dedupe_that_is_none_is_refused_at_registration(make_cron: Make, wrong: Any) -> None:
    with pytest.raises(RegistrationError, match="dedupe"):
        make_cron().task("report", dedupe=wrong)(lambda run: None)


@pytest.mark.parametrize("key", [None, "", 5, "x" * 300])
async def test_a_callable_that_gives_no_key_is_an_error_of_the_call(make_cron: Make, db: Db, key: Any) -> None:
    cron = make_cron()
    cron.task("report", mode="guard", dedupe=lambda payload: key)(lambda run: None)
    async with cron:
        with pytest.raises(PayloadError, match="key that dedupe of the task 'report' makes of this payload must"):
            await cron.enqueue(None, "report", {})
        with pytest.raises(PayloadError, match=r"^the idempotency key must have"):
            await cron.enqueue(None, "report", {}, idempotency_key="")
    assert live(db) == 0


WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


# -- one winner -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["fresh", "expired"])
async def test_24_callers_at_one_moment_have_one_winner(make_cron: Make, db: Db, state: str) -> None:
    crons = [make_cron(pool_size=8) for _ in range(3)]
    for cron in crons:
        cron.task("note", mode="guard")(lambda run: None)
    async with crons[0], crons[1], crons[2]:
        for number in range(15):
            key = f"k{number}"
            if state == "expired":
                await crons[0].enqueue(None, "note", {"old": number}, idempotency_key=key)
                db.execute("UPDATE cronlock.idempotency_key SET expires_at = clock_timestamp()")
            calls = [crons[n % 3].enqueue(None, "note", {"n": number}, idempotency_key=key) for n in range(24)]
            made = await asyncio.gather(*calls)
            assert [one.is_duplicate for one in made].count(False) == 1
            assert len({one.job_id for one in made}) == 1
    assert live(db) == 15 * (2 if state == "expired" else 1)


async def test_a_winner_that_rolls_back_leaves_the_key_to_one_of_the_others(
    cron: Cronlock, database_url: str, db: Db
) -> None:
    async with cron, await psycopg.AsyncConnection.connect(database_url) as connection:
        first = await cron.enqueue(connection, "note", {"n": 1}, idempotency_key="k")
        calls = [asyncio.create_task(cron.enqueue(None, "note", {"n": 1}, idempotency_key="k")) for _ in range(8)]
        await until(lambda: value(db, WAITING) >= 5, "the others wait")
        await connection.rollback()
        made = await asyncio.gather(*calls)
    assert [one.is_duplicate for one in made].count(False) == 1
    assert {one.job_id for one in made}.isdisjoint({first.job_id})
    assert live(db) == 1


async def test_a_key_that_is_being_used_for_longer_than_2_s_is_a_clear_error(
    cron: Cronlock, database_url: str, db: Db
) -> None:
    async with cron, await psycopg.AsyncConnection.connect(database_url) as connection:
        await cron.enqueue(connection, "note", {"n": 1}, idempotency_key="k")
        with pytest.raises(IdempotencyKeyInUse) as refused:
            await cron.enqueue(None, "note", {"n": 1}, idempotency_key="k")
        assert refused.value.retry_after == 1
        await connection.commit()
        again = await cron.enqueue(None, "note", {"n": 1}, idempotency_key="k")
    assert again.is_duplicate
    assert live(db) == 1


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_at_a_higher_isolation_a_conflict_is_the_callers_40001(
    cron: Cronlock, database_url: str, db: Db, level: str
) -> None:
    engine = create_async_engine(driver(database_url, "psycopg"), poolclass=NullPool, isolation_level=level)
    async with cron, engine.connect() as connection:
        await connection.exec_driver_sql("SELECT count(*) FROM cronlock.job")  # its snapshot
        first = await cron.enqueue(None, "note", {"n": 1}, idempotency_key="k")
        with pytest.raises(DBAPIError) as refused:
            await cron.enqueue(connection, "note", {"n": 1}, idempotency_key="k")
        assert getattr(refused.value.orig, "sqlstate", None) == "40001"
        await connection.rollback()
        again = await cron.enqueue(connection, "note", {"n": 1}, idempotency_key="k")
        await connection.commit()
    assert (again.job_id, again.is_duplicate) == (first.job_id, True)
    assert live(db) == 1


async def test_callers_that_are_cancelled_while_they_wait_for_a_key_keep_nothing_from_others(
    cron: Cronlock, database_url: str, db: Db
) -> None:
    async with cron, await psycopg.AsyncConnection.connect(database_url) as connection:
        await cron.enqueue(connection, "note", {"n": 1}, idempotency_key="k")
        calls = [asyncio.create_task(cron.enqueue(None, "note", {"n": 1}, idempotency_key="k")) for _ in range(5)]
        await until(lambda: value(db, WAITING) == 5, "all wait")
        for call in calls:
            call.cancel()
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(end) for end in ends] == [asyncio.CancelledError] * 5
        await connection.rollback()
        made = await asyncio.gather(
            *(cron.enqueue(None, "note", {"n": n}, idempotency_key=f"other {n}") for n in range(30))
        )
        assert {one.is_duplicate for one in made} == {False}
        await until(lambda: value(db, WAITING) == 0, "nobody waits any more")
    # One of them may have won before its cancellation was noticed; then its job is there, once.
    keys = value(db, "SELECT count(*) FROM cronlock.idempotency_key")
    assert live(db) == keys
    assert keys in (30, 31)


def test_threads_enqueue_beside_each_other(cron: Cronlock, database_url: str, db: Db) -> None:
    made: list[Enqueued] = []

    def call() -> None:
        with psycopg.connect(database_url) as connection:
            for n in range(20):
                made.append(cron.enqueue_sync(connection, "note", {"n": n}, idempotency_key=f"k{n}"))
                connection.commit()

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.is_duplicate for one in made].count(False) == 20
    assert live(db) == 20
