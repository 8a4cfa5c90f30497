"""`migrate`: many at once, killed in the middle, behind others, without rights; it ends, or says why not."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cronlock import Run
from cronlock import migrate as module
from cronlock.errors import MigrationError
from cronlock.migrate import migrate
from cronlock.models import REVISION
from tests import Db, Make, serving
from tests.commands import Running, environment
from tests.observing import is_quiet, locks
from tests.working import working

KEY = "hashtextextended('cronlock migrate' || chr(31) || 'cronlock', 0)"
NEXT = f"{int(REVISION) + 1:04}"
MIGRATION = f'''
from alembic import context, op

revision = "{NEXT}"
down_revision = "{REVISION}"
branch_labels = None
depends_on = None


def upgrade() -> None:
    schema = context.config.attributes["schema"]
%s
'''
WIDER = """    op.execute(f'ALTER TABLE "{schema}".run ADD COLUMN wider integer')"""
WIDER_JOBS = """    for table in ("job", "job_waiting", "job_history", "idempotency_key"):
        op.execute(f'ALTER TABLE "{schema}".{table} ADD COLUMN wider integer NOT NULL DEFAULT 7')"""
SLOW = """
quick = upgrade


def upgrade() -> None:
    quick()
    op.execute("SELECT pg_sleep(60)")
"""
CONCURRENT = """
    with op.get_context().autocommit_block():
        op.execute(f'CREATE INDEX CONCURRENTLY run_host_idx ON "{schema}".run (host)')
"""


@pytest.fixture
def db(empty_url: str) -> Iterator[Db]:
    with psycopg.connect(empty_url, autocommit=True, application_name="observer") as connection:
        yield connection


@pytest.fixture
def newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Adds a migration to the ones there are, for this process; gives the directory for others."""
    ours = module.script_location()

    def add(body: str) -> Path:
        directory = tmp_path / "migrations"
        shutil.copytree(ours, directory, ignore=shutil.ignore_patterns("__pycache__"))
        (directory / "versions" / f"{NEXT}_newer.py").write_text(MIGRATION % body)
        monkeypatch.setattr(module, "script_location", lambda: directory)
        return directory

    return add


@contextmanager
def migrators(count: int, url: str, *arguments: str) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Processes that are ready to migrate; killed at the end if they still live."""
    here = Path(__file__).parent
    command = [sys.executable, str(here / "migrator.py"), url, "cronlock", *arguments]
    inherited = os.environ | {"PYTHONPATH": str(here.parent)}
    with ExitStack() as stack:
        started = []
        for _ in range(count):
            pipe = subprocess.PIPE
            opened = subprocess.Popen(command, env=inherited, stdin=pipe, stdout=pipe, stderr=pipe)
            process = stack.enter_context(opened)
            stack.callback(process.kill)
            started.append(process)
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        yield started


def go(processes: list["subprocess.Popen[bytes]"]) -> None:
    """Let them migrate."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()


def results(processes: list["subprocess.Popen[bytes]"]) -> list[Any]:
    """[before, after] of each; fails with what one said if it failed."""
    found = []
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err.decode()
        found.append(json.loads(out))
    return found


def revisions(db: Db) -> list[str]:
    """What alembic_version says."""
    return [row[0] for row in db.execute("SELECT version_num FROM cronlock.alembic_version").fetchall()]


@contextmanager
def held(url: str, statement: str) -> Iterator["psycopg.Connection[tuple[Any, ...]]"]:
    """Another session has run `statement` and keeps its transaction open."""
    with psycopg.connect(url, application_name="somebody else") as other:
        other.execute(statement)
        yield other
        other.rollback()


def test_ten_processes_at_once_make_the_schema_once(empty_url: str, db: Db) -> None:
    with migrators(10, empty_url, "30") as processes:
        go(processes)
        found = results(processes)
    assert sorted(found, key=str) == sorted([[None, REVISION], *[[REVISION, REVISION]] * 9], key=str)
    assert revisions(db) == [REVISION]
    assert is_quiet(db)


@pytest.mark.stress
@pytest.mark.timeout(400)
def test_ten_processes_at_once_twenty_times(empty_url: str, db: Db) -> None:
    for _ in range(20):
        db.execute("DROP SCHEMA IF EXISTS cronlock CASCADE")
        test_ten_processes_at_once_make_the_schema_once(empty_url, db)


