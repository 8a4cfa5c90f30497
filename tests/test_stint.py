"""`/cron/cronlock.work`: a queue is worked off by calls, with no worker that lives long."""

import asyncio
import time
from typing import Any

import pytest

from cronlock import Cronlock, Retry, Run
from tests import AUTH, Db, Make, advisory_locks, serving, until, value

pytestmark = pytest.mark.anyio


@pytest.fixture
def cron(make_cron: Make, db: Db) -> Cronlock:
    db.execute("CREATE TABLE effect (job bigint)")
    return with_tasks(make_cron())


def with_tasks(cron: Cronlock) -> Cronlock:
    @cron.task("write")
    async def write(run: Run) -> None:
        await run.driver.execute("INSERT INTO effect VALUES (%s)", (run.id,))

    @cron.task("write-in-thread")
    def write_in_thread(run: Run) -> None:
        run.driver.execute("INSERT INTO effect VALUES (%s)", (run.id,))

    @cron.task("mixed", max_attempts=2)
    async def mixed(run: Run, payload: dict[str, Any]) -> None:
        if payload["how"] == "fail":
            raise ValueError("on purpose")
        if payload["how"] == "retry":
            raise Retry(after=3600)

    @cron.task("long", mode="guard")
    async def long(run: Run) -> None:
        await asyncio.sleep(60)

    @cron.task("stuck", mode="guard")
    def stuck(run: Run) -> None:
        time.sleep(8)

    @cron.task("apart", queue="apart")
    async def apart(run: Run) -> None: ...

    return cron


async def enqueue(cron: Cronlock, task: str, number: int, **payload: Any) -> None:
    await cron.enqueue_many(None, task, [payload] * number)


def nothing_is_left(db: Db) -> None:
    """No job is claimed, no worker known, no lock held."""
    assert value(db, "SELECT count(*) FROM cronlock.job WHERE lease_token IS NOT NULL") == 0
    assert value(db, "SELECT count(*) FROM cronlock.worker") == 0
    assert advisory_locks(db) == 0


async def test_a_call_works_off_what_is_due_and_says_what_became_of_it(cron: Cronlock, db: Db) -> None:
    async with serving(cron.app()) as client:
        await enqueue(cron, "write", 120)
        await enqueue(cron, "write-in-thread", 30)
        for how in ("fail", "retry", "nothing"):
            await enqueue(cron, "mixed", 2, how=how)
        await cron.enqueue(None, "write", delay="1h")
        await cron.enqueue(None, "write", delay="1ms")
        await enqueue(cron, "apart", 1)
        answer = await client.get("/cron/cronlock.work")
        body = answer.json()
        assert answer.status_code == 200
        assert answer.headers["cronlock-status"] == body["status"] == "completed"
        counts = {"taken": 157, "completed": 153, "failed": 2, "retried": 2, "cancelled": 0, "lost": 0}
        assert {name: body[name] for name in counts} == counts
        assert (body["givenBack"], body["stillRunning"], body["isEmpty"]) == (0, 0, True)
        assert set(body) == {*counts, "status", "task", "givenBack", "stillRunning", "isEmpty", "durationMs"}
        nothing_is_left(db)
        again = (await client.post("/cron/cronlock.work/")).json()
        assert (again["taken"], again["isEmpty"]) == (0, True)
        assert (await client.get("/cron/cronlock.work?queue=apart,default")).json()["completed"] == 1
    assert value(db, "SELECT count(*) FROM effect") == 151
    assert value(db, "SELECT count(*) FROM cronlock.job_history") == 156
    found = cron.metrics.registry.get_sample_value("cronlock_jobs_ended_total", {"task": "mixed", "status": "failed"})
    assert found == 2


async def test_it_takes_no_more_jobs_than_it_is_told_to(cron: Cronlock, db: Db) -> None:
    async with serving(cron.app()) as client:
        await enqueue(cron, "write", 30)
        body = (await client.get("/cron/cronlock.work?max=12")).json()
        assert (body["taken"], body["completed"], body["isEmpty"]) == (12, 12, False)
        nothing_is_left(db)
    assert value(db, "SELECT count(*) FROM cronlock.job") == 18


async def test_what_is_not_done_in_its_time_is_given_back_uncounted(cron: Cronlock, db: Db) -> None:
    async with serving(cron.app()) as client:
        await enqueue(cron, "long", 2)
        started = time.monotonic()
        body = (await client.get("/cron/cronlock.work?seconds=1")).json()
        assert 1 <= time.monotonic() - started < 3
        assert (body["taken"], body["givenBack"], body["completed"], body["isEmpty"]) == (2, 2, 0, False)
        nothing_is_left(db)
    assert db.execute("SELECT DISTINCT attempts, lease_token FROM cronlock.job").fetchall() == [(0, None)]


