"""A task's writes and its outcome commit together or not at all, whatever the task does."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from cronlock import Cancel, Cronlock, Outcome, Retry, Run, attempts, seats, stopping
from cronlock.lending import CONTEXT, OWN, cut
from tests import Db, Make, Steps, advisory_locks, end_holders, holders, rows, run_once, task_of, until, value

pytestmark = pytest.mark.anyio
both = pytest.mark.parametrize("is_async", [True, False], ids=["async", "thread"])


class Base(DeclarativeBase):
    pass


class Written(Base):
    __tablename__ = "written"
    a: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def written(db: Db) -> Db:
    """An observer of a table `written`, which has a row with a = 0."""
    db.execute("CREATE TABLE written (a int PRIMARY KEY)")
    db.execute("INSERT INTO written VALUES (0)")
    return db


def numbers(db: Db) -> list[int]:
    return [a for (a,) in db.execute("SELECT a FROM written ORDER BY a").fetchall()]


# -- errors that the task catches --------------------------------------------------------------------------


def catch(statement: Callable[[], Any]) -> Steps:
    """Ignore the error of a statement."""
    try:
        yield statement()
    except (psycopg.Error, DBAPIError):
        pass


def with_driver(run: Run) -> Steps:
    yield run.driver.execute("INSERT INTO written VALUES (1)")
    try:
        yield run.driver.execute("INSERT INTO written VALUES (0)")
    except psycopg.errors.UniqueViolation:
        yield from catch(lambda: run.driver.execute("SELECT 1"))
    return "done"


def with_connection(run: Run) -> Steps:
    yield run.connection.execute(text("INSERT INTO written VALUES (1)"))
    try:
        yield run.connection.execute(text("INSERT INTO written VALUES (0)"))
    except IntegrityError:
        yield from catch(lambda: run.connection.execute(text("SELECT 1")))
    return "done"


def with_session(run: Run) -> Steps:
    run.session.add(Written(a=1))
    yield run.session.flush()
    try:
        yield run.session.execute(text("INSERT INTO written VALUES (0)"))
    except IntegrityError:
        yield from catch(lambda: run.session.execute(text("SELECT 1")))
    return "done"


@both
@pytest.mark.parametrize("steps", [with_driver, with_connection, with_session])
async def test_an_sql_error_that_the_task_catches_fails_the_run_and_nothing_is_written(
    make_cron: Make, written: Db, steps: Callable[[Run], Steps], is_async: bool
) -> None:
    outcome = await run_once(make_cron(), task_of(steps, is_async))
    assert outcome.status == "failed"
    assert outcome.failure is not None
    assert outcome.failure.type == "TransactionEnded"
    assert "already aborted" in outcome.failure.message
    assert "written_pkey" in outcome.failure.message, "the first error is named"
    assert numbers(written) == [0]
    assert rows(written, "once") == [("failed", None)]


@both
async def test_what_a_savepoint_undid_is_gone_and_the_rest_is_committed(
    make_cron: Make, written: Db, is_async: bool
) -> None:
    held: list[int] = []

    def steps(run: Run) -> Steps:
        savepoint = yield run.connection.begin_nested()
        try:
            yield run.connection.execute(text("INSERT INTO written VALUES (9), (0)"))
        except IntegrityError:
            yield savepoint.rollback()
        for number in (1, 2, 3):
            yield run.connection.execute(text(f"INSERT INTO written VALUES ({number})"))
        held.extend(holders(written, "once"))

    outcome = await run_once(make_cron(), task_of(steps, is_async))
    assert outcome.status == "completed"
    assert numbers(written) == [0, 1, 2, 3]
    assert len(held) == 1, "the lock was held to the end"


@both
async def test_a_savepoint_of_the_same_name_as_cronlocks_changes_nothing(
    make_cron: Make, written: Db, is_async: bool
) -> None:
    for first, end, left in ((1, "", [0, 1, 2]), (3, "SELECT 1 / 0", [0, 1, 2])):

        def steps(run: Run, first: int = first, end: str = end) -> Steps:
            yield run.driver.execute("INSERT INTO written VALUES (%s)", (first,))
            yield run.driver.execute("SAVEPOINT cronlock_task")
            yield run.driver.execute("INSERT INTO written VALUES (%s)", (first + 1,))
            if end:
                yield run.driver.execute(end)

        await run_once(make_cron(), task_of(steps, is_async))
        assert numbers(written) == left


@both
async def test_commit_of_the_session_ends_only_a_savepoint(make_cron: Make, written: Db, is_async: bool) -> None:
    def steps(run: Run) -> Steps:
        run.session.add(Written(a=1))
        yield run.session.commit()
        assert numbers(written) == [0]
        assert len(holders(written, "once")) == 1
        run.session.add(Written(a=2))
        yield run.session.rollback()
        run.session.add(Written(a=0))
        try:
            yield run.session.commit()
        except IntegrityError:
            yield run.session.rollback()
        run.session.add(Written(a=3))  # flushed when the task returns

    outcome = await run_once(make_cron(), task_of(steps, is_async))
    assert outcome.failure is None
    assert outcome.status == "completed"
    assert numbers(written) == [0, 1, 3]


@both
async def test_a_session_that_cannot_be_flushed_at_the_end_fails_the_run(
    make_cron: Make, written: Db, is_async: bool
) -> None:
    def steps(run: Run) -> Steps:
        yield run.driver.execute("INSERT INTO written VALUES (1)")
        run.session.add(Written(a=0))
        return "done"

    outcome = await run_once(make_cron(), task_of(steps, is_async))
    assert outcome.status == "failed"
    assert outcome.failure is not None
    assert outcome.failure.type == "IntegrityError"
    assert outcome.failure.sqlstate == "23505"
    assert numbers(written) == [0]


# -- the close ---------------------------------------------------------------------------------------------


@both
async def test_a_deferred_constraint_fails_the_run_while_its_lock_is_still_held(
    make_cron: Make, written: Db, database_url: str, is_async: bool
) -> None:
    """A trigger that fires before the constraint's (by name) says how many locks its transaction has."""
    written.execute(
        """CREATE TABLE orphan (a int CONSTRAINT has_parent REFERENCES written DEFERRABLE INITIALLY DEFERRED);
        CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            RAISE WARNING 'locks: %', (SELECT count(*) FROM pg_locks
                WHERE locktype = 'advisory' AND granted AND pid = pg_backend_pid());
            RETURN NULL;
        END $$;
        CREATE CONSTRAINT TRIGGER "A look" AFTER INSERT ON orphan DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION look()"""
    )
    said: list[str | None] = []

    def steps(run: Run) -> Steps:
        run.driver.add_notice_handler(lambda notice: said.append(notice.message_primary))
        yield run.driver.execute("INSERT INTO orphan VALUES (77)")
        return "done"

    outcome = await run_once(make_cron(), task_of(steps, is_async))
    assert outcome.status == "failed"
    assert outcome.failure is not None
    assert outcome.failure.sqlstate == "23503"
    assert "has_parent" in outcome.failure.message
    assert said == ["locks: 1"]
    assert value(written, "SELECT count(*) FROM orphan") == 0
    assert rows(written, "once") == [("failed", None)]


