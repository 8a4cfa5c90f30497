"""A worker: what it claims, how jobs end in it, and what it survives of their code and of the database."""

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from typing import Any, Literal

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from pydantic import BaseModel, field_validator
from sqlalchemy import text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from cronlock import Cronlock, Invalidation, Run, StatementRefused
from cronlock.migrate import migrate
from tests import Db, Make, until, value
from tests.observing import in_transaction, locks
from tests.proxy import Proxy
from tests.working import EFFECTS, all_ended, attempts, effects, live, put, status, working

pytestmark = pytest.mark.anyio
WRITE = "INSERT INTO effect (job_id, attempt, what) VALUES (%s, %s, %s)"


@pytest.fixture
def effect(db: Db) -> None:
    db.execute(EFFECTS)


def told(caplog: pytest.LogCaptureFixture, event: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if getattr(record, "event", "") == event]


def ended_jobs(db: Db) -> int:
    return int(value(db, "SELECT count(*) FROM cronlock.job_history"))


def commits(db: Db) -> int:
    """How many transactions of this database were committed, as its sessions have told."""
    return int(value(db, "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"))


def result(db: Db, job_id: int) -> Any:
    return json.loads(value(db, "SELECT result FROM cronlock.job_history WHERE id = %s", job_id))


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "thread"])
async def test_a_jobs_writes_and_its_end_are_one_commit_and_its_result_is_kept(
    make_cron: Make, db: Db, effect: None, is_async: bool
) -> None:
    db.execute("ALTER TABLE effect ADD COLUMN written_by xid8 DEFAULT pg_current_xact_id()")
    cron = make_cron()

    async def awaiting(run: Run, payload: dict[str, Any]) -> dict[str, Any]:
        await run.driver.execute(WRITE, (run.id, run.attempt, "done"))
        return {"is": payload["a"], "in": run.attempt}

    def plain(run: Run, payload: dict[str, Any]) -> dict[str, Any]:
        run.driver.execute(WRITE, (run.id, run.attempt, "done"))
        return {"is": payload["a"], "in": run.attempt}

    cron.task("work")(awaiting if is_async else plain)
    async with working(cron):
        job = await cron.enqueue(None, "work", {"a": "ü"})
        assert await all_ended(db) == {"completed": 1}
    assert effects(db, job.job_id) == [(1, "done")]
    assert result(db, job.job_id) == {"is": "ü", "in": 1}
    same = "SELECT e.written_by::xid = h.xmin FROM effect e JOIN cronlock.job_history h ON h.id = e.job_id"
    assert value(db, same) is True
    assert locks(db) == []
    assert in_transaction(db) == []
    assert value(db, "SELECT count(*) FROM cronlock.worker") == 0


async def test_a_result_that_is_too_large_or_cannot_be_written_is_marked_and_the_job_has_completed(
    make_cron: Make, db: Db
) -> None:
    cron = make_cron()
    results: list[Any] = ["x" * 1_000_000, object(), float("nan"), 10**5000, {"a\0": "\ud800"}, None]

    @cron.task("work", mode="guard")
    async def work(run: Run, payload: dict[str, int]) -> Any:
        return results[payload["n"]]

    async with working(cron):
        made = await cron.enqueue_many(None, "work", [{"n": n} for n in range(len(results))])
        assert await all_ended(db) == {"completed": len(results)}
    assert result(db, made[0].job_id)["cronlock"] == "truncated"
    assert result(db, made[1].job_id)["cronlock"] == "not serialisable"
    assert result(db, made[2].job_id) == "NaN"
    assert result(db, made[3].job_id)["cronlock"] == "not serialisable"
    assert result(db, made[4].job_id) == {"a\ufffd": "\ufffd"}
    assert db.execute("SELECT result FROM cronlock.job_history WHERE id = %s", (made[5].job_id,)).fetchone() == (None,)


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "thread"])
@pytest.mark.parametrize("how", ["driver", "connection", "session"])
async def test_an_sql_error_that_a_job_catches_fails_it_and_nothing_is_written(
    make_cron: Make, db: Db, effect: None, how: str, is_async: bool
) -> None:
    cron = make_cron()

    async def awaiting(run: Run) -> str:
        await run.driver.execute(WRITE, (run.id, run.attempt, "gone"))
        try:
            if how == "driver":
                await run.driver.execute("SELECT 1/0")
            else:
                await getattr(run, how).execute(text("SELECT 1/0"))
        except Exception:
            return "as if nothing had happened"
        raise AssertionError("it did not fail")

    def plain(run: Run) -> str:
        run.driver.execute(WRITE, (run.id, run.attempt, "gone"))
        try:
            if how == "driver":
                run.driver.execute("SELECT 1/0")
            else:
                getattr(run, how).execute(text("SELECT 1/0"))
        except Exception:
            return "as if nothing had happened"
        raise AssertionError("it did not fail")

    cron.task("work")(awaiting if is_async else plain)
    async with working(cron):
        job = await cron.enqueue(None, "work")
        assert await all_ended(db) == {"failed": 1}
    assert effects(db, job.job_id) == []
    message = value(db, "SELECT error_message FROM cronlock.job_history")
    assert "already aborted" in message
    assert "division by zero" in message
    assert attempts(db, job.job_id) == [(1, "failed", "TransactionEnded")]


