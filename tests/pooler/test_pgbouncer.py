"""Everything through a real PgBouncer in transaction mode, whose pool is smaller than the work.

A slot is a server connection of PgBouncer's pool; an open run keeps one. With `CRONLOCK_DIRECT_URL` records
go past the pooler, without it they need a slot too: then CRONLOCK_POOL_SIZE of all processes together must
stay below the pooler's pool, and where it does not, nothing may hang and nothing may be left behind.
"""

import asyncio
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx2
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from cronlock import Cronlock, Run
from cronlock.embedded import Embedded
from cronlock.errors import MigrationError
from cronlock.migrate import migrate
from cronlock.models import REVISION
from tests import Db, Make, serving, until
from tests.conftest import SERVER_SETTINGS
from tests.crashes import served
from tests.crashes.process import Served
from tests.observing import in_transaction, is_quiet, locks, statuses
from tests.pooler.bouncer import Bouncer

pytestmark = pytest.mark.anyio
MIGRATION_KEY = "hashtextextended('cronlock migrate' || chr(31) || 'cronlock', 0)"


@pytest.fixture(scope="module")
def bouncer(server_url: str) -> Iterator[Bouncer]:
    with tempfile.TemporaryDirectory(prefix="cronlock-pgbouncer-") as directory:
        made = Bouncer(Path(directory), server_url)
        try:
            made.start()
            yield made
        finally:
            made.stop()


@pytest.fixture
def pooled_url(bouncer: Bouncer, database_url: str) -> str:
    """The test's database, through PgBouncer."""
    return bouncer.url(str(conninfo_to_dict(database_url)["dbname"]))


@pytest.fixture
def make_pooled(make_cron: Make, pooled_url: str) -> Make:
    """Makes a Cronlock that reaches the test's database through PgBouncer."""

    def make(**settings: Any) -> Cronlock:
        return make_cron(**{"database_url": pooled_url, "pooler": "transaction", **settings})

    return make


def give_tasks(cron: Cronlock, *, threads: bool = True) -> None:
    """Ten tasks that repeat their statements, past the driver's threshold for preparing one."""

    async def awaiting(run: Run, payload: dict[str, Any]) -> int:
        for _ in range(7):
            await run.driver.execute("SELECT %s::int", (1,))
            await run.connection.exec_driver_sql("SELECT %s::text", ("a",))
        await run.connection.exec_driver_sql("INSERT INTO effect VALUES (%s, %s)", (run.id, run.task))
        if "fail" in payload:
            raise ValueError("asked to fail")
        return 1

    def blocking(run: Run, payload: dict[str, Any]) -> int:
        for _ in range(7):
            run.driver.execute("SELECT %s::int", (1,))
            run.connection.exec_driver_sql("SELECT %s::text", ("a",))
        run.driver.execute("INSERT INTO effect VALUES (%s, %s)", (run.id, run.task))
        if "fail" in payload:
            raise ValueError("asked to fail")
        return 1

    for number in range(10):
        cron.task(f"task-{number}")(blocking if threads and number % 2 else awaiting)


async def call_many(clients: list[httpx2.AsyncClient], calls: int, at_once: int) -> list[httpx2.Response]:
    """Call the ten tasks in turn, a third of the calls failing, `at_once` of them at one time."""
    room = asyncio.Semaphore(at_once)

    async def one(number: int) -> httpx2.Response:
        async with room:
            query = "?fail=1" if number % 3 == 0 else ""
            return await clients[number % len(clients)].get(f"/cron/task-{number % 10}{query}")

    return list(await asyncio.gather(*(one(number) for number in range(calls))))


def assert_all_agrees(db: Db, answers: list[httpx2.Response]) -> None:
    """No lock and no transaction is left, and answers, rows and effects tell the same story."""
    assert locks(db) == []
    assert in_transaction(db) == []
    assert {answer.status_code for answer in answers} <= {200, 500, 503}
    answered = {
        int(answer.headers["cronlock-run-id"]): answer.json()["status"]
        for answer in answers
        if "cronlock-run-id" in answer.headers
    }
    recorded: dict[int, str] = dict(db.execute("SELECT id, status FROM cronlock.run").fetchall())
    assert {run: recorded[run] for run in answered} == answered
    assert set(answered.values()) <= {"completed", "failed", "skipped"}
    # A 503 may have left a row, but never one that says that the task did something.
    assert {recorded[run] for run in recorded.keys() - answered.keys()} <= {"cancelled", "skipped", "lost"}
    effects = {run for (run,) in db.execute("SELECT run_id FROM effect").fetchall()}
    assert effects == {run for run, status in recorded.items() if status == "completed"}


