"""Cases of the queue (QUEUE) as callers of its routes see them."""

import asyncio
import unicodedata
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import psycopg
import pytest

from cronlock import Cronlock, Run
from tests import AUTH, Db, Make, serving, until, value
from tests.cases.conftest import Start
from tests.commands import Running, environment
from tests.working import working

pytestmark = pytest.mark.anyio

JSON = {"content-type": "application/json"}


@asynccontextmanager
async def at_work(cron: Cronlock) -> AsyncIterator[None]:
    """A worker in this process."""
    async with cron, working(cron, drain=10):
        yield


def echoing(make_cron: Make) -> Cronlock:
    """A Cronlock whose task "echo" returns its payload."""
    cron = make_cron(admin_secret="an-admin-secret-0123456789")

    @cron.task("echo", dedupe=None)
    async def echo(run: Run, payload: dict[str, Any]) -> dict[str, Any]:
        return payload

    return cron


async def none_live(db: Db) -> None:
    live = "SELECT (SELECT count(*) FROM cronlock.job) + (SELECT count(*) FROM cronlock.job_waiting)"
    await until(lambda: value(db, live) == 0, "all jobs end", 30)


# -- Q07 -----------------------------------------------------------------------------------------------------


async def test_half_a_surrogate_pair_is_400_and_a_whole_one_arrives_as_it_was(make_cron: Make, db: Db) -> None:
    cron = echoing(make_cron)
    async with serving(cron.app()) as client:
        for half in (b'{"a":"\\ud83d"}', b'{"a":"\\ude00"}', b'{"a":"\\ude00\\ud83d"}', b'{"\\ud83d":1}'):
            answer = await client.post("/jobs/echo", content=half, headers=JSON)
            assert (answer.status_code, answer.json()["status"]) == (400, "bad_request"), half
        whole = await client.post("/jobs/echo", content=b'{"a":"\\ud83d\\ude00"}', headers=JSON)
        assert whole.status_code == 202
        key = await client.post("/jobs/echo", json={}, headers=[(b"idempotency-key", b"\xed\xa0\xbd")])
        assert key.status_code == 400
        async with at_work(echoing(make_cron)):
            await none_live(db)
        admin = {"authorization": "Bearer an-admin-secret-0123456789"}
        seen = (await client.get(f"/jobs/{whole.json()['jobId']}", headers=admin)).json()
    assert seen["payload"] == seen["result"] == {"a": "😀"}
    assert value(db, "SELECT count(*) FROM cronlock.job_history") == 1


# -- Q08 -----------------------------------------------------------------------------------------------------

NUMBERS = {
    "NaN": None,
    "Infinity": None,
    "-Infinity": None,
    "1e400": None,
    "1e5000": None,
    "9" * 5000: None,
    "9" * 40: int("9" * 40),
    "0.1": 0.1,
    "-0.0": 0.0,
    str(2**53 + 1): 2**53 + 1,
    "1e22": 10**22,
    "5e-324": 5e-324,
}
"""A number as it is sent, and as the worker has it; None where it is refused."""


async def test_numbers_arrive_unchanged_in_the_worker_or_are_400(make_cron: Make, db: Db) -> None:
    cron = echoing(make_cron)
    made: dict[str, int] = {}
    async with serving(cron.app()) as client:
        for text, expected in NUMBERS.items():
            answer = await client.post("/jobs/echo", content=b'{"n":%s}' % text.encode(), headers=JSON)
            assert answer.status_code == (400 if expected is None else 202), text[:20]
            if expected is not None:
                made[text] = answer.json()["jobId"]
        async with at_work(echoing(make_cron)):
            await none_live(db)
        admin = {"authorization": "Bearer an-admin-secret-0123456789"}
        for text, job_id in made.items():
            seen = (await client.get(f"/jobs/{job_id}", headers=admin)).json()
            assert seen["status"] == "completed"
            assert seen["payload"] == seen["result"] == {"n": NUMBERS[text]}, text
    assert value(db, "SELECT count(*) FROM cronlock.job_history") == len(made)


async def test_a_result_that_json_does_not_have_ends_the_job_once_with_a_mark(make_cron: Make, db: Db) -> None:
    cron = make_cron()
    db.execute("CREATE TABLE effect (a int)")

    @cron.task("odd")
    async def odd(run: Run) -> dict[str, Any]:
        await run.driver.execute("INSERT INTO effect VALUES (1)")
        return {"n": float("nan"), "long": 10**5000, "object": object()}

    async with cron:
        await cron.enqueue(None, "odd")
    async with at_work(cron):
        await none_live(db)
    assert db.execute("SELECT status, attempts FROM cronlock.job_history").fetchall() == [("completed", 1)]
    assert "not serialisable" in value(db, "SELECT result FROM cronlock.job_history")
    assert value(db, "SELECT count(*) FROM effect") == 1


