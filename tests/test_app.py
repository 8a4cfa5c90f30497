"""`cron.run` and `run_sync` from everywhere code may be, and `using` another database for a while."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from cronlock import ConfigError, Cronlock, CronlockError, Outcome, PayloadInvalid, Run, UnknownTask
from tests import AUTH, Db, Make, rows, value
from tests.commands import environment

pytestmark = pytest.mark.anyio


@pytest.fixture
def cron(make_cron: Make) -> Cronlock:
    cron = make_cron(pool_size=3)

    @cron.task("double")
    def double(run: Run, payload: dict[str, int]) -> int:
        run.driver.execute("SELECT 1")
        return payload["of"] * 2

    @cron.task("outer")
    async def outer(run: Run) -> Any:
        await run.driver.execute("CREATE TABLE seen (n int)")
        inner = await cron.run("inner")
        raise ValueError(f"{inner.status} {inner.value}")

    @cron.task("outer-in-thread")
    def outer_in_thread(run: Run) -> Any:
        run.driver.execute("CREATE TABLE seen (n int)")
        inner = cron.run_sync("inner")
        raise ValueError(f"{inner.status} {inner.value}")

    @cron.task("inner")
    async def inner(run: Run) -> Any:
        cursor = await run.driver.execute("SELECT to_regclass('seen')")
        await run.driver.execute("CREATE TABLE of_inner (n int)")
        return [run.id, (await cursor.fetchone())[0]]

    @cron.task("itself")
    async def itself(run: Run) -> Any:
        outcome = await cron.run("itself")
        return [outcome.reason, outcome.holder and outcome.holder.run_id == run.id]

    @cron.task("itself-in-thread")
    def itself_in_thread(run: Run) -> Any:
        return cron.run_sync("itself-in-thread").reason

    @cron.task("slow")
    async def slow(run: Run) -> None:
        await asyncio.sleep(0.5)

    return cron


def test_a_script_that_is_not_async_runs_a_task_and_leaves_nothing_open(cron: Cronlock, db: Db) -> None:
    for _ in range(2):
        outcome = cron.run_sync("double", {"of": 3})
        assert (outcome.status, outcome.value) == ("completed", 6)
        assert cron._process is None
    cron.run_sync("double", {"of": 3}, idempotency_key="delivery-1")
    assert cron.run_sync("double", {"of": 3}, idempotency_key="delivery-1").reason == "duplicate"
    with pytest.raises(UnknownTask):
        cron.run_sync("triple")
    with pytest.raises(PayloadInvalid):
        cron.run_sync("double", {"of": "many"})
    assert cron._process is None
    query = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name ~ '^cronlock'"
    )
    until_then = time.monotonic() + 5
    while value(db, query) and time.monotonic() < until_then:
        time.sleep(0.01)  # a server process ends a moment after its connection
    assert value(db, query) == 0


def test_a_script_runs_a_task_without_a_warning(database_url: str, tmp_path: Path) -> None:
    script = """
from cronlock import Cronlock, Run
cron = Cronlock()

@cron.task("double")
def double(run: Run, payload: dict) -> int:
    return payload["of"] * 2