@pytest.mark.parametrize("body", [WIDER, CONCURRENT], ids=["table", "concurrent index"])
def test_processes_one_revision_behind_upgrade_once_without_a_deadlock(
    empty_url: str, db: Db, newer: Callable[[str], Path], body: str
) -> None:
    migrate(empty_url, "cronlock")
    directory = newer(body)
    with migrators(5, empty_url, "30", str(directory)) as processes:
        go(processes)
        found = results(processes)
    assert sorted(found) == [[REVISION, NEXT], *[[NEXT, NEXT]] * 4]
    assert revisions(db) == [NEXT]
    assert db.execute("SELECT count(*) FROM pg_index WHERE NOT indisvalid").fetchone() == (0,)
    assert is_quiet(db)


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize("body", [WIDER, CONCURRENT], ids=["table", "concurrent index"])
def test_ten_processes_one_revision_behind_twenty_times(
    empty_url: str, db: Db, newer: Callable[[str], Path], body: str
) -> None:
    migrate(empty_url, "cronlock")
    directory = newer(body)
    for _ in range(20):
        with migrators(10, empty_url, "30", str(directory)) as processes:
            go(processes)
            assert sorted(results(processes)) == [[REVISION, NEXT], *[[NEXT, NEXT]] * 9]
        assert revisions(db) == [NEXT]
        assert db.execute("SELECT count(*) FROM pg_index WHERE NOT indisvalid").fetchone() == (0,)
        assert is_quiet(db)
        db.execute("ALTER TABLE cronlock.run DROP COLUMN IF EXISTS wider; DROP INDEX IF EXISTS cronlock.run_host_idx")
        db.execute("UPDATE cronlock.alembic_version SET version_num = %s", (REVISION,))


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.stress)])
def test_the_next_migration_completes_what_a_killed_one_left(
    empty_url: str, db: Db, tmp_path: Path, kills: int
) -> None:
    slow = shutil.copytree(module.script_location(), tmp_path / "migrations")
    with next((slow / "versions").glob(f"{REVISION}_*.py")).open("a") as file:
        file.write(SLOW)
    asleep = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '%pg_sleep(60)'"
    for _ in range(kills):
        with migrators(1, empty_url, "30", str(slow)) as (process,):
            go([process])
            deadline = time.monotonic() + 10
            while db.execute(asleep).fetchone() is None:
                assert time.monotonic() < deadline, "it did not get to the middle"
                time.sleep(0.02)
            process.kill()
            process.wait()
        started = time.monotonic()
        assert migrate(empty_url, "cronlock", wait=timedelta(seconds=20)).after == REVISION
        assert time.monotonic() - started < 5
        assert revisions(db) == [REVISION]
        db.execute("DROP SCHEMA cronlock CASCADE")
    assert is_quiet(db)


def test_at_head_nobody_waits_though_the_lock_is_held_elsewhere(empty_url: str) -> None:
    migrate(empty_url, "cronlock")
    lines: list[str] = []
    with held(empty_url, f"SELECT pg_advisory_xact_lock({KEY})"):
        started = time.monotonic()
        for _ in range(20):
            done = migrate(empty_url, "cronlock", report=lines.append)
            assert (done.before, done.after) == (REVISION, REVISION)
        assert time.monotonic() - started < 5
    assert lines == []


def test_twenty_processes_that_start_at_head_at_once_wait_for_nobody(empty_url: str, db: Db) -> None:
    migrate(empty_url, "cronlock")
    with held(empty_url, f"SELECT pg_advisory_xact_lock({KEY})"), migrators(20, empty_url, "30") as processes:
        began = time.monotonic()
        go(processes)
        found = results(processes)
        assert time.monotonic() - began < 25, "it is the processors that they share"
    assert found == [[REVISION, REVISION]] * 20


def test_three_processes_behind_a_held_lock_each_say_for_whom_they_wait_and_exit_with_1(
    empty_url: str, db: Db, tmp_path: Path
) -> None:
    arguments = ("migrate", "--wait", "2s")
    with held(empty_url, f"SELECT pg_advisory_xact_lock({KEY})") as other, ExitStack() as stack:
        env = environment(DATABASE_URL=empty_url)
        started = [stack.enter_context(Running(*arguments, cwd=tmp_path, env=env)) for _ in range(3)]
        assert [process.ends() for process in started] == [1, 1, 1]
        holder = f"held by backend {other.info.backend_pid} (somebody else), for"
        for process in started:
            said = " ".join(process.said.split())
            assert f"waiting for another migration; its lock is {holder}" in said
            assert f"another migration has not finished in time; its lock is {holder}" in said
    assert db.execute("SELECT to_regnamespace('cronlock')").fetchone() == (None,)
    assert is_quiet(db)


