"""What a task is handed runs SQL and cannot end the transaction that holds its lock."""

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from cronlock import Run, StatementRefused, TransactionEnded, TransactionRefused
from tests import Db, Make, Steps, advisory_locks, holders, rows, run_once, task_of, value

pytestmark = pytest.mark.anyio
both = pytest.mark.parametrize("is_async", [True, False], ids=["async", "thread"])


async def left(connection: Any) -> None:
    """Leave a connection as a context manager."""
    async with connection:
        pass


def left_sync(connection: Any) -> None:
    with connection:
        pass


def leave(connection: Any) -> Any:
    return left(connection) if hasattr(connection, "__aenter__") else left_sync(connection)


async def begun(connection: Any) -> None:
    async with connection.begin():
        pass


def begun_sync(connection: Any) -> None:
    with connection.begin():
        pass


def leave_begin(connection: Any) -> Any:
    return begun(connection) if hasattr(connection, "__aenter__") else begun_sync(connection)


def of_session(method: str) -> Callable[[Run], Any]:
    async def asynchronous(run: Run) -> None:
        await getattr(await run.session.connection(), method)()

    def call(run: Run) -> Any:
        connection = run.session.connection()
        return asynchronous(run) if inspect.isawaitable(drop(connection)) else getattr(connection, method)()

    return call


def drop(awaitable: Any) -> Any:
    """Close a coroutine that was only looked at."""
    if inspect.iscoroutine(awaitable):
        awaitable.close()
    return awaitable


def of_raw(method: str) -> Callable[[Run], Any]:
    async def asynchronous(run: Run) -> None:
        await getattr((await run.connection.get_raw_connection()).driver_connection, method)()

    def call(run: Run) -> Any:
        if hasattr(run.connection, "get_raw_connection"):
            return asynchronous(run)
        return getattr(run.connection.connection, method)()

    return call


ENDINGS: dict[str, Callable[[Run], Any]] = {
    "connection.commit": lambda run: run.connection.commit(),
    "connection.rollback": lambda run: run.connection.rollback(),
    "connection.close": lambda run: run.connection.close(),
    "connection.invalidate": lambda run: run.connection.invalidate(),
    "connection.get_transaction().commit": lambda run: run.connection.get_transaction().commit(),
    "connection.get_transaction().rollback": lambda run: run.connection.get_transaction().rollback(),
    "connection.get_transaction().close": lambda run: run.connection.get_transaction().close(),
    "commit of the connection under it": of_raw("commit"),
    "rollback of the connection under it": of_raw("rollback"),
    "close of the connection under it": of_raw("close"),
    "driver.commit": lambda run: run.driver.commit(),
    "driver.rollback": lambda run: run.driver.rollback(),
    "driver.close": lambda run: run.driver.close(),
    "driver left as a context manager": lambda run: leave(run.driver),
    "commit of the session's connection": of_session("commit"),
    "rollback of the session's connection": of_session("rollback"),
    "close of the session's connection": of_session("close"),
}


@both
@pytest.mark.parametrize("is_caught", [False, True], ids=["raised", "caught"])
@pytest.mark.parametrize("ending", ENDINGS)
async def test_ending_the_transaction_is_refused_before_it_acts_and_fails_the_run(
    make_cron: Make, db: Db, ending: str, is_caught: bool, is_async: bool
) -> None:
    db.execute("CREATE TABLE written (a int)")
    seen: list[tuple[list[int], int]] = []

    def steps(run: Run) -> Steps:
        yield run.driver.execute("INSERT INTO written VALUES (1)")
        try:
            yield ENDINGS[ending](run)
        except BaseException:
            if not is_caught:
                raise
        finally:
            seen.append((holders(db, "once"), value(db, "SELECT count(*) FROM written")))
        return "done"

    outcome = await run_once(make_cron(pool_size=1), task_of(steps, is_async))
    assert outcome.status == "failed"
    assert outcome.failure is not None
    assert "is refused" in outcome.failure.message
    ((pids, count),) = seen
    assert len(pids) == 1, "the lock is still held"
    assert count == 0, "nothing was committed by it"
    assert value(db, "SELECT count(*) FROM written") == 0
    assert rows(db, "once") == [("failed", None)]
    assert advisory_locks(db) == 0