@pytest.mark.parametrize("is_direct", [True, False], ids=["records go direct", "records need a slot"])
async def test_300_calls_leave_no_lock_and_no_transaction_and_every_answer_is_true(
    make_pooled: Make, database_url: str, db: Db, is_direct: bool
) -> None:
    db.execute("CREATE TABLE effect (run_id bigint, task text)")
    # Two processes with one connection for runs each leave one of the three slots to the records.
    settings = {"direct_url": database_url} if is_direct else {"pool_size": 1}
    crons = [make_pooled(**settings) for _ in range(2)]
    for cron in crons:
        give_tasks(cron, threads=is_direct)
    async with serving(crons[0].app()) as here, serving(crons[1].app()) as elsewhere:
        answers = await call_many([here, elsewhere], 300, 8)
        assert_all_agrees(db, answers)
    ended = [answer.json()["status"] for answer in answers]
    assert ended.count("completed") > 100
    assert ended.count("failed") > 50
    assert ended.count("unavailable") == 0


async def test_more_runs_than_slots_end_in_bounded_time_and_leave_nothing(make_pooled: Make, db: Db) -> None:
    db.execute("CREATE TABLE effect (run_id bigint, task text)")
    crons = [make_pooled(acquire_timeout="1s", pool_size=10) for _ in range(2)]
    for cron in crons:
        give_tasks(cron)
    async with serving(crons[0].app()) as here, serving(crons[1].app()) as elsewhere:
        started = time.monotonic()
        answers = await call_many([here, elsewhere], 60, 20)
        assert time.monotonic() - started < 20
        await until(lambda: is_quiet(db), "everything is given back", 5)
        answers += await call_many([here, elsewhere], 10, 1)
        assert {answer.status_code for answer in answers[-10:]} == {200, 500}
        await until(lambda: "running" not in statuses(db), "every run has ended", 5)
        assert_all_agrees(db, answers)


async def test_the_end_of_a_run_is_recorded_though_every_slot_is_kept_by_an_open_transaction(
    make_pooled: Make, pooled_url: str, db: Db
) -> None:
    cron = make_pooled()
    end = asyncio.Event()

    @cron.task("first")
    async def first(run: Run) -> None:
        await run.driver.execute("CREATE TABLE left_behind (a int)")
        await end.wait()
        raise ValueError("asked to fail")

    @cron.task("second")
    def second(run: Run) -> None:
        run.driver.execute("SET search_path = nowhere")
        run.driver.execute("SELECT pg_advisory_lock(7)")
        while not end.is_set():
            time.sleep(0.01)
        raise ValueError("asked to fail")

    async with serving(cron.app()) as client, AsyncExitStack() as stack:
        calls = [asyncio.create_task(client.get(f"/cron/{name}")) for name in ("first", "second")]
        await until(lambda: len(locks(db)) == 3, "both run", 5)
        connect = psycopg.AsyncConnection.connect
        others = [await stack.enter_async_context(await connect(pooled_url)) for _ in range(3)]
        await others[0].execute("SELECT 1")  # has the third slot, and the next two stand in front of our record
        waiting = [asyncio.create_task(other.execute("SELECT 1")) for other in others[1:]]
        await asyncio.sleep(0.1)
        end.set()
        started = time.monotonic()
        answers = await asyncio.gather(*calls)
        ended = db.execute("SELECT status, error_type FROM cronlock.run").fetchall()
        assert ended == [("failed", "ValueError")] * 2
        assert time.monotonic() - started < 2
        assert [answer.json()["status"] for answer in answers] == ["failed", "failed"]
        assert locks(db) == []
        assert db.execute("SELECT to_regclass('left_behind')").fetchone() == (None,)
        # What ran on the slots left nothing on them.
        await asyncio.gather(*waiting)
        for other in others:
            cursor = await other.execute("SHOW search_path")
            assert await cursor.fetchone() == ('"$user", public',)