async def test_an_orphan_that_only_the_commit_finds_fails_the_job_and_names_the_constraint(
    make_cron: Make, db: Db
) -> None:
    db.execute("CREATE TABLE parent (id int PRIMARY KEY)")
    db.execute("CREATE TABLE child (parent int CONSTRAINT child_has_parent REFERENCES parent DEFERRABLE"
               " INITIALLY DEFERRED)")  # fmt: skip
    cron = make_cron()

    @cron.task("work")
    async def work(run: Run) -> str:
        await run.driver.execute("INSERT INTO child VALUES (1)")
        return "done"

    async with working(cron):
        await cron.enqueue(None, "work")
        assert await all_ended(db) == {"failed": 1}
    assert "child_has_parent" in value(db, "SELECT error_message FROM cronlock.job_history")
    assert value(db, "SELECT count(*) FROM child") == 0


@pytest.mark.parametrize("script", ["COMMIT", "COMMIT; BEGIN", "ROLLBACK; BEGIN; SAVEPOINT cronlock_task"])
async def test_a_job_that_ends_its_transaction_by_raw_sql_is_failed_with_a_reason_that_says_so(
    make_cron: Make, db: Db, effect: None, script: str
) -> None:
    cron = make_cron()

    @cron.task("work")
    async def work(run: Run) -> None:
        cursor = psycopg.AsyncClientCursor(run.driver)
        await run.driver.execute(WRITE, (run.id, run.attempt, "before"))
        await cursor.execute(script)

    async with working(cron):
        job = await cron.enqueue(None, "work")
        assert await all_ended(db) == {"failed": 1}
    assert status(db, job.job_id) == ("failed", 1, "TransactionEnded")
    assert "ended its transaction by SQL" in value(db, "SELECT error_message FROM cronlock.job_history")


async def test_what_the_session_has_pending_is_flushed_at_the_end_and_a_failing_flush_fails_the_job(
    make_cron: Make, db: Db
) -> None:
    db.execute("CREATE TABLE thing (id int PRIMARY KEY)")
    cron = make_cron()

    class Base(DeclarativeBase):
        pass

    class Thing(Base):
        __tablename__ = "thing"
        id: Mapped[int] = mapped_column(primary_key=True)

    @cron.task("work")
    async def work(run: Run) -> None:
        run.session.add(Thing(id=1))

    async with working(cron, concurrency=1):
        first = await cron.enqueue(None, "work")
        second = await cron.enqueue(None, "work")
        assert await all_ended(db) == {"completed": 1, "failed": 1}
    assert status(db, first.job_id) == ("completed", 1, None)
    assert status(db, second.job_id) == ("failed", 1, "IntegrityError")
    assert value(db, "SELECT count(*) FROM thing") == 1


RAISED: dict[str, Any] = {
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "CancelledError": asyncio.CancelledError,
    "GeneratorExit": GeneratorExit,
    "ExceptionGroup": lambda: ExceptionGroup("several", [ValueError("one")]),
    "ValueError": lambda: ValueError("x\0\ud800"),
}


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "thread"])
async def test_whatever_a_job_raises_is_kept_by_its_type_and_the_worker_goes_on(
    make_cron: Make, db: Db, is_async: bool
) -> None:
    cron = make_cron()

    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    kinds = {**RAISED, "Unspeakable": Unspeakable}

    async def awaiting(run: Run, payload: dict[str, str]) -> None:
        raise kinds[payload["what"]]()

    def plain(run: Run, payload: dict[str, str]) -> None:
        raise kinds[payload["what"]]()

    cron.task("work", mode="guard")(awaiting if is_async else plain)

    @cron.task("good", mode="guard")
    async def good(run: Run) -> None:
        pass

    async with working(cron):
        made = await cron.enqueue_many(None, "work", [{"what": what} for what in kinds])
        assert await all_ended(db) == {"failed": len(kinds)}
        last = await cron.enqueue(None, "good")
        await until(lambda: status(db, last.job_id) == ("completed", 1, None), "the worker goes on")
    found = [status(db, job.job_id) for job in made]
    assert found == [("failed", 1, what) for what in kinds]


