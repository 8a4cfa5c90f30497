"""Queue mode: a call of a cron URL makes one job for its occurrence, and none while one is live."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx2
import psycopg
import pytest

from cronlock import Cronlock, RegistrationError, Run
from tests import Db, Make, rows, serving, until, value
from tests.working import working

pytestmark = pytest.mark.anyio


@pytest.fixture
def cron(make_cron: Make) -> Cronlock:
    return with_tasks(make_cron())


def with_tasks(cron: Cronlock) -> Cronlock:
    @cron.task("nightly", mode="queue", max_attempts=3, retry_delay=0.01)
    async def nightly(run: Run, payload: dict[str, Any]) -> dict[str, Any]:
        await run.driver.execute("CREATE TABLE IF NOT EXISTS effect (job bigint)")
        await run.driver.execute("INSERT INTO effect VALUES (%s)", (run.id,))
        if payload.get("fails"):
            raise ConnectionError("not now")
        return {"occurrence": run.occurrence, **payload}

    @cron.task("tenant", mode="queue", key="{tenant}")
    async def tenant(run: Run, payload: dict[str, Any]) -> None: ...

    @cron.task("spaced", mode="queue", min_interval="1h")
    async def spaced(run: Run) -> None: ...

    @cron.task("asked", mode="queue", skip_status=409)
    async def asked(run: Run) -> None: ...

    return cron


@asynccontextmanager
async def at_work(make_cron: Make) -> AsyncIterator[None]:
    """A worker of the same tasks, in this process."""
    other = with_tasks(make_cron())
    async with other, working(other, drain=10):
        yield


async def nothing_live(db: Db) -> None:
    live = "SELECT (SELECT count(*) FROM cronlock.job) + (SELECT count(*) FROM cronlock.job_waiting)"
    await until(lambda: value(db, live) == 0, "the jobs end")


async def test_a_call_makes_a_job_and_the_next_one_is_skipped_while_it_is_live(
    cron: Cronlock, make_cron: Make, db: Db
) -> None:
    async with serving(cron.app()) as client:
        first = await client.get("/cron/nightly?full=1")
        assert first.status_code == 202, first.text
        job_id = first.json()["jobId"]
        assert first.json() == {"status": "queued", "task": "nightly", "jobId": job_id, "duplicate": False}
        assert first.headers["cronlock-status"] == "queued"
        second = await client.get("/cron/nightly")
        assert (second.status_code, second.json()["reason"]) == (200, "queued_already")
        assert second.json()["holder"] == {"jobId": job_id}
        assert second.headers["cronlock-run-id"] == str(second.json()["runId"])
        assert (await client.get("/cron/nightly?on_skip=409")).status_code == 409
        assert rows(db, "nightly") == [("skipped", "queued_already")] * 2
        assert db.execute("SELECT lock_key = hashtext('nightly') FROM cronlock.run").fetchall() == [(True,)] * 2
        row = db.execute("SELECT task, trigger, payload, cron_key, max_attempts FROM cronlock.job").fetchone()
        assert row == ("nightly", "http", {"full": "1"}, "", 3)
        async with at_work(make_cron):
            await nothing_live(db)
        assert value(db, "SELECT result FROM cronlock.job_history") == '{"occurrence":null,"full":"1"}'
        assert (await client.get("/cron/nightly")).status_code == 202, "the first has ended"
    assert value(db, "SELECT count(*) FROM effect") == 1, "in the worker it has a transaction"


async def test_a_job_that_waits_to_be_tried_again_is_live(cron: Cronlock, db: Db) -> None:
    async with serving(cron.app()) as client:
        assert (await client.get("/cron/nightly")).status_code == 202
        db.execute(
            """WITH gone AS (DELETE FROM cronlock.job RETURNING *)
               INSERT INTO cronlock.job_waiting (id, task, queue, payload, trigger, cron_key, max_attempts, attempts,
                   run_at)
               SELECT id, task, queue, payload, trigger, cron_key, max_attempts, 1, now() + interval '1 h' FROM gone"""
        )
        assert (await client.get("/cron/nightly")).json()["reason"] == "queued_already"


async def test_jobs_that_were_enqueued_otherwise_keep_no_call_back(cron: Cronlock) -> None:
    async with serving(cron.app()) as client:
        assert (await client.post("/jobs/nightly", json={})).status_code == 202
        assert (await client.get("/cron/nightly")).status_code == 202


async def test_an_attempt_that_failed_is_tried_again_and_keeps_its_place(
    cron: Cronlock, make_cron: Make, db: Db
) -> None:
    async with serving(cron.app()) as client:
        await client.post("/cron/nightly", json={"fails": True})
        async with at_work(make_cron):
            await nothing_live(db)
        assert (await client.get("/cron/nightly")).status_code == 202, "one that failed is not live"
    assert db.execute("SELECT status, attempts, cron_key FROM cronlock.job_history").fetchall() == [("failed", 3, "")]


async def test_one_occurrence_is_given_one_job_whatever_became_of_it(cron: Cronlock, make_cron: Make, db: Db) -> None:
    tick = {"idempotency-key": "tick-1"}
    async with serving(cron.app()) as client:
        first = (await client.get("/cron/nightly", headers=tick)).json()
        again = await client.post("/cron/nightly", json={"other": "payload"}, headers=tick)
        assert (again.status_code, again.json()) == (202, {**first, "duplicate": True})
        other = await client.get("/cron/nightly", headers={"idempotency-key": "tick-2"})
        assert other.json()["reason"] == "queued_already"
        async with at_work(make_cron):
            await nothing_live(db)
        assert (await client.get("/cron/nightly", headers=tick)).json() == {**first, "duplicate": True}
        assert (await client.get("/cron/nightly", headers={"idempotency-key": "tick-2"})).json()["duplicate"] is False
        enqueued = await client.post("/jobs/nightly", json={"x": 1}, headers=tick)
        assert enqueued.json()["duplicate"] is False, "a tick and a key of an enqueue are not the same"
        db.execute("UPDATE cronlock.idempotency_key SET expires_at = now() - interval '1 s' WHERE key LIKE '_tick-1'")
        await asyncio.sleep(0)
        async with at_work(make_cron):
            await nothing_live(db)
        assert (await client.get("/cron/nightly", headers=tick)).json()["duplicate"] is False
    assert rows(db, "nightly") == [("skipped", "queued_already")]


async def test_each_value_of_a_key_has_its_job(cron: Cronlock, db: Db) -> None:
    async with serving(cron.app()) as client:
        codes = [(await client.get(f"/cron/tenant?tenant={name}")).status_code for name in ("a", "b", "a")]
        assert codes == [202, 202, 200]
        assert (await client.get("/cron/tenant")).status_code == 422
    found = db.execute(
        "SELECT key, reason, lock_key = hashtextextended(concat('tenant', chr(31), 'a'), 0) FROM cronlock.run"
    ).fetchall()
    assert found == [("a", "queued_already", True)]


async def test_a_paused_task_makes_no_job_and_one_too_soon_neither(cron: Cronlock, make_cron: Make, db: Db) -> None:
    async with serving(cron.app()) as client:
        db.execute("UPDATE cronlock.task SET paused_at = now() WHERE name = 'nightly'")
        assert (await client.get("/cron/nightly")).json()["reason"] == "paused"
        assert (await client.get("/cron/spaced")).status_code == 202
        async with at_work(make_cron):
            await nothing_live(db)
        soon = await client.get("/cron/spaced?on_skip=503")
        assert (soon.status_code, soon.json()["reason"]) == (503, "too_soon")
        assert 3500 < int(soon.headers["retry-after"]) <= 3600
        db.execute("UPDATE cronlock.job_history SET finished_at = now() - interval '61 minutes'")
        assert (await client.get("/cron/spaced")).status_code == 202
        assert (await client.get("/cron/asked")).status_code == 202
        assert (await client.get("/cron/asked")).status_code == 409
    assert rows(db, "nightly") == [("skipped", "paused")]


@pytest.mark.parametrize("has_occurrence", [False, True])
async def test_sixty_calls_at_once_on_three_servers_make_one_job(make_cron: Make, db: Db, has_occurrence: bool) -> None:
    headers = {"idempotency-key": "tick-1"} if has_occurrence else {}
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(serving(with_tasks(make_cron()).app())) for _ in range(3)]
        for number in range(1, 21):
            if has_occurrence:
                headers = {"idempotency-key": f"tick-{number}"}
            answers = await asyncio.gather(*(servers[n % 3].get("/cron/nightly", headers=headers) for n in range(60)))
            made = [answer.json() for answer in answers if answer.status_code == 202]
            assert len([body for body in made if not body["duplicate"]]) == 1
            assert value(db, "SELECT count(*) FROM cronlock.job") == 1
            if has_occurrence:
                assert len(made) == 60
                assert len({body["jobId"] for body in made}) == 1
            else:
                assert {answer.json()["reason"] for answer in answers if answer.status_code == 200} == {
                    "queued_already"
                }
            db.execute("DELETE FROM cronlock.job")


async def test_while_the_first_call_is_open_the_second_waits_and_then_sees_its_job(
    cron: Cronlock, database_url: str, db: Db
) -> None:
    async with serving(cron.app()) as client, await psycopg.AsyncConnection.connect(database_url) as other:
        assert (await client.get("/cron/spaced")).status_code == 202
        await other.execute("SELECT FROM cronlock.task WHERE name = 'nightly' FOR NO KEY UPDATE")
        await other.execute(
            """INSERT INTO cronlock.job (task, queue, payload, trigger, cron_key, max_attempts)
               VALUES ('nightly', 'default', '{}', 'http', '', 5)"""
        )
        call = asyncio.create_task(client.get("/cron/nightly"))
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        await until(lambda: value(db, waits), "the call waits")
        await other.commit()
        assert (await call).json()["reason"] == "queued_already"
        await other.execute("SELECT FROM cronlock.task WHERE name = 'asked' FOR NO KEY UPDATE")
        answer = await client.get("/cron/asked")
        assert (answer.status_code, answer.json()["reason"]) == (503, "database_unavailable")
        await other.rollback()
        assert (await client.get("/cron/asked")).status_code == 202


async def test_a_claim_of_such_a_job_changes_no_index(cron: Cronlock, make_cron: Make, db: Db) -> None:
    async with serving(cron.app()) as client:
        await client.get("/cron/nightly")
        async with at_work(make_cron):
            await nothing_live(db)
    counted = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'job'"
    await until(lambda: (db.execute(counted).fetchone() or (0, 0))[0] > 0, "the statistics have it")
    updates, hot = db.execute(counted).fetchone() or (0, 0)
    assert updates == hot


async def test_such_a_task_has_one_slot(make_cron: Make) -> None:
    with pytest.raises(RegistrationError, match="in queue mode its URL has one live job at a time"):
        make_cron().task("x", mode="queue", max_concurrent=2)(lambda run: None)
    with pytest.raises(RegistrationError, match="mode must be 'transaction', 'guard' or 'queue'"):
        make_cron().task("x", mode="queued")(lambda run: None)


async def test_from_code_it_runs_at_once(cron: Cronlock, db: Db) -> None:
    async with cron:
        assert (await cron.run("nightly")).status == "completed"
    assert value(db, "SELECT count(*) FROM cronlock.job") == 0


async def test_without_a_database_a_call_answers_503(make_cron: Make) -> None:
    cron = with_tasks(make_cron(database_url="postgresql://nobody:x@127.0.0.1:9/none", acquire_timeout="300ms"))
    async with serving(cron.app()) as client:
        answer: httpx2.Response = await client.get("/cron/nightly")
    assert (answer.status_code, answer.json()["reason"]) == (503, "database_unavailable")
