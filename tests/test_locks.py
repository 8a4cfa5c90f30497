"""The lock of a run: which number it is, what opening it leaves alone, and who else is excluded by it."""

import asyncio
import json
import logging
import os
import shutil
import subprocess
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
from psycopg import sql

from cronlock import Cronlock, RegistrationError, Run, Unavailable
from cronlock.embedded import find_binaries
from tests import Db, Make, Steps, advisory_locks, held, holders, rows, run_once, serving, task_of, until, value

pytestmark = pytest.mark.anyio
both = pytest.mark.parametrize("is_async", [True, False], ids=["async", "thread"])
CLEANUP, NIGHTLY = -2098783330, 759228614
"""hashtext('cleanup') and hashtext('nightly-report')"""


# -- which number it is ------------------------------------------------------------------------------------


async def endless(run: Run) -> None:
    await asyncio.Event().wait()


@asynccontextmanager
async def running(cron: Cronlock, db: Db, *names: str) -> AsyncIterator[None]:
    """These tasks of `cron`, which are endless, run; they are cancelled in the end."""
    async with cron:
        calls = [asyncio.create_task(cron.run(name)) for name in names]
        count = "SELECT count(*) FROM cronlock.run WHERE status = 'running' AND task = ANY (%s)"
        await until(lambda: value(db, count, list(names)) == len(names), "they run")
        yield
        await cron.close(0)
        await asyncio.gather(*calls)


async def test_the_view_shows_who_holds_which_lock_for_negative_keys_too(make_cron: Make, db: Db) -> None:
    cron = make_cron()
    for name in ("cleanup", "nightly-report"):
        cron.task(name)(endless)
    cron.task("numbered", lock=-8492019482019283)(endless)
    async with running(cron, db, "cleanup", "nightly-report", "numbered"):
        query = "SELECT task, lock_key, lock_name, run_id, backend_pid, application_name FROM cronlock.lock_holder"
        shown = {row[0]: row[1:] for row in db.execute(query).fetchall()}
        assert shown.keys() == {"cleanup", "nightly-report", "numbered"}
        assert shown["cleanup"][:2] == (CLEANUP, "cleanup")
        assert shown["nightly-report"][:2] == (NIGHTLY, "nightly-report")
        assert shown["numbered"][:2] == (-8492019482019283, None)
        for name, (_, _, run_id, pid, application) in shown.items():
            expected = value(db, "SELECT id FROM cronlock.run WHERE task = %s", name)
            assert run_id == expected
            assert application == f"cronlock:{name}"
            assert value(db, "SELECT backend_pid FROM cronlock.run WHERE id = %s", run_id) == pid


async def test_the_plain_query_on_pg_locks_shows_the_tasks_by_application_name(make_cron: Make, db: Db) -> None:
    cron = make_cron()
    cron.task("cleanup")(endless)
    async with running(cron, db, "cleanup"):
        query = """SELECT a.application_name FROM pg_locks l JOIN pg_stat_activity a USING (pid)
            WHERE l.locktype = 'advisory' AND a.datname = current_database()"""
        assert db.execute(query).fetchall() == [("cronlock:cleanup",)]


@pytest.mark.parametrize("key", [8492019482019283, -8492019482019283, 0, -1, 1, 2**63 - 1, -(2**63), CLEANUP])
async def test_an_int_is_the_key_itself(make_cron: Make, db: Db, key: int) -> None:
    cron = make_cron()
    ran: list[int] = []

    @cron.task("numbered", lock=key)
    async def numbered(run: Run) -> None:
        ran.append(run.id)
        assert value(db, "SELECT pg_try_advisory_xact_lock(%s::bigint)", key) is False

    async with cron:
        assert (await cron.run("numbered")).failure is None
        db.execute("BEGIN")
        assert value(db, "SELECT pg_try_advisory_xact_lock(%s::bigint)", key) is True
        skipped = await cron.run("numbered")
        db.execute("ROLLBACK")
        assert (skipped.status, skipped.reason) == ("skipped", "already_running")
        assert skipped.holder is not None
        assert skipped.holder.pid == db.info.backend_pid
        assert (await cron.run("numbered")).status == "completed"
    assert len(ran) == 2


