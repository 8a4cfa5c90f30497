"""The plugin for users' tests, in projects of users': the pages' own, and some that do it wrong."""

import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.commands import PROJECT, Running, environment, is_alive
from tests.pages import write_files

TASK = """
from cronlock import Cronlock, Run

cron = Cronlock()

@cron.task("item")
def item(run: Run) -> int:
    run.driver.execute("INSERT INTO item VALUES (1)")
    return run.driver.execute("SELECT count(*) FROM item").fetchone()[0]
"""
PREPARE = """
import psycopg, pytest

kept = []

@pytest.fixture(scope="session")
def cronlock_prepare():
    def prepare(url):
        connection = psycopg.connect(url, autocommit=True)
        connection.execute("CREATE TABLE item (n int)")
        kept.append(connection)  # as a pool would
    return prepare
"""
STRICT = """
[pytest]
filterwarnings = error
asyncio_default_fixture_loop_scope = function
addopts = -q -p no:cacheprovider
"""


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """The directory of a user's project, where every warning is an error."""
    (tmp_path / "pytest.ini").write_text(STRICT)
    return tmp_path


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A TMPDIR that the account of root's server can pass through."""
    with tempfile.TemporaryDirectory(prefix="cronlock-tests-", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o711)
        yield Path(name)


def write(user: Path, **modules: str) -> None:
    for name, text in modules.items():
        (user / f"{name}.py").write_text(textwrap.dedent(text))


def run_pytest(user: Path, *arguments: str, **settings: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pytest", *arguments]
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(user.parent / "compiled")}
    env = {**environment(), "TMPDIR": "/tmp", **compiled, **settings}
    env = {name: text for name, text in env.items() if not name.startswith(("PYTEST_", "COV_"))}
    return subprocess.run(command, cwd=user, env=env, capture_output=True, text=True, timeout=110, check=False)


def passed(done: "subprocess.CompletedProcess[str]") -> int:
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) passed", done.stdout)
    assert found is not None
    return int(found[1])


@pytest.fixture
def server(server_url: str) -> Iterator[str]:
    """The server of our own tests as that of the users' tests; at the end it has none of their databases left."""
    with psycopg.connect(server_url, autocommit=True) as connection:
        query = "SELECT datname FROM pg_database WHERE datname ~ '^cronlock_test_[0-9a-f]{16}$'"
        before = set(connection.execute(query).fetchall())
        yield server_url
        assert set(connection.execute(query).fetchall()) == before


def test_the_project_of_the_testing_page_passes_its_tests_with_a_server_of_its_own(user: Path) -> None:
    names = write_files("testing", user)
    assert {"shop.py", "conftest.py", "test_shop.py"} <= set(names)
    done = run_pytest(user)
    written = sum(len(re.findall(r"^(?:async )?def test_", (user / name).read_text(), re.MULTILINE)) for name in names)
    assert passed(done) == written >= 6
    assert done.stdout.count("skipped") == 0


def test_the_workers_of_xdist_share_a_server_that_is_named(user: Path, server: str) -> None:
    write_files("testing", user)
    assert passed(run_pytest(user, "-n", "2", CRONLOCK_TEST_DATABASE_URL=server)) >= 6


def test_the_workers_of_xdist_have_a_server_each_and_leave_nothing(user: Path, temporary: Path) -> None:
    write(
        user,
        shop=TASK,
        conftest=PREPARE,
        test_shop="""
        import os, pathlib, pytest
        from shop import cron

        @pytest.mark.parametrize("number", range(8))
        def test_item(cronlock_run, cronlock_server, number):
            assert cronlock_run(cron, "item").result == "1"
            worker = os.environ["PYTEST_XDIST_WORKER"]
            pathlib.Path(f"seen-{worker}").write_text(cronlock_server)
        """,
    )
    done = run_pytest(user, "-n", "2", TMPDIR=str(temporary))
    assert passed(done) == 8
    assert len({path.read_text() for path in user.glob("seen-*")}) == 2
    assert [path.name for path in temporary.iterdir() if path.name.startswith("cronlock-")] == []


def test_every_test_has_a_database_of_its_own_and_the_cronlock_is_put_back(user: Path, server: str) -> None:
    write(
        user,
        shop=TASK,
        conftest=PREPARE,
        test_shop="""
        import psycopg, pytest
        from shop import cron

        seen = set()
        before = cron.settings

        @pytest.mark.parametrize("number", range(3))
        def test_item(cronlock_run, cronlock_database, number):
            assert cronlock_run(cron, "item").result == "1"
            assert cronlock_run(cron, "item").result == "2"
            with psycopg.connect(cronlock_database) as connection:
                assert connection.execute("SELECT count(*) FROM cronlock.run").fetchone() == (2,)
            seen.add(cronlock_database)
            assert cron.settings is before
            kept.append(psycopg.connect(cronlock_database))

        kept = []

        def test_they_differed():
            assert len(seen) == 3
            for connection in kept:
                connection.close()
        """,
    )
    assert passed(run_pytest(user, CRONLOCK_TEST_DATABASE_URL=server)) == 4


