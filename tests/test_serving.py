"""The server process: what it answers and how it ends, by signal, with work under way."""

import asyncio
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from tests import AUTH, SECRET, Db, rows, until, value
from tests.commands import APP, Running, address, cronlock, environment, json_lines, served

pytestmark = pytest.mark.anyio


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A directory with an app."""
    (tmp_path / "shop.py").write_text(APP)
    return tmp_path


@asynccontextmanager
async def client(url: str) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=url, headers=AUTH, timeout=30, trust_env=False) as made:
        yield made


def is_running(db: Db, task: str) -> bool:
    return rows(db, task) == [("running", None)]


async def test_it_serves_the_cron_routes_and_the_probes(shop: Path, database_url: str) -> None:
    with served(shop, DATABASE_URL=database_url) as (server, url):
        async with client(url) as http:
            ran = await http.get("/cron/sleep")
            assert (ran.status_code, ran.json()["result"]) == (200, {"slept": 0.0})
            assert (await http.get("/healthz")).status_code == 200
            assert (await http.get("/readyz")).status_code == 200
        assert "sleep completed" in server.said
        server.send(signal.SIGTERM)
        assert server.ends() == 0


async def test_during_the_drain_new_calls_are_answered_503_and_what_runs_completes(
    shop: Path, database_url: str, db: Db
) -> None:
    with served(shop, DATABASE_URL=database_url) as (server, url):
        async with client(url) as http:
            call = asyncio.create_task(http.post("/cron/sleep", json={"lasts": 2}))
            await until(lambda: is_running(db, "sleep"), "the task runs")
            server.send(signal.SIGTERM)
            await asyncio.to_thread(server.until_says, "draining")
            refused = await http.get("/cron/fail")
            assert (refused.status_code, refused.json()["reason"]) == (503, "shutting_down")
            assert int(refused.headers["retry-after"]) > 0
            async with client(url) as another:  # the listener is open, too
                assert (await another.get("/cron/fail")).status_code == 503
            ran = await call
            assert (ran.status_code, ran.json()["status"]) == (200, "completed")
        assert await asyncio.to_thread(server.ends) == 0
    assert rows(db, "sleep") == [("completed", None)]


async def test_what_outlasts_the_drain_timeout_is_cancelled_and_recorded(shop: Path, database_url: str, db: Db) -> None:
    with served(shop, DATABASE_URL=database_url, CRONLOCK_DRAIN_TIMEOUT="300ms") as (server, url):
        async with client(url) as http:
            call = asyncio.create_task(http.post("/cron/sleep", json={"lasts": 60}))
            await until(lambda: is_running(db, "sleep"), "the task runs")
            server.send(signal.SIGTERM)
            answer = await call
            assert (answer.status_code, answer.json()["status"]) == (500, "cancelled")
        assert await asyncio.to_thread(server.ends) == 0
    assert rows(db, "sleep") == [("cancelled", None)]
    assert "shutting down" in value(db, "SELECT error_message FROM cronlock.run")


async def test_a_second_signal_cancels_what_runs_at_once(shop: Path, database_url: str, db: Db) -> None:
    with served(shop, DATABASE_URL=database_url, CRONLOCK_DRAIN_TIMEOUT="60s") as (server, url):
        async with client(url) as http:
            call = asyncio.create_task(http.post("/cron/sleep", json={"lasts": 60}))
            await until(lambda: is_running(db, "sleep"), "the task runs")
            begun = time.monotonic()
            server.send(signal.SIGINT)
            await asyncio.to_thread(server.until_says, "draining")
            server.send(signal.SIGINT)
            assert (await call).json()["status"] == "cancelled"
        assert await asyncio.to_thread(server.ends) == 0
        assert time.monotonic() - begun < 10
    assert rows(db, "sleep") == [("cancelled", None)]


@pytest.mark.parametrize("task", ["stuck", "stuck-in-asyncio"])
async def test_a_thread_that_never_returns_does_not_keep_the_process(
    shop: Path, database_url: str, db: Db, task: str
) -> None:
    with served(shop, DATABASE_URL=database_url, CRONLOCK_DRAIN_TIMEOUT="200ms") as (server, url):
        async with client(url) as http:
            call = asyncio.create_task(http.get(f"/cron/{task}"))
            await until(lambda: is_running(db, task), "the task runs")
            begun = time.monotonic()
            server.send(signal.SIGTERM)
            assert (await call).json()["status"] == "cancelled"
        assert await asyncio.to_thread(server.ends) == 0
        assert time.monotonic() - begun < 10
    assert rows(db, task) == [("cancelled", None)]


async def test_serve_returns_to_the_code_that_called_it_although_a_thread_does_not(
    shop: Path, database_url: str, db: Db
) -> None:
    (shop / "own.py").write_text(
        "from cronlock.serving import serve\nserve('shop:cron', port=0)\nprint('returned', flush=True)\n"
    )
    env = environment(DATABASE_URL=database_url, CRONLOCK_LOG_FORMAT="text", CRONLOCK_DRAIN_TIMEOUT="200ms")
    with Running(cwd=shop, env=env, command=(sys.executable, "own.py")) as server:
        url = address(server)
        async with client(url) as http:
            call = asyncio.create_task(http.get("/cron/stuck-in-asyncio"))
            await until(lambda: is_running(db, "stuck-in-asyncio"), "the task runs")
            server.send(signal.SIGTERM)
            assert (await call).json()["status"] == "cancelled"
        await asyncio.to_thread(server.until_says, "returned")


async def test_log_lines_are_json_with_the_facts_of_the_run_and_without_secrets(shop: Path, database_url: str) -> None:
    with served(shop, DATABASE_URL=database_url, CRONLOCK_LOG_FORMAT="json") as (server, url):
        async with client(url) as http:
            await http.get("/cron/sleep")
            await http.get("/cron/sleep", headers={"authorization": "Bearer a-wrong-one-0123456789"})
        server.send(signal.SIGTERM)
        assert await asyncio.to_thread(server.ends) == 0
    completed = next(line for line in json_lines(server.said) if line.get("event") == "run.completed")
    assert (completed["task"], completed["level"], completed["status"]) == ("sleep", "INFO", "completed")
    assert {"timestamp", "logger", "message", "runId", "durationMs", "lockKey", "instance"} <= completed.keys()
    assert SECRET not in server.said
    assert "a-wrong-one" not in server.said


async def test_it_starts_without_a_database_and_answers_503(shop: Path) -> None:
    with served(shop, DATABASE_URL="postgresql://u:p@127.0.0.1:1/x", CRONLOCK_ACQUIRE_TIMEOUT="500ms") as (server, url):
        async with client(url) as http:
            assert (await http.get("/cron/sleep")).status_code == 503
            assert (await http.get("/healthz")).status_code == 200
        server.send(signal.SIGTERM)
        assert await asyncio.to_thread(server.ends) == 0


async def test_a_signal_during_the_start_ends_it_in_order(shop: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections, and never answers
        address = f"postgresql://u:p@127.0.0.1:{silent.getsockname()[1]}/x"
        env = environment(DATABASE_URL=address, CRONLOCK_LOG_FORMAT="text", CRONLOCK_ACQUIRE_TIMEOUT="30s")
        with Running("serve", "shop:cron", "--port", "0", cwd=shop, env=env) as server:
            connection, _ = await asyncio.to_thread(silent.accept)
            server.send(signal.SIGTERM)
            assert await asyncio.to_thread(server.ends) == 0
            connection.close()
    assert "serving" not in server.said


def test_a_port_in_use_is_one_clear_sentence(shop: Path, database_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = cronlock("serve", "shop:cron", "--port", port, cwd=shop, DATABASE_URL=database_url)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"cronlock: cannot listen on 127.0.0.1 port {port}: Address already in use; choose another --port"
    )


@pytest.mark.parametrize("secret", ["", "undefined", "short"])
def test_it_does_not_start_without_a_usable_secret(shop: Path, database_url: str, secret: str) -> None:
    done = cronlock("serve", "shop:cron", "--port", "0", cwd=shop, DATABASE_URL=database_url, CRON_SECRET=secret)
    assert done.returncode == 2
    assert "CRON_SECRET" in done.stderr
    assert "Traceback" not in done.stderr


def test_two_locks_with_one_key_stop_the_start(shop: Path, database_url: str) -> None:
    more = "\nfor name in ('sync-posts-20', 'refresh-tenants-347'):\n    cron.task(name)(lambda run: None)\n"
    (shop / "shop.py").write_text(APP + more)
    done = cronlock("serve", "shop:cron", "--port", "0", cwd=shop, DATABASE_URL=database_url)
    assert done.returncode == 2
    assert "sync-posts-20" in done.stderr
    assert "refresh-tenants-347" in done.stderr
    assert "Traceback" not in done.stderr