async def test_a_lock_of_two_ints_is_another_lock(make_cron: Make, db: Db) -> None:
    """Of the same two halves: pg_locks tells them apart by objsubid."""
    cron = make_cron()
    cron.task("numbered", lock=(3 << 32) + 7)(lambda run: None)
    db.execute("BEGIN")
    db.execute("SELECT pg_advisory_xact_lock(3, 7)")
    async with cron:
        assert (await cron.run("numbered")).status == "completed"
    db.execute("ROLLBACK")


@pytest.mark.parametrize(
    ("name", "lock"),
    [("nightly", None), ("nightly", "x" * 200), ("nightly", "Ärger 'quoted' \\ 😀 %s"), ("nightly", " ")],
)
async def test_a_name_is_hashed_by_the_server_so_that_any_program_can_name_it(
    make_cron: Make, db: Db, database_url: str, name: str, lock: str | None
) -> None:
    cron = make_cron()
    cron.task(name, lock=lock)(lambda run: None)
    async with cron:
        async with held(database_url, lock or name):
            assert (await cron.run(name)).status == "skipped"
        assert (await cron.run(name)).status == "completed"


async def test_the_namespace_is_part_of_the_name_and_tells_installations_apart(
    make_cron: Make, db: Db, database_url: str
) -> None:
    cron = make_cron(namespace="blue")
    cron.task("nightly")(lambda run: None)
    cron.task("numbered", lock=42)(lambda run: None)
    async with cron:
        async with held(database_url, "nightly"):
            assert (await cron.run("nightly")).status == "completed"
        async with held(database_url, "blue:nightly"):
            assert (await cron.run("nightly")).status == "skipped"
        db.execute("BEGIN; SELECT pg_advisory_xact_lock(42)")
        assert (await cron.run("numbered")).status == "skipped", "an int is used as it is"
        db.execute("ROLLBACK")


async def test_a_lock_of_another_database_of_the_server_is_not_seen(make_cron: Make, empty_url: str, db: Db) -> None:
    """pg_locks lists the locks of all databases."""
    cron = make_cron()
    ran: list[Any] = []

    @cron.task("nightly")
    async def nightly(run: Run) -> None:
        ran.append(value(db, "SELECT count(*) FROM cronlock.lock_holder"))

    async with cron, held(empty_url, "nightly"):
        assert (await cron.run("nightly")).status == "completed"
    assert ran == [1]


async def test_an_opening_that_has_no_row_yet_is_no_holder_and_nor_is_one_in_another_database(
    make_cron: Make, empty_url: str, database_url: str, db: Db
) -> None:
    """The lock is held, but by nobody who can be named: that is no skip."""
    cron = make_cron()
    cron.task("once")(lambda run: None)
    async with cron, held(empty_url, "once"):
        async with held(database_url, "once", application="cronlock:once"):
            with pytest.raises(Unavailable) as undecided:
                await cron.run("once")
        assert undecided.value.reason == "undecided"
        assert (await cron.run("once")).status == "completed"
    assert rows(db, "once") == [("completed", None)]


# -- collisions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "two", "key"),
    [("sync-posts-20", "refresh-tenants-347", 1421259250), ("job-215061", "job-363802", -90472845)],
)
async def test_two_names_with_one_key_stop_the_start_and_both_are_named(
    make_cron: Make, db: Db, one: str, two: str, key: int
) -> None:
    assert value(db, "SELECT hashtext(%s)", one) == value(db, "SELECT hashtext(%s)", two) == key
    cron = make_cron()
    for name in (one, two):
        cron.task(name)(lambda run: None)
    with pytest.raises(RegistrationError) as refused:
        async with serving(cron.app()):
            pass
    for text in (one, two, str(key), "lock="):
        assert text in str(refused.value)
    with pytest.raises(RegistrationError):
        await cron.run(one)
    await cron.close()
    assert value(db, "SELECT count(*) FROM cronlock.run") == 0


async def test_an_int_that_is_the_key_of_another_tasks_name_stops_the_start(make_cron: Make, db: Db) -> None:
    cron = make_cron()
    cron.task("cleanup")(lambda run: None)
    cron.task("numbered", lock=CLEANUP)(lambda run: None)
    with pytest.raises(RegistrationError, match="cleanup"):
        async with serving(cron.app()):
            pass


