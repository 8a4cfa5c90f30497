"""A server that restarts, crashes, is away for a while, or is set up against us."""

import asyncio
import logging
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx2
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cronlock import Run
from cronlock.embedded import Embedded
from cronlock.migrate import migrate
from tests import Db, Make, Steps, serving, task_of, until
from tests.observing import is_quiet, locks, statuses

pytestmark = pytest.mark.anyio
numbers = count(1)

# A small lock table, which a test can fill.
SETTINGS = {"max_connections": "40", "max_locks_per_transaction": "10", "fsync": "off", "shared_buffers": "16MB"}

COMES_BACK = 4.0
"""Seconds within which calls succeed again when the server is back."""


@pytest.fixture(scope="module")
def machine() -> Iterator[Embedded]:
    """A server of our own."""
    directory = Path(tempfile.mkdtemp(prefix="cronlock-restarts-"))
    directory.chmod(0o755)  # root's server runs as another user, who must get through
    try:
        with Embedded(directory / "server", settings=SETTINGS) as server:
            yield server
    finally:
        shutil.rmtree(directory)


@pytest.fixture
def database_url(machine: Embedded) -> Iterator[str]:
    """A migrated database on that server."""
    machine.start()
    name = f"cronlock_restarts_{next(numbers)}"
    with psycopg.connect(machine.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    url = make_conninfo(machine.url, dbname=name)
    migrate(url, "cronlock")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE effect (run_id bigint)")
    yield url
    machine.start()


@pytest.fixture
def look(database_url: str) -> Callable[[], Db]:
    """Connects an observer, each time anew: the server it saw before may be gone."""
    return lambda: psycopg.connect(database_url, autocommit=True)


def seen(look: Callable[[], Db], task: str) -> list[str]:
    """The statuses of a task's runs."""
    with look() as db:
        return statuses(db, task)


def writes(look: Callable[[], Db]) -> list[int]:
    """The ids of the runs whose work was committed."""
    with look() as db:
        return [run for (run,) in db.execute("SELECT run_id FROM effect ORDER BY 1").fetchall()]


async def comes_back(client: httpx2.AsyncClient, path: str, since: float) -> httpx2.Response:
    """The first answer that is no 503; it must come soon after `since`."""
    while (answer := await client.get(path)).status_code == 503:
        assert time.monotonic() - since < COMES_BACK
        await asyncio.sleep(0.05)
    return answer


async def one_more(codes: list[int]) -> None:
    """Wait for the next 200."""
    enough = codes.count(200) + 1
    await until(lambda: codes.count(200) >= enough, "calls succeed again", COMES_BACK)


def pause(seconds: float, is_async: bool) -> Any:
    """Sleep, as each kind of task does."""
    if is_async:
        return asyncio.sleep(seconds)
    time.sleep(seconds)
    return None


async def write(run: Run) -> None:
    """A task that works in a moment."""
    await run.driver.execute("INSERT INTO effect VALUES (%s)", (run.id,))


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "thread"])
@pytest.mark.parametrize("how", ["restart", "kill"])
async def test_a_restart_in_mid_run_loses_the_run_and_lets_the_next_one_go(
    machine: Embedded, make_cron: Make, look: Callable[[], Db], is_async: bool, how: str
) -> None:
    cron, other = make_cron(), make_cron()
    began: list[int] = []
    ended: list[float] = []

    def long(run: Run) -> Steps:
        yield run.driver.execute("INSERT INTO effect VALUES (%s)", (run.id,))
        began.append(run.id)
        try:
            for _ in range(100):
                yield pause(0.1, is_async)
                if not is_async:  # a thread cannot be cancelled
                    run.check()
        finally:
            ended.append(time.monotonic())

    cron.task("long")(task_of(long, is_async))
    other.task("long")(write)
    async with serving(cron.app()) as here, serving(other.app()) as elsewhere:
        call = asyncio.create_task(here.get("/cron/long"))
        await until(lambda: began, "it has written")
        assert seen(look, "long") == ["running"]
        stopped = time.monotonic()
        if how == "kill":
            await asyncio.to_thread(machine.kill)
        await asyncio.to_thread(machine.restart)
        back = time.monotonic()
        second = await comes_back(elsewhere, "/cron/long", back)
        assert second.json()["status"] == "completed"
        first = await call
        assert (first.status_code, first.json()["status"]) == (500, "lost")
        assert ended[0] - stopped < 2
        await until(lambda: seen(look, "long") == ["lost", "completed"], "both are recorded")
        assert writes(look) == [second.json()["runId"]]
        with look() as db:
            told = db.execute("SELECT started_at < finished_at FROM cronlock.run ORDER BY id").fetchall()
            assert told == [(True,), (True,)]
            await until(lambda: is_quiet(db), "everything is given back")