async def test_a_job_whose_code_does_not_stop_keeps_its_lease_after_the_answer(make_cron: Make, db: Db) -> None:
    cron = with_tasks(make_cron(lease="2s"))
    async with serving(cron.app()) as client:
        await enqueue(cron, "stuck", 1)
        body = (await client.get("/cron/cronlock.work?seconds=1")).json()
        assert (body["taken"], body["stillRunning"], body["givenBack"]) == (1, 1, 0)
        for _ in range(3):
            other = (await client.get("/cron/cronlock.work?seconds=1")).json()
            assert other["taken"] == 0, "nobody else gets it while its code runs"
            if not value(db, "SELECT count(*) FROM cronlock.job WHERE lease_token IS NOT NULL"):
                break
            assert value(db, "SELECT bool_and(lease_until > now()) FROM cronlock.job")
            await asyncio.sleep(0.8)
        ended = "SELECT count(*) FROM cronlock.job_history WHERE status = 'completed' AND attempts = 1"
        await until(lambda: value(db, ended) == 1, "it did what it should, once")
        await until(lambda: value(db, "SELECT count(*) FROM cronlock.worker") == 0, "the stint ends")
        nothing_is_left(db)


async def test_several_at_once_take_each_job_once(cron: Cronlock, make_cron: Make, db: Db) -> None:
    other = with_tasks(make_cron())
    async with serving(cron.app()) as one, serving(other.app()) as two:
        await enqueue(cron, "write", 400)
        answers = await asyncio.gather(*((one, two)[n % 2].get("/cron/cronlock.work") for n in range(6)))
        assert {answer.status_code for answer in answers} == {200}
        assert sum(answer.json()["completed"] for answer in answers) == 400
        nothing_is_left(db)
    found = db.execute("SELECT count(*), count(DISTINCT job) FROM effect").fetchone()
    assert found == (400, 400)


async def test_calls_have_connections_while_a_queue_is_drained(make_cron: Make, db: Db) -> None:
    cron = make_cron(pool_size=4)

    @cron.task("slow")
    async def slow(run: Run) -> None:
        await run.driver.execute("SELECT pg_sleep(0.2)")

    @cron.task("nightly")
    async def nightly(run: Run) -> None:
        await run.driver.execute("SELECT 1")

    async with serving(cron.app()) as client:
        await enqueue(cron, "slow", 40)
        work = asyncio.create_task(client.get("/cron/cronlock.work?seconds=3"))
        await until(lambda: value(db, "SELECT count(*) FROM cronlock.job WHERE lease_token IS NOT NULL"), "it works")
        started = time.monotonic()
        assert (await client.get("/cron/nightly")).status_code == 200
        assert time.monotonic() - started < 0.5
        assert (await work).json()["completed"] > 10


@pytest.mark.parametrize(
    "query", ["max=0", "max=x", "max=10001", "max=-1", "seconds=0", "seconds=901", "seconds=1.5", "queue=A", "queue=",
              "on_skip=409", "max=1&max=2"]
)  # fmt: skip
async def test_what_it_cannot_do_answers_400(cron: Cronlock, query: str) -> None:
    async with serving(cron.app()) as client:
        answer = await client.get(f"/cron/cronlock.work?{query}")
    assert (answer.status_code, answer.json()["status"]) == (400, "bad_request")


async def test_it_is_behind_the_secret_and_the_methods_of_the_cron_route(cron: Cronlock) -> None:
    async with serving(cron.app()) as client:
        assert (await client.put("/cron/cronlock.work")).status_code == 405
        assert (await client.head("/cron/cronlock.work")).status_code == 405
        assert (await client.get("/cron/cronlock.other")).status_code == 404
        del client.headers["authorization"]
        assert (await client.get("/cron/cronlock.work")).status_code == 401


async def test_without_a_database_it_answers_503(make_cron: Make) -> None:
    cron = make_cron(database_url="postgresql://nobody:x@127.0.0.1:9/none", acquire_timeout="300ms")
    async with serving(cron.app()) as client:
        answer = await client.get("/cron/cronlock.work", headers=AUTH)
    assert (answer.status_code, answer.json()["reason"]) == (503, "database_unavailable")


async def test_a_server_that_stops_gives_back_what_a_call_has(cron: Cronlock, db: Db) -> None:
    async with serving(cron.app()) as client:
        await enqueue(cron, "long", 1)
        work = asyncio.create_task(client.get("/cron/cronlock.work?seconds=60"))
        await until(lambda: value(db, "SELECT count(*) FROM cronlock.job WHERE lease_token IS NOT NULL"), "it works")
        started = time.monotonic()
        await cron.drain(0)
        assert time.monotonic() - started < 5
        assert (await work).json()["givenBack"] == 1
        answer = await client.get("/cron/cronlock.work")
        assert (answer.status_code, answer.json()["reason"]) == (503, "shutting_down")
    nothing_is_left(db)
