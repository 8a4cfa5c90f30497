"""The timer's duties: old rows go in batches, lost runs are closed, a changed schema is noticed."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest

from cronlock import Cronlock, Run, Unavailable, recovery
from cronlock.app import Process
from cronlock.models import REVISION

pytestmark = pytest.mark.anyio
Make = Callable[..., Cronlock]
Db = psycopg.Connection[tuple[Any, ...]]

OLD = """
INSERT INTO cronlock.run (nonce, task, status, reason, trigger, started_at, finished_at, instance, host, pid,
    lock_key, lock_classid, lock_objid)
SELECT gen_random_uuid(), %(task)s, %(status)s, CASE WHEN %(status)s = 'skipped' THEN 'already_running' END, 'http',
    now() - %(age)s::interval, CASE WHEN %(status)s <> 'running' THEN now() - %(age)s::interval END,
    gen_random_uuid(), 'gone', 1, 7, 0, 7 FROM generate_series(1, %(n)s)
"""


def old(db: Db, task: str, status: str, age: str, n: int = 1) -> None:
    """Write rows as they would have been written `age` ago."""
    db.execute(OLD, {"task": task, "status": status, "age": age, "n": n})


async def forever(cron: Cronlock) -> None:
    async with asyncio.timeout(10):
        while True:
            await cron.run("nightly")


def counts(db: Db) -> dict[tuple[str, str], int]:
    rows = db.execute("SELECT task, status, count(*) FROM cronlock.run GROUP BY task, status").fetchall()
    return {(task, status): number for task, status, number in rows}


@asynccontextmanager
async def connected(cron: Cronlock) -> AsyncIterator[Process]:
    """Its connections without its timer, so that nothing happens but what the test does."""
    process = Process(cron.settings, cron.tasks)
    await process.runner.spawn(process.database.open())
    try:
        await process.readiness.require()
        yield process
    finally:
        await process.close(0)


async def test_rows_older_than_their_retention_are_pruned_but_never_a_tasks_last_run(make_cron: Make, db: Db) -> None:
    old(db, "a", "skipped", "8 days", 3)
    old(db, "a", "skipped", "6 days", 2)
    old(db, "a", "completed", "29 days", 3)
    old(db, "a", "failed", "29 days", 1)
    old(db, "a", "completed", "1 day", 1)
    old(db, "rare", "lost", "200 days", 1)
    old(db, "rare", "failed", "100 days", 1)
    old(db, "paused", "skipped", "8 days", 2)
    async with connected(make_cron()) as process:
        assert await recovery.prune(process.database, process.runner.statements) == 9
        assert await recovery.prune(process.database, process.runner.statements) == 0
    assert counts(db) == {
        ("a", "skipped"): 2,
        ("a", "failed"): 1,
        ("a", "completed"): 1,
        ("rare", "failed"): 1,
    }


async def test_pruning_goes_in_batches_oldest_first(make_cron: Make, db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "PRUNE_BATCH", 10)
    old(db, "a", "skipped", "9 days", 25)
    old(db, "a", "completed", "1 hour")
    async with connected(make_cron()) as process:
        assert await recovery.prune(process.database, process.runner.statements) == 10
        assert db.execute("SELECT min(id) FROM cronlock.run").fetchone() == (11,)


async def test_a_run_that_runs_is_neither_pruned_nor_lost_while_a_dead_one_is_closed(make_cron: Make, db: Db) -> None:
    cron = make_cron()
    gate, running = asyncio.Event(), asyncio.Event()

    @cron.task("slow")
    async def slow(run: Run) -> None:
        running.set()
        await gate.wait()

    old(db, "dead", "running", "300 days")
    async with cron:
        call = asyncio.create_task(cron.run("slow"))
        await running.wait()
        process = await cron.open()
        db.execute("UPDATE cronlock.run SET started_at = now() - interval '300 days'")
        lost = await recovery.recover(process.database, process.runner.statements)
        await recovery.prune(process.database, process.runner.statements)
        assert [row[1] for row in lost] in (["dead"], [])  # or the timer was first
        assert counts(db) == {("slow", "running"): 1, ("dead", "lost"): 1}
        gate.set()
        assert (await call).status == "completed"


async def test_the_timer_closes_lost_runs_and_notices_a_changed_schema(make_cron: Make, db: Db) -> None:
    cron = make_cron(recover_interval="100ms")

    @cron.task("nightly")
    async def nightly(run: Run) -> None: ...

    async with cron:
        assert (await cron.run("nightly")).status == "completed"
        old(db, "dead", "running", "1 hour")
        db.execute("UPDATE cronlock.alembic_version SET version_num = '9999'")
        try:
            with pytest.raises(Unavailable, match="revision 9999"):
                await forever(cron)
        finally:
            db.execute(f"UPDATE cronlock.alembic_version SET version_num = '{REVISION}'")
        async with asyncio.timeout(10):
            while ("dead", "lost") not in counts(db):
                await asyncio.sleep(0.02)
        assert (await cron.run("nightly")).status == "completed"