# -- Q10 -----------------------------------------------------------------------------------------------------


async def sixty(clients: list[httpx2.AsyncClient], key: str) -> list[httpx2.Response]:
    """60 posts at once with one key and one payload, in turn to each server."""
    headers = {"idempotency-key": key}
    return list(
        await asyncio.gather(*(clients[n % 3].post("/jobs/nightly", json={"a": 1}, headers=headers) for n in range(60)))
    )


@asynccontextmanager
async def three_servers(start: Start) -> AsyncIterator[list[httpx2.AsyncClient]]:
    """Three servers in processes of their own, and a client of each."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(httpx2.AsyncClient(base_url=url, headers=AUTH, timeout=30))
            for url in [start()[1] for _ in range(3)]
        ]


async def test_sixty_posts_of_one_key_on_three_servers_make_one_job_fifty_times(start: Start, db: Db) -> None:
    async with three_servers(start) as clients:
        for number in range(50):
            answers = await sixty(clients, f"round-{number}")
            assert {answer.status_code for answer in answers} == {202}
            assert len({answer.json()["jobId"] for answer in answers}) == 1
            assert Counter(answer.json()["duplicate"] for answer in answers) == {True: 59, False: 1}
    assert value(db, "SELECT count(*) FROM cronlock.job") == 50


@pytest.mark.parametrize("is_kept", [True, False])
async def test_while_the_winner_is_open_the_losers_wait_and_one_of_them_wins_if_it_rolls_back(
    start: Start, make_cron: Make, database_url: str, db: Db, is_kept: bool
) -> None:
    cron = make_cron()
    cron.task("nightly")(lambda run: None)
    async with three_servers(start) as clients, await psycopg.AsyncConnection.connect(database_url) as winner:
        first = await cron.enqueue(winner, "nightly", {"a": 1}, idempotency_key="one")
        posts = asyncio.create_task(sixty(clients, "one"))
        await asyncio.sleep(2 if is_kept else 0.5)
        await (winner.commit() if is_kept else winner.rollback())
        answers = await posts
    codes = Counter(answer.status_code for answer in answers)
    assert set(codes) <= {202, 409}, codes
    assert codes[202]
    assert {answer.headers.get("retry-after") for answer in answers if answer.status_code == 409} <= {"1"}
    bodies = [answer.json() for answer in answers if answer.status_code == 202]
    assert [body["duplicate"] for body in bodies].count(False) == (0 if is_kept else 1)
    (job_id,) = {body["jobId"] for body in bodies}
    assert (job_id == first.job_id) == is_kept
    assert db.execute("SELECT id FROM cronlock.job").fetchall() == [(job_id,)]


# -- Q11 -----------------------------------------------------------------------------------------------------

SAME = [b'{"b":[1,2],"a":1}', b'{ "a" : 1 ,\n"b":[1, 2]}', b'{"a":1,"b":[1,2]}', b'{"\\u0061":1,"b":[1,2]}']
OTHER = [b'{"a":1,"b":[2,1]}', b'{"a":1.0,"b":[1,2]}', b'{"a":1,"b":[1,2],"c":null}', b'{"a":"1","b":[1,2]}', b"{}"]


async def test_a_key_of_another_payload_is_422_in_every_state_of_the_first_job(make_cron: Make, db: Db) -> None:
    cron = make_cron()
    gate, running = asyncio.Event(), asyncio.Event()

    def register(cron: Cronlock) -> Cronlock:
        @cron.task("steps", max_attempts=1)
        async def steps(run: Run, payload: dict[str, Any]) -> None:
            running.set()
            await gate.wait()
            if "fails" in payload:
                raise ValueError("on purpose")

        cron.task("other")(lambda run: None)
        return cron

    register(cron)

    async def compare(key: str, first: int, fails: bool) -> None:
        more = b',"fails":1}' if fails else b"}"
        headers = {**JSON, "idempotency-key": key}
        for body in SAME:
            answer = await client.post("/jobs/steps?priority=9", content=body[:-1] + more, headers=headers)
            assert (answer.status_code, answer.json()) == (
                202,
                {"status": "queued", "jobId": first, "duplicate": True},
            ), body
        for body in OTHER:
            answer = await client.post("/jobs/steps", content=body, headers=headers)
            assert (answer.status_code, answer.json()["jobId"]) == (422, first), body

    async with serving(cron.app()) as client:
        for fails in (False, True):
            key = f"key-{fails}"
            body = {"a": 1, "b": [1, 2], **({"fails": 1} if fails else {})}
            answer = await client.post("/jobs/steps", json=body, headers={"idempotency-key": key})
            first = answer.json()["jobId"]
            await compare(key, first, fails)
            gate.clear()
            running.clear()
            async with at_work(register(make_cron())):
                await running.wait()
                await compare(key, first, fails)
                gate.set()
                await none_live(db)
            await compare(key, first, fails)
        other = await client.post("/jobs/other", json={}, headers={"idempotency-key": "key-True"})
        assert other.json()["duplicate"] is False, "another task has its own keys"
    ends = db.execute("SELECT status FROM cronlock.job_history ORDER BY id").fetchall()
    assert ends == [("completed",), ("failed",)]


async def test_two_payloads_that_race_for_one_key_make_one_job_and_the_other_is_422(make_cron: Make, db: Db) -> None:
    async with serving(echoing(make_cron).app()) as one, serving(echoing(make_cron).app()) as two:
        for number in range(20):
            headers = {"idempotency-key": f"round-{number}"}
            answers = await asyncio.gather(
                *((one, two)[n % 2].post("/jobs/echo", json={"n": n % 2}, headers=headers) for n in range(20))
            )
            assert Counter(answer.status_code for answer in answers) == {202: 10, 422: 10}
            assert len({answer.json()["jobId"] for answer in answers}) == 1
    assert value(db, "SELECT count(*) FROM cronlock.job") == 20


# -- Q13 -----------------------------------------------------------------------------------------------------

REFUSED_KEYS = [
    b"",
    b" ",
    b'""',
    b"a" * 256,
    b"a" * 60_000,
    bytes(range(128, 256)) * 20,
    "é".encode(),
    unicodedata.normalize("NFD", "é").encode(),
    b'"a\tb"',
    b'"' + b"a" * 256 + b'"',
]
TAKEN_KEYS = [
    b"a" * 255,
    b"../x",
    b"A",
    b"a",
    b'" a"',
    b'"a "',
    b'"5',
    b"5",
    b"null",
    b"[1]",
    b'"a\\"b"',
    b"a'b",
    b"%00",
]


async def test_a_key_is_compared_byte_for_byte_or_refused(make_cron: Make, db: Db) -> None:
    async with serving(echoing(make_cron).app()) as client:
        for key in REFUSED_KEYS:
            answer = await client.post("/jobs/echo", json={}, headers=[(b"idempotency-key", key)])
            assert (answer.status_code, answer.json()["status"]) == (400, "bad_request"), key[:20]
            assert len(answer.content) < 4096
        two = [(b"idempotency-key", b"a"), (b"idempotency-key", b"b")]
        assert (await client.post("/jobs/echo", json={}, headers=two)).status_code == 400
        for key in TAKEN_KEYS:
            for is_duplicate in (False, True):
                answer = await client.post("/jobs/echo", json={}, headers=[(b"idempotency-key", key)])
                assert (answer.status_code, answer.json()["duplicate"]) == (202, is_duplicate), key
        quoted = await client.post("/jobs/echo", json={}, headers=[(b"idempotency-key", b'"../x"')])
        assert quoted.json()["duplicate"] is True, "quotes are the header's, not the key's"
        in_body = await client.post("/jobs/echo", json={"idempotencyKey": "b"}, headers={"idempotency-key": "z"})
        assert in_body.json()["duplicate"] is False, "a body has a payload and no key"
    assert value(db, "SELECT count(*) FROM cronlock.idempotency_key") == len(TAKEN_KEYS) + 1


@pytest.mark.parametrize("key", ["", "a" * 256, "a\0b", "a\nb", 5, None, ["a"], b"a"])
async def test_a_key_that_is_none_is_refused_in_code_too(make_cron: Make, db: Db, key: Any) -> None:
    cron = echoing(make_cron)
    async with cron:
        if key is None:
            await cron.enqueue(None, "echo", idempotency_key=None)
            return
        from cronlock import PayloadError

        with pytest.raises(PayloadError, match="the idempotency key"):
            await cron.enqueue(None, "echo", idempotency_key=key)
    assert value(db, "SELECT count(*) FROM cronlock.job") == 0


# -- Q14 -----------------------------------------------------------------------------------------------------


async def test_payloads_up_to_the_limit_are_taken_and_a_notification_carries_nothing(
    make_cron: Make, db: Db, database_url: str
) -> None:
    payloads = [{"a": "x" * 7900}, {"a": "x" * 8100}, {"a": "x" * 900_000}, {"a": "é" * 4000}, {"a": "😀" * 2000}]
    cron = echoing(make_cron)
    with psycopg.connect(database_url, autocommit=True) as listener:
        listener.execute('LISTEN "cronlock_job:cronlock"')
        async with at_work(echoing(make_cron)):
            await until(lambda: value(db, "SELECT bool_or(is_idle) FROM cronlock.worker"), "the worker is idle")
            async with serving(cron.app()) as client:
                for payload in payloads:
                    answer = await client.post("/jobs/echo", json=payload)
                    assert answer.status_code == 202
                assert (await client.post("/jobs/echo", json={"a": "x" * 1_100_000})).status_code == 413
            await none_live(db)
        told = [notify.payload for notify in listener.notifies(timeout=0.5)]
    assert told
    assert set(told) == {""}
    kept = [row[0] for row in db.execute("SELECT payload FROM cronlock.job_history ORDER BY id").fetchall()]
    assert kept == payloads


async def test_ten_thousand_enqueues_in_one_transaction_are_taken_or_none_is(
    make_cron: Make, database_url: str, db: Db
) -> None:
    cron = make_cron()
    name = "a" * 40
    cron.task(name, queue="q" * 40)(lambda run: None)
    count: Callable[[], int] = lambda: value(db, "SELECT count(*) FROM cronlock.job")  # noqa: E731
    async with await psycopg.AsyncConnection.connect(database_url) as connection:
        for _ in range(100):
            await cron.enqueue_many(connection, name, [{"n": n} for n in range(100)])
        await connection.rollback()
        assert count() == 0
        for _ in range(100):
            await cron.enqueue_many(connection, name, [{"n": n} for n in range(100)])
        await connection.commit()
    assert count() == 10_000


# -- Q16 -----------------------------------------------------------------------------------------------------

APP = """
from cronlock import Cronlock, Run