@both
async def test_the_run_after_a_refused_call_is_a_run_like_any_other(make_cron: Make, db: Db, is_async: bool) -> None:
    db.execute("CREATE TABLE written (a int)")
    ending: Callable[[Run], Any] | None = None

    def steps(run: Run) -> Steps:
        if ending is not None:
            yield ending(run)
        yield run.connection.execute(text("INSERT INTO written VALUES (1)"))

    cron = make_cron(pool_size=1)
    cron.task("once")(task_of(steps, is_async))
    async with cron:
        for ending in ENDINGS.values():
            assert (await cron.run("once")).status == "failed"
            ending = None
            assert (await cron.run("once")).status == "completed"
    assert value(db, "SELECT count(*) FROM written") == len(ENDINGS)


@both
@pytest.mark.parametrize("way", [leave, leave_begin], ids=["with connection", "with connection.begin()"])
async def test_a_connection_used_as_a_context_manager_ends_nothing(
    make_cron: Make, db: Db, way: Callable[[Any], Any], is_async: bool
) -> None:
    def steps(run: Run) -> Steps:
        yield run.connection.execute(text("CREATE TABLE written (a int)"))
        try:
            yield way(run.connection)
        finally:
            assert len(holders(db, "once")) == 1
            assert value(db, "SELECT to_regclass('written')") is None

    outcome = await run_once(make_cron(), task_of(steps, is_async))
    assert outcome.status == "failed"
    assert value(db, "SELECT to_regclass('written')") is None


RAW_ENDINGS = [
    "COMMIT",
    "END",
    "ROLLBACK",
    "ABORT",
    "COMMIT AND CHAIN",
    "ROLLBACK AND CHAIN",
    "COMMIT; BEGIN",
    "END; BEGIN; SAVEPOINT cronlock_task",
    "ROLLBACK; BEGIN; SELECT pg_advisory_xact_lock(hashtext('once')); SAVEPOINT cronlock_task",
    "COMMIT; BEGIN; SELECT pg_advisory_xact_lock(hashtext('once')); SAVEPOINT cronlock_task",
    "COMMIT AND CHAIN; SELECT pg_advisory_xact_lock(hashtext('once')); SAVEPOINT cronlock_task",
    "RELEASE SAVEPOINT cronlock_task; COMMIT",
]


@both
@pytest.mark.parametrize("statement", RAW_ENDINGS)
async def test_a_transaction_ended_by_raw_sql_is_found_out_and_never_completed(
    make_cron: Make, db: Db, statement: str, is_async: bool
) -> None:
    db.execute("CREATE TABLE written (a int)")
    cursors = {True: psycopg.AsyncClientCursor, False: psycopg.ClientCursor}

    def steps(run: Run) -> Steps:
        yield run.driver.execute("INSERT INTO written VALUES (1)")
        yield cursors[is_async](run.driver).execute(statement)
        return "done"

    outcome = await run_once(make_cron(pool_size=1), task_of(steps, is_async))
    assert outcome.status == "failed"
    assert outcome.failure is not None
    assert outcome.failure.type == "TransactionEnded"
    assert "ended its transaction by SQL" in outcome.failure.message
    assert rows(db, "once") == [("failed", None)]
    kept = statement.startswith(("COMMIT", "END", "RELEASE"))
    assert value(db, "SELECT count(*) FROM written") == int(kept)
    assert advisory_locks(db) == 0


@both
async def test_a_statement_after_a_raw_commit_is_refused(make_cron: Make, db: Db, is_async: bool) -> None:
    db.execute("CREATE TABLE written (a int)")
    refused: list[type[BaseException]] = []

    def steps(run: Run) -> Steps:
        yield run.driver.execute("COMMIT")
        uses: list[Callable[[], Any]] = [
            lambda: run.driver.execute("INSERT INTO written VALUES (1)"),
            lambda: run.connection.execute(text("INSERT INTO written VALUES (2)")),
            lambda: run.session.execute(text("INSERT INTO written VALUES (3)")),
        ]
        for use in uses:
            try:
                yield use()
            except TransactionEnded as error:
                refused.append(type(error))

    outcome = await run_once(make_cron(), task_of(steps, is_async))
    assert refused == [TransactionEnded] * 3
    assert outcome.status == "failed"
    assert outcome.failure is not None
    assert "by SQL" in outcome.failure.message
    assert value(db, "SELECT count(*) FROM written") == 0