def test_who_waits_says_so_again_and_again(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPORT_EVERY", 0.4)
    lines: list[str] = []
    with held(empty_url, f"SELECT pg_advisory_xact_lock({KEY})"), pytest.raises(MigrationError):
        migrate(empty_url, "cronlock", wait=timedelta(seconds=2), report=lines.append)
    assert 3 <= len(lines) <= 5
    assert len(set(lines)) > 1, "the age grows"


def test_who_waits_says_at_once_for_whom_and_gives_up_at_its_limit(empty_url: str, db: Db) -> None:
    lines: list[tuple[float, str]] = []
    with held(empty_url, f"SELECT pg_advisory_xact_lock({KEY})") as other:
        time.sleep(1.1)
        started = time.monotonic()
        with pytest.raises(MigrationError, match="somebody else"):
            migrate(
                empty_url,
                "cronlock",
                wait=timedelta(seconds=1),
                report=lambda line: lines.append((time.monotonic() - started, line)),
            )
        assert 1 <= time.monotonic() - started < 2
        pid = other.info.backend_pid
    ((after, line),) = lines
    assert after < 0.5
    assert f"backend {pid} (somebody else)" in line
    assert "for 1 s" in line
    assert db.execute("SELECT to_regnamespace('cronlock')").fetchone() == (None,)
    assert is_quiet(db)
    assert migrate(empty_url, "cronlock").after == REVISION


def test_tables_in_use_are_not_queued_for_long_and_tried_again(
    empty_url: str, db: Db, newer: Callable[[str], Path]
) -> None:
    migrate(empty_url, "cronlock")
    newer(WIDER)
    lines: list[str] = []
    done: list[Any] = []
    with held(empty_url, "SELECT * FROM cronlock.run"):
        work = threading.Thread(
            target=lambda: done.append(migrate(empty_url, "cronlock", wait=timedelta(seconds=30), report=lines.append))
        )
        work.start()
        longest, started = 0.0, time.monotonic()
        while not lines:
            asked = time.monotonic()
            db.execute("UPDATE cronlock.run SET reason = reason WHERE id = 0")
            longest = max(longest, time.monotonic() - asked)
            assert time.monotonic() - started < 10
            time.sleep(0.05)
        assert done == []
        assert 0.5 < longest < 3  # it was blocked by the queue in front of it, and not for long
        assert "in use" in lines[0]
    work.join(10)
    assert [(one.before, one.after) for one in done] == [(REVISION, NEXT)]
    assert is_quiet(db)


@pytest.mark.anyio
async def test_calls_go_on_while_a_migration_waits_for_a_table_that_a_reader_keeps(
    empty_url: str, db: Db, newer: Callable[[str], Path], make_cron: Make
) -> None:
    """A call may stand behind the migration's wait for its lock, which is short, and is then answered."""
    migrate(empty_url, "cronlock")
    newer(WIDER)
    cron = make_cron(database_url=empty_url)

    @cron.task("nightly")
    async def nightly(run: Run) -> None: ...

    lines: list[str] = []
    took: list[float] = []
    async with serving(cron.app()) as client:

        async def call() -> None:
            began = time.monotonic()
            answer = await client.get("/cron/nightly")
            took.append(time.monotonic() - began)
            assert (answer.status_code, answer.json()["status"]) == (200, "completed")

        with held(empty_url, "SELECT * FROM cronlock.run"):
            migrating = asyncio.create_task(
                asyncio.to_thread(migrate, empty_url, "cronlock", wait=timedelta(seconds=30), report=lines.append)
            )
            while len(lines) < 2:
                await call()
            assert not migrating.done()
        assert 0.5 < max(took) < 3, "as long as the migration waits for its lock, and no longer"
        assert ((done := await migrating).before, done.after) == (REVISION, NEXT)
        await call()
    assert revisions(db) == [NEXT]
    assert is_quiet(db)


@pytest.mark.anyio
async def test_jobs_go_on_while_a_migration_waits_for_their_tables(
    empty_url: str, db: Db, newer: Callable[[str], Path], make_cron: Make
) -> None:
    """An enqueue or the end of a job may stand behind the migration's wait for its lock; no lease runs out for it."""
    migrate(empty_url, "cronlock")
    newer(WIDER_JOBS)
    cron = make_cron(database_url=empty_url, lease="4s")

    @cron.task("work")
    async def work(run: Run) -> None:
        await run.driver.execute("SELECT 1")

    lines: list[str] = []
    took: dict[str, list[float]] = {"post": [], "get": [], "job": []}
    ids: list[int] = []
    reader = "SELECT FROM cronlock.job_status, cronlock.idempotency_key, cronlock.run"
    async with working(cron), serving(cron.app()) as client:

        async def one() -> None:
            began = time.monotonic()
            answer = await client.post("/jobs/work", headers={"idempotency-key": f"job {len(ids)}"})
            assert answer.status_code == 202, answer.text
            took["post"].append(time.monotonic() - began)
            ids.append(answer.json()["jobId"])
            while True:
                asked = time.monotonic()
                told = await client.get(f"/jobs/{ids[-1]}")
                took["get"].append(time.monotonic() - asked)
                assert told.status_code == 200, told.text
                if told.json()["status"] == "completed":
                    break
                await asyncio.sleep(0.01)
            took["job"].append(time.monotonic() - began)

        with held(empty_url, reader):
            migrating = asyncio.create_task(
                asyncio.to_thread(migrate, empty_url, "cronlock", wait=timedelta(seconds=30), report=lines.append)
            )
            while len(lines) < 2:
                await one()
            assert not migrating.done()
        assert max(took["job"]) > 0.5, "one came behind the migration"
        for what, durations in took.items():
            assert max(durations) < 3.5, f"{what}: as long as the migration waits for its lock, and no longer"
        assert ((done := await migrating).before, done.after) == (REVISION, NEXT)
        await one()
    assert revisions(db) == [NEXT]
    found = db.execute("SELECT id, status, attempts FROM cronlock.job_history ORDER BY id").fetchall()
    assert found == [(job_id, "completed", 1) for job_id in ids]
    assert is_quiet(db)


def test_tables_in_use_for_too_long_are_an_error_and_nothing_is_changed(
    empty_url: str, db: Db, newer: Callable[[str], Path]
) -> None:
    migrate(empty_url, "cronlock")
    newer(WIDER)
    with held(empty_url, "SELECT * FROM cronlock.run"), pytest.raises(MigrationError, match="lock timeout"):
        migrate(empty_url, "cronlock", wait=timedelta(seconds=0.1))
    assert revisions(db) == [REVISION]
    assert is_quiet(db)


@pytest.mark.parametrize("revision", ["9999", "some-branch"])
def test_a_database_ahead_of_this_code_is_said_to_be_and_left_alone(empty_url: str, db: Db, revision: str) -> None:
    migrate(empty_url, "cronlock")
    db.execute("UPDATE cronlock.alembic_version SET version_num = %s", (revision,))
    with pytest.raises(MigrationError, match=f"{revision}.*ahead of this code"):
        migrate(empty_url, "cronlock")
    assert revisions(db) == [revision]


def test_two_revisions_at_once_are_an_error(empty_url: str, db: Db) -> None:
    migrate(empty_url, "cronlock")
    db.execute("INSERT INTO cronlock.alembic_version VALUES ('other')")
    with pytest.raises(MigrationError, match="2 rows"):
        migrate(empty_url, "cronlock")


@pytest.fixture
def role_url(empty_url: str, db: Db) -> Iterator[str]:
    """A role that may connect and nothing else."""
    name = f"cronlock_role_{os.getpid()}"
    db.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'of-the-tests'")
    try:
        yield make_conninfo(empty_url, user=name, password="of-the-tests")
    finally:
        db.execute(f"DROP OWNED BY {name} CASCADE")
        db.execute(f"DROP ROLE {name}")


def test_a_role_that_may_create_nothing_can_migrate_what_is_at_head(empty_url: str, role_url: str, db: Db) -> None:
    migrate(empty_url, "cronlock")
    role = sql.Identifier(str(conninfo_to_dict(role_url)["user"]))
    db.execute(sql.SQL("GRANT USAGE ON SCHEMA cronlock TO {}").format(role))
    db.execute(sql.SQL("GRANT SELECT ON cronlock.alembic_version TO {}").format(role))
    assert migrate(role_url, "cronlock").before == REVISION


def test_a_role_that_owns_only_the_schema_can_migrate_into_it(empty_url: str, role_url: str, db: Db) -> None:
    role = sql.Identifier(str(conninfo_to_dict(role_url)["user"]))
    db.execute(sql.SQL("CREATE SCHEMA cronlock AUTHORIZATION {}").format(role))
    assert migrate(role_url, "cronlock").after == REVISION
    assert revisions(db) == [REVISION]


def test_a_role_without_rights_is_told_what_the_database_refused(role_url: str, db: Db) -> None:
    with pytest.raises(MigrationError, match="permission denied for database"):
        migrate(role_url, "cronlock")
    assert is_quiet(db)
    assert locks(db) == []