cron = Cronlock()


@cron.task("known")
async def known(run: Run) -> None: ...
"""
NEW = """

@cron.task("new")
async def new(run: Run) -> None: ...
"""


async def test_a_worker_that_does_not_have_a_task_leaves_its_jobs_alone_and_they_are_seen(
    make_cron: Make, database_url: str, db: Db, tmp_path: Path
) -> None:
    (tmp_path / "v1.py").write_text(APP)
    (tmp_path / "v2.py").write_text(APP + NEW)
    cron = make_cron(admin_secret="an-admin-secret-0123456789")
    for name in ("known", "new"):
        cron.task(name)(lambda run: None)
    env = environment(DATABASE_URL=database_url, CRONLOCK_LOG_FORMAT="text")
    admin = {"authorization": "Bearer an-admin-secret-0123456789"}

    def worker(version: str) -> Running:
        return Running("worker", f"{version}:cron", cwd=tmp_path, env=env)

    async def enqueue(number: int) -> None:
        for _ in range(number):
            assert (await client.post("/jobs/new", json={})).status_code == 202

    def ends() -> Any:
        return db.execute("SELECT status, attempts, count(*) FROM cronlock.job_history GROUP BY 1, 2").fetchall()

    async def scrape(line: str) -> bool:
        return line in (await client.get("/metrics", headers=admin)).text

    async with serving(cron.app()) as client:
        assert (await client.post("/jobs/misspelt", json={})).status_code == 404
        with worker("v1") as v1, worker("v2") as v2:
            v1.until_says("working for")
            v2.until_says("working for")
            await enqueue(50)
            await none_live(db)
            assert ends() == [("completed", 1, 50)]
            v2.process.terminate()
            assert v2.ends() == 0
            await enqueue(20)
            known = (await client.post("/jobs/known", json={})).json()["jobId"]
            await until(lambda: value(db, "SELECT count(*) FROM cronlock.job_history WHERE id = %s", known), "known")
            assert db.execute("SELECT DISTINCT task, attempts FROM cronlock.job").fetchall() == [("new", 0)]
            assert await scrape('cronlock_jobs_without_worker{task="new"} 20.0')
            listed = (await client.get("/admin/jobs?task=new&status=queued", headers=admin)).json()["jobs"]
            assert [row["hasNoWorker"] for row in listed] == [True] * 20
            seen = (await client.get(f"/jobs/{listed[0]['jobId']}", headers=admin)).json()
            assert (seen["code"], seen["attempts"]) == ("no_handler", 0)
            age = (await client.get("/metrics", headers=admin)).text.split(
                'cronlock_queue_age_seconds{queue="default"} '
            )
            assert float(age[1].split()[0]) > 0
            with worker("v2"):
                await none_live(db)
    assert sorted(ends()) == [("completed", 1, 71)]
