"""The example of reports: an order and its job in one transaction, a report that is made once."""

import asyncio
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import httpx2
import pytest

from tests import SECRET, Db, client_of, until, value
from tests.working import working

pytestmark = pytest.mark.anyio

ORDER = {"userId": 1, "reportId": 7}


@pytest.fixture
def reports(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example's module, on the test's database, with its table."""
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("CRON_SECRET", SECRET)
    sys.modules.pop("examples.reports", None)
    module = importlib.import_module("examples.reports")
    module.main()
    yield module
    sys.modules.pop("examples.reports", None)


async def shown(client: httpx2.AsyncClient, report: int) -> httpx2.Response:
    return await client.get(f"/reports/{report}")


async def test_orders_that_come_together_make_one_job_and_one_report(reports: ModuleType, db: Db) -> None:
    async with client_of(reports.app()) as client:
        answers = await asyncio.gather(*(client.post("/reports", json=ORDER) for _ in range(8)))
        assert {answer.status_code for answer in answers} == {202}
        assert len({answer.json()["jobId"] for answer in answers}) == 1
        assert sorted(answer.json()["duplicate"] for answer in answers) == [False, *[True] * 7]
        assert (await shown(client, 7)).json()["body"] is None
        async with working(reports.cron):
            await until(lambda: value(db, "SELECT count(*) FROM cronlock.job_history") == 1, "it is made")
            told = "SELECT count(*) FROM cronlock.cache_version WHERE key = 'report:7' AND version = 1"
            await until(lambda: value(db, told) == 1, "who shows it is told")
        body = (await shown(client, 7)).json()["body"]
        assert body.startswith("report 7 for user 1, rendered as ")
        assert (await shown(client, 8)).status_code == 404
    await reports.engine.dispose()
    assert value(db, "SELECT status FROM cronlock.job_history") == "completed"


async def test_an_order_that_makes_no_sense_leaves_neither_an_order_nor_a_job(reports: ModuleType, db: Db) -> None:
    async with client_of(reports.app()) as client:
        for wrong in (
            *({"userId": "x", "reportId": 7}, {"userId": 1}, {**ORDER, "more": 1}),
            *({**ORDER, name: number} for name in ORDER for number in (0, 2**63, 10**21)),
        ):
            assert (await client.post("/reports", json=wrong)).status_code == 422
    await reports.engine.dispose()
    assert value(db, "SELECT count(*) FROM report") == 0
    assert value(db, "SELECT count(*) FROM cronlock.job") == 0


async def test_a_report_that_another_user_has_ordered_is_refused_and_nothing_is_written(
    reports: ModuleType, db: Db
) -> None:
    async with client_of(reports.app()) as client:
        first = (await client.post("/reports", json=ORDER)).json()
        refused = await client.post("/reports", json={**ORDER, "userId": 2})
    await reports.engine.dispose()
    assert refused.status_code == 409
    assert refused.json() == {"reason": "report 7 has been ordered for another user", "jobId": first["jobId"]}
    assert db.execute("SELECT id, user_id FROM report").fetchall() == [(7, 1)]
    assert value(db, "SELECT count(*) FROM cronlock.job") == 1


async def test_another_job_for_the_same_report_finds_the_marker(reports: ModuleType, db: Db) -> None:
    async with client_of(reports.app()) as client:
        await client.post("/reports", json=ORDER)
        async with working(reports.cron):
            await until(lambda: value(db, "SELECT count(*) FROM cronlock.job_history") == 1, "it is made")
            first = (await shown(client, 7)).json()["body"]
            await reports.cron.enqueue(None, "generate-report", ORDER)
            await until(lambda: value(db, "SELECT count(*) FROM cronlock.job_history") == 2, "the other one ends")
        assert (await shown(client, 7)).json()["body"] == first
    assert first.endswith(f"rendered as {value(db, 'SELECT external_request_id FROM report')}")
    await reports.engine.dispose()
    results = [
        result for (result,) in db.execute("SELECT result::jsonb->>'isNew' FROM cronlock.job_history ORDER BY id")
    ]
    assert results == ["true", "false"]