def test_a_schema_of_another_name_is_that_of_the_environment_or_of_the_override(user: Path, server: str) -> None:
    write(
        user,
        shop=TASK,
        conftest=PREPARE,
        test_shop="""
        from shop import cron

        def test_item(cronlock_run):
            assert cronlock_run(cron, "item").status == "completed"
        """,
    )
    assert passed(run_pytest(user, CRONLOCK_TEST_DATABASE_URL=server, CRONLOCK_SCHEMA="Jobs")) == 1
    write(user, shop=TASK.replace("Cronlock()", "Cronlock(schema_name='crons')"))
    override = '\n@pytest.fixture(scope="session")\ndef cronlock_schema(): return "crons"\n'
    write(user, conftest=PREPARE + override)
    assert passed(run_pytest(user, CRONLOCK_TEST_DATABASE_URL=server)) == 1


def test_an_async_test_that_blocks_its_loop_is_told_what_to_write(user: Path, server: str) -> None:
    write(
        user,
        shop=TASK,
        conftest=PREPARE,
        test_shop="""
        import pytest
        from cronlock import CronlockError
        from shop import cron

        @pytest.mark.asyncio
        async def test_item(cronlock_run, cronlock_database):
            with pytest.raises(CronlockError, match="await cron.run"):
                cronlock_run(cron, "item")
            async with cron.using(cronlock_database):
                assert (await cron.run("item")).status == "completed"
        """,
    )
    assert passed(run_pytest(user, CRONLOCK_TEST_DATABASE_URL=server)) == 1


ONE = "def test_it(cronlock_database): ..."


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"CRONLOCK_TEST_DATABASE_URL": "mysql://root@localhost/x"}, "CRONLOCK_TEST_DATABASE_URL begins with mysql"),
        (
            {"CRONLOCK_TEST_DATABASE_URL": "postgresql://a:s3cr3t@127.0.0.1:1/x"},
            "no connection to the server for tests",
        ),
        ({"CRONLOCK_PG_BIN": "/nowhere"}, "Or name a server for tests: CRONLOCK_TEST_DATABASE_URL=.."),
        ({"CRONLOCK_SCHEMA": "pg_mine"}, "a name that PostgreSQL keeps for itself"),
    ],
)
def test_what_is_missing_is_said_in_a_sentence(user: Path, settings: dict[str, str], told: str) -> None:
    write(user, test_it=ONE)
    done = run_pytest(user, **settings)
    assert done.returncode == 1
    assert told in done.stdout
    assert "Traceback" not in done.stdout
    assert "s3cr3t" not in done.stdout


def test_a_role_that_may_make_no_database_is_told_so(user: Path, server: str) -> None:
    write(user, test_it=ONE)
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("CREATE ROLE no_databases LOGIN PASSWORD 'no-databases'")
        try:
            url = re.sub("//[^@]+@", "//no_databases:no-databases@", server)
            done = run_pytest(user, CRONLOCK_TEST_DATABASE_URL=url)
        finally:
            connection.execute("DROP ROLE no_databases")
    assert "the role 'no_databases' must be allowed to CREATE DATABASE" in done.stdout


def test_a_prepare_that_breaks_shows_its_own_traceback_and_leaves_no_database(user: Path, server: str) -> None:
    write(user, test_it=ONE, conftest=PREPARE.replace("CREATE TABLE item (n int)", "CREATE TABEL item"))
    done = run_pytest(user, CRONLOCK_TEST_DATABASE_URL=server)
    assert done.returncode == 1
    assert "SyntaxError" in done.stdout
    assert "TABEL" in done.stdout


def test_who_asks_for_no_fixture_pays_nothing(user: Path) -> None:
    write(
        user,
        test_it="""
        import sys

        def test_nothing_is_loaded():
            assert "cronlock.fixtures" in sys.modules
            ours = {name for name in sys.modules if name.startswith("cronlock")}
            assert ours == {"cronlock", "cronlock.fixtures"}
            assert not {"psycopg", "sqlalchemy", "pydantic", "starlette", "alembic"} & set(sys.modules)
        """,
    )
    assert passed(run_pytest(user)) == 1


def test_killed_tests_leave_no_server_running(user: Path, temporary: Path) -> None:
    write(
        user,
        test_it="""
        import pathlib, time

        def test_it(cronlock_server, cronlock_database):
            import psycopg
            with psycopg.connect(cronlock_server) as connection:
                directory = connection.execute("SHOW data_directory").fetchone()[0]
            pid = pathlib.Path(directory, "postmaster.pid").read_text().split()[0]
            pathlib.Path("pid.new").write_text(pid)
            pathlib.Path("pid.new").rename("pid")
            time.sleep(60)
        """,
    )
    env = {**environment(), "PYTHONPATH": str(PROJECT), "TMPDIR": str(temporary)}
    with Running("-m", "pytest", cwd=user, env=env, command=(sys.executable,)) as tests:
        until = time.monotonic() + 60
        while not (user / "pid").exists():
            assert time.monotonic() < until, tests.said
            assert tests.process.poll() is None, tests.said
            time.sleep(0.05)
        server = int((user / "pid").read_text())
        assert is_alive(server)
        tests.send(signal.SIGKILL)
        tests.ends()
        while is_alive(server):
            assert time.monotonic() < until
            time.sleep(0.05)
