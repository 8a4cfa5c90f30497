"""`min_interval`: no run too soon after the last one that completed, by the database's clock and under the lock."""

import asyncio
import re
from collections import Counter
from datetime import timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from cronlock import RegistrationError, Run, runs
from cronlock.recording import HEAD
from tests import Db, Make, held, rows, serving, until, value

pytestmark = pytest.mark.anyio


async def nothing(run: Run) -> None: ...


@pytest.mark.parametrize("interval", ["", "soon", 0, -1, "0s", "29d", timedelta(days=29), [], True])
def test_an_interval_that_is_none_or_longer_than_completed_runs_are_kept_is_refused(
    make_cron: Make, interval: Any
) -> None:
    with pytest.raises(RegistrationError, match="'nightly': min_interval: "):
        make_cron().task("nightly", min_interval=interval)(nothing)


@pytest.mark.parametrize("interval", ["1ms", "90s", "28d", 0.5, timedelta(minutes=5)])
async def test_an_interval_is_read_by_the_server_as_it_was_meant(make_cron: Make, db: Db, interval: Any) -> None:
    cron = make_cron()
    cron.task("sync", min_interval=interval)(nothing)
    async with cron:
        await cron.run("sync")
    span = cron.tasks.get("sync").min_interval
    assert value(db, "SELECT min_interval FROM cronlock.run") == span


async def test_a_call_too_soon_after_the_last_completed_run_is_skipped(make_cron: Make, db: Db) -> None:
    crons = [make_cron(), make_cron()]
    for cron in crons:
        cron.task("sync", min_interval="100s")(nothing)
    async with serving(crons[0].app()) as here, serving(crons[1].app()) as there:
        first = (await here.get("/cron/sync")).json()
        assert first["status"] == "completed"
        for client in (here, there):
            answer = await client.get("/cron/sync")
            assert answer.status_code == 200
            assert "retry-after" not in answer.headers
            answer = await client.get("/cron/sync?on_skip=409")
            body = answer.json()
            assert (answer.status_code, body["reason"], body["holder"]) == (409, "too_soon", {"runId": first["runId"]})
            assert 95 <= int(answer.headers["retry-after"]) <= 100
        db.execute("UPDATE cronlock.run SET finished_at = finished_at - '98.5 s'::interval WHERE status = 'completed'")
        answer = await there.get("/cron/sync?on_skip=503")
        assert (answer.status_code, answer.headers["retry-after"]) in ((503, "1"), (503, "2"))
        db.execute("UPDATE cronlock.run SET finished_at = finished_at - '2 s'::interval WHERE status = 'completed'")
        assert (await there.get("/cron/sync")).json()["status"] == "completed"
        assert (await here.get("/cron/sync")).json()["reason"] == "too_soon"
    told = db.execute("SELECT DISTINCT reason, blocked_by FROM cronlock.run WHERE status = 'skipped'").fetchall()
    assert (("too_soon", first["runId"])) in told


async def test_it_is_counted_from_the_end_of_a_run_and_not_from_its_start(make_cron: Make, db: Db) -> None:
    cron = make_cron()
    cron.task("sync", min_interval="60s")(nothing)
    async with cron:
        await cron.run("sync")
        db.execute("UPDATE cronlock.run SET started_at = started_at - '1 h'::interval")
        assert (await cron.run("sync")).reason == "too_soon"


async def test_it_is_not_counted_from_runs_that_did_not_complete_nor_from_skips(
    make_cron: Make, db: Db, database_url: str
) -> None:
    cron = make_cron()
    failing = True

    async def sync(run: Run) -> None:
        if failing:
            raise ValueError("no")

    cron.task("sync", min_interval="60s")(sync)
    async with cron:
        for _ in range(2):
            assert (await cron.run("sync")).status == "failed"
        async with held(database_url, "sync"):
            assert (await cron.run("sync")).reason == "already_running"
        failing = False
        assert (await cron.run("sync")).status == "completed"
        db.execute("UPDATE cronlock.run SET finished_at = finished_at - '1 h'::interval WHERE status = 'completed'")
        failing = True
        assert (await cron.run("sync")).status == "failed"
        assert (await cron.run("sync")).status == "failed"