async def test_two_tasks_that_name_one_lock_on_purpose_exclude_each_other(make_cron: Make, db: Db) -> None:
    cron, other = make_cron(), make_cron()
    for app in (cron, other):
        app.task("one", lock="shared")(endless)
        app.task("two", lock="shared")(endless)
    async with other, running(cron, db, "one"):
        for app in (cron, other):
            skipped = await app.run("two")
            assert (skipped.status, skipped.reason) == ("skipped", "already_running")
            assert skipped.holder is not None
            assert skipped.holder.run_id == value(db, "SELECT id FROM cronlock.run WHERE task = 'one'")


async def test_a_collision_with_a_task_that_only_the_database_knows_is_a_warning(
    make_cron: Make, db: Db, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere, cron = make_cron(), make_cron()
    elsewhere.task("sync-posts-20")(lambda run: None)
    cron.task("refresh-tenants-347")(lambda run: None)
    async with elsewhere:
        await elsewhere.run("sync-posts-20")
    async with cron:
        assert (await cron.run("refresh-tenants-347")).status == "completed"
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "sync-posts-20" in warnings[0]
    assert "refresh-tenants-347" in warnings[0]


# -- what the role of the connection says ------------------------------------------------------------------


@pytest.fixture
def make_role(server_url: str, database_url: str) -> Iterator[Callable[..., str]]:
    """Makes a role with defaults of its own and only what cronlock needs; gives a URL that connects as it."""
    made: list[sql.Identifier] = []

    with psycopg.connect(database_url, autocommit=True) as connection:

        def make(**defaults: str) -> str:
            name = f"cronlock_test_{connection.info.backend_pid}_{len(made)}"
            role = sql.Identifier(name)
            connection.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'of-the-test'").format(role))
            made.append(role)
            for grant in (
                "USAGE ON SCHEMA cronlock",
                "SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA cronlock",
                "CREATE, USAGE ON SCHEMA public",
            ):
                connection.execute(sql.SQL("GRANT {} TO {}").format(sql.SQL(grant), role))
            for setting, default in defaults.items():
                command = sql.SQL("ALTER ROLE {} SET {} = {}")
                literal = sql.SQL(default) if setting == "search_path" else sql.Literal(default)
                connection.execute(command.format(role, sql.Identifier(setting), literal))
            parts = urlsplit(database_url)
            address = f"{name}:of-the-test@{parts.hostname}:{parts.port}"
            return urlunsplit(parts._replace(netloc=address))

        yield make
        for role in made:
            connection.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(role))


DEFAULTS: dict[str, dict[str, str]] = {
    "nothing": {},
    "repeatable read": {"default_transaction_isolation": "repeatable read"},
    "serializable and deferrable": {
        "default_transaction_isolation": "serializable",
        "default_transaction_deferrable": "on",
    },
    "asynchronous commit": {"synchronous_commit": "off"},
    "short limits": {
        "statement_timeout": "500ms",
        "lock_timeout": "500ms",
        "idle_in_transaction_session_timeout": "500ms",
        "transaction_timeout": "500ms",
    },
    "a hostile search_path": {"search_path": "hostile, pg_catalog"},
    "foreign ways to write": {
        "datestyle": "SQL, DMY",
        "timezone": "Asia/Kolkata",
        "intervalstyle": "sql_standard",
        "standard_conforming_strings": "off",
        "escape_string_warning": "off",
        "backslash_quote": "off",
        "bytea_output": "escape",
        "extra_float_digits": "-15",
        "client_encoding": "latin1",
        "lc_messages": "C",
        "transform_null_equals": "on",
    },
    "row security": {"row_security": "off"},
    "another application_name": {"application_name": "%s '\\"},
}


