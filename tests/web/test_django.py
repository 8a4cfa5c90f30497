"""cronlock beside a real Django project: the one of docs/django.md, served by uvicorn and by `cronlock serve`."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests import AUTH, Db, value
from tests.commands import COMMAND, Running, environment, served
from tests.pages import write_files

MORE_TASKS = """

@cron.task("broken-in-transaction")
@own_connections()
def broken_in_transaction(run: Run) -> None:
    Report.objects.create(run=run.id, deleted=1)
    run.driver.execute("INSERT INTO shop_report (run, deleted) VALUES (%s, 2)", (run.id,))
    raise ValueError("after both")


@cron.task("broken-in-guard", mode="guard")
@own_connections()
def broken_in_guard(run: Run) -> None:
    Report.objects.create(run=run.id, deleted=1)
    with transaction.atomic():
        Report.objects.create(run=run.id, deleted=2)
        run.connection


@cron.task("slow", mode="guard")
@own_connections()
def slow(run: Run) -> None:
    Report.objects.create(run=run.id, deleted=0)
    with transaction.atomic(), connections["default"].cursor() as cursor:
        cursor.execute("SELECT pg_sleep(2)")


@cron.task("without-the-idiom", mode="guard")
async def without_the_idiom(run: Run) -> int:
    return await Cart.objects.acount()