async def test_each_task_and_each_key_has_its_own(make_cron: Make, db: Db) -> None:
    cron = make_cron()
    cron.task("sync", min_interval="60s", key="{tenant}")(nothing)
    cron.task("other", min_interval="60s", lock="shared")(nothing)
    cron.task("another", min_interval="60s", lock="shared")(nothing)
    async with cron:
        calls: list[tuple[str, dict[str, str]]] = [("sync", {"tenant": "a"}), ("sync", {"tenant": "b"})]
        calls += [("other", {}), ("another", {})]
        assert {(await cron.run(*call)).status for call in calls} == {"completed"}
        assert {(await cron.run(*call)).reason for call in calls} == {"too_soon"}


async def test_a_clock_that_is_wrong_changes_nothing(make_cron: Make, db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the process's clock nor its zone, nor that of its session."""
    import time

    real = time.time
    for skew in (-86400, 86400):
        monkeypatch.setattr(time, "time", lambda skew=skew: real() + skew)
        for zone in ("Asia/Kolkata", "America/Los_Angeles"):
            url = f"{make_cron().settings.database_url}?options=-c%20timezone%3D{zone}"
            cron = make_cron(database_url=url)
            cron.task("sync", min_interval="60s")(nothing)
            async with cron:
                statuses = [(await cron.run("sync")).reason for _ in range(2)]
            assert statuses == [None, "too_soon"]
            db.execute(
                "UPDATE cronlock.run SET finished_at = finished_at - '61 s'::interval WHERE finished_at IS NOT NULL"
            )


async def test_paused_wins_and_a_duplicate_is_said_before_too_soon(make_cron: Make, db: Db) -> None:
    cron = make_cron()
    cron.task("sync", min_interval="60s")(nothing)
    async with cron:
        await cron.run("sync", idempotency_key="one")
        assert (await cron.run("sync", idempotency_key="one")).reason == "duplicate"
        assert (await cron.run("sync", idempotency_key="two")).reason == "too_soon"
        db.execute("UPDATE cronlock.task SET paused_at = now()")
        assert (await cron.run("sync", idempotency_key="one")).reason == "paused"
        assert (await cron.run("sync")).reason == "paused"


async def test_what_runs_is_said_while_it_runs(make_cron: Make, db: Db) -> None:
    crons = [make_cron(), make_cron()]
    running, go = asyncio.Event(), asyncio.Event()

    async def sync(run: Run) -> None:
        running.set()
        await go.wait()

    for cron in crons:
        cron.task("sync", min_interval="60s")(sync)
    async with crons[0], crons[1]:
        first = asyncio.create_task(crons[0].run("sync"))
        await running.wait()
        assert [(await cron.run("sync")).reason for cron in crons] == ["already_running"] * 2
        go.set()
        await first
        assert [(await cron.run("sync")).reason for cron in crons] == ["too_soon"] * 2


async def test_of_many_callers_at_the_moment_it_ends_one_runs(make_cron: Make, db: Db) -> None:
    """On three servers, each time: what was asked before the lock is asked again under it."""
    crons = [make_cron(pool_size=4) for _ in range(3)]
    for cron in crons:
        cron.task("sync", min_interval="150ms")(nothing)
    outcomes: list[Any] = []

    async def caller(number: int) -> None:
        while sum(outcome.status == "completed" for outcome in outcomes) < 5:
            outcomes.append(await crons[number % 3].run("sync"))

    async with crons[0], crons[1], crons[2]:
        await asyncio.wait_for(asyncio.gather(*(caller(number) for number in range(12))), 30)
    statuses = Counter(outcome.reason or outcome.status for outcome in outcomes)
    assert statuses.keys() <= {"completed", "too_soon", "already_running"}
    assert statuses["completed"] >= 5
    between = """SELECT min(started_at - before) FROM (SELECT started_at, lag(finished_at) OVER (ORDER BY id) AS before
        FROM cronlock.run WHERE status = 'completed') r"""
    assert value(db, between) > timedelta(milliseconds=150)


async def test_it_is_checked_under_the_lock(make_cron: Make, db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run completes between the question and the lock."""
    crons = [make_cron(), make_cron()]
    ran: list[int] = []
    for cron in crons:
        cron.task("sync", min_interval="60s")(lambda run: ran.append(run.id))
    async with crons[0], crons[1]:
        for cron in crons:
            await (await cron.open()).readiness.require()
        attempts = (await crons[1].open()).runner.attempts
        asked, go = asyncio.Event(), asyncio.Event()
        real = attempts.skips.ask

        async def ask(*arguments: Any) -> Any:
            answer = await real(*arguments)
            asked.set()
            await go.wait()
            return answer

        monkeypatch.setattr(attempts.skips, "ask", ask)
        second = asyncio.create_task(crons[1].run("sync"))
        await asked.wait()
        first = await crons[0].run("sync")
        go.set()
        outcome = await second
    assert first.status == "completed"
    assert (outcome.reason, outcome.holder and outcome.holder.run_id) == ("too_soon", first.run_id)
    assert outcome.retry_after is not None
    assert 55 <= outcome.retry_after <= 60
    assert len(ran) == 1


@pytest.mark.parametrize("kind", [runs.BEGIN_CHECKED, runs.SKIP_CHECKED], ids=["begin", "skip"])
async def test_a_million_skips_in_between_are_passed_by(db: Db, kind: str) -> None:
    """A quarter of one, in fact; the plan is the one that a session keeps, made when the tables were empty."""
    statements = runs.Statements("cronlock", runs.Instance(uuid4(), "host", 1, None))
    ask(db, statements.prepare())
    insert = """INSERT INTO cronlock.run (nonce, task, status, reason, trigger, finished_at, instance, host, pid,
            lock_key, lock_classid, lock_objid, occurrence)
        SELECT gen_random_uuid(), 'sync', 'skipped', 'too_soon', 'http', now(), gen_random_uuid(), 'h', 1, 1, 0, 1,
               'one'
          FROM generate_series(1, 250000)"""
    completed = insert.replace("'skipped', 'too_soon'", "'completed', NULL").replace("250000", "1")
    db.execute(completed)
    db.execute("ALTER TABLE cronlock.run DISABLE TRIGGER USER")
    db.execute(insert)
    row = {"nonce": str(uuid4()), "task": "sync", "lock_name": "sync", "lock_key": 1, "slots": [1], "backend_pid": 1,
           "trigger": "http", "occurrence": "one", "min_interval": "60 seconds"}  # fmt: skip
    ask(db, HEAD + b"SET LOCAL plan_cache_mode = force_generic_plan")
    plan = "\n".join(line for (line,) in ask(db, b"EXPLAIN (ANALYZE, TIMING OFF) " + statements.execute(kind, [row])))
    ask(db, b"ROLLBACK")
    for index in ("run_completed_idx", "run_occurrence_"):
        assert index in plan, plan
    assert not re.search("Seq Scan on run", plan), plan
    for scanned in re.findall(r" on run [ce] .*actual.*rows=(\d+)", plan):
        assert int(scanned) <= 2, plan
    took = re.search(r"Execution Time: ([0-9.]+) ms", plan)
    assert took is not None
    assert float(took[1]) < 200, plan


def ask(db: Db, message: bytes) -> list[tuple[Any, ...]]:
    """The rows of the last statement of a message."""
    cursor = psycopg.ClientCursor(db).execute(message)
    cursor.set_result(-1)
    return cursor.fetchall() if cursor.description else []


async def test_the_last_run_may_be_deleted_in_between(make_cron: Make, db: Db) -> None:
    cron = make_cron()
    cron.task("sync", min_interval="60s")(nothing)
    async with cron:
        await cron.run("sync")
        assert (await cron.run("sync")).reason == "too_soon"
        db.execute("DELETE FROM cronlock.run")
        assert (await cron.run("sync")).status == "completed"
        await until(lambda: rows(db, "sync") == [("completed", None)], "it is written")