print(cron.run_sync("double", {"of": 3}).value)
"""
    command = [sys.executable, "-W", "error", "-c", script]
    env = environment(DATABASE_URL=database_url, CRON_SECRET="")
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "6\n", "")


async def test_in_an_event_loop_run_sync_refuses_to_block_it(cron: Cronlock, db: Db) -> None:
    for _ in range(2):
        with pytest.raises(CronlockError, match=r"await cron\.run\('double'\)"):
            cron.run_sync("double", {"of": 3})
        await cron.open()
    await cron.close()
    assert rows(db, "double") == []


async def test_threads_of_an_application_run_tasks_in_its_loop(cron: Cronlock, db: Db) -> None:
    async with cron:
        with ThreadPoolExecutor(4) as threads:
            loop = asyncio.get_running_loop()
            calls = [loop.run_in_executor(threads, cron.run_sync, "double", {"of": n}) for n in range(4)]
            outcomes: list[Outcome] = await asyncio.gather(*calls)
    assert {outcome.status for outcome in outcomes} <= {"completed", "skipped"}
    assert len(rows(db, "double")) == 4
    assert value(db, "SELECT count(DISTINCT instance) FROM cronlock.run") == 1


@pytest.mark.parametrize("task", ["outer", "outer-in-thread"])
async def test_a_task_that_runs_another_shares_no_transaction_with_it(cron: Cronlock, db: Db, task: str) -> None:
    async with cron:
        outcome = await cron.run(task)
    assert outcome.failure is not None
    inner = value(db, "SELECT id FROM cronlock.run WHERE task = 'inner'")
    assert outcome.failure.message == f"completed [{inner}, None]"
    assert rows(db, task) == [("failed", None)]
    assert value(db, "SELECT to_regclass('of_inner')::text") == "of_inner"
    assert value(db, "SELECT to_regclass('seen')") is None


async def test_a_task_that_runs_itself_is_skipped(cron: Cronlock) -> None:
    async with cron:
        assert (await cron.run("itself")).value == ["already_running", True]
        assert (await cron.run("itself-in-thread")).value == "already_running"


async def test_tasks_that_all_wait_for_another_one_do_not_wait_for_ever(make_cron: Make) -> None:
    cron = make_cron(pool_size=2, acquire_timeout="1s")
    barrier = asyncio.Barrier(2)

    async def outer(run: Run) -> Any:
        await barrier.wait()
        return (await cron.run("inner")).status

    async def inner(run: Run) -> None: ...

    cron.task("one")(outer)
    cron.task("other")(outer)
    cron.task("inner")(inner)
    async with cron:
        outcomes = await asyncio.gather(cron.run("one"), cron.run("other"))
    assert [outcome.status for outcome in outcomes] == ["failed", "failed"]
    assert [outcome.failure.type for outcome in outcomes if outcome.failure] == ["Unavailable"] * 2


def test_routes_threads_and_background_tasks_of_a_web_application_run_tasks(cron: Cronlock, db: Db) -> None:
    async def route(_: Request) -> Response:
        outcome = await cron.run("double", {"of": 1})
        return JSONResponse(outcome.value, background=BackgroundTask(cron.run, "double", {"of": 2}))

    def in_thread(_: Request) -> Response:
        return JSONResponse(cron.run_sync("double", {"of": 3}).value)

    routes = [Route("/route", route), Route("/thread", in_thread), Mount("/", cron.app())]
    with TestClient(Starlette(routes=routes, lifespan=cron.lifespan), headers=AUTH) as client:
        assert client.get("/route").json() == 2
        assert client.get("/thread").json() == 6
        assert client.get("/cron/double?of=5").json()["result"] == 10
    triggers = db.execute("SELECT trigger, caller, count(*) FROM cronlock.run GROUP BY 1, 2 ORDER BY 1").fetchall()
    assert triggers == [("http", "testclient", 1), ("manual", "code", 3)]


async def test_a_caller_that_is_cancelled_does_not_stop_the_run(cron: Cronlock, db: Db) -> None:
    entered = asyncio.Event()

    @cron.task("entered")
    async def enter(run: Run) -> None:
        entered.set()
        await asyncio.sleep(0.2)

    async with cron:
        calling = asyncio.ensure_future(cron.run("entered"))
        await entered.wait()
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
    assert rows(db, "entered") == [("completed", None)]


async def test_another_event_loop_is_told_how_to_call(cron: Cronlock) -> None:
    async with cron:
        with pytest.raises(CronlockError, match=r"open in another event loop.*run_sync"):
            await asyncio.to_thread(asyncio.run, cron.run("double", {"of": 1}))


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_event_loop_that_ended_without_a_close_is_named_and_not_waited_for(cron: Cronlock) -> None:
    asyncio.run(cron.run("double", {"of": 1}))
    with pytest.raises(CronlockError, match="opened in an event loop that has ended"):
        asyncio.run(cron.run("double", {"of": 1}))
    with pytest.raises(CronlockError, match="opened in an event loop that has ended"):
        cron.run_sync("double", {"of": 1})


def test_threads_of_a_script_never_open_it_twice(cron: Cronlock) -> None:
    barrier = threading.Barrier(4)

    def call(number: int) -> str:
        barrier.wait()
        return cron.run_sync("double", {"of": number}).status

    with ThreadPoolExecutor(4) as threads:
        statuses = set(threads.map(call, range(4)))
    assert statuses <= {"completed", "skipped"}
    assert cron._process is None


def test_a_thread_that_joins_the_call_of_another_is_not_left_behind(
    make_cron: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    cron = make_cron()
    running, joining = threading.Event(), threading.Event()

    @cron.task("first")
    async def first(run: Run) -> None:
        running.set()
        while not joining.is_set():
            await asyncio.sleep(0.01)

    @cron.task("second")
    async def second(run: Run) -> None: ...

    submit = asyncio.run_coroutine_threadsafe

    def late(*arguments: Any) -> Any:
        joining.set()
        time.sleep(0.5)  # in which the first call ends
        return submit(*arguments)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", late)
    with ThreadPoolExecutor(2) as threads:
        one = threads.submit(cron.run_sync, "first")
        assert running.wait(10)
        two = threads.submit(cron.run_sync, "second")
        assert (two.result(10).status, one.result(10).status) == ("completed", "completed")
    assert cron._process is None


# -- using -----------------------------------------------------------------------------------------------------


async def test_using_another_database_puts_everything_back(cron: Cronlock, empty_url: str, db: Db) -> None:
    before = cron.settings
    async with cron.using(empty_url) as same:
        assert same is cron
        assert cron.settings.pool_size == 3
        with pytest.raises(CronlockError, match="cronlock migrate"):
            await cron.run("double", {"of": 1})
    assert cron.settings is before
    async with cron:
        assert (await cron.run("double", {"of": 1})).status == "completed"
    assert rows(db, "double") == [("completed", None)]


async def test_using_is_left_as_it_was_when_the_block_raises(cron: Cronlock, empty_url: str) -> None:
    before = cron.settings
    with pytest.raises(ZeroDivisionError):
        async with cron.using(empty_url):
            raise ZeroDivisionError
    assert cron.settings is before
    assert cron._process is None


def test_using_the_lifespan_of_an_application(make_cron: Make, database_url: str, empty_url: str) -> None:
    cron = make_cron(database_url=empty_url)

    @cron.task("nightly")
    async def nightly(run: Run) -> None: ...

    app = cron.app()
    with cron.using(database_url), TestClient(app, headers=AUTH) as client:
        assert client.get("/cron/nightly").json()["status"] == "completed"
    with TestClient(app, headers=AUTH) as client:
        assert client.get("/cron/nightly").json()["reason"] == "schema_missing"


async def test_using_while_it_is_open_is_refused(cron: Cronlock, empty_url: str) -> None:
    async with cron:
        with pytest.raises(CronlockError, match="is open on its database"):
            async with cron.using(empty_url):
                raise AssertionError("it was used")
        assert (await cron.run("double", {"of": 1})).status == "completed"


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_block_that_leaves_it_open_is_told_so_and_the_next_is_not_hit(cron: Cronlock, database_url: str) -> None:
    def leave_open() -> None:
        with cron.using(database_url):
            TestClient(cron.app(), headers=AUTH).get("/cron/double?of=1")

    with pytest.raises(CronlockError, match=r"with TestClient\(app\) as client"):
        leave_open()
    with cron.using(database_url):
        assert cron.run_sync("double", {"of": 1}).status == "completed"


def test_using_leaves_the_pooler_and_the_direct_url_aside(make_cron: Make, database_url: str) -> None:
    elsewhere = "postgresql://me:pw@127.0.0.1:1/elsewhere"
    cron = make_cron(database_url=elsewhere, direct_url=elsewhere, pooler="transaction", schema_name="crons")
    with cron.using(database_url):
        assert cron.settings.database_url == database_url
        assert (cron.settings.direct_url, cron.settings.pooler) == (None, "none")
        assert cron.settings.schema_name == "crons"
        password = database_url.split(":")[2].split("@")[0]
        assert password not in cron.settings.scrub(f"no password {password} in it")
    with cron.using(f"{database_url}?pgbouncer=true"):
        assert cron.settings.pooler == "transaction"
    assert cron.settings.pooler == "transaction"
    assert cron.settings.direct_url == elsewhere


@pytest.mark.parametrize("url", ["", "mysql://me:s3cr3t@db/x", "postgresql://me:s3@cr3t@db/x"])
def test_using_a_wrong_url_is_an_error_of_configuration(cron: Cronlock, url: str) -> None:
    with pytest.raises(ConfigError, match="database_url") as caught:
        cron.using(url)
    assert "cr3t" not in str(caught.value)


def test_the_value_of_an_outcome_is_its_result(cron: Cronlock) -> None:
    assert Outcome("skipped", "double", 1, 0).value is None
    outcome = cron.run_sync("double", {"of": 3})
    assert json.loads(outcome.result or "") == outcome.value == 6
