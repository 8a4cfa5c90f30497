"""A run whose process is gone is found lost by whoever looks, and one that goes on is never taken for it."""

import asyncio
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from cronlock import Run, runs
from cronlock.recovery import recover
from cronlock.runs import Instance, Statements
from tests import Db, Make, Steps, rows, task_of, until, value

pytestmark = pytest.mark.anyio


def leave(db: Db, task: str, *, backend_pid: int = 999_999_999, ago: str = "1 hour") -> int:
    """The row that a killed process leaves behind; gives its id."""
    query = """INSERT INTO cronlock.run (nonce, task, status, trigger, started_at, instance, host, pid, backend_pid,
            lock_name, lock_key, lock_classid, lock_objid)
        SELECT %s, task, 'running', 'http', clock_timestamp() - %s::interval, %s, 'gone', 1, %s, task, key,
            (key >> 32) & 4294967295, key & 4294967295
          FROM (SELECT %s::text AS task, hashtext(%s)::bigint AS key) t RETURNING id"""
    return int(value(db, query, str(uuid4()), ago, str(uuid4()), backend_pid, task, task))


def error_of(db: Db, run_id: int) -> Any:
    query = "SELECT status, error_type, finished_at > started_at FROM cronlock.run WHERE id = %s"
    return db.execute(query, (run_id,)).fetchone()


async def test_the_next_run_of_a_lock_finds_the_lost_one(make_cron: Make, db: Db) -> None:
    cron = make_cron(recover_interval="1h")
    cron.task("once")(lambda run: None)
    async with cron:
        assert (await cron.run("once")).status == "completed"
        mine, other = leave(db, "once"), leave(db, "other")
        assert (await cron.run("once")).status == "completed"
        assert error_of(db, mine) == ("lost", "ProcessGone", True)
        assert error_of(db, other) == ("running", None, None), "its lock was not asked about"


async def test_a_lost_run_is_found_by_the_timer(make_cron: Make, db: Db) -> None:
    cron = make_cron(recover_interval="200ms")
    cron.task("once")(lambda run: None)
    async with cron:
        lost = leave(db, "anything")
        await until(lambda: error_of(db, lost) == ("lost", "ProcessGone", True), "the timer finds it")


async def test_a_run_is_lost_too_if_its_backends_number_was_given_to_another(make_cron: Make, db: Db) -> None:
    """The backend lives, but it does not hold that lock."""
    cron = make_cron(recover_interval="1h")
    process = await cron.open()
    await process.readiness.require()
    lost = leave(db, "once", backend_pid=db.info.backend_pid)
    await recover(process.database, process.runner.statements)
    assert error_of(db, lost) == ("lost", "ProcessGone", True)
    held = leave(db, "once", backend_pid=db.info.backend_pid)
    db.execute("BEGIN; SELECT pg_advisory_xact_lock(hashtext('once'))")
    assert await recover(process.database, process.runner.statements) == []
    assert error_of(db, held) == ("running", None, None)
    db.execute("COMMIT")
    await cron.close()


async def test_a_lock_of_another_database_does_not_keep_a_lost_run_running(
    make_cron: Make, db: Db, empty_url: str
) -> None:
    cron = make_cron(recover_interval="1h")
    process = await cron.open()
    await process.readiness.require()
    with psycopg.connect(empty_url) as elsewhere:
        elsewhere.execute("SELECT pg_advisory_xact_lock(hashtext('once'))")
        lost = leave(db, "once", backend_pid=elsewhere.info.backend_pid)
        await recover(process.database, process.runner.statements)
        assert error_of(db, lost) == ("lost", "ProcessGone", True)
    await cron.close()


@pytest.mark.parametrize("runs_wanted", [400, pytest.param(5000, marks=pytest.mark.stress)])
async def test_no_run_is_taken_for_lost_while_recovery_never_stops(make_cron: Make, db: Db, runs_wanted: int) -> None:
    """Rows and locks are read by one statement: read one after the other they would contradict each other."""
    db.execute("CREATE TABLE counter (n int); INSERT INTO counter VALUES (0)")
    said: list[int] = []
    is_over = False

    def steps(run: Run) -> Steps:
        yield run.driver.execute("UPDATE counter SET n = n + 1")

    made = [make_cron(pool_size=4) for _ in range(3)]
    for cron in made:
        for number in range(4):
            cron.task(f"task-{number}")(task_of(steps, is_async=number % 2 == 0))

    async def recovering(cron: Any) -> int:
        process = await cron.open()
        await process.readiness.require()
        asked = 0
        while not is_over:
            said.extend(row[0] for row in await recover(process.database, process.runner.statements))
            asked += 1
        return asked

    completed = 0

    async def calling(cron: Any, number: int) -> None:
        nonlocal completed
        while completed < runs_wanted:
            outcome = await cron.run(f"task-{number % 4}")
            completed += outcome.status == "completed"

    async with made[0], made[1], made[2]:
        recoveries = [asyncio.create_task(recovering(cron)) for cron in made]
        await asyncio.gather(*(calling(made[number % 3], number) for number in range(12)))
        is_over = True
        asked = sum([await recovery for recovery in recoveries])
    assert asked > 50
    assert said == []
    assert value(db, "SELECT n FROM counter") == completed
    statuses: dict[str, int] = dict(db.execute("SELECT status, count(*) FROM cronlock.run GROUP BY 1").fetchall())
    assert statuses.keys() <= {"completed", "skipped"}
    assert statuses["completed"] == completed


async def test_the_last_word_of_a_process_wins_over_lost(make_cron: Make, db: Db) -> None:
    cron = make_cron()

    @cron.task("once")
    async def once(run: Run) -> None:
        db.execute("UPDATE cronlock.run SET status = 'lost', finished_at = now(), error_type = 'LockLost'")
        raise ValueError("no")

    async with cron:
        await cron.run("once")
    assert rows(db, "once") == [("failed", None)]
    assert value(db, "SELECT error_type FROM cronlock.run") == "ValueError"


async def test_nothing_overwrites_completed(make_cron: Make, db: Db) -> None:
    cron = make_cron(recover_interval="1h")
    cron.task("once")(lambda run: {"n": 1})
    async with cron:
        outcome = await cron.run("once")
        process = await cron.open()
        nonce = str(value(db, "SELECT nonce FROM cronlock.run"))
        for kind, facts in (
            (runs.END, {"status": "failed"}),
            (runs.STOPPING, {}),
            (runs.PROGRESS, {"done": 1, "total": 2}),
        ):
            await process.recorder.put(kind, {"nonce": nonce, **facts})
        await recover(process.database, Statements("cronlock", Instance(uuid4(), "h", 1, None)))
    query = "SELECT id, status, result, stopping_at, progress_done FROM cronlock.run"
    assert db.execute(query).fetchall() == [(outcome.run_id, "completed", '{"n":1}', None, None)]