@both
@pytest.mark.parametrize("kind", DEFAULTS)
async def test_the_defaults_of_the_role_change_nothing(
    make_cron: Make, make_role: Callable[..., str], db: Db, kind: str, is_async: bool
) -> None:
    defaults = dict(DEFAULTS[kind])
    if db.info.server_version < 170000:
        defaults.pop("transaction_timeout", None)
    db.execute(
        """CREATE SCHEMA hostile; GRANT ALL ON SCHEMA hostile TO public;
        CREATE FUNCTION hostile.hashtext(text) RETURNS int LANGUAGE sql AS 'SELECT 7';
        CREATE FUNCTION hostile.now() RETURNS timestamptz LANGUAGE sql AS $$SELECT clock_timestamp()$$;
        CREATE FUNCTION hostile.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS $$SELECT 'epoch'::timestamptz$$;
        CREATE FUNCTION hostile.pg_try_advisory_xact_lock(bigint) RETURNS bool LANGUAGE sql AS 'SELECT true';
        CREATE FUNCTION hostile.nay(bigint, bigint) RETURNS bool LANGUAGE sql AS 'SELECT false';
        CREATE OPERATOR hostile.= (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = hostile.nay);
        CREATE TABLE hostile.run (id bigint); CREATE TABLE hostile.pg_locks (id bigint);
        CREATE TABLE public.commits (setting text, isolation text);
        GRANT ALL ON public.commits TO public;
        CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO public.commits
            VALUES (current_setting('synchronous_commit'), current_setting('transaction_isolation'));
            RETURN NULL;
        END $$;
        CREATE TRIGGER note AFTER INSERT OR UPDATE ON cronlock.run FOR EACH ROW EXECUTE FUNCTION note()"""
    )
    url = make_role(**defaults)
    cron, other = make_cron(database_url=url), make_cron(database_url=url)
    ends = {"completed": None, "failed": ValueError("it's \\ ä")}
    expected: list[Any] = []

    def make(status: str) -> Callable[[Run], Steps]:
        def steps(run: Run) -> Steps:
            held_by = holders(db, status)
            skipped = [app.run(status) for app in (cron, other)] if is_async else []
            for call in skipped:
                outcome = yield call
                assert (outcome.status, outcome.reason) == ("skipped", "already_running")
                assert outcome.holder.run_id == run.id
            if kind == "short limits":
                yield run.driver.execute("SELECT pg_sleep(0.8)")
                yield asyncio.sleep(0.8) if is_async else db.execute("SELECT pg_sleep(0.8)")
            expected.append(held_by)
            yield run.driver.execute("SELECT 1")
            if error := ends[status]:
                raise error
            return {"text": "it's \\ ä"}

        return steps

    for app in (cron, other):
        for status in ends:
            app.task(status)(task_of(make(status), is_async))
    cron.task("untouched")(task_of(untouched, is_async))
    async with cron, other:
        assert (await cron.run("untouched")).status == "completed"
        for status in ends:
            outcome = await cron.run(status)
            assert outcome.status == status, outcome.failure
            assert outcome.failure is None or "it's" in outcome.failure.message
            assert await asyncio.to_thread(lambda: advisory_locks(db)) == 0
    assert [len(pids) for pids in expected] == [1, 1]
    skips = [("skipped", "already_running")] * 2 if is_async else []
    for status in ends:
        assert rows(db, status) == [(status, None), *skips]
    began = "SELECT bool_and(finished_at >= started_at AND started_at > now() - interval '1 min') FROM cronlock.run"
    assert value(db, began) is True
    assert json.loads(
        value(db, "SELECT result FROM cronlock.run WHERE task = 'completed' AND status = 'completed'")
    ) == {"text": "it's \\ ä"}
    assert db.execute("SELECT DISTINCT * FROM public.commits").fetchall() == [("on", "read committed")]


def untouched(run: Run) -> Steps:
    yield None


async def test_a_task_may_idle_longer_than_the_roles_idle_timeout(
    make_cron: Make, make_role: Callable[..., str], db: Db
) -> None:
    """No message is sent for it in all that time."""
    url = make_role(idle_in_transaction_session_timeout="1s")

    async def idle(run: Run) -> None:
        await run.driver.execute("SELECT 1")
        await asyncio.sleep(2.5)
        await run.driver.execute("SELECT 1")

    assert (await run_once(make_cron(database_url=url), idle)).failure is None


async def test_connections_that_the_server_ends_for_idling_in_the_pool_are_replaced(
    make_cron: Make, make_role: Callable[..., str], db: Db
) -> None:
    url = make_role(idle_session_timeout="600ms")
    cron = make_cron(database_url=url)
    cron.task("awaiting")(with_one_statement)
    cron.task("plain")(lambda run: run.driver.execute("SELECT 1") and None)
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND usename <> current_user"
    async with cron:
        for _ in range(2):
            for name in ("awaiting", "plain"):
                assert (await cron.run(name)).status == "completed"
            await until(lambda: value(db, sessions) == 0, "the server ended them")


async def with_one_statement(run: Run) -> None:
    await run.driver.execute("SELECT 1")