async def test_a_payload_that_a_model_refuses_or_chokes_on_fails_its_job_alone(make_cron: Make, db: Db) -> None:
    cron = make_cron()

    class Order(BaseModel):
        number: int

        @field_validator("number")
        @classmethod
        def check(cls, number: int) -> int:
            if number == 13:
                raise KeyError("no such order")  # which pydantic passes on
            return number

    @cron.task("work", mode="guard")
    async def work(run: Run, payload: Order) -> int:
        return payload.number

    payloads = ['{"number": 1}', '{"number": "x"}', '{"number": 13}', '{"number": 2}']
    made = [put(db, "work", payload)[0] for payload in payloads]
    async with working(cron):
        assert await all_ended(db) == {"completed": 2, "failed": 2}
    assert [status(db, job) for job in made] == [
        ("completed", 1, None), ("failed", 1, "PayloadInvalid"), ("failed", 1, "KeyError"), ("completed", 1, None),
    ]  # fmt: skip


async def test_jobs_go_by_priority_and_then_by_age_and_only_those_of_registered_tasks(make_cron: Make, db: Db) -> None:
    cron = make_cron()
    order: list[str] = []

    @cron.task("work", mode="guard")
    async def work(run: Run, payload: dict[str, str]) -> None:
        order.append(payload["name"])

    unknown = put(db, "of-another-version")
    async with cron:
        for name, priority in (("d", 0), ("e", 0), ("b", 5), ("f", -3), ("c", 5), ("a", 9)):
            await cron.enqueue(None, "work", {"name": name}, priority=priority)
    async with working(cron, concurrency=1):
        await until(lambda: live(db) == 1, "all others have ended")
    assert order == ["a", "b", "c", "d", "e", "f"]
    assert status(db, unknown[0]) == ("queued", 0, None)


async def test_queues_are_served_in_their_order_and_others_are_left_alone(make_cron: Make, db: Db) -> None:
    cron = make_cron()
    order: list[str] = []

    @cron.task("work", mode="guard")
    async def work(run: Run, payload: dict[str, str]) -> None:
        order.append(payload["name"])

    async with cron:
        for queue in ("third", "second", "first"):
            await cron.enqueue(None, "work", {"name": queue}, queue=queue)
    async with working(cron, queues=["first", "second"], concurrency=1):
        await until(lambda: live(db) == 1, "those of two queues have ended")
        await asyncio.sleep(0.3)
    assert order == ["first", "second"]


async def test_a_delayed_job_starts_at_its_time_and_not_before(make_cron: Make, db: Db) -> None:
    cron = make_cron()

    @cron.task("work", mode="guard")
    async def work(run: Run) -> None:
        pass

    async with working(cron):
        job = await cron.enqueue(None, "work", delay=1.2)
        await asyncio.sleep(0.7)
        assert status(db, job.job_id) == ("queued", 0, None)
        assert await all_ended(db, 3) == {"completed": 1}
    late = value(db, "SELECT extract(epoch FROM started_at - run_at)::float8 FROM cronlock.job_history")
    assert 0 <= late < 1


async def test_an_idle_worker_starts_a_job_at_once(make_cron: Make, db: Db) -> None:
    cron = make_cron()

    @cron.task("work", mode="guard")
    async def work(run: Run) -> None:
        pass

    async with working(cron):
        await until(lambda: value(db, "SELECT count(*) FROM cronlock.worker WHERE is_idle") == 1, "it says it is idle")
        await asyncio.sleep(0.1)
        for _ in range(10):
            job = await cron.enqueue(None, "work")
            await until(lambda: status(db, job.job_id) == ("completed", 1, None), "it ends")  # noqa: B023
            await until(lambda: value(db, "SELECT is_idle FROM cronlock.worker"), "it is idle again")
    query = "SELECT extract(epoch FROM started_at - enqueued_at)::float8 FROM cronlock.job_history ORDER BY 1"
    waits = [wait for (wait,) in db.execute(query).fetchall()]
    assert waits[5] < 0.1, waits  # a poll alone would be 0.5 s


