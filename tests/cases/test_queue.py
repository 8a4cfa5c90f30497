"""Whole scenarios of jobs: a pool that is too small, a row lock in the way of a claim, many jobs in one transaction."""

import asyncio
import json
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cronlock import Run
from tests import Db, Make, until, value
from tests.working import EFFECTS, all_ended, effects, live, put, status, workers, working

pytestmark = pytest.mark.anyio


async def test_six_cron_tasks_that_enqueue_and_a_worker_on_a_pool_of_two_all_end(make_cron: Make, db: Db) -> None:
    # Case Y10.
    db.execute(EFFECTS)
    write = "INSERT INTO effect (job_id, attempt, what) VALUES (%s, %s, %s)"
    crons = [make_cron(pool_size=2, lease="2s") for _ in range(2)]

    async def nightly(run: Run) -> None:
        await run.driver.execute(write, (0, 1, run.task))
        await asyncio.sleep(0.1)
        await run.enqueue("follow-up", {"of": run.task})

    async def follow_up(run: Run, payload: dict[str, Any]) -> None:
        await run.driver.execute(write, (run.id, run.attempt, payload["of"]))
        await asyncio.sleep(3)  # longer than its lease: renewals find a connection all the same

    for cron in crons:
        for number in range(6):
            cron.task(f"nightly-{number}")(nightly)
        cron.task("follow-up")(follow_up)
    async with crons[0], working(crons[1], concurrency=4):
        outcomes = await asyncio.gather(*(crons[0].run(f"nightly-{number}") for number in range(6)))
        assert [outcome.status for outcome in outcomes] == ["completed"] * 6
        assert await all_ended(db, 20) == {"completed": 6}
    assert value(db, "SELECT count(*) FROM effect WHERE job_id > 0") == 6
    assert value(db, "SELECT max(attempts) FROM cronlock.job_history") == 1


async def test_a_claim_passes_by_a_row_that_is_locked_and_a_lease_begins_when_it_is_taken(
    database_url: str, db: Db, tmp_path: Path
) -> None:
    # Case T10: a job's row is locked for longer than a lease lasts.
    db.execute(EFFECTS)
    with workers(database_url, tmp_path) as start, psycopg.connect(database_url) as other:
        first, second = put(db, "work", json.dumps({"pause": 1}), jobs=2)
        other.execute("SELECT FROM cronlock.job WHERE id = %s FOR UPDATE", (first,))
        start.start(CRONLOCK_LEASE="2s")
        await until(lambda: status(db, second) == ("completed", 1, None), "the other one is done", 5)
        await asyncio.sleep(1.5)
        assert status(db, first) == ("queued", 0, None)
        other.rollback()
        await until(lambda: status(db, first) == ("processing", 1, None), "it is taken", 3)
        assert value(db, "SELECT lease_until > clock_timestamp() + interval '1 s' FROM cronlock.job") is True
        assert await all_ended(db) == {"completed": 2}
    assert effects(db, first) == [(1, "begun"), (1, "ended")]
    took = "SELECT finished_at - started_at BETWEEN interval '1 s' AND interval '2 s' FROM cronlock.job_history"
    assert value(db, f"{took} WHERE id = %s", first) is True


async def test_ten_thousand_enqueues_in_one_transaction_wake_nobody_before_it_ends(
    make_cron: Make, database_url: str, db: Db
) -> None:
    # Cases T08 and Q14.
    cron = make_cron()

    @cron.task("note", mode="guard")
    async def note(run: Run, payload: dict[str, Any]) -> None:
        pass

    async with working(cron, concurrency=200), await psycopg.AsyncConnection.connect(database_url) as connection:
        await until(lambda: value(db, "SELECT is_idle FROM cronlock.worker"), "it is idle")
        for number in range(0, 10_000, 100):
            await cron.enqueue_many(connection, "note", [{"n": number + more} for more in range(100)])
        await asyncio.sleep(1.2)
        assert live(db) == 0
        assert value(db, "SELECT count(*) FROM cronlock.job_history") == 0
        await connection.commit()
        assert await all_ended(db, 30) == {"completed": 10_000}
    assert value(db, "SELECT max(attempts) FROM cronlock.job_history") == 1