async def test_a_role_that_is_read_only_by_default_gets_503_and_runs_nothing(
    make_cron: Make, make_role: Callable[..., str], db: Db
) -> None:
    url = make_role(
        default_transaction_isolation="serializable",
        default_transaction_read_only="on",
        default_transaction_deferrable="on",
    )
    cron = make_cron(database_url=url)
    ran: list[Any] = []
    cron.task("nightly")(lambda run: ran.append(run))
    async with cron:
        with pytest.raises(Unavailable) as refused:
            await cron.run("nightly")
    assert refused.value.reason == "read_only"
    assert ran == []


# -- what an open run leaves alone -------------------------------------------------------------------------


@both
async def test_an_untouched_run_has_no_snapshot_and_no_transaction_id_and_vacuum_passes_it_by(
    make_cron: Make, db: Db, is_async: bool
) -> None:
    db.execute("CREATE TABLE crowded AS SELECT generate_series(1, 10000) AS a")

    def steps(run: Run) -> Steps:
        query = """SELECT state, backend_xid, backend_xmin FROM pg_stat_activity
            WHERE datname = current_database() AND application_name = 'cronlock:once'"""
        assert db.execute(query).fetchall() == [("idle in transaction", None, None)]
        db.execute("DELETE FROM crowded")
        limit = time.monotonic() + 5
        while db.execute("VACUUM crowded") and value(db, "SELECT pg_relation_size('crowded')"):
            assert time.monotonic() < limit, "this run holds VACUUM back, and not a short transaction beside it"
            yield asyncio.sleep(0.1) if is_async else time.sleep(0.1)  # type: ignore[func-returns-value]  # a pause
        relations = """SELECT count(*) FROM pg_locks WHERE locktype = 'relation' AND pid IN
            (SELECT pid FROM pg_stat_activity
              WHERE datname = current_database() AND application_name = 'cronlock:once')"""
        assert value(db, relations) == 0
        yield

    outcome = await run_once(make_cron(), task_of(steps, is_async))
    assert outcome.failure is None


async def test_a_hundred_refused_openings_leave_no_transaction_behind(
    make_cron: Make, db: Db, database_url: str
) -> None:
    cron = make_cron(pool_size=4)
    cron.task("nightly")(endless)
    cron.task("plain", lock="nightly")(lambda run: None)
    activity = """SELECT count(*) FILTER (WHERE state LIKE 'idle in%%'), count(backend_xid), count(backend_xmin)
        FROM pg_stat_activity
        WHERE datname = current_database() AND application_name LIKE 'cronlock%%' AND pid <> ALL (%s)"""
    async with cron, held(database_url, "nightly"):
        process = await cron.open()
        for _ in range(25):
            names = ("nightly", "plain", "nightly", "plain")
            outcomes = await asyncio.gather(*(cron.run(name) for name in names))
            assert {outcome.reason for outcome in outcomes} == {"already_running"}
        assert db.execute(activity, ([],)).fetchone() == (0, 0, 0)
        for pool in (process.database.runs, process.database.threads, process.database.records):
            stats: dict[str, int] = pool.get_stats()
            assert stats["pool_available"] == stats["pool_size"]
            assert stats.get("requests_waiting", 0) == 0
    assert advisory_locks(db) == 0
    assert value(db, "SELECT count(*) FROM cronlock.run WHERE reason = 'already_running'") == 100


async def test_the_lock_is_held_by_the_transaction_and_never_by_the_session(make_cron: Make, db: Db) -> None:
    """A session lock would survive the end of the transaction; a transaction's does not."""
    cron = make_cron(pool_size=1)
    pids: list[int] = []

    @cron.task("nightly")
    async def nightly(run: Run) -> None:
        (pid,) = holders(db, "nightly")
        pids.append(pid)
        await run.driver.execute("ROLLBACK")
        pids.extend(holders(db, "nightly"))

    async with cron:
        assert (await cron.run("nightly")).status == "failed"
        assert value(db, "SELECT count(*) FROM pg_stat_activity WHERE pid = %s", pids[0]) == 1
    assert len(pids) == 1


async def test_a_failing_statement_leaves_the_lock_held(make_cron: Make, db: Db) -> None:
    """Outside a savepoint any error would free it at once."""
    seen: list[int] = []

    async def failing(run: Run) -> None:
        for statement in ("SELECT 1 / 0", "SELECT 1", "nonsense", "LOCK TABLE nowhere"):
            with pytest.raises(psycopg.Error):
                await run.driver.execute(statement)
            seen.append(len(holders(db, "once")))

    await run_once(make_cron(), failing)
    assert seen == [1, 1, 1, 1]