@both
async def test_completed_and_the_tasks_writes_appear_in_one_commit(
    make_cron: Make, written: Db, is_async: bool
) -> None:
    written.execute(
        """CREATE TABLE stamped (what text, xid xid8 DEFAULT pg_current_xact_id());
        CREATE FUNCTION stamp() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO public.stamped VALUES (NEW.status);
            RETURN NULL;
        END $$;
        CREATE TRIGGER stamp AFTER UPDATE ON cronlock.run FOR EACH ROW EXECUTE FUNCTION stamp()"""
    )

    def steps(run: Run) -> Steps:
        yield run.driver.execute("INSERT INTO stamped VALUES ('task')")

    await run_once(make_cron(), task_of(steps, is_async))
    stamps: dict[str, str] = dict(written.execute("SELECT what, xid::text FROM stamped").fetchall())
    assert set(stamps) == {"task", "completed"}
    assert stamps["task"] == stamps["completed"]


@both
async def test_a_run_whose_row_was_closed_by_others_writes_nothing(
    make_cron: Make, written: Db, is_async: bool
) -> None:
    def steps(run: Run) -> Steps:
        yield run.driver.execute("INSERT INTO written VALUES (1)")
        written.execute("UPDATE cronlock.run SET status = 'cancelled', finished_at = now() WHERE id = %s", (run.id,))

    outcome = await run_once(make_cron(), task_of(steps, is_async))
    assert outcome.status != "completed"
    assert numbers(written) == [0]
    assert rows(written, "once") == [("cancelled", None)]


