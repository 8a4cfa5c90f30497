"""A run that is stopped keeps its lock until its code has ended, and its caller does not wait for that."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy import text

from cronlock import Outcome, RegistrationError, Run, StatementRefused, locks, stopping
from tests import Db, Make, Steps, advisory_locks, holders, rows, run_once, task_of, until, value

pytestmark = pytest.mark.anyio
both = pytest.mark.parametrize("is_async", [True, False], ids=["async", "thread"])
EASILY = 1.0
"""Seconds within which the caller of a run that is stopped has its answer."""


@pytest.fixture
def written(db: Db) -> Db:
    """An observer of an empty table `written`."""
    db.execute("CREATE TABLE written (a int)")
    return db


async def timed(call: Awaitable[Outcome]) -> tuple[Outcome, float]:
    started = time.monotonic()
    outcome = await call
    return outcome, time.monotonic() - started


async def test_a_slow_finally_keeps_the_lock_and_the_caller_has_its_answer(make_cron: Make, written: Db) -> None:
    cron, other = make_cron(), make_cron()
    go, at_rest = asyncio.Event(), asyncio.Event()
    seen: list[BaseException] = []

    @cron.task("slow", timeout="300ms")
    async def slow(run: Run) -> None:
        await run.driver.execute("INSERT INTO written VALUES (1)")
        try:
            await asyncio.sleep(30)
        finally:
            try:
                await run.driver.execute("INSERT INTO written VALUES (2)")
            except StatementRefused as error:
                seen.append(error)
            await go.wait()
            at_rest.set()

    @other.task("slow")
    async def again(run: Run) -> None: ...

    async with cron, other:
        outcome, seconds = await timed(cron.run("slow"))
        assert outcome.status == "timed_out"
        assert seconds < 0.3 + EASILY
        assert len(seen) == 1, "no statement is sent any more"
        assert len(holders(written, "slow")) == 1
        assert value(written, "SELECT status FROM cronlock.run WHERE id = %s", outcome.run_id) == "running"
        await until(lambda: value(written, "SELECT stopping_at IS NOT NULL FROM cronlock.run"), "stopping_at")
        for caller in (cron, other):
            skipped = await caller.run("slow")
            assert (skipped.status, skipped.reason) == ("skipped", "already_running")
            assert skipped.holder is not None
            assert skipped.holder.run_id == outcome.run_id
        go.set()
        await at_rest.wait()
        await until(lambda: not holders(written, "slow"), "the lock is freed")
        assert rows(written, "slow")[0] == ("timed_out", None)
        assert (await other.run("slow")).status == "completed"
    assert value(written, "SELECT count(*) FROM written") == 0


async def test_a_coroutine_that_swallows_its_cancellation_keeps_the_lock_and_never_completes(
    make_cron: Make, written: Db
) -> None:
    cron = make_cron()
    go = asyncio.Event()

    @cron.task("stubborn", timeout="200ms")
    async def stubborn(run: Run) -> str:
        await run.driver.execute("INSERT INTO written VALUES (1)")
        while not go.is_set():
            try:
                await go.wait()
            except asyncio.CancelledError:
                pass
        return "done"

    async with cron:
        outcome, seconds = await timed(cron.run("stubborn"))
        assert (outcome.status, outcome.result) == ("timed_out", None)
        assert seconds < 0.2 + EASILY
        assert len(holders(written, "stubborn")) == 1
        go.set()
        await until(lambda: not holders(written, "stubborn"), "the lock is freed")
    assert rows(written, "stubborn") == [("timed_out", None)]
    assert value(written, "SELECT result FROM cronlock.run") is None
    assert value(written, "SELECT count(*) FROM written") == 0


async def test_a_thread_that_sleeps_through_its_timeout_keeps_the_lock_and_writes_nothing_more(
    make_cron: Make, written: Db
) -> None:
    cron = make_cron(pool_size=2)
    go, gone = threading.Event(), threading.Event()
    refused: list[BaseException] = []

    @cron.task("sleeping", timeout="200ms")
    def sleeping(run: Run) -> str:
        run.driver.execute("INSERT INTO written VALUES (1)")
        go.wait(20)
        uses: list[Callable[[], Any]] = [
            lambda: run.driver.execute("INSERT INTO written VALUES (2)"),
            lambda: run.connection.execute(text("INSERT INTO written VALUES (3)")),
            lambda: run.session.execute(text("INSERT INTO written VALUES (4)")),
        ]
        for use in uses:
            try:
                use()
            except StatementRefused as error:
                refused.append(error)
        gone.set()
        return "done"

    async with cron:
        outcome, seconds = await timed(cron.run("sleeping"))
        assert (outcome.status, outcome.result) == ("timed_out", None)
        assert seconds < 0.2 + EASILY
        assert len(holders(written, "sleeping")) == 1
        stopping = "SELECT stopping_at IS NOT NULL FROM cronlock.lock_holder WHERE run_id = %s"
        await until(lambda: value(written, stopping, outcome.run_id), "stopping_at in the view")
        assert (await cron.run("sleeping")).status == "skipped"
        go.set()
        await asyncio.to_thread(gone.wait, 10)
        await until(lambda: not holders(written, "sleeping"), "the lock is freed")
        assert rows(written, "sleeping")[0] == ("timed_out", None)
    assert len(refused) == 3
    assert value(written, "SELECT result FROM cronlock.run WHERE status = 'timed_out'") is None
    assert value(written, "SELECT count(*) FROM written") == 0


@both
async def test_the_servers_own_limits_do_not_free_the_lock_of_code_that_goes_on(
    make_cron: Make, written: Db, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "IDLE_MARGIN", timedelta(seconds=1))
    monkeypatch.setattr(stopping, "PING", 0.2)
    cron = make_cron()
    go = threading.Event()

    async def awaiting(run: Run) -> None:
        run.driver  # noqa: B018 - it is touched
        while not go.is_set():
            try:
                await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                pass

    def plain(run: Run) -> None:
        run.driver  # noqa: B018
        go.wait(20)

    cron.task("long", timeout="200ms")(awaiting if is_async else plain)
    async with cron:
        outcome = await cron.run("long")
        assert outcome.status == "timed_out"
        (pid,) = holders(written, "long")
        limit = value(written, "SELECT clock_timestamp() + interval '2 s'")
        await until(lambda: value(written, "SELECT clock_timestamp() > %s", limit), "more than the limit of 1.2 s")
        assert holders(written, "long") == [pid]
        go.set()
        await until(lambda: not holders(written, "long"), "the lock is freed")
    assert rows(written, "long") == [("timed_out", None)]


@both
@pytest.mark.parametrize("by", ["timeout", "operator"])
@pytest.mark.parametrize("use", ["driver", "connection", "session"])
async def test_a_running_statement_is_cancelled_and_the_lock_kept_to_the_end_of_the_code(
    make_cron: Make, written: Db, by: str, use: str, is_async: bool
) -> None:
    seen: list[Any] = []

    def steps(run: Run) -> Steps:
        yield run.driver.execute("INSERT INTO written VALUES (1)")
        if by == "operator":
            written.execute("UPDATE cronlock.run SET cancel_requested_at = now(), cancel_requested_by = 'ana'")
        sleep = "SELECT pg_sleep(30)"
        try:
            yield getattr(run, use).execute(sleep if use == "driver" else text(sleep))
        except BaseException as error:
            seen.append(type(error).__name__)
            raise
        finally:
            seen.append(len(holders(written, "once")))

    cron = make_cron(pool_size=1)
    timeout = "300ms" if by == "timeout" else "60s"
    outcome, _ = await timed(run_once(cron, task_of(steps, is_async), timeout=timeout))
    assert outcome.status == {"timeout": "timed_out", "operator": "cancelled"}[by]
    assert outcome.duration_ms < (300 if by == "timeout" else 1000) + 1000 * EASILY
    assert seen[-1] == 1, "the lock was held while the code ended"
    assert seen[0] in ("QueryCanceled", "OperationalError", "CancelledError")
    assert rows(written, "once") == [(outcome.status, None)]
    assert value(written, "SELECT count(*) FROM written") == 0


@both
async def test_a_task_that_catches_the_cancelled_statement_and_goes_on_is_not_completed(
    make_cron: Make, written: Db, is_async: bool
) -> None:
    def steps(run: Run) -> Steps:
        for number in range(50):
            try:
                savepoint = yield run.connection.begin_nested()
                yield run.connection.execute(text(f"INSERT INTO written VALUES ({number})"))
                yield run.connection.execute(text("SELECT pg_sleep(5)"))
                yield savepoint.commit()
            except BaseException:
                pass
        return "done"

    outcome, seconds = await timed(run_once(make_cron(), task_of(steps, is_async), timeout="300ms"))
    assert outcome.status == "timed_out"
    assert seconds < 4
    assert value(written, "SELECT count(*) FROM written") == 0


@pytest.mark.parametrize("use", ["driver", "connection", "session"])
async def test_a_statement_that_the_task_itself_gives_up_does_not_free_the_lock(
    make_cron: Make, written: Db, use: str
) -> None:
    """SQLAlchemy closes a connection whose statement is cancelled in this way; here that is refused."""
    held: list[int] = []
    cron = make_cron(pool_size=1)

    @cron.task("impatient")
    async def impatient(run: Run) -> str:
        await run.driver.execute("INSERT INTO written VALUES (1)")
        sleep = "SELECT pg_sleep(30)"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(getattr(run, use).execute(sleep if use == "driver" else text(sleep)), 0.1)
        held.append(len(holders(written, "impatient")))
        await asyncio.sleep(0.05)
        held.append(len(holders(written, "impatient")))
        return "done"

    @cron.task("next")
    async def following(run: Run) -> None:
        await run.driver.execute("SELECT 1")

    async with cron:
        outcome = await cron.run("impatient")
        assert outcome.status == "failed"
        assert held == [1, 1]
        assert (await cron.run("next")).status == "completed"
        assert advisory_locks(written) == 0
    assert value(written, "SELECT count(*) FROM written") == 0


async def test_a_statement_given_up_inside_a_savepoint_leaves_the_rest(make_cron: Make, written: Db) -> None:
    async def impatient(run: Run) -> str:
        await run.driver.execute("INSERT INTO written VALUES (1)")
        try:
            async with run.driver.transaction():
                await asyncio.wait_for(run.driver.execute("SELECT pg_sleep(30)"), 0.1)
        except TimeoutError:
            await run.driver.execute("INSERT INTO written VALUES (2)")
        return "done"

    outcome = await run_once(make_cron(), impatient)
    assert outcome.failure is None
    assert value(written, "SELECT count(*) FROM written") == 2


@both
async def test_a_statement_that_still_runs_when_the_task_returns_fails_the_run(
    make_cron: Make, written: Db, is_async: bool
) -> None:
    """Nobody waits for it, so nobody can say that the work was done."""
    late: list[Any] = []
    statement = "INSERT INTO written SELECT 1 FROM pg_sleep(20)"

    async def late_statement(run: Run) -> None:
        with pytest.raises(psycopg.OperationalError):
            await run.driver.execute(statement)

    def late_thread(run: Run) -> None:
        with pytest.raises(psycopg.OperationalError):
            run.driver.execute(statement)

    async def awaiting(run: Run) -> None:
        late.append(asyncio.create_task(late_statement(run)))
        await until(lambda: sleeping(written), "it runs")

    def plain(run: Run) -> None:
        late.append(threading.Thread(target=late_thread, args=(run,)))
        late[0].start()
        asyncio.run(until(lambda: sleeping(written), "it runs"))

    cron = make_cron(pool_size=1)
    cron.task("next")(with_a_statement)
    cron.task("once")(awaiting if is_async else plain)
    async with cron:
        outcome, seconds = await timed(cron.run("once"))
        assert outcome.status == "failed"
        assert outcome.failure is not None
        assert "left open" in outcome.failure.message
        assert seconds < 5
        assert (await cron.run("next")).status == "completed"
        if is_async:
            await asyncio.wait_for(late[0], 5)
        else:
            await asyncio.to_thread(late[0].join, 5)
        await until(lambda: not holders(written, "once"), "the lock is free")
    assert value(written, "SELECT count(*) FROM written") == 0


def sleeping(db: Db) -> bool:
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"
    return bool(value(db, query))


async def with_a_statement(run: Run) -> None:
    await run.driver.execute("SELECT 1")


@pytest.mark.parametrize("is_wrapped", [True, False], ids=["a wrapper that does not await", "an async task"])
async def test_a_task_that_returns_a_coroutine_nobody_ran_is_failed(
    make_cron: Make, written: Db, is_wrapped: bool
) -> None:
    """A decorator that is not async hides that its function is; the work would never be done."""

    async def work(run: Run) -> None:
        await run.driver.execute("INSERT INTO written VALUES (1)")

    def wrapper(run: Run) -> Any:
        return work(run)

    async def forgetful(run: Run) -> Any:
        return work(run)

    outcome = await run_once(make_cron(), wrapper if is_wrapped else forgetful)
    assert outcome.status == "failed"
    assert outcome.failure is not None
    assert "await" in outcome.failure.message


async def test_a_generator_cannot_be_a_task(make_cron: Make) -> None:
    def generator(run: Run) -> Any:
        yield run

    async def asynchronous(run: Run) -> Any:
        yield run

    for function in (generator, asynchronous):
        with pytest.raises(RegistrationError, match="generator"):
            make_cron().task("once")(function)


async def test_a_caller_that_goes_away_does_not_stop_the_run(make_cron: Make, written: Db) -> None:
    cron = make_cron()
    running, go = asyncio.Event(), asyncio.Event()

    @cron.task("going-on")
    async def going_on(run: Run) -> None:
        await run.driver.execute("INSERT INTO written VALUES (1)")
        running.set()
        await go.wait()
        await run.driver.execute("INSERT INTO written VALUES (2)")

    async with cron:
        caller = asyncio.create_task(cron.run("going-on"))
        await running.wait()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert len(holders(written, "going-on")) == 1
        go.set()
        await until(lambda: rows(written, "going-on") == [("completed", None)], "the run ends")
    assert value(written, "SELECT count(*) FROM written") == 2


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.002, 0.004, 0.008])
@both
async def test_a_caller_that_goes_away_early_leaves_no_lock_and_no_connection(
    make_cron: Make, written: Db, delay: float, is_async: bool
) -> None:
    """At any moment of the opening: the run happens wholly or not at all, and the next call is as usual."""

    def steps(run: Run) -> Steps:
        yield run.driver.execute("INSERT INTO written VALUES (1)")
        yield run.driver.execute("INSERT INTO written VALUES (1)")

    cron = make_cron(pool_size=2)
    cron.task("early")(task_of(steps, is_async))
    async with cron:
        await cron.run("early")
        for number in range(10):
            caller = asyncio.create_task(cron.run("early"))
            await asyncio.sleep(delay + number * 0.0003)
            caller.cancel()
            await asyncio.wait((caller,))
        process = await cron.open()
        await until(lambda: not process.runner.active and not advisory_locks(written), "everything ends")
        assert (await cron.run("early")).status == "completed"
        pool = process.database.runs if is_async else process.database.threads
        stats: dict[str, int] = pool.get_stats()
        await until(lambda: pool.get_stats()["pool_available"] == pool.get_stats()["pool_size"], f"{stats}")
    completed = value(written, "SELECT count(*) FROM cronlock.run WHERE status = 'completed'")
    assert value(written, "SELECT count(*) FROM written") == 2 * completed
    left = written.execute("SELECT DISTINCT status FROM cronlock.run").fetchall()
    assert set(left) <= {("completed",), ("cancelled",), ("skipped",)}


async def test_draining_lets_a_run_end_and_then_cancels_what_is_left(make_cron: Make, written: Db) -> None:
    running = asyncio.Event()

    def make(seconds: float) -> Callable[[Run], Awaitable[None]]:
        async def task(run: Run) -> None:
            await run.driver.execute("INSERT INTO written VALUES (1)")
            running.set()
            await asyncio.sleep(seconds)

        return task

    for seconds, status in ((0.3, "completed"), (30, "cancelled")):
        running.clear()
        cron = make_cron()
        cron.task("last")(make(seconds))
        await cron.open()
        call = asyncio.create_task(cron.run("last"))
        await running.wait()
        await cron.close(1)
        assert (await call).status == status
    assert rows(written, "last") == [("completed", None), ("cancelled", None)]
    assert value(written, "SELECT count(*) FROM written") == 1