class Base(DeclarativeBase):
    pass


class Written(Base):
    __tablename__ = "written"
    a: Mapped[int] = mapped_column(primary_key=True)


@both
async def test_a_session_is_not_flushed_after_a_raw_commit(make_cron: Make, db: Db, is_async: bool) -> None:
    """What is flushed then would be committed by itself, without the run."""
    db.execute("CREATE TABLE written (a int PRIMARY KEY)")

    def steps(run: Run) -> Steps:
        run.session.add(Written(a=1))
        yield run.session.flush()
        yield run.driver.execute("COMMIT")
        run.session.add(Written(a=2))

    outcome = await run_once(make_cron(), task_of(steps, is_async))
    assert outcome.status == "failed"
    assert outcome.failure is not None
    assert outcome.failure.type == "TransactionEnded"
    assert db.execute("SELECT a FROM written").fetchall() == [(1,)]


async def test_a_task_that_waits_after_a_raw_commit_is_stopped_within_a_second(make_cron: Make, db: Db) -> None:
    async def waiting(run: Run) -> None:
        await run.driver.execute("COMMIT")
        await asyncio.Event().wait()

    outcome = await asyncio.wait_for(run_once(make_cron(), waiting), 3)
    assert outcome.status == "failed"
    assert outcome.duration_ms < 1500
    assert rows(db, "once") == [("failed", None)]


@both
async def test_a_transaction_prepared_for_two_phases_is_found_out(make_cron: Make, db: Db, is_async: bool) -> None:
    db.execute("CREATE TABLE written (a int)")
    name = db.info.dbname
    can_prepare = value(db, "SELECT current_setting('max_prepared_transactions')::int") > 0

    def steps(run: Run) -> Steps:
        yield run.driver.execute("INSERT INTO written VALUES (1)")
        try:
            yield run.driver.execute(f"PREPARE TRANSACTION '{name}'")
        except psycopg.Error:
            assert not can_prepare
        return "done"

    cron = make_cron()
    cron.task("once")(task_of(steps, is_async))
    async with cron:
        outcome = await cron.run("once")
        assert outcome.status == "failed"
        assert outcome.failure is not None
        assert "by SQL" in outcome.failure.message
        if can_prepare:
            # The lock is in the prepared transaction now, which no process holds.
            blocked = await cron.run("once")
            assert (blocked.status, blocked.reason) == ("skipped", "already_running")
            assert blocked.holder is not None
            assert blocked.holder.pid is None
            assert blocked.holder.application_name is None
            db.execute(f"ROLLBACK PREPARED '{name}'")
    assert value(db, "SELECT count(*) FROM written") == 0
    assert advisory_locks(db) == 0


async def test_a_driver_kept_beyond_its_run_is_refused(make_cron: Make, db: Db) -> None:
    """By a coroutine of the task, by its threads, and from outside; idle, and while another run has it."""
    db.execute("CREATE TABLE written (a int)")
    kept: list[Any] = []
    late: list[asyncio.Task[Any]] = []
    go, went = asyncio.Event(), asyncio.Event()
    refused: list[BaseException] = []

    async def use() -> None:
        for again in range(2):
            await go.wait()
            go.clear()
            actions: list[Callable[[], Any]] = [
                lambda: kept[0].execute(f"INSERT INTO written VALUES ({again})"),  # noqa: B023
                lambda: kept[0].commit(),
                lambda: kept[0].rollback(),
                lambda: kept[0].close(),
            ]
            for action in actions:
                try:
                    await action()
                except (StatementRefused, TransactionRefused) as error:
                    refused.append(error)
            went.set()

    cron = make_cron(pool_size=1)

    @cron.task("keeping")
    async def keeping(run: Run) -> None:
        kept.append(run.driver)
        late.append(asyncio.create_task(use()))

    @cron.task("other")
    async def other(run: Run) -> None:
        assert run.driver is kept[0]
        go.set()
        await went.wait()

    async with cron:
        assert (await cron.run("keeping")).status == "completed"
        go.set()
        await went.wait()
        went.clear()
        assert len(refused) == 4
        assert (await cron.run("other")).status == "completed"
        assert len(refused) == 8
        await late[0]
    assert value(db, "SELECT count(*) FROM written") == 0