@both
async def test_a_run_taken_for_lost_by_mistake_has_the_last_word(make_cron: Make, written: Db, is_async: bool) -> None:
    def steps(run: Run) -> Steps:
        yield run.driver.execute("INSERT INTO written VALUES (1)")
        written.execute("UPDATE cronlock.run SET status = 'lost', finished_at = now() WHERE id = %s", (run.id,))

    outcome = await run_once(make_cron(), task_of(steps, is_async))
    assert outcome.status == "completed"
    assert numbers(written) == [0, 1]
    assert rows(written, "once") == [("completed", None)]


@both
async def test_a_task_whose_connection_is_ended_by_the_server_writes_nothing(
    make_cron: Make, written: Db, is_async: bool
) -> None:
    def steps(run: Run) -> Steps:
        yield run.driver.execute("INSERT INTO written VALUES (1)")
        end_holders(written)
        return "done"

    cron = make_cron(pool_size=1)
    cron.task("next")(task_of(with_nothing, is_async))
    cron.task("once")(task_of(steps, is_async))
    async with cron:
        assert (await cron.run("once")).status == "lost"
        assert (await cron.run("next")).status == "completed"
    assert numbers(written) == [0]
    assert rows(written, "once") == [("lost", None)]


def with_nothing(run: Run) -> Steps:
    yield None


@both
async def test_a_statement_over_the_tasks_own_statement_timeout_fails_the_run(
    make_cron: Make, written: Db, is_async: bool
) -> None:
    def steps(run: Run) -> Steps:
        yield run.driver.execute("INSERT INTO written VALUES (1)")
        yield run.driver.execute("SET LOCAL statement_timeout = '50ms'")
        try:
            yield run.driver.execute("SELECT pg_sleep(5)")
        finally:
            assert len(holders(written, "once")) == 1

    outcome = await run_once(make_cron(), task_of(steps, is_async))
    assert outcome.status == "failed"
    assert outcome.failure is not None
    assert outcome.failure.sqlstate == "57014"
    assert numbers(written) == [0]


@both
async def test_a_close_that_has_to_wait_longer_than_the_tasks_own_limits_still_commits(
    make_cron: Make, written: Db, is_async: bool
) -> None:
    written.execute(f"ALTER DATABASE {written.info.dbname} SET statement_timeout = '100ms'")
    written.execute(
        """CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            PERFORM pg_sleep(0.3); RETURN NULL; END $$;
        CREATE TRIGGER slow AFTER UPDATE ON cronlock.run FOR EACH ROW EXECUTE FUNCTION slow()"""
    )

    def steps(run: Run) -> Steps:
        yield run.driver.execute("SET statement_timeout = '100ms'")
        yield run.driver.execute("INSERT INTO written VALUES (1)")

    outcome = await run_once(make_cron(), task_of(steps, is_async))
    assert outcome.failure is None
    assert numbers(written) == [0, 1]


# -- whatever a task raises --------------------------------------------------------------------------------


class Odd(BaseException):
    pass


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