async def test_a_notify_that_is_lost_costs_a_second(make_cron: Make, db: Db) -> None:
    cron = make_cron()

    @cron.task("work", mode="guard")
    async def work(run: Run) -> None:
        pass

    listening = "FROM pg_stat_activity WHERE datname = current_database() AND starts_with(query, 'LISTEN')"
    async with working(cron):
        await until(lambda: value(db, "SELECT count(*) FROM cronlock.worker WHERE is_idle") == 1, "it is idle")
        await until(lambda: value(db, f"SELECT count(*) {listening}"), "it listens")
        assert value(db, f"SELECT pg_terminate_backend(pid) {listening}") is True
        started = time.monotonic()
        await cron.enqueue(None, "work")
        assert await all_ended(db) == {"completed": 1}
        assert time.monotonic() - started < 2
        await until(lambda: value(db, f"SELECT count(*) {listening}"), "it listens again")


# -- lost answers, refused ends, rows that somebody has locked -------------------------------------------------


@pytest.fixture
async def proxied(make_cron: Make, database_url: str) -> AsyncIterator[tuple[Cronlock, Proxy]]:
    """A Cronlock whose connections all go through a proxy."""
    parts = conninfo_to_dict(database_url)
    async with Proxy(str(parts["host"]), int(parts["port"] or 0)) as proxy:
        yield make_cron(database_url=make_conninfo(database_url, host="127.0.0.1", port=proxy.listening)), proxy


LOST = {
    "a plain end": (b"EXECUTE cronlock_done(", ("completed", 1, None)),
    "an end with a result": (b"EXECUTE cronlock_end(", ("completed", 1, None)),
    "an end with an error": (b"EXECUTE cronlock_end(", ("failed", 1, "ValueError")),
    "an end of a transaction": (b"complete_job", ("completed", 1, None)),
}


@pytest.mark.parametrize("what", LOST)
@pytest.mark.parametrize("is_forwarded", [True, False], ids=["written", "not written"])
async def test_an_end_whose_answer_is_lost_is_written_once_and_not_taken_for_a_lost_lease(
    proxied: tuple[Cronlock, Proxy], db: Db, effect: None, caplog: pytest.LogCaptureFixture, what: str,
    is_forwarded: bool,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO)
    cron, proxy = proxied
    runs = []

    async def guarded(run: Run) -> Any:
        runs.append(run.attempt)
        if what == "an end with an error":
            raise ValueError("no")
        return 1 if what == "an end with a result" else None

    async def work(run: Run) -> None:
        runs.append(run.attempt)
        await run.driver.execute(WRITE, (run.id, run.attempt, "done"))

    is_open = what == "an end of a transaction"
    if is_open:
        cron.task("work", retry_delay="10ms")(work)
    else:
        cron.task("work", mode="guard")(guarded)
    needle, end = LOST[what]
    async with working(cron):
        cut = proxy.cut_at(needle, is_forwarded=is_forwarded)
        job = await cron.enqueue(None, "work")
        await asyncio.wait_for(cut, 10)
        await all_ended(db)
        word = end[0]
        await until(lambda: told(caplog, f"job.{word}"), "it is said how the job ended", 5)
    tries = 2 if is_open and not is_forwarded else 1
    assert status(db, job.job_id) == (end[0], tries, end[2])
    assert len(runs) == tries
    assert len(told(caplog, f"job.{word}")) == 1
    assert told(caplog, "job.lease_lost") == []
    if is_open:
        assert effects(db, job.job_id) == [(tries, "done")]


@pytest.mark.parametrize("is_forwarded", [True, False], ids=["claimed", "not claimed"])
async def test_a_claim_whose_answer_is_lost_is_given_back_and_costs_no_attempt(
    proxied: tuple[Cronlock, Proxy], db: Db, is_forwarded: bool
) -> None:
    cron, proxy = proxied

    @cron.task("work", mode="guard")
    async def work(run: Run) -> None:
        pass

    async with working(cron):
        put(db, "work", jobs=20)
        await asyncio.wait_for(proxy.cut_at(b"EXECUTE cronlock_claim", is_forwarded=is_forwarded), 10)
        assert await all_ended(db, 15) == {"completed": 20}
    assert value(db, "SELECT max(attempts) FROM cronlock.job_history") == 1


