"""Cases of caches (CACHE): what is told, when, and how often, with real processes where one is killed."""

import asyncio
import time
from typing import Any

import httpx2
import psycopg
import pytest

from cronlock import Cronlock, Retry, Run, Webhook
from tests import AUTH, Db, Make, advisory_locks, serving, until, value
from tests.commands import Running, address, environment
from tests.receiver import HOOK_SECRET, Receiver, receiving
from tests.working import working

pytestmark = pytest.mark.anyio
APP = "tests.invalidating:cron"
WITHIN = 8.0
"""Seconds in which what a killed process left is told, as docs/invalidation.md says: a look, and a lease."""


def with_webhook(make_cron: Make, receiver: Receiver, **settings: Any) -> Cronlock:
    cron = make_cron(webhook_secret=HOOK_SECRET, **settings)
    cron.target("next", Webhook(receiver.url, timeout="30s"))
    return cron


def waiting(db: Db) -> int:
    return int(value(db, "SELECT count(*) FROM cronlock.invalidation WHERE delivered_at IS NULL"))


@pytest.mark.parametrize("kind", ["run", "job"])
async def test_a_webhook_that_reads_the_row_at_once_reads_the_new_value_a_hundred_times_of_a_hundred(
    make_cron: Make, db: Db, kind: str
) -> None:
    """C01: each task updates its row, says so, waits two seconds, and returns."""
    db.execute("CREATE TABLE shown (id int PRIMARY KEY, body text)")
    db.execute("INSERT INTO shown SELECT n, 'old' FROM generate_series(1, 100) n")
    read: list[tuple[str, str]] = []

    def came(body: dict[str, Any]) -> None:
        read.extend((tag, value(db, "SELECT body FROM shown WHERE id = %s", int(tag))) for tag in body["tags"])

    async with receiving(came=came) as receiver:
        cron = with_webhook(make_cron, receiver, pool_size=50, acquire_timeout="30s")

        @cron.task("showing", key="{number}")
        async def showing(run: Run, payload: dict[str, Any]) -> None:
            number = payload["number"]
            run.invalidate(tags=[str(number)])
            await run.driver.execute("UPDATE shown SET body = 'new' WHERE id = %s", (number,))
            await asyncio.sleep(2)

        async with cron:
            if kind == "run":
                calls = [cron.run("showing", {"number": number}) for number in range(1, 101)]
                assert {outcome.status for outcome in await asyncio.gather(*calls)} == {"completed"}
            else:
                await cron.enqueue_many(None, "showing", [{"number": number} for number in range(1, 101)])
                async with working(cron, concurrency=50, drain=5):
                    await until(lambda: len({tag for tag, _ in read}) == 100, "all are told", 40)
            await until(lambda: waiting(db) == 0, "all is told")
    assert {tag for tag, _ in read} == {str(number) for number in range(1, 101)}
    assert [tag for tag, body in read if body != "new"] == []
    assert receiver.forged == 0


async def test_only_what_was_committed_is_told_and_a_job_tried_thrice_tells_it_once(make_cron: Make, db: Db) -> None:
    """C02: a run that raises; the same connection after it; a savepoint; a job that fails twice."""
    async with receiving() as receiver:
        cron = with_webhook(make_cron, receiver, pool_size=1)
        backends: list[int] = []

        @cron.task("telling", retry_delay="10ms", retry_cap="10ms")
        async def telling(run: Run, payload: dict[str, str]) -> None:
            cursor = await run.driver.execute("SELECT pg_backend_pid()")
            backends.extend(await cursor.fetchone() or ())
            if payload["tag"] == "A":
                run.invalidate(tags=["A"])
                await run.driver.execute("SELECT 1")
                run.invalidate(tags=["A"])
                raise ValueError("on purpose")
            if payload["tag"] == "CD":
                nested = await run.connection.begin_nested()
                run.invalidate(tags=["C"])
                await nested.rollback()
                run.invalidate(tags=["D"])
                return
            run.invalidate(tags=[payload["tag"]])
            if payload["tag"] == "E" and run.attempt < 3:
                raise Retry("again", after=0.05)

        async with cron:
            ends = [(await cron.run("telling", {"tag": tag})).status for tag in ("A", "B", "CD")]
            assert ends == ["failed", "completed", "completed"]
            assert len(set(backends)) == 1
            await until(lambda: len(receiver.told()) >= 2, "B and D are told")
            job = await cron.enqueue(None, "telling", {"tag": "E"})
            async with working(cron, drain=5):
                query = "SELECT status, attempts FROM cronlock.job_history WHERE id = %s"
                row = await until(lambda: db.execute(query, (job.job_id,)).fetchone(), "the job", 20)
                assert row == ("completed", 3)
                await until(lambda: waiting(db) == 0 and "E" in receiver.told(), "E is told")
    assert receiver.told() == ["B", "D", "E"]


def settings(database_url: str, receiver: Receiver, **more: str) -> dict[str, str]:
    return environment(
        DATABASE_URL=database_url,
        CASES_WEBHOOK=receiver.url,
        CRONLOCK_WEBHOOK_SECRET=HOOK_SECRET,
        CRONLOCK_LOG_FORMAT="text",
        **more,
    )