async def test_a_thread_that_keeps_a_driver_beyond_its_run_is_refused(make_cron: Make, db: Db) -> None:
    db.execute("CREATE TABLE written (a int)")
    kept: list[Any] = []
    go, went = threading.Event(), threading.Event()
    refused: list[BaseException] = []

    def use() -> None:
        go.wait(10)
        actions: list[Callable[[], Any]] = [
            lambda: kept[0].execute("INSERT INTO written VALUES (1)"),
            lambda: kept[0].commit(),
            lambda: kept[0].rollback(),
        ]
        for action in actions:
            try:
                action()
            except StatementRefused as error:
                refused.append(error)
        went.set()

    cron = make_cron(pool_size=1)

    @cron.task("keeping")
    def keeping(run: Run) -> None:
        kept.append(run.driver)
        threading.Thread(target=use, daemon=True).start()

    @cron.task("next")
    def after(run: Run) -> None:
        assert run.driver is kept[0]

    async with cron:
        assert (await cron.run("keeping")).status == "completed"
        go.set()
        await asyncio.to_thread(went.wait, 10)
        assert (await cron.run("next")).status == "completed"
    assert len(refused) == 3
    assert value(db, "SELECT count(*) FROM written") == 0


async def test_a_thread_of_the_tasks_own_may_run_sql_and_not_end_the_transaction(make_cron: Make, db: Db) -> None:
    refused: list[BaseException] = []

    def elsewhere(run: Run) -> None:
        run.driver.execute("CREATE TABLE written (a int)")
        for action in (run.driver.commit, run.driver.rollback, run.driver.close):
            try:
                action()
            except TransactionRefused as error:
                refused.append(error)

    def threaded(run: Run) -> None:
        thread = threading.Thread(target=elsewhere, args=(run,))
        thread.start()
        thread.join()

    outcome = await run_once(make_cron(), threaded)
    assert len(refused) == 3
    assert outcome.status == "failed"
    assert value(db, "SELECT to_regclass('written')") is None


async def undone(driver: Any) -> None:
    async with driver.transaction():
        await driver.execute("INSERT INTO written VALUES (99)")
        await driver.execute("SELECT 1 / 0")


def undone_sync(driver: Any) -> None:
    with driver.transaction():
        driver.execute("INSERT INTO written VALUES (99)")
        driver.execute("SELECT 1 / 0")


@both
async def test_copy_cursors_pipelines_and_savepoints_of_the_driver_work_as_usual(
    make_cron: Make, db: Db, is_async: bool
) -> None:
    db.execute("CREATE TABLE written (a int)")

    async def awaiting(run: Run) -> None:
        driver = run.driver
        async with driver.cursor() as cursor, cursor.copy("COPY written FROM STDIN") as copy:
            for number in range(3):
                await copy.write_row((number,))
        async with driver.transaction():
            await driver.execute("INSERT INTO written VALUES (3)")
        with pytest.raises(psycopg.errors.DivisionByZero):
            await undone(driver)
        async with driver.pipeline():
            await driver.execute("INSERT INTO written VALUES (4)")
        async with driver.cursor("named") as cursor:
            await cursor.execute("SELECT a FROM written ORDER BY a")
            assert [row[0] async for row in cursor] == [0, 1, 2, 3, 4]

    def plain(run: Run) -> None:
        driver = run.driver
        with driver.cursor() as cursor, cursor.copy("COPY written FROM STDIN") as copy:
            for number in range(3):
                copy.write_row((number,))
        with driver.transaction():
            driver.execute("INSERT INTO written VALUES (3)")
        with pytest.raises(psycopg.errors.DivisionByZero):
            undone_sync(driver)
        with driver.pipeline():
            driver.execute("INSERT INTO written VALUES (4)")
        with driver.cursor("named") as cursor:
            cursor.execute("SELECT a FROM written ORDER BY a")
            assert [row[0] for row in cursor] == [0, 1, 2, 3, 4]

    outcome = await run_once(make_cron(), awaiting if is_async else plain)
    assert outcome.failure is None
    assert [a for (a,) in db.execute("SELECT a FROM written ORDER BY a").fetchall()] == [0, 1, 2, 3, 4]
