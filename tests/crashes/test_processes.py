"""Processes that are killed, frozen, stopped, or left by their callers in the middle of a run."""

import asyncio
import logging
import signal
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterator
from urllib.parse import urlsplit

import httpx2
import pytest

from tests import SECRET, Db, Make, serving, until
from tests.crashes.process import Served
from tests.crashes.served import give_tasks
from tests.observing import is_quiet, locks, statuses

pytestmark = pytest.mark.anyio

FREES_WITHIN = 1.0
"""Seconds; client_connection_check_interval is half of one."""


@pytest.fixture
def effect(db: Db) -> None:
    db.execute("CREATE TABLE effect (run_id bigint)")


def writes(db: Db) -> dict[int, int]:
    """How many rows each run committed."""
    return dict(db.execute("SELECT run_id, count(*) FROM effect GROUP BY 1 ORDER BY 1").fetchall())


@pytest.fixture
def server(database_url: str, effect: None) -> Iterator[Served]:
    with Served(database_url) as server:
        yield server


@pytest.fixture
async def other(make_cron: Make, effect: None) -> AsyncIterator[httpx2.AsyncClient]:
    """A second instance, in this process; its timer runs once at the start and then not soon."""
    cron = make_cron(recover_interval="10m")
    give_tasks(cron)
    async with serving(cron.app()) as client:
        yield client


async def begin(server: Served, db: Db, path: str) -> "asyncio.Task[httpx2.Response | None]":
    """Call, and return when the task has written; the call ends with None when the connection does."""

    async def call() -> httpx2.Response | None:
        async with server.client() as client:
            try:
                return await client.get(path)
            except httpx2.HTTPError:
                return None

    calling = asyncio.create_task(call())
    await until(lambda: any("INSERT" in query or "pg_sleep" in query for *_, query in locks(db)), "the task runs")
    return calling


KILLED = [("work", "sql"), ("work", "python"), ("work-in-thread", "sql"), ("work-in-thread", "python")]


@pytest.mark.parametrize(("task", "how"), KILLED)
async def test_a_killed_process_frees_its_lock_within_a_second_and_the_next_taker_finds_its_run_lost(
    server: Served, other: httpx2.AsyncClient, db: Db, task: str, how: str
) -> None:
    path = f"/cron/{task}?how={how}&pause=60"
    calling = await begin(server, db, path)
    assert (await other.get(f"/cron/{task}")).json()["reason"] == "already_running"
    if how == "sql":
        await until(lambda: locks(db)[0][2] == "active", "it is in its statement")
    server.kill()
    killed = time.monotonic()
    await until(lambda: not locks(db), "the lock is free", FREES_WITHIN)
    answer = await other.get(f"/cron/{task}")
    assert time.monotonic() - killed < FREES_WITHIN + 0.5
    assert answer.json()["status"] == "completed"
    assert await calling is None
    assert statuses(db, task) == ["lost", "skipped", "completed"]
    assert writes(db) == {answer.json()["runId"]: 2}
    row = db.execute("SELECT error_type, finished_at > started_at, result FROM cronlock.run WHERE status = 'lost'")
    assert row.fetchone() == ("ProcessGone", True, None)


async def test_the_run_of_a_killed_process_is_closed_by_the_timer_of_any_other(
    server: Served, make_cron: Make, db: Db, caplog: pytest.LogCaptureFixture
) -> None:
    cron = make_cron(recover_interval="500ms")
    async with serving(cron.app()):
        await begin(server, db, "/cron/work?how=sql&pause=60")
        await asyncio.sleep(0.7)
        assert statuses(db) == ["running"]  # a timer that only looks does no harm
        server.kill()
        await until(lambda: statuses(db) == ["lost"], "the timer has closed it", FREES_WITHIN + 1.5)
        await until(lambda: told(caplog), "and said so", 2)
    assert len(told(caplog)) == 1


def told(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if getattr(record, "event", "") == "run.lost"]


