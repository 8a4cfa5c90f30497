"""Cases of callers that leave and of tasks that raise anything (ASYNC), in real servers."""

import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from tests import AUTH, SECRET, Db, rows, until, value
from tests.cases.app import RAISED
from tests.cases.conftest import Start
from tests.commands import Running, environment, is_alive
from tests.observing import is_quiet, statuses

pytestmark = pytest.mark.anyio

RUNS = "SELECT count(*) FROM cronlock.run"
SESSIONS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"


@contextmanager
def layered(place: Path, database_url: str) -> Iterator[str]:
    """The tasks inside an application with middleware, under plain uvicorn; the URL of a task."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = (sys.executable, "-m", "uvicorn", "--factory", "tests.cases.app:layered", "--port", str(port))
    with Running(cwd=place, env=environment(DATABASE_URL=database_url), command=command) as server:
        server.until_says("running on")
        yield f"http://127.0.0.1:{port}/internal/cron"


async def begin(db: Db, count: int) -> None:
    """Return when so many runs have begun."""
    await until(lambda: value(db, RUNS) == count, f"run {count} has begun")


@pytest.mark.parametrize(
    ("calls", "pause"), [(6, 0.8), pytest.param(50, 3, marks=[pytest.mark.stress, pytest.mark.timeout(600)])]
)
async def test_callers_that_reset_their_connection_change_nothing_below_middleware(
    database_url: str, db: Db, effect: None, tmp_path: Path, calls: int, pause: float
) -> None:
    """Y01: the caller has gone in the middle of the task; with Starlette's middleware around the routes."""
    with layered(tmp_path, database_url) as url:
        place = urlsplit(url)
        async with httpx2.AsyncClient(headers=AUTH, timeout=30) as client:
            answer = await client.get(f"{url}/slow")
            assert (answer.json()["status"], answer.headers["x-layer"]) == ("completed", "passed")
            before = value(db, SESSIONS)
            head = f"GET {place.path}/slow?pause={pause} HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer {SECRET}\r\n\r\n"
            left = 0
            for began in range(2, calls + 2):
                with socket.create_connection((place.hostname, place.port or 0)) as caller:
                    caller.sendall(head.encode())
                    await begin(db, began)
                    left += statuses(db)[-1] == "running"
                    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                await until(lambda: "running" not in statuses(db), "the task has ended", pause + 5)
            assert left > 0, "somebody has left in the middle"
            for _ in range(calls):
                assert (await client.get(f"{url}/slow")).json()["status"] == "completed"
            assert statuses(db) == ["completed"] * (2 * calls + 1)
            assert value(db, "SELECT count(*) FROM (SELECT FROM effect GROUP BY run_id HAVING count(*) = 2) r") == (
                2 * calls + 1
            )
            await until(lambda: is_quiet(db), "everything is given back")
            assert value(db, SESSIONS) == before


@pytest.mark.parametrize("task", ["raising", "raising-in-a-thread"])
async def test_a_server_survives_whatever_its_tasks_raise(start: Start, db: Db, task: str) -> None:
    """Y11: each is a failed run with its type; the process serves on, and no lock is left."""
    server, url = start()
    async with httpx2.AsyncClient(headers=AUTH, timeout=10) as client:
        for kind in RAISED:
            answer = await client.get(f"{url}/cron/{task}?what={kind}")
            assert (answer.status_code, answer.json()["status"]) == (500, "failed"), kind
            assert answer.json()["error"]["type"] == kind
            await until(lambda: is_quiet(db), kind)
            assert (await client.get(f"{url}/cron/nightly")).json()["status"] == "completed", kind
    assert is_alive(server.process.pid)
    assert rows(db, task) == [("failed", None)] * len(RAISED)
    assert value(db, "SELECT count(*) FROM effect") == len(RAISED), "what nightly wrote, and nothing else"