@pytest.mark.parametrize("task", ["tagging", "tagging-in-a-thread", "guarded"])
@pytest.mark.parametrize("kind", ["server", "worker"])
async def test_a_process_killed_right_after_its_commit_loses_nothing_that_it_had_to_tell(
    database_url: str, db: Db, tmp_path: Any, kind: str, task: str, make_cron: Make
) -> None:
    """C04: SIGKILL between the answer to COMMIT and everything else; then both are started again."""
    async with receiving() as receiver:
        command = ("serve", APP, "--port", "0") if kind == "server" else ("worker", APP)
        with Running(*command, cwd=tmp_path, env=settings(database_url, receiver, CASES_KILL="1")) as killed:
            if kind == "server":
                url = await asyncio.to_thread(address, killed)
                async with httpx2.AsyncClient(headers=AUTH, timeout=20) as client:
                    with pytest.raises(httpx2.HTTPError):
                        await client.get(f"{url}/cron/{task}?number=1")
                done = "SELECT count(*) FROM cronlock.run WHERE status = 'completed'"
            else:
                enqueue(database_url, task, 1)
                done = "SELECT count(*) FROM cronlock.job_history WHERE status = 'completed'"
            assert await asyncio.to_thread(killed.ends) == -9
        await until(lambda: value(db, done) == 1, "it was committed")
        assert waiting(db) >= 1
        assert receiver.tries == []
        with (
            Running("serve", APP, "--port", "0", cwd=tmp_path, env=settings(database_url, receiver)) as server,
            Running("worker", APP, cwd=tmp_path, env=settings(database_url, receiver)) as worker,
        ):
            url = await asyncio.to_thread(address, server)
            await asyncio.to_thread(worker.until_says, "working for")
            began = time.monotonic()
            await until(lambda: set(receiver.told()) == {"a1", "b1", "c1"}, "all three are told", WITHIN)
            assert time.monotonic() - began < WITHIN
            async with httpx2.AsyncClient(headers=AUTH, timeout=20) as client:
                assert (await client.get(f"{url}/cron/{task}?number=2")).json()["status"] == "completed"
            await until(lambda: waiting(db) == 0, "the next ones are told")
    assert receiver.told() == ["a1", "b1", "c1", "a2", "b2", "c2"]
    assert receiver.forged == 0


def enqueue(database_url: str, task: str, number: int) -> None:
    """Write a job as any program could."""
    from tests.invalidating import cron

    with psycopg.connect(database_url) as connection:
        cron.enqueue_sync(connection, task, {"number": number})


async def test_a_process_killed_while_a_target_hangs_lets_another_one_tell_it_soon(
    database_url: str, db: Db, tmp_path: Any
) -> None:
    """C04: the dead process had the target's lease."""
    async with receiving(answer="hang") as receiver:
        with Running("serve", APP, "--port", "0", cwd=tmp_path, env=settings(database_url, receiver)) as first:
            url = await asyncio.to_thread(address, first)
            async with httpx2.AsyncClient(headers=AUTH, timeout=20) as client:
                assert (await client.get(f"{url}/cron/tagging?number=1")).json()["status"] == "completed"
            await until(lambda: receiver.tries, "it hangs")
            with Running("worker", APP, cwd=tmp_path, env=settings(database_url, receiver)) as other:
                await asyncio.to_thread(other.until_says, "working for")
                await asyncio.sleep(5)  # more than the lease: it is renewed
                assert len(receiver.tries) == 1
                receiver.answer = 200
                first.process.kill()
                await until(lambda: waiting(db) == 0, "the worker tells it", WITHIN)
    assert receiver.told() == ["a1", "b1", "c1"]


async def test_a_webhook_that_takes_long_keeps_neither_lock_nor_connection_nor_answer(make_cron: Make, db: Db) -> None:
    """C05: it takes 25 s; the pool has one connection."""
    async with receiving(pause=25) as receiver:
        cron = with_webhook(make_cron, receiver, pool_size=1, record_pool_size=1)

        @cron.task("quick")
        async def quick(run: Run) -> None:
            await run.driver.execute("SELECT 1")
            run.invalidate(tags=["quick"])

        async with serving(cron.app()) as client:
            began = time.monotonic()
            assert (await client.get("/cron/quick")).json()["status"] == "completed"
            assert time.monotonic() - began < 1
            await until(lambda: receiver.tries, "it is being told")
            await asyncio.sleep(max(0.0, 2 - (time.monotonic() - began)))
            assert advisory_locks(db) == 0
            query = """SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
                AND pid <> pg_backend_pid() AND (state <> 'idle' OR xact_start IS NOT NULL)"""
            await until(lambda: value(db, query) == 0, "nothing is open", 2)
            await asyncio.sleep(max(0.0, 5 - (time.monotonic() - began)))
            again = time.monotonic()
            assert (await client.get("/cron/quick")).json()["status"] == "completed"
            assert time.monotonic() - again < 1
            assert receiver.bodies == []
            closing = time.monotonic()
        assert time.monotonic() - closing < 8
