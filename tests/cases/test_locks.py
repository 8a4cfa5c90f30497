"""Cases of locks (LOCK): whole scenarios that no test of a single module shows."""

import asyncio

import pytest

from cronlock import Run
from tests import Db, Make, advisory_locks, rows, serving, until, value

pytestmark = pytest.mark.anyio


async def test_a_run_outlives_an_idle_limit_of_the_server_and_one_that_lifts_that_protection_is_lost(
    make_cron: Make, db: Db, effect: None
) -> None:
    """L05: the server's limit is 2 s, the task waits 4 s between two writes, another instance calls after 3 s."""
    db.execute(f"ALTER DATABASE {db.info.dbname} SET idle_in_transaction_session_timeout = '2s'")
    here, elsewhere = make_cron(pool_size=1), make_cron()
    for cron in (here, elsewhere):

        @cron.task("slow")
        async def slow(run: Run, payload: dict[str, str]) -> None:
            if limit := payload.get("limit"):
                await run.driver.execute(f"SET LOCAL idle_in_transaction_session_timeout = '{limit}'")
            await run.driver.execute("INSERT INTO effect VALUES (%s)", (run.id,))
            await asyncio.sleep(float(payload["waits"]))
            await run.driver.execute("INSERT INTO effect VALUES (%s)", (run.id,))

    async with serving(here.app()) as first, serving(elsewhere.app()) as second:
        call = asyncio.create_task(first.get("/cron/slow?waits=4"))
        await asyncio.sleep(3)
        assert (await second.get("/cron/slow?waits=0")).json()["reason"] == "already_running"
        assert (await call).json()["status"] == "completed"
        assert value(db, "SELECT count(*) FROM effect") == 2

        call = asyncio.create_task(first.get("/cron/slow?waits=4&limit=500ms"))
        await until(lambda: ("running", None) in rows(db, "slow"), "it runs")
        await until(lambda: advisory_locks(db) == 0, "the server has ended it", 5)
        assert (await second.get("/cron/slow?waits=0")).json()["status"] == "completed"
        lost = await call
        assert (lost.status_code, lost.json()["status"]) == (500, "lost")
        assert "connection" in lost.json()["error"]["message"]
        assert value(db, "SELECT count(*) FROM effect WHERE run_id = %s", lost.json()["runId"]) == 0
        assert (await first.get("/cron/slow?waits=0")).json()["status"] == "completed", "its connection was replaced"
    assert [status for status, _ in rows(db, "slow")] == ["completed", "skipped", "lost", "completed", "completed"]