RAISED: list[tuple[BaseException, str]] = [
    (SystemExit(3), "failed"),
    (KeyboardInterrupt(), "failed"),
    (asyncio.CancelledError(), "failed"),
    (GeneratorExit(), "failed"),
    (Odd("odd"), "failed"),
    (ExceptionGroup("several", [ValueError("one"), KeyError("two")]), "failed"),
    (BaseExceptionGroup("several", [SystemExit(1), KeyError("two")]), "failed"),
    (Unspeakable(), "failed"),
    (StopIteration("out"), "failed"),
    (StopAsyncIteration(), "failed"),
    (RecursionError("deep"), "failed"),
    (MemoryError(), "failed"),
    (TimeoutError("of its own"), "failed"),
    (Retry(after=5), "failed"),
    (Cancel("enough"), "cancelled"),
    (psycopg.OperationalError("of another database"), "failed"),
]


@both
@pytest.mark.parametrize(("error", "status"), RAISED, ids=lambda given: type(given).__name__)
async def test_whatever_a_task_raises_is_recorded_by_its_type_and_the_process_goes_on(
    make_cron: Make, written: Db, error: BaseException, status: str, is_async: bool
) -> None:
    async def awaiting(run: Run) -> None:
        await run.driver.execute("INSERT INTO written VALUES (1)")
        raise error

    def plain(run: Run) -> None:
        run.driver.execute("INSERT INTO written VALUES (1)")
        raise error

    cron = make_cron(pool_size=1)
    cron.task("raising")(awaiting if is_async else plain)
    cron.task("next")(task_of(with_nothing, is_async))
    async with cron:
        outcome = await cron.run("raising")
        assert (await cron.run("next")).status == "completed"
        assert advisory_locks(written) == 0
    assert outcome.status == status
    assert numbers(written) == [0]
    recorded = value(written, "SELECT error_type FROM cronlock.run WHERE task = 'raising'")
    # A coroutine cannot raise StopIteration: Python makes a RuntimeError of it (PEP 479).
    expected = "RuntimeError" if is_async and isinstance(error, StopIteration) else type(error).__name__
    assert recorded == expected
    assert rows(written, "raising") == [(status, None)]


# -- a connection is given back as it was ------------------------------------------------------------------

SHOWN = (
    "statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "search_path", "role", "timezone",
    "application_name", "client_encoding", "standard_conforming_strings", "datestyle", "session_authorization",
    "default_transaction_isolation", "default_transaction_read_only", "transaction_isolation", "row_security",
    "synchronous_commit", "client_connection_check_interval", "session_replication_role", "escape_string_warning",
)  # fmt: skip

MESS: dict[str, list[str]] = {
    "search_path": [
        "CREATE SCHEMA hostile",
        "CREATE TABLE hostile.run (id bigint, status text)",
        "CREATE FUNCTION hostile.hashtext(text) RETURNS int LANGUAGE sql AS 'SELECT 7'",
        "CREATE FUNCTION hostile.now() RETURNS timestamptz LANGUAGE sql AS $$SELECT 'epoch'::timestamptz$$",
        "CREATE FUNCTION hostile.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS $$SELECT 'epoch'::timestamptz$$",
        "CREATE FUNCTION hostile.never(timestamptz, timestamptz) RETURNS bool LANGUAGE sql AS 'SELECT false'",
        "CREATE OPERATOR hostile.= (LEFTARG = timestamptz, RIGHTARG = timestamptz, FUNCTION = hostile.never)",
        "CREATE FUNCTION hostile.nay(bigint, bigint) RETURNS bool LANGUAGE sql AS 'SELECT false'",
        "CREATE OPERATOR hostile.= (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = hostile.nay)",
        "SET search_path = hostile, pg_catalog",
    ],
    "role": ["CREATE ROLE {role}", "SET ROLE {role}"],
    "session authorization": ["CREATE ROLE {role}", "SET SESSION AUTHORIZATION {role}"],
    "limits": ["SET statement_timeout = '7s'", "SET lock_timeout = '7s'",
               "SET idle_in_transaction_session_timeout = '7s'", "SET application_name = 'mine'"],
    "client_encoding": ["SET client_encoding = 'latin1'", "CREATE TABLE umlaut AS SELECT 'ä'::text AS a"],
    "strings": ["SET standard_conforming_strings = off", "SET escape_string_warning = off"],
    "dates": ["SET datestyle = 'SQL, DMY'", "SET timezone = 'Asia/Kolkata'", "SET intervalstyle = 'sql_standard'"],
    "transaction defaults": ["SET default_transaction_read_only = on",
                             "SET default_transaction_isolation = 'serializable'", "SET synchronous_commit = off"],
    "session locks": ["SELECT pg_advisory_lock(1), pg_advisory_lock(2, 3), pg_advisory_lock_shared(4)"],
    "listen": ["LISTEN something"],
    "temporary tables": ["CREATE TEMP TABLE run (id int)", "CREATE TEMP TABLE scratch (a int) ON COMMIT PRESERVE ROWS"],
    "cursor with hold": ["DECLARE kept CURSOR WITH HOLD FOR SELECT generate_series(1, 10)"],
    "prepared statement": ["PREPARE mine AS SELECT 1"],
    "sequence": ["CREATE SEQUENCE counted", "SELECT nextval('counted')"],
    "replication role": ["SET session_replication_role = replica"],
    "row security": ["SET row_security = off"],
    "own setting": ["SELECT set_config('my.tenant', '42', false)"],
}  # fmt: skip