@pytest.mark.parametrize("kind", ["pg_sleep", "pg_sleep in a thread", "sleep"])
@pytest.mark.parametrize("how", ["timeout", "operator"])
async def test_a_timeout_and_an_operator_end_a_run_through_the_pooler(
    make_pooled: Make, database_url: str, db: Db, kind: str, how: str
) -> None:
    cron = make_pooled(direct_url=database_url)

    async def awaiting(run: Run) -> None:
        await run.driver.execute("CREATE TABLE left_behind (a int)")
        await (asyncio.sleep(30) if kind == "sleep" else run.driver.execute("SELECT pg_sleep(30)"))

    def blocking(run: Run) -> None:
        run.driver.execute("CREATE TABLE left_behind (a int)")
        run.driver.execute("SELECT pg_sleep(30)")

    cron.task("slow", timeout="1s" if how == "timeout" else "30s")(
        blocking if kind == "pg_sleep in a thread" else awaiting
    )
    async with serving(cron.app()) as client:
        call = asyncio.create_task(client.get("/cron/slow"))
        started = time.monotonic()
        if how == "operator":
            await until(lambda: statuses(db) == ["running"], "it runs", 5)
            started = time.monotonic()
            db.execute("UPDATE cronlock.run SET cancel_requested_at = now(), cancel_requested_by = 'ana'")
        answer = await call
        assert time.monotonic() - started < 2.2
        assert answer.json()["status"] == ("timed_out" if how == "timeout" else "cancelled")
        assert statuses(db) == [answer.json()["status"]]
        assert locks(db) == []
        assert in_transaction(db) == []
        assert db.execute("SELECT to_regclass('left_behind')").fetchone() == (None,)


@pytest.mark.parametrize("how", ["sql", "python"])
async def test_a_killed_process_frees_its_lock_behind_the_pooler(
    make_pooled: Make, pooled_url: str, database_url: str, db: Db, how: str
) -> None:
    db.execute("CREATE TABLE effect (run_id bigint)")
    cron = make_pooled(direct_url=database_url)
    served.give_tasks(cron)
    async with serving(cron.app()) as other:
        with Served(pooled_url, pooler="transaction", direct_url=database_url) as server:
            async with server.client() as client:
                calling = asyncio.create_task(client.get(f"/cron/work?how={how}&pause=60"))
                await until(lambda: any("INSERT" in query or "sleep" in query for *_, query in locks(db)), "it runs")
                server.kill()
                await until(lambda: not locks(db), "the lock is free", 1.5)
                await asyncio.wait((calling,))
                assert calling.exception() is not None
        assert (await other.get("/cron/work")).json()["status"] == "completed"
    assert statuses(db, "work") == ["lost", "completed"]


@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "through the pooler"])
async def test_a_migration_beside_a_pooler_completes_and_waits_for_another_one(
    bouncer: Bouncer, empty_url: str, is_direct: bool
) -> None:
    url = empty_url if is_direct else bouncer.url(str(conninfo_to_dict(empty_url)["dbname"]))
    with psycopg.connect(empty_url, application_name="somebody") as other:
        other.execute("SELECT pg_advisory_xact_lock(hashtextextended('cronlock migrate' || chr(31) || 'cronlock', 0))")
        lines: list[str] = []
        # Long enough for a statement that is repeated to be prepared, if it were.
        with pytest.raises(MigrationError, match="somebody"):
            await asyncio.to_thread(migrate, url, "cronlock", wait=timedelta(seconds=1), report=lines.append)
        assert "somebody" in lines[0]
    assert (await asyncio.to_thread(migrate, url, "cronlock")).before is None
    assert (await asyncio.to_thread(migrate, url, "cronlock")).before == REVISION
    with psycopg.connect(empty_url, autocommit=True) as db:
        assert db.execute("SELECT version_num FROM cronlock.alembic_version").fetchall() == [(REVISION,)]
        assert locks(db) == []
        assert in_transaction(db) == []