@pytest.mark.parametrize("seconds", [8, pytest.param(60, marks=[pytest.mark.stress, pytest.mark.timeout(180)])])
async def test_while_the_server_is_away_every_call_gets_503_and_the_first_one_after_works(
    machine: Embedded,
    make_cron: Make,
    look: Callable[[], Db],
    caplog: pytest.LogCaptureFixture,
    seconds: int,
) -> None:
    caplog.set_level(logging.INFO)
    cron = make_cron(acquire_timeout="1s", recover_interval="2s")

    @cron.task("blocking")
    def blocking(run: Run) -> None:
        run.driver.execute("INSERT INTO effect VALUES (%s)", (run.id,))

    cron.task("awaiting")(write)
    async with serving(cron.app()) as client:
        for name in ("blocking", "awaiting"):
            assert (await client.get(f"/cron/{name}")).status_code == 200
        await asyncio.to_thread(machine.stop)
        stopped = time.monotonic()
        caplog.clear()
        calls = 0
        while time.monotonic() - stopped < seconds:
            asked = time.monotonic()
            answers = await asyncio.gather(*(client.get(f"/cron/{name}") for name in ("blocking", "awaiting") * 5))
            calls += len(answers)
            assert {answer.status_code for answer in answers} == {503}
            assert all(int(answer.headers["retry-after"]) > 0 for answer in answers)
            assert time.monotonic() - asked < 3
            await asyncio.sleep(0.1)
        noise = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert calls >= 10 * seconds / 3
        assert len(noise) < 10 + 6 * seconds
        assert not [record for record in noise if record.exc_info]
        await asyncio.to_thread(machine.start)
        back = time.monotonic()
        for name in ("blocking", "awaiting"):
            assert (await comes_back(client, f"/cron/{name}", back)).json()["status"] == "completed"
        assert (await client.get("/readyz")).status_code == 200
    assert set(seen(look, "blocking") + seen(look, "awaiting")) <= {"completed", "cancelled"}
    assert len(writes(look)) == 4


async def test_five_restarts_in_a_row_are_survived(machine: Embedded, make_cron: Make, look: Callable[[], Db]) -> None:
    cron = make_cron(acquire_timeout="1s")
    cron.task("work")(write)
    codes: list[int] = []
    async with serving(cron.app()) as client:

        async def call_on() -> None:
            while True:
                codes.append((await client.get("/cron/work")).status_code)
                await asyncio.sleep(0.02)

        calling = asyncio.create_task(call_on())
        for _ in range(5):
            await asyncio.to_thread(machine.restart)
            await one_more(codes)
            assert not calling.done()
        calling.cancel()
        await asyncio.wait((calling,))
        await until(lambda: "running" not in seen(look, "work"), "every run has ended")
    assert set(codes) <= {200, 500, 503}
    ended = seen(look, "work")
    assert codes.count(500) == ended.count("lost") + ended.count("failed") < 10
    assert len(writes(look)) == ended.count("completed") >= 5


async def test_an_application_that_starts_before_its_server_works_when_that_is_there(
    machine: Embedded, make_cron: Make, look: Callable[[], Db]
) -> None:
    cron = make_cron(acquire_timeout="1s")
    cron.task("work")(write)
    await asyncio.to_thread(machine.stop)
    async with serving(cron.app()) as client:
        assert (await client.get("/cron/work")).status_code == 503
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/healthz")).status_code == 200
        await asyncio.to_thread(machine.start)
        answer = await comes_back(client, "/cron/work", time.monotonic())
        assert answer.json()["status"] == "completed"


@asynccontextmanager
async def set_up(machine: Embedded, *settings: str) -> AsyncIterator[None]:
    """The whole server has these settings meanwhile."""
    with psycopg.connect(machine.url, autocommit=True) as admin:
        for setting in settings:
            admin.execute(f"ALTER SYSTEM SET {setting}")
        admin.execute("SELECT pg_reload_conf()")
        try:
            yield
        finally:
            admin.execute("ALTER SYSTEM RESET ALL")
            admin.execute("SELECT pg_reload_conf()")


async def test_limits_of_the_server_shorter_than_a_task_do_not_stop_it(
    machine: Embedded, make_cron: Make, look: Callable[[], Db]
) -> None:
    cron = make_cron()
    limits = ["idle_in_transaction_session_timeout = '1s'", "statement_timeout = '1s'", "lock_timeout = '100ms'"]
    with look() as db:
        if db.info.server_version >= 170000:
            limits.append("transaction_timeout = '1s'")

    def idle(run: Run) -> Steps:
        yield run.driver.execute("INSERT INTO effect VALUES (%s)", (run.id,))
        yield pause(2, is_async=run.task == "awaiting")
        yield run.driver.execute("SELECT pg_sleep(1.2)")

    cron.task("awaiting")(task_of(idle, True))
    cron.task("blocking")(task_of(idle, False))
    async with set_up(machine, *limits):
        with psycopg.connect(machine.url) as trapped:
            await until(lambda: trapped.execute("SHOW statement_timeout").fetchone() == ("1s",), "it holds")
        async with serving(cron.app()) as client:
            answers = await asyncio.gather(*(client.get(f"/cron/{name}") for name in ("awaiting", "blocking")))
    assert [answer.json()["status"] for answer in answers] == ["completed", "completed"]
    assert writes(look) == sorted(answer.json()["runId"] for answer in answers)


def fill_lock_table(db: Db) -> None:
    """Take locks of the session until the server has no room for another one."""
    for taken in range(0, 100_000, 100):
        db.execute("SELECT pg_advisory_lock(n) FROM generate_series(%s::int, %s::int) n", (taken, taken + 99))


async def test_a_full_lock_table_answers_503_and_runs_nothing(
    machine: Embedded, make_cron: Make, look: Callable[[], Db], database_url: str
) -> None:
    cron = make_cron()
    cron.task("work")(write)
    async with serving(cron.app()) as client:
        with look() as hoarder:
            with pytest.raises(psycopg.errors.OutOfMemory):
                fill_lock_table(hoarder)
            answer = await client.get("/cron/work")
            assert (answer.status_code, answer.json()["reason"]) == (503, "lock_table_full")
            assert int(answer.headers["retry-after"]) > 0
        assert seen(look, "work") == []
        assert (await client.get("/cron/work")).json()["status"] == "completed"
        with look() as db:
            assert locks(db) == []