RESULT = {"text": "ä \\ ' \n \" 😀", "more": ["\\'", "\\"]}


async def shown(cron: Cronlock, is_async: bool) -> dict[str, Any]:
    """What the one pooled connection looks like from inside, between two runs."""
    process = await cron.open()
    query = " UNION ALL ".join(f"SELECT '{name}', current_setting('{name}')" for name in SHOWN)
    query = f"""SELECT * FROM ({query}) s
        UNION ALL SELECT 'pid', pg_backend_pid()::text
        UNION ALL SELECT 'user', current_user || '/' || session_user
        UNION ALL SELECT 'listening', string_agg(c, ',') FROM pg_listening_channels() c
        UNION ALL SELECT 'temporary', count(*)::text FROM pg_class WHERE relnamespace = pg_my_temp_schema()
        UNION ALL SELECT 'cursors', count(*)::text FROM pg_cursors WHERE is_holdable
        UNION ALL SELECT 'prepared', count(*)::text FROM pg_prepared_statements WHERE from_sql
        UNION ALL SELECT 'tenant', coalesce(current_setting('my.tenant', true), '')
        UNION ALL SELECT 'locks', count(*)::text FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"""

    def look() -> dict[str, Any]:
        with process.database.threads.connection(5) as connection:
            return dict(connection.execute(query).fetchall())

    if not is_async:
        return await process.database.in_thread(look)
    token = CONTEXT.set(OWN)
    try:
        async with process.database.runs.connection(5) as connection:
            return dict(await (await connection.execute(query)).fetchall())
    finally:
        CONTEXT.reset(token)


@pytest.fixture
def role(db: Db, request: pytest.FixtureRequest) -> Any:
    """The name of a role that the test may create."""
    name = f"cronlock_test_{db.info.backend_pid}"
    yield name
    db.execute(f"DROP OWNED BY {name}; DROP ROLE {name}" if role_exists(db, name) else "SELECT 1")


def role_exists(db: Db, name: str) -> bool:
    return bool(value(db, "SELECT count(*) FROM pg_roles WHERE rolname = %s", name))