"""
PERSISTENT = '\nDATABASES["default"]["CONN_MAX_AGE"] = None\n'


@pytest.fixture
def user(tmp_path: Path, database_url: str) -> Path:
    """The project of the page, its tables made by Django's own migrations; its connections are kept for ever."""
    names = write_files("django", tmp_path)
    assert {"shop/settings.py", "shop/asgi.py", "shop/crons.py", "shop/models.py", "conftest.py"} <= set(names)
    (tmp_path / "shop/__init__.py").touch()
    (tmp_path / "shop/crons.py").write_text((tmp_path / "shop/crons.py").read_text() + MORE_TASKS)
    (tmp_path / "shop/settings.py").write_text((tmp_path / "shop/settings.py").read_text() + PERSISTENT)
    for arguments in (("makemigrations", "shop"), ("migrate",)):
        command = [sys.executable, "-m", "django", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=settings(database_url, tmp_path), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    return tmp_path


def settings(url: str, directory: Path) -> dict[str, str]:
    """What a user of the page has exported."""
    env = environment(DATABASE_URL=url, DJANGO_SETTINGS_MODULE="shop.settings", DJANGO_SECRET_KEY="only-for-the-tests")
    return {**env, "PYTHONPATH": f"{directory}:{env['PYTHONPATH']}"}


@contextmanager
def uvicorn(user: Path, url: str) -> Iterator[tuple[Running, httpx2.Client]]:
    """`uvicorn shop.asgi:application`, warnings of Python's being errors, and a client of it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = (sys.executable, "-W", "error::ResourceWarning", "-m", "uvicorn")
    arguments = ("shop.asgi:application", "--port", str(port), "--lifespan", "on")
    env = settings(url, user)
    with Running(*arguments, cwd=user, env=env, command=command) as server:
        server.until_says("Uvicorn running")
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", headers=AUTH, timeout=60) as client:
            yield server, client


def djangos(db: Db) -> list[tuple[Any, ...]]:
    """The connections to the test's database that are neither cronlock's nor the observer's."""
    query = """SELECT pid, state, query FROM pg_stat_activity WHERE datname = current_database()
        AND backend_type = 'client backend' AND application_name !~ '^(cronlock|observer)'"""
    return db.execute(query).fetchall()


def none_is_left(db: Db, seconds: float = 5) -> None:
    """A backend needs a moment to end after its client has gone."""
    until = time.monotonic() + seconds
    while left := djangos(db):
        assert time.monotonic() < until, left
        time.sleep(0.02)


def test_django_and_cronlock_answer_side_by_side_and_end_in_order(user: Path, database_url: str, db: Db) -> None:
    with uvicorn(user, database_url) as (server, client):
        db.execute("INSERT INTO shop_cart (seen_at) VALUES (now() - interval '40 days'), (now())")
        answer = client.post("/cron/expire-carts")
        assert (answer.status_code, answer.json()["result"]) == (200, {"deleted": 1})
        run_id = answer.json()["runId"]
        assert db.execute("SELECT run, deleted FROM shop_report").fetchall() == [(run_id, 1)]
        assert client.get("/cron/remind").json()["result"] == {"reminded": 1}
        assert client.get("/cron/count-carts").json()["result"] == {"rows": 1}
        assert client.get("/readyz").json() == {"status": "ready"}
        assert client.get("/cron/expire-carts", headers={"authorization": "Bearer no"}).status_code == 401
        for path in ("/expire/", "/expire-from-a-thread/"):
            answer = client.get(path)
            assert (answer.status_code, answer.json()["status"]) == (200, "completed"), answer.text
        missing = client.get("/no-such-page/")
        assert (missing.status_code, missing.headers["content-type"]) == (404, "text/html; charset=utf-8")
        redirected = client.get("/expire")
        assert redirected.status_code == 404  # no CommonMiddleware in this project, and none of ours
        server.send(signal.SIGTERM)
        assert server.ends() in (0, -signal.SIGTERM)
    assert "Traceback" not in server.said
    assert "ResourceWarning" not in server.said
    assert value(db, "SELECT count(*) FROM cronlock.run WHERE status = 'running'") == 0
    triggers = db.execute("SELECT trigger, count(*) FROM cronlock.run GROUP BY 1 ORDER BY 1").fetchall()
    assert triggers == [("http", 3), ("manual", 2)]


def test_no_connection_of_djangos_is_left_after_twenty_runs(user: Path, database_url: str, db: Db) -> None:
    with uvicorn(user, database_url) as (_, client):
        for task in ("expire-carts", "remind"):
            for _ in range(20):
                assert client.get(f"/cron/{task}").json()["status"] == "completed"
            none_is_left(db)
        with ThreadPoolExecutor(8) as callers:
            answers = list(callers.map(lambda _: client.get("/cron/expire-carts").json(), range(24)))
        assert {answer["status"] for answer in answers} <= {"completed", "skipped"}
        none_is_left(db)
        assert client.get("/cron/without-the-idiom").json()["status"] == "completed"
        with pytest.raises(AssertionError):
            none_is_left(db, seconds=1)


def test_a_connection_that_the_server_closed_does_not_break_later_runs(user: Path, database_url: str, db: Db) -> None:
    with uvicorn(user, database_url) as (_, client):
        assert client.get("/cron/without-the-idiom").status_code == 200
        ((pid, *_),) = djangos(db)
        db.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
        for task in ("remind", "expire-carts"):
            assert client.get(f"/cron/{task}").json()["status"] == "completed"
        assert client.get("/cron/without-the-idiom").json()["status"] == "failed"


def test_what_the_orm_wrote_stays_when_the_run_fails(user: Path, database_url: str, db: Db) -> None:
    with uvicorn(user, database_url) as (_, client):
        for task, kind in (("broken-in-transaction", "ValueError"), ("broken-in-guard", "NotInTransaction")):
            answer = client.get(f"/cron/{task}")
            assert (answer.status_code, answer.json()["error"]["type"]) == (500, kind)
            run_id = answer.json()["runId"]
            assert db.execute("SELECT deleted FROM shop_report WHERE run = %s", (run_id,)).fetchall() == [(1,)]


def test_a_guard_run_of_the_orm_is_not_overlapped_and_holds_no_snapshot(user: Path, database_url: str, db: Db) -> None:
    with uvicorn(user, database_url) as (_, client), ThreadPoolExecutor(1) as callers:
        first = callers.submit(client.get, "/cron/slow")
        until = time.monotonic() + 20
        while not any("pg_sleep" in query for _, _, query in djangos(db)):
            assert time.monotonic() < until
            time.sleep(0.01)
        second = client.get("/cron/slow").json()
        assert (second["reason"], second["holder"]["runId"]) == ("already_running", first.result().json()["runId"])
        assert value(db, "SELECT count(*) FROM shop_report") == 1


def test_the_cron_routes_alone_are_served_by_cronlock_serve(user: Path, database_url: str) -> None:
    extra = {name: text for name, text in settings(database_url, user).items() if name.startswith("DJANGO_")}
    with served(user, "shop.asgi:cron", DATABASE_URL=database_url, **extra) as (server, url):
        with httpx2.Client(base_url=url, headers=AUTH) as client:
            assert client.get("/cron/expire-carts").json()["status"] == "completed"
            assert client.get("/expire/").json() == {"status": "not_found"}
        server.send(signal.SIGTERM)
        assert server.ends() == 0


def test_the_commands_find_the_tasks(user: Path, database_url: str) -> None:
    done = subprocess.run(
        [*COMMAND, "run", "shop.asgi:cron", "expire-carts", "--json"],
        cwd=user,
        env=settings(database_url, user),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "completed"


def test_the_tests_of_the_page_pass(user: Path, server_url: str) -> None:
    (user / "pytest.ini").write_text(
        "[pytest]\nfilterwarnings = error\naddopts = -q -p no:asyncio -p no:cacheprovider\n"
    )
    env = environment(CRONLOCK_TEST_DATABASE_URL=server_url)
    done = subprocess.run(
        [sys.executable, "-m", "pytest"], cwd=user, env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b2 passed", done.stdout)


def test_a_wsgi_application_is_refused_with_a_sentence(user: Path, database_url: str) -> None:
    path = user / "shop/asgi.py"
    path.write_text(path.read_text().replace("core.asgi", "core.wsgi").replace("get_asgi_", "get_wsgi_"))
    done = subprocess.run(
        [*COMMAND, "tasks", "shop.asgi:cron"],
        cwd=user,
        env=settings(database_url, user),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "fallback=WSGIHandler is no ASGI application" in done.stderr