async def test_an_end_that_the_database_refuses_is_written_without_its_words_and_stops_nobody(
    server_url: str, template: str, make_cron: Make, caplog: pytest.LogCaptureFixture
) -> None:
    # A database whose encoding has no room for the error's text.
    name = f"latin_{os.getpid()}"
    with psycopg.connect(server_url, autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C'")
        try:
            url = make_conninfo(server_url, dbname=name)
            migrate(url, "cronlock")
            cron = make_cron(database_url=url)

            @cron.target("prices")
            async def prices(invalidation: Invalidation) -> None:
                pass

            @cron.task("work", mode="guard")
            async def work(run: Run, payload: dict[str, int]) -> str:
                if payload["n"] == 3:
                    raise ValueError("it costs 3 €")
                if payload["n"] == 5:
                    run.invalidate("price:€")
                return "€" if payload["n"] == 4 else "fine"

            with psycopg.connect(url, autocommit=True) as db:
                made = [put(db, "work", f'{{"n": {n}}}')[0] for n in range(8)]
                async with working(cron):
                    assert await all_ended(db) == {"completed": 6, "failed": 2}
                assert status(db, made[3]) == ("failed", 1, "Unrecordable")
                assert result(db, made[4]) == "€"
                assert status(db, made[5]) == ("failed", 1, "Unrecordable"), "nobody would be told of its words"
            assert len(told(caplog, "job.refused")) == 2
        finally:
            server.execute(f"DROP DATABASE {name} WITH (FORCE)")


async def test_a_row_that_somebody_keeps_locked_holds_up_no_other_job(
    make_cron: Make, database_url: str, db: Db
) -> None:
    cron = make_cron()
    goes = asyncio.Event()

    @cron.task("work", mode="guard")
    async def work(run: Run, payload: dict[str, Any]) -> str:
        if payload:
            await goes.wait()
        return "fine"

    async with working(cron):
        (kept,) = put(db, "work", '{"waits": 1}')
        await until(lambda: value(db, "SELECT started_at IS NOT NULL FROM cronlock.job WHERE id = %s", kept), "it runs")
        with psycopg.connect(database_url) as other:
            other.execute("SELECT FROM cronlock.job WHERE id = %s FOR UPDATE", (kept,))
            goes.set()
            await asyncio.sleep(0.1)
            put(db, "work", jobs=30)
            await until(lambda: live(db) == 1, "all others have ended", 12)
            before = commits(db)
            await asyncio.sleep(3)
            assert commits(db) - before < 100, "it does not ask again and again meanwhile"
        assert await all_ended(db, 12) == {"completed": 31}


async def test_a_job_waits_for_a_connection_without_using_up_an_attempt(make_cron: Make, db: Db, effect: None) -> None:
    cron = make_cron(pool_size=1)

    @cron.task("work", acquire_timeout="100ms", timeout="3s")
    async def work(run: Run) -> None:
        await run.driver.execute(WRITE, (run.id, run.attempt, "done"))
        await asyncio.sleep(0.6)

    async with cron:
        process = await cron.open()
        await process.readiness.require()
        seats = [await process.database.acquire(True, 1)]
        async with working(cron, concurrency=1):
            (job,) = put(db, "work")
            await asyncio.sleep(1.5)
            assert status(db, job) == ("processing", 1, None)
            await seats[0].give_back()
            await until(lambda: status(db, job) == ("completed", 1, None), "it runs when there is one")
    assert attempts(db, job) == []


async def test_ended_jobs_that_an_open_transaction_keeps_from_being_removed_slow_no_claim(
    make_cron: Make, database_url: str, db: Db
) -> None:
    cron = make_cron()

    @cron.task("work", mode="guard")
    async def work(run: Run) -> None:
        pass

    with psycopg.connect(database_url) as other:
        other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        other.execute("SELECT FROM cronlock.job")
        put(db, "work", jobs=1_000_000)
        db.execute("DELETE FROM cronlock.job")
        # Of a table that it takes for empty PostgreSQL believes that a walk through all of its index is as good.
        db.execute("INSERT INTO cronlock.job (task, queue, payload, trigger, max_attempts)"
                   " SELECT 'work', 'another', '{}', 'manual', 5 FROM generate_series(1, 2000)")  # fmt: skip
        db.execute("VACUUM ANALYZE cronlock.job")
        async with working(cron):
            await cron.enqueue(None, "work")
            await until(lambda: ended_jobs(db) == 1, "the first one has ended")
            began = time.monotonic()
            for n in range(50):
                await cron.enqueue(None, "work")
                await until(lambda: ended_jobs(db) == 2 + n, "it has ended")  # noqa: B023
            assert time.monotonic() - began < 6, "each claim walked through all of them"
            db.execute("INSERT INTO cronlock.job (id, task, queue, payload, trigger, max_attempts)"
                       " VALUES (1, 'work', 'default', '{}', 'manual', 5)")  # fmt: skip
            await until(lambda: ended_jobs(db) == 52, "what is at the front is found, too", 70)


@pytest.mark.parametrize("mode", ["transaction", "guard"])
async def test_jobs_for_which_there_is_no_thread_now_are_tried_again_and_hold_up_no_other(
    make_cron: Make, db: Db, monkeypatch: pytest.MonkeyPatch, mode: Literal["transaction", "guard"]
) -> None:
    cron, start = make_cron(), threading.Thread.start
    refused: list[threading.Thread] = []

    @cron.task("work", mode=mode, retry_delay="50ms")
    def work(run: Run) -> None:
        pass

    def no_room(thread: threading.Thread) -> None:
        if thread.name == "cronlock-work" and len(refused) < 3:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", no_room)
    put(db, "work", jobs=40)
    async with working(cron, concurrency=20):
        assert await all_ended(db) == {"completed": 40}
    assert value(db, "SELECT count(*) FROM cronlock.job_attempt WHERE error_type = 'Unavailable'") == 3


# -- timeouts, cancels, drains -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["await", "statement", "statement in a thread", "guard"])
async def test_a_job_over_its_timeout_is_stopped_undone_and_tried_again(
    make_cron: Make, db: Db, effect: None, how: str
) -> None:
    cron = make_cron()

    async def awaiting(run: Run) -> None:
        if how != "guard":
            await run.driver.execute(WRITE, (run.id, run.attempt, "gone"))
        await (run.driver.execute("SELECT pg_sleep(30)") if how == "statement" else asyncio.Event().wait())

    def plain(run: Run) -> None:
        run.driver.execute(WRITE, (run.id, run.attempt, "gone"))
        run.driver.execute("SELECT pg_sleep(30)")

    mode = "guard" if how == "guard" else "transaction"
    options: dict[str, Any] = {"mode": mode, "timeout": "800ms", "max_attempts": 2, "retry_delay": "10ms"}
    cron.task("work", **options)(plain if "thread" in how else awaiting)
    async with working(cron):
        job = await cron.enqueue(None, "work")
        started = time.monotonic()
        assert await all_ended(db) == {"failed": 1}
        assert time.monotonic() - started < 6
        assert live(db) == 0
    assert status(db, job.job_id) == ("failed", 2, "TimeoutError")
    assert attempts(db, job.job_id) == [(1, "timed_out", "TimeoutError"), (2, "timed_out", "TimeoutError")]
    assert effects(db, job.job_id) == []
    assert in_transaction(db) == []


async def test_a_thread_that_goes_on_keeps_its_lease_until_it_returns_and_writes_nothing_more(
    make_cron: Make, db: Db, effect: None
) -> None:
    # Case Y08: another worker is there to take it.
    cron, other = make_cron(lease="2s"), make_cron(lease="2s")
    refused: list[BaseException] = []

    def work(run: Run) -> None:
        if run.attempt > 1:
            return
        time.sleep(5)
        try:
            run.driver.execute(WRITE, (run.id, run.attempt, "late"))
        except BaseException as error:
            refused.append(error)
            raise

    for each in (cron, other):
        each.task("work", timeout="1s", retry_delay="10ms")(work)
    async with working(cron, concurrency=1), working(other, concurrency=1):
        job = await cron.enqueue(None, "work")
        await asyncio.sleep(4)
        assert status(db, job.job_id) == ("processing", 1, None)
        assert value(db, "SELECT lease_until > clock_timestamp() FROM cronlock.job") is True
        assert await all_ended(db) == {"completed": 1}
    assert status(db, job.job_id) == ("completed", 2, None)
    assert attempts(db, job.job_id) == [(1, "timed_out", "TimeoutError")]
    assert "timeout" in str(refused[0])
    assert effects(db, job.job_id) == []


@pytest.mark.parametrize("mode", ["transaction", "guard"])
async def test_an_operator_cancels_a_job_that_runs_and_it_is_not_tried_again(
    make_cron: Make, db: Db, effect: None, mode: str
) -> None:
    cron = make_cron()

    @cron.task("work", mode=mode)
    async def work(run: Run) -> None:
        if mode == "transaction":
            await run.driver.execute(WRITE, (run.id, run.attempt, "gone"))
        await asyncio.Event().wait()

    async with working(cron):
        job = await cron.enqueue(None, "work")
        await until(lambda: status(db, job.job_id) == ("processing", 1, None), "it runs")
        db.execute("UPDATE cronlock.job SET cancel_requested_at = now(), cancel_requested_by = 'ana'")
        started = time.monotonic()
        assert await all_ended(db) == {"cancelled": 1}
        assert time.monotonic() - started < 3
    assert attempts(db, job.job_id) == [(1, "cancelled", "CancelAsked")]
    assert effects(db, job.job_id) == []


async def test_cancels_that_race_with_the_end_give_one_end_each(make_cron: Make, db: Db) -> None:
    # Case Q19: 200 of them, at any moment; what ended before it was asked has completed, and nothing ends twice.
    cron = make_cron()

    @cron.task("work", mode="guard")
    async def work(run: Run) -> None:
        await asyncio.sleep(0.02)

    async with working(cron):
        made = await cron.enqueue_many(None, "work", [{} for _ in range(200)])
        for job in made:
            db.execute(
                "UPDATE cronlock.job SET cancel_requested_at = now(), cancel_requested_by = 'ana' WHERE id = %s",
                (job.job_id,),
            )
            await asyncio.sleep(0.003)
        found = await all_ended(db)
    assert sum(found.values()) == 200
    assert set(found) <= {"completed", "cancelled"}
    assert value(db, "SELECT count(DISTINCT id) FROM cronlock.job_history") == 200


async def test_a_job_that_is_given_back_though_it_was_to_be_cancelled_is_not_run_again(make_cron: Make, db: Db) -> None:
    cron = make_cron()
    begun = asyncio.Event()

    @cron.task("work", mode="guard")
    async def work(run: Run) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with working(cron):
        job = await cron.enqueue(None, "work")
        await begun.wait()
        db.execute("UPDATE cronlock.job SET cancel_requested_at = now()")
    assert status(db, job.job_id) == ("cancelled", 1, "CancelAsked")


async def test_a_drain_gives_back_what_runs_but_what_has_completed_stays_completed(
    make_cron: Make, db: Db, effect: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    cron = make_cron()

    @cron.task("long")
    async def long(run: Run) -> None:
        await run.driver.execute(WRITE, (run.id, run.attempt, "gone"))
        await asyncio.Event().wait()

    @cron.task("stubborn", mode="guard")
    async def stubborn(run: Run) -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "done all the same"
        return ""

    async with working(cron):
        jobs = [await cron.enqueue(None, name) for name in ("long", "stubborn")]
        for job in jobs:
            await until(lambda: status(db, job.job_id) == ("processing", 1, None), "it runs")  # noqa: B023
        await asyncio.sleep(0.2)
    assert status(db, jobs[0].job_id) == ("queued", 0, None)
    assert status(db, jobs[1].job_id) == ("completed", 1, None)
    assert effects(db, jobs[0].job_id) == []
    assert [vars(said)["jobId"] for said in told(caplog, "job.given_back")] == [jobs[0].job_id]
    assert value(db, "SELECT count(*) FROM cronlock.worker") == 0


async def test_a_lease_that_cannot_be_renewed_stops_the_code_and_the_job_goes_to_somebody_else(
    proxied: tuple[Cronlock, Proxy], make_cron: Make, db: Db, effect: None, caplog: pytest.LogCaptureFixture
) -> None:
    cron, proxy = proxied
    cron.settings = cron.settings.model_copy(update={"lease": timedelta(seconds=2)})
    other = make_cron(lease="2s", presence_grace="2s")
    begun, stopped = threading.Event(), []

    async def work(run: Run) -> None:
        if run.attempt > 1:
            return
        begun.set()
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            stopped.append(time.monotonic())
            with pytest.raises(StatementRefused):
                run.check()
            raise

    for each in (cron, other):
        each.task("work", mode="guard")(work)
    async with working(cron), AsyncExitStack() as stack:
        (job,) = put(db, "work")
        await until(begun.is_set, "it runs")
        proxy.stall()
        stalled = time.monotonic()
        await stack.enter_async_context(working(other))
        await until(lambda: status(db, job) == ("completed", 2, None), "another one has it", 10)
        assert stopped, "the code was stopped before another worker began"
        assert stopped[0] - stalled < 3
        proxy.flow()
        await until(lambda: told(caplog, "job.lease_lost"), "the loser says so", 10)
        (again,) = put(db, "work")
        await until(lambda: status(db, again) is not None and (status(db, again) or ("",))[0] != "queued", "and works")


@pytest.mark.parametrize("mode", ["guard", "transaction"])
async def test_a_row_that_somebody_keeps_locked_is_not_believed_to_be_renewed_and_its_code_is_stopped_in_time(
    make_cron: Make, database_url: str, db: Db, effect: None, mode: Literal["guard", "transaction"]
) -> None:
    """The lease of the other job of its claim is renewed; and nobody takes the locked one before it can be written."""
    cron = make_cron(lease="2s", presence_grace="2s")
    stopped: list[float] = []

    @cron.task("work", mode=mode)
    async def work(run: Run, payload: dict[str, float]) -> None:
        if mode == "transaction":
            await run.driver.execute(WRITE, (run.id, run.attempt, "done"))
        try:
            await asyncio.sleep(payload["seconds"] if run.attempt == 1 else 0)
        except asyncio.CancelledError:
            stopped.append(time.monotonic())
            raise

    left = "SELECT extract(epoch FROM lease_until - clock_timestamp())::float8 FROM cronlock.job WHERE id = %s"
    async with working(cron) as crew:
        kept, goes = await cron.enqueue_many(None, "work", [{"seconds": 30}, {"seconds": 6}])
        await until(lambda: len([one for one in crew.worker.running.values() if one.code]) == 2, "both run")
        running = crew.worker.running
        assert running[kept.job_id].token == running[goes.job_id].token, "both are of one claim"
        await asyncio.sleep(0.3)
        with psycopg.connect(database_url) as other:
            other.execute("SELECT FROM cronlock.job WHERE id = %s FOR UPDATE", (kept.job_id,))
            locked, is_held = time.monotonic(), value(db, left, kept.job_id)
            while time.monotonic() < locked + 4:
                for one in list(running.values()):
                    believed = one.lease.until - time.monotonic()
                    assert believed <= value(db, left, one.run_id) + 0.01
                await asyncio.sleep(0.05)
            assert len(stopped) == 1
            assert stopped[0] - locked < is_held, "it was stopped before its lease had run out"
            assert status(db, kept.job_id) == ("processing", 1, None), "and is nobody else's while it is locked"
        assert await all_ended(db, 15) == {"completed": 2}
    assert len(stopped) == 1
    assert status(db, kept.job_id) == ("completed", 2, None)
    assert status(db, goes.job_id) == ("completed", 1, None)
    assert len(effects(db, kept.job_id)) == (mode == "transaction")


async def test_a_task_that_gives_its_first_statement_up_and_goes_on_loses_nothing(
    make_cron: Make, db: Db, effect: None
) -> None:
    """Its transaction was being begun at that moment."""
    cron = make_cron()

    @cron.task("work")
    async def impatient(run: Run) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(0):
                await run.driver.execute("SELECT 1")
        await run.driver.execute("INSERT INTO effect VALUES (%s, %s, 'after')", (run.id, run.attempt))

    async with working(cron):
        job = await cron.enqueue(None, "work")
        await until(lambda: value(db, "SELECT count(*) FROM cronlock.job_history") == 1, "it ends")
    assert value(db, "SELECT status FROM cronlock.job_history WHERE id = %s", job.job_id) == "completed"
    assert value(db, "SELECT count(*) FROM effect WHERE job_id = %s", job.job_id) == 1


async def test_a_job_whose_transaction_could_not_be_begun_has_not_completed_whatever_its_code_makes_of_that(
    proxied: tuple[Cronlock, Proxy], db: Db, effect: None
) -> None:
    cron, proxy = proxied

    @cron.task("work", retry_delay="10ms")
    async def work(run: Run) -> str:
        try:
            await run.driver.execute(WRITE, (run.id, run.attempt, "done"))
        except psycopg.Error:
            return "as if nothing had happened"
        return "done"

    async with working(cron):
        cut = proxy.cut_at(b"backend_pid = pg_catalog.pg_backend_pid()", is_forwarded=False)
        job = await cron.enqueue(None, "work")
        await asyncio.wait_for(cut, 10)
        assert await all_ended(db) == {"completed": 1}
    assert status(db, job.job_id) == ("completed", 2, None)
    assert effects(db, job.job_id) == [(2, "done")]