@both
@pytest.mark.parametrize("end", ["success", "exception", "timeout", "cancelled", "operator"])
async def test_the_same_backend_is_as_new_after_every_mess_and_every_end(
    make_cron: Make, db: Db, role: str, is_async: bool, end: str
) -> None:
    cron = make_cron(pool_size=1)
    mess: list[str] = []
    results: list[Any] = []

    def steps(run: Run) -> Steps:
        for statement in mess:
            yield run.driver.execute(statement.format(role=role))
        results.append(None)
        if end == "exception":
            raise ValueError("ä \\ '")
        if end == "cancelled":
            raise Cancel("ä \\ '")
        if end == "timeout":
            yield run.driver.execute("SELECT pg_sleep(20)")
        if end == "operator":
            db.execute("UPDATE cronlock.run SET cancel_requested_at = now() WHERE id = %s", (run.id,))
            yield run.driver.execute("SELECT pg_sleep(20)")
        return RESULT

    cron.task("messy", timeout="300ms" if end == "timeout" else "60s")(task_of(steps, is_async))
    cron.task("next")(task_of(with_insert, is_async))
    expected = {"success": "completed", "exception": "failed", "timeout": "timed_out"}.get(end, "cancelled")
    # A stop takes its time: all at once then.
    groups = [[name] for name in MESS] if end in ("success", "exception", "cancelled") else [together()]
    db.execute("CREATE TABLE noted (id bigint)")
    async with cron:
        assert (await cron.run("next")).status == "completed"
        before = await shown(cron, is_async)
        for names in groups:
            mess[:] = [statement for name in names for statement in MESS[name]]
            outcome = await cron.run("messy")
            assert outcome.status == expected, (names, outcome.failure)
            assert len(results) == groups.index(names) + 1, (names, outcome.failure)
            after = await shown(cron, is_async)
            if names == ["prepared statement"]:  # goes only with its connection
                assert after["pid"] != before["pid"]
                before["pid"] = after["pid"]
            assert after == before, names
            following = await cron.run("next")
            assert following.status == "completed", (names, following.failure)
            if end == "success":
                told = value(db, "SELECT result FROM cronlock.run WHERE id = %s", outcome.run_id)
                assert json.loads(told) == RESULT
            if end == "success" and role_exists(db, role):
                db.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
    assert value(db, "SELECT count(*) FROM noted") == len(groups) + 1


def together() -> list[str]:
    """Every mess in an order in which one does not forbid the next."""
    last = ["transaction defaults", "search_path", "role"]
    alone = ["session authorization", "replication role", "prepared statement"]
    return [name for name in MESS if name not in (*last, *alone)] + last


def with_insert(run: Run) -> Steps:
    yield run.driver.execute("INSERT INTO noted VALUES (%s)", (run.id,))


@both
@pytest.mark.parametrize("what", ["copy in", "copy out", "pipeline", "rows of a stream"])
async def test_what_a_task_leaves_unfinished_on_the_driver_ends_the_run_and_nothing_else(
    make_cron: Make, written: Db, what: str, is_async: bool
) -> None:
    def steps(run: Run) -> Steps:
        yield run.driver.execute("INSERT INTO written VALUES (1)")
        if what == "pipeline":
            pipeline = run.driver.pipeline()
            kept.append(pipeline)
            yield (pipeline.__aenter__ if is_async else pipeline.__enter__)()
            yield run.driver.execute("INSERT INTO written VALUES (2)")
        elif what == "rows of a stream":
            rows = run.driver.cursor().stream("SELECT generate_series(1, 1000)")
            kept.append(rows)
            yield (rows.__anext__ if is_async else rows.__next__)()
        else:
            command = "COPY written FROM STDIN" if what == "copy in" else "COPY pg_class TO STDOUT"
            copy = run.driver.cursor().copy(command)
            kept.append(copy)
            yield (copy.__aenter__ if is_async else copy.__enter__)()
        return "done"

    kept: list[Any] = []
    cron = make_cron(pool_size=1)
    cron.task("leaving")(task_of(steps, is_async))
    cron.task("next")(task_of(with_nothing, is_async))
    async with cron:
        outcome = await asyncio.wait_for(cron.run("leaving"), 20)
        assert (await cron.run("next")).failure is None
        assert advisory_locks(written) == 0
    assert outcome.status == "failed"
    assert outcome.failure is not None
    assert "left open" in outcome.failure.message
    assert rows(written, "leaving") == [("failed", None)]
    assert numbers(written) == [0]