async def test_no_session_level_lock_and_no_named_statement_ever_reaches_the_server(make_cron: Make) -> None:
    with tempfile.TemporaryDirectory(prefix="cronlock-pgbouncer-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        settings = SERVER_SETTINGS | {"log_statement": "all", "log_min_messages": "log"}
        with Embedded(directory / "server", settings=settings) as server:
            bouncer = Bouncer(directory, server.url)
            bouncer.start()
            try:
                with psycopg.connect(server.url) as other:
                    other.execute(f"SELECT pg_advisory_xact_lock({MIGRATION_KEY})")
                    with pytest.raises(MigrationError):  # long enough for what is repeated to be prepared
                        migrate(bouncer.url("postgres"), "cronlock", wait=timedelta(seconds=2))
                migrate(bouncer.url("postgres"), "cronlock")
                with psycopg.connect(server.url, autocommit=True) as db:
                    db.execute("CREATE TABLE effect (run_id bigint, task text)")
                    cron: Cronlock = make_cron(database_url=bouncer.url("postgres"), pooler="transaction", pool_size=1)
                    give_tasks(cron)
                    async with serving(cron.app()) as client:
                        answers = await call_many([client], 60, 3)
                        assert_all_agrees(db, answers)
                    assert {answer.status_code for answer in answers} == {200, 500}
            finally:
                bouncer.stop()
        said = (directory / "server" / "server.log").read_text()
    assert said.count("pg_try_advisory_xact_lock") > 50
    assert re.findall(r"pg_(?:try_)?advisory_lock\w*", said) == []
    # "execute <unnamed>" is a statement that was not prepared.
    assert set(re.findall(r"execute ([^:]+):", said)) <= {"<unnamed>"}
    assert re.findall(r"(?im)statement: .*\b(?:LISTEN|PREPARE)\b.*", said.replace("UNLISTEN", "")) == []


@pytest.mark.parametrize("is_direct", [True, False], ids=["direct url", "pooler only"])
async def test_a_guard_holds_its_lock_through_the_pooler_and_another_process_is_skipped(
    make_pooled: Make, database_url: str, db: Db, is_direct: bool
) -> None:
    settings = {"guard_ping": "200ms", **({"direct_url": database_url} if is_direct else {"pool_size": 1})}
    entered, leave = asyncio.Event(), asyncio.Event()

    async def work(run: Run) -> None:
        entered.set()
        await leave.wait()
        run.check()

    first, second = make_pooled(**settings), make_pooled(**settings)
    for cron in (first, second):
        cron.task("work", mode="guard")(work)
    async with first, second:
        running = asyncio.create_task(first.run("work"))
        await entered.wait()
        await asyncio.sleep(1.5)  # seven pings, past the driver's threshold for preparing one
        assert [query for *_, query in locks(db)] == ["SELECT 1"]
        assert (await second.run("work")).reason == "already_running"
        leave.set()
        assert (await running).status == "completed"
        assert (await second.run("work")).status == "completed"
        await until(lambda: is_quiet(db), "nothing is left")


@pytest.mark.parametrize("is_direct", [True, False], ids=["direct url", "pooler only"])
async def test_keys_slots_intervals_and_occurrences_decide_the_same_through_the_pooler(
    make_pooled: Make, database_url: str, db: Db, is_direct: bool
) -> None:
    cron = make_pooled(**({"direct_url": database_url} if is_direct else {"pool_size": 2}))
    leave = asyncio.Event()

    async def work(run: Run) -> None:
        await leave.wait()

    async def nothing(run: Run) -> None:
        pass

    cron.task("keyed", key="{tenant}")(work)
    cron.task("slots", max_concurrent=2)(work)
    cron.task("spaced", min_interval="1h")(nothing)
    cron.task("named")(nothing)
    async with cron:
        for name, payloads in (("keyed", [{"tenant": "a"}, {"tenant": "ä"}]), ("slots", [{}, {}])):
            leave.clear()
            running = [asyncio.create_task(cron.run(name, payload)) for payload in payloads]
            await until(lambda: len(locks(db)) == 2, "both run")
            skipped = await cron.run(name, payloads[0])
            assert (skipped.status, skipped.reason) == ("skipped", "already_running")
            leave.set()
            assert [(await run).status for run in running] == ["completed", "completed"]
        assert [(await cron.run("spaced")).reason for _ in range(2)] == [None, "too_soon"]
        assert [(await cron.run("named", idempotency_key="ü")).reason for _ in range(2)] == [None, "duplicate"]
        await until(lambda: is_quiet(db), "nothing is left")
