"""Jobs through a real PgBouncer in transaction mode, with and without a way past it.

Without one a worker has no presence and is told nothing: its leases decide, and it looks every second. A pool of two
slots is smaller than what the workers would like to have.
"""

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from cronlock import Run
from tests import Db, Make, until, value
from tests.observing import is_quiet
from tests.pooler.bouncer import Bouncer
from tests.working import EFFECTS, Workers, all_ended, attempts, effects, put, status, workers, working

pytestmark = pytest.mark.anyio


@pytest.fixture
def pooled_url(bouncer: Bouncer, database_url: str) -> str:
    """The test's database, through PgBouncer."""
    return bouncer.url(str(conninfo_to_dict(database_url)["dbname"]))


@pytest.fixture(autouse=True)
def effect(db: Db) -> None:
    db.execute(EFFECTS)


@pytest.fixture
def start(pooled_url: str, tmp_path: Path) -> Iterator[Workers]:
    with workers(pooled_url, tmp_path) as started:
        yield started


def settings(is_direct: bool, database_url: str) -> dict[str, Any]:
    """What the workers are told of the pooler."""
    direct = {"CRONLOCK_DIRECT_URL": database_url} if is_direct else {}
    return {"CRONLOCK_POOLER": "transaction", "CRONLOCK_LEASE": "3s", **direct}


DIRECT = pytest.mark.parametrize("is_direct", [True, False], ids=["direct url", "pooler only"])


@DIRECT
async def test_two_workers_behind_a_pooler_run_every_job_once_and_leave_nothing_on_its_sessions(
    start: Workers, database_url: str, db: Db, is_direct: bool
) -> None:
    for _ in range(2):
        start.start("--concurrency", "2", CRONLOCK_POOL_SIZE="2", **settings(is_direct, database_url))
    made = [job for task in ("work", "work-in-thread", "guarded") for job in put(db, task, '{"pause": 0.01}', jobs=60)]
    assert await all_ended(db, 60) == {"completed": len(made)}
    assert db.execute("SELECT job_id FROM effect GROUP BY 1 HAVING count(*) <> 2").fetchall() == []
    assert value(db, "SELECT count(DISTINCT job_id) FROM effect") == len(made)
    assert value(db, "SELECT max(attempts) FROM cronlock.job_history") == 1
    assert value(db, "SELECT count(*) FROM cronlock.worker WHERE has_presence") == (2 if is_direct else 0)
    for worker in start.all:
        worker.send(signal.SIGTERM)
        assert worker.ends() == 0
        assert "WARNING" not in worker.said
        assert "ERROR" not in worker.said
    assert is_quiet(db)
    assert value(db, "SELECT count(*) FROM cronlock.worker") == 0


@DIRECT
async def test_a_worker_killed_behind_a_pooler_loses_its_jobs_to_another_one(
    start: Workers, database_url: str, db: Db, is_direct: bool
) -> None:
    given = settings(is_direct, database_url)
    first = start.start(CRONLOCK_POOL_SIZE="2", **given)
    jobs = [put(db, task, json.dumps({"pause": 60, "once": True}))[0] for task in ("work", "guarded")]
    await until(lambda: value(db, "SELECT count(*) FROM effect") == 1, "the one begins")
    await until(lambda: value(db, "SELECT count(backend_pid) FROM cronlock.job") == 1, "and the other")
    start.start(CRONLOCK_POOL_SIZE="2", **given)
    first.process.kill()
    killed = time.monotonic()
    for job in jobs:
        await until(lambda: status(db, job) == ("completed", 2, None), "it has completed", 12)  # noqa: B023
    assert time.monotonic() - killed < 8
    assert effects(db, jobs[0]) == [(2, "begun"), (2, "ended")]
    assert effects(db, jobs[1]) == [(1, "begun"), (2, "begun"), (2, "ended")]
    assert attempts(db, jobs[0]) == [(1, "lost", "WorkerLost")]


@DIRECT
async def test_a_worker_frozen_past_its_lease_behind_a_pooler_cannot_commit(
    start: Workers, database_url: str, db: Db, is_direct: bool
) -> None:
    given = settings(is_direct, database_url)
    first = start.start(CRONLOCK_POOL_SIZE="2", **given)
    (job,) = put(db, "work", json.dumps({"pause": 1, "once": True}))
    await until(lambda: value(db, "SELECT count(backend_pid) FROM cronlock.job") == 1, "it has begun")
    await asyncio.sleep(0.3)
    first.send(signal.SIGSTOP)
    start.start(CRONLOCK_POOL_SIZE="2", **given)
    await until(lambda: status(db, job) == ("completed", 2, None), "the other one has done it", 12)
    first.send(signal.SIGCONT)
    first.until_says("was lost", 6)
    assert effects(db, job) == [(2, "begun"), (2, "ended")]
    (other,) = put(db, "work")
    await until(lambda: status(db, other) == ("completed", 1, None), "work goes on", 6)


@DIRECT
async def test_enqueue_through_a_pooler_with_keys_and_without_and_in_a_callers_transaction(
    make_cron: Make, pooled_url: str, database_url: str, db: Db, is_direct: bool
) -> None:
    direct = {"direct_url": database_url} if is_direct else {}
    cron = make_cron(database_url=pooled_url, pooler="transaction", pool_size=2, **direct)

    @cron.task("note", mode="guard")
    async def note(run: Run, payload: dict[str, Any]) -> Any:
        return payload

    async with working(cron, concurrency=4):
        await asyncio.gather(*(cron.enqueue(None, "note", {"n": n}) for n in range(50)))
        first = await cron.enqueue(None, "note", {"n": 1}, idempotency_key="a")
        again = await cron.enqueue(None, "note", {"n": 1}, idempotency_key="a")
        assert (again.job_id, again.is_duplicate) == (first.job_id, True)
        keys = [f"k{n}" for n in range(20)]
        many = await cron.enqueue_many(None, "note", [{"n": n} for n in range(20)], idempotency_keys=keys)
        assert [one.is_duplicate for one in many] == [False] * 20
        await cron.enqueue(None, "note", {"n": "later"}, delay=0.3)
        connect = psycopg.AsyncConnection.connect
        async with await connect(pooled_url, prepare_threshold=None) as connection:
            for n in range(8):
                await cron.enqueue(connection, "note", {"own": n})
        assert await all_ended(db, 20) == {"completed": 50 + 1 + 20 + 1 + 8}