@both
async def test_an_error_in_the_middle_of_a_stream_fails_the_run_with_that_error_and_at_once(
    make_cron: Make, written: Db, is_async: bool
) -> None:
    """The error's traceback keeps the frame, and the frame the stream, which keeps the connection to itself."""

    async def awaiting(run: Run) -> None:
        stream = run.driver.cursor().stream("SELECT generate_series(1, 100000)")
        async for (number,) in stream:
            raise ValueError(f"at {number}")

    def plain(run: Run) -> None:
        stream = run.driver.cursor().stream("SELECT generate_series(1, 100000)")
        for (number,) in stream:
            raise ValueError(f"at {number}")

    started = time.monotonic()
    outcome = await run_once(make_cron(), awaiting if is_async else plain)
    assert time.monotonic() - started < 1.9
    assert outcome.status == "failed"
    assert outcome.failure is not None
    assert outcome.failure.message == "at 1"
    assert advisory_locks(written) == 0


@both
async def test_a_stopped_task_that_is_in_a_stream_keeps_its_lock(
    make_cron: Make, written: Db, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    """The pings that put the server's limits off cannot pass the stream, and must not harm it."""
    monkeypatch.setattr(stopping, "PING", 0.1)
    monkeypatch.setattr(seats, "BUSY_WAIT", 0.1)
    monkeypatch.setattr(stopping, "RECORD_WAIT", 0.3)
    go = threading.Event()

    async def awaiting(run: Run) -> None:
        async for _ in run.driver.cursor().stream("SELECT generate_series(1, 3)"):
            while not go.is_set():
                try:
                    await asyncio.sleep(0.02)
                except asyncio.CancelledError:
                    pass

    def plain(run: Run) -> None:
        for _ in run.driver.cursor().stream("SELECT generate_series(1, 3)"):
            go.wait(20)

    cron = make_cron()
    cron.task("once", timeout="200ms")(awaiting if is_async else plain)
    async with cron:
        assert (await cron.run("once")).status == "timed_out"
        (pid,) = holders(written, "once")
        enough = time.monotonic() + 1.5
        await until(lambda: time.monotonic() > enough, "several pings")
        assert holders(written, "once") == [pid]
        go.set()
        await until(lambda: not holders(written, "once"), "the lock is freed")
    assert rows(written, "once") == [("timed_out", None)]


@both
async def test_what_a_task_sets_on_the_driver_object_is_not_left_for_the_next_run(
    make_cron: Make, db: Db, is_async: bool
) -> None:
    def setting(run: Run) -> Steps:
        run.driver.row_factory = dict_row
        run.driver.cursor_factory = psycopg.AsyncClientCursor if is_async else psycopg.ClientCursor
        run.driver.prepare_threshold = None
        yield run.driver.execute("SELECT 1")

    def using(run: Run) -> Steps:
        cursor = yield run.driver.execute("SELECT %s", (1,))
        row = yield cursor.fetchone()
        return [list(row), type(cursor).__name__, run.driver.prepare_threshold]

    cron = make_cron(pool_size=1)
    cron.task("setting")(task_of(setting, is_async))
    cron.task("using")(task_of(using, is_async))
    async with cron:
        before = (await cron.run("using")).result
        assert (await cron.run("setting")).status == "completed"
        assert (await cron.run("using")).result == before


# -- runs within runs, and time ----------------------------------------------------------------------------


async def test_a_task_that_runs_itself_is_skipped_and_one_that_runs_another_runs_it(make_cron: Make, db: Db) -> None:
    cron = make_cron()
    inner: dict[str, Outcome] = {}

    @cron.task("outer")
    async def outer(run: Run) -> None:
        await run.connection.execute(text("SELECT 1"))
        inner["itself"] = await cron.run("outer")
        inner["other"] = await cron.run("other")
        await run.connection.execute(text("SELECT 1"))

    @cron.task("other")
    async def other(run: Run) -> int:
        inner["outer"] = await cron.run("outer")
        cursor = await run.driver.execute("SELECT pg_backend_pid()")
        pid: int = (await cursor.fetchone())[0]
        assert pid not in holders(db, "outer")
        return pid

    async with cron:
        outcome = await cron.run("outer")
    assert outcome.status == "completed"
    for name in ("itself", "outer"):
        assert (inner[name].status, inner[name].reason) == ("skipped", "already_running")
        holder = inner[name].holder
        assert holder is not None
        assert holder.run_id == outcome.run_id
    assert inner["other"].status == "completed"
    assert inner["other"].run_id > outcome.run_id


async def test_a_plain_task_that_runs_itself_is_skipped_and_one_that_runs_another_runs_it(
    make_cron: Make, db: Db
) -> None:
    cron = make_cron()
    loop = asyncio.get_running_loop()

    @cron.task("outer")
    def outer(run: Run) -> list[str]:
        run.driver.execute("SELECT 1")
        calls = [asyncio.run_coroutine_threadsafe(cron.run(name), loop) for name in ("outer", "other")]
        return [call.result(10).status for call in calls]

    @cron.task("other")
    def other(run: Run) -> None:
        run.driver.execute("SELECT 1")

    async with cron:
        outcome = await cron.run("outer")
    assert outcome.result == '["skipped","completed"]'


@both
async def test_more_plain_runs_than_connections_wait_for_one_another(make_cron: Make, db: Db, is_async: bool) -> None:
    cron = make_cron(pool_size=2, acquire_timeout="10s")

    def steps(run: Run) -> Steps:
        yield run.driver.execute("SELECT pg_sleep(0.05)")

    for number in range(8):
        cron.task(f"task-{number}")(task_of(steps, is_async))
    async with cron:
        started = time.monotonic()
        outcomes = await asyncio.gather(*(cron.run(f"task-{number}") for number in range(8)))
        assert time.monotonic() - started < 5
    assert {outcome.status for outcome in outcomes} == {"completed"}


@both
async def test_a_connection_that_was_cut_in_the_moment_of_its_answer_is_not_used(
    make_cron: Make, written: Db, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    cuts: list[float] = []

    async def within_and_cut(seconds: float, connection: Any, talk: Any) -> Any:
        """Its time is over when the answer is there, and nobody has looked at it yet."""
        reply = await talk
        if not cuts:
            cuts.append(seconds)
            cut(connection)
        return reply

    def writing(run: Run) -> Steps:
        yield run.driver.execute("INSERT INTO written VALUES (1)")

    cron = make_cron()
    cron.task("once")(task_of(writing, is_async))
    async with cron:
        await (await cron.open()).readiness.require()
        monkeypatch.setattr(attempts, "within", within_and_cut)
        outcome = await cron.run("once")
    assert cuts
    assert outcome.status == "completed"
    assert rows(written, "once") == [("completed", None)]


@both
async def test_the_duration_is_what_the_wall_clock_says(make_cron: Make, db: Db, is_async: bool) -> None:
    def steps(run: Run) -> Steps:
        yield run.driver.execute("SELECT pg_sleep(0.5)")

    started = time.monotonic()
    outcome = await run_once(make_cron(), task_of(steps, is_async))
    elapsed = time.monotonic() - started
    row = db.execute("SELECT started_at, finished_at FROM cronlock.run").fetchone()
    assert row is not None
    assert isinstance(row[0], datetime)
    seconds = (row[1] - row[0]).total_seconds()
    assert 0.5 <= seconds <= elapsed
    assert 0.5 <= outcome.duration_ms / 1000 <= elapsed


async def test_a_run_can_be_seen_from_outside_while_it_runs_and_after_it_failed(make_cron: Make, db: Db) -> None:
    seen: list[Any] = []
    query = "SELECT status, finished_at, started_at <= clock_timestamp(), backend_pid FROM cronlock.run"

    async def failing(run: Run) -> None:
        seen.append(db.execute(query).fetchone())
        seen.append(holders(db, "once"))
        raise ValueError("no")

    outcome = await run_once(make_cron(), failing)
    ((status, finished_at, has_begun, pid), pids) = seen
    assert (status, finished_at, has_begun) == ("running", None, True)
    assert pids == [pid]
    assert outcome.status == "failed"
    row = db.execute(
        "SELECT status, error_type, error_message, error_traceback, finished_at > started_at FROM cronlock.run"
    ).fetchone()
    assert row is not None
    assert (row[0], row[1], row[2], row[4]) == ("failed", "ValueError", "no", True)
    assert "raise ValueError" in row[3]