async def test_kills_in_a_row_stop_nobody_and_count_as_no_duration(
    database_url: str, other: httpx2.AsyncClient, db: Db
) -> None:
    for _ in range(3):
        with Served(database_url) as server:
            await begin(server, db, "/cron/work?how=sql&pause=60")
            server.kill()
        killed = time.monotonic()
        while (answer := await other.get("/cron/work")).json()["status"] != "completed":
            assert answer.status_code == 200
            assert time.monotonic() - killed < FREES_WITHIN
            await asyncio.sleep(0.02)
    ended = [status for status in statuses(db, "work") if status != "skipped"]
    assert ended == ["lost", "completed"] * 3
    db.execute("UPDATE cronlock.run SET started_at = started_at - interval '1 hour' WHERE status = 'lost'")
    health = db.execute(
        "SELECT lost, completed, last_status, p50_duration < '1 min', p95_duration < '1 min', success_rate"
        " FROM cronlock.task_health WHERE task = 'work'"
    ).fetchone()
    assert health == (3, 3, "completed", True, True, 0.5)
    assert db.execute("SELECT count(*) FROM cronlock.lock_holder").fetchone() == (0,)


async def test_sigterm_lets_a_run_end_within_the_drain_timeout(database_url: str, effect: None, db: Db) -> None:
    with Served(database_url, drain_timeout="20s") as server:
        calling = await begin(server, db, "/cron/work?pause=2")
        calling.cancel()
        server.send(signal.SIGTERM)
        server.process.wait(10)
        assert statuses(db) == ["completed"]
        assert list(writes(db).values()) == [2]
        assert is_quiet(db)


@pytest.mark.parametrize(("task", "how"), KILLED)
async def test_sigterm_cancels_and_records_a_run_that_outlasts_the_drain_timeout(
    database_url: str, effect: None, db: Db, task: str, how: str
) -> None:
    with Served(database_url, drain_timeout="500ms") as server:
        calling = await begin(server, db, f"/cron/{task}?how={how}&pause=60")
        stopped = time.monotonic()
        server.send(signal.SIGTERM)
        await asyncio.to_thread(server.process.wait, 15)
        # uvicorn gives open requests a second; code that cannot be stopped gets three more from us.
        assert time.monotonic() - stopped < (8 if (task, how) == ("work-in-thread", "python") else 4)
        await until(lambda: not locks(db), "the lock is free", FREES_WITHIN)
        assert statuses(db) == ["cancelled"]
        told = db.execute("SELECT error_type, error_message FROM cronlock.run").fetchone()
        assert told == ("ShuttingDown", "the server was shutting down")
        assert writes(db) == {}
        assert is_quiet(db)
        await calling


async def test_callers_that_reset_their_connection_change_nothing(server: Served, db: Db) -> None:
    place = urlsplit(server.url)
    async with server.client() as client:
        await asyncio.gather(client.get("/cron/work"), client.get("/cron/work-in-thread"))
        sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        before = db.execute(sessions).fetchone()
        for number in range(20):
            task = ("work", "work-in-thread")[number % 2]
            with socket.create_connection((place.hostname, place.port or 0)) as caller:
                head = f"GET /cron/{task}?pause=0.1 HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer {SECRET}\r\n\r\n"
                caller.sendall(head.encode())
                await until(lambda: locks(db), "the task runs")
                caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await until(lambda: not locks(db), "the task has ended")
        for number in range(20):
            answer = await client.get(f"/cron/{('work', 'work-in-thread')[number % 2]}")
            assert answer.json()["status"] == "completed"
        assert set(statuses(db)) == {"completed"}
        assert list(writes(db).values()) == [2] * 42
        assert is_quiet(db)
        assert db.execute(sessions).fetchone() == before


async def test_a_frozen_process_loses_its_lock_in_bounded_time_and_cannot_commit_when_it_thaws(
    server: Served, other: httpx2.AsyncClient, db: Db
) -> None:
    calling = await begin(server, db, "/cron/brief")
    await until(lambda: locks(db)[0][2] == "idle in transaction", "it is idle")
    server.send(signal.SIGSTOP)
    frozen = time.monotonic()
    answer = await other.get("/cron/work")
    assert answer.json()["reason"] == "already_running"
    while (answer := await other.get("/cron/work")).json()["status"] != "completed":
        assert time.monotonic() - frozen < 13  # its timeout of 1 s, and 10 s
        await asyncio.sleep(0.25)
    assert time.monotonic() - frozen > 5
    assert statuses(db, "brief") == ["lost"]
    server.send(signal.SIGCONT)
    told = await calling
    assert told is not None
    assert told.status_code in (500, 504)
    await until(lambda: is_quiet(db), "everything is given back")
    assert statuses(db, "brief")[0] in ("lost", "timed_out", "failed")
    assert writes(db) == {answer.json()["runId"]: 2}
    async with server.client() as client:
        assert (await client.get("/cron/work")).json()["status"] == "completed"