# -- other programs ----------------------------------------------------------------------------------------

JAVASCRIPT = """
const { Client } = require("pg");
(async () => {
  const client = new Client({ connectionString: process.env.URL });
  await client.connect();
  for await (const line of require("readline").createInterface({ input: process.stdin })) {
    await client.query(line === "try" ? "BEGIN" : "ROLLBACK");
    if (line !== "try") { console.log("ended"); continue; }
    const query = "SELECT pg_try_advisory_xact_lock(hashtext($1)::bigint) AS acquired";
    const { rows } = await client.query(query, ["nightly"]);
    console.log(rows[0].acquired ? "t" : "f");
  }
  await client.end();
})();
"""


@pytest.fixture(scope="session")
def node_modules() -> Path:
    """A directory with the npm package `pg`, installed once per machine."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        if os.environ.get("CRONLOCK_NO_NODE"):
            pytest.skip("CRONLOCK_NO_NODE is set")
        pytest.fail("node and npm are needed for this test; set CRONLOCK_NO_NODE=1 to do without it")
    kept = Path(tempfile.gettempdir()) / f"cronlock-tests-node-{os.getuid()}"
    if not (kept / "node_modules" / "pg" / "package.json").exists():
        fresh = Path(tempfile.mkdtemp(prefix=f"{kept.name}-"))
        install(npm, fresh)
        shutil.rmtree(kept, ignore_errors=True)
        try:
            fresh.rename(kept)
        except OSError:  # another test run was first
            return fresh
    return kept


def install(npm: str, directory: Path) -> None:
    (directory / "package.json").write_text("{}")
    command = [npm, "install", "--no-audit", "--no-fund", "--silent", "pg@8"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr or done.stdout


class Program:
    """Another program that tries the lock `nightly` in a transaction, and ends that when told to."""

    def __init__(self, process: Process, to_try: str, to_end: str) -> None:
        self.process = process
        self.to_try = to_try
        self.to_end = to_end

    async def tries(self) -> bool:
        answer = await self.say(self.to_try)
        assert answer in ("t", "f")
        return answer == "t"

    async def ends(self) -> None:
        assert await self.say(self.to_end) == "ended"

    async def say(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line.encode())
        await self.process.stdin.drain()
        return (await asyncio.wait_for(self.process.stdout.readline(), 20)).decode().strip()


@asynccontextmanager
async def begun(*command: str, **options: Any) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, **options)
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        assert await asyncio.wait_for(process.wait(), 10) == 0


@asynccontextmanager
async def psql(url: str, request: pytest.FixtureRequest) -> AsyncIterator[Program]:
    command = shutil.which("psql") or str(find_binaries() / "psql")
    query = "BEGIN;\nSELECT pg_try_advisory_xact_lock(hashtext('nightly')::bigint);\n"
    async with begun(command, "-XAtq", "-v", "ON_ERROR_STOP=1", url) as process:
        yield Program(process, query, "ROLLBACK;\n\\echo ended\n")


@asynccontextmanager
async def node(url: str, request: pytest.FixtureRequest) -> AsyncIterator[Program]:
    directory: Path = request.getfixturevalue("node_modules")
    async with begun("node", "-e", JAVASCRIPT, env={**os.environ, "URL": url}, cwd=directory) as process:
        yield Program(process, "try\n", "end\n")


@pytest.mark.parametrize("program", [psql, node])
async def test_another_program_excludes_the_task_and_is_excluded_by_it(
    make_cron: Make, db: Db, database_url: str, program: Any, request: pytest.FixtureRequest
) -> None:
    cron = make_cron()
    during: list[bool] = []

    async with program(database_url, request) as other:

        @cron.task("nightly")
        async def nightly(run: Run) -> None:
            during.append(await other.tries())
            await other.ends()

        async with cron:
            assert await other.tries() is True
            skipped = await cron.run("nightly")
            assert (skipped.status, skipped.reason) == ("skipped", "already_running")
            assert skipped.holder is not None
            assert [skipped.holder.pid] == holders(db, "nightly")
            await other.ends()
            assert (await cron.run("nightly")).status == "completed"
            assert during == [False]
            assert await other.tries() is True
            await other.ends()
