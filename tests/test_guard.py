"""Guard mode: the lock is held beside the work, costs the database nothing, and its loss ends the work."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cronlock import Cronlock, LockLost, NotInTransaction, Run, StatementRefused
from cronlock.migrate import migrate
from tests import Db, Make, Steps, end_holders, held, holders, rows, run_once, serving, task_of, until, value
from tests.proxy import Proxy

pytestmark = pytest.mark.anyio
both = pytest.mark.parametrize("is_async", [True, False], ids=["async", "thread"])

PING = 0.2
GUARDS = """
SELECT pid, state, backend_xid, backend_xmin FROM pg_stat_activity
 WHERE datname = current_database() AND application_name = 'cronlock:once'
"""


@pytest.fixture
async def proxy(database_url: str) -> AsyncIterator[Proxy]:
    parts = conninfo_to_dict(database_url)
    async with Proxy(str(parts["host"]), int(parts["port"] or 5432)) as proxy:
        yield proxy


@pytest.fixture
def proxied_url(database_url: str, proxy: Proxy) -> str:
    parts = {**conninfo_to_dict(database_url), "port": str(proxy.listening), "sslmode": "disable"}
    return make_conninfo("", **{**parts, "gssencmode": "disable"})


def last_ping(db: Db, pid: int) -> Any:
    return value(db, "SELECT query_start FROM pg_stat_activity WHERE pid = %s", pid)


def wait_for_pings(db: Db, pid: int, count: int) -> None:
    """Wait until a backend has been asked something so many times more; to be called off the event loop."""
    until_then = time.monotonic() + 10
    before = last_ping(db, pid)
    while count:
        assert time.monotonic() < until_then, "it is not pinged"
        time.sleep(0.02)
        now = last_ping(db, pid)
        count, before = count - (now != before), now


# -- what it costs -----------------------------------------------------------------------------------------


@both
async def test_a_guard_costs_vacuum_concurrent_indexes_and_migrations_nothing(
    make_cron: Make, db: Db, database_url: str, is_async: bool
) -> None:
    db.execute("CREATE TABLE crowded AS SELECT generate_series(1, 10000) AS a")

    def work() -> None:
        ((pid, *_),) = db.execute(GUARDS).fetchall()
        wait_for_pings(db, pid, 8)  # psycopg would prepare a statement that it sends for the sixth time
        assert db.execute(GUARDS).fetchall() == [(pid, "idle in transaction", None, None)]
        others = "SELECT count(*) FROM pg_locks WHERE pid = %s AND locktype NOT IN ('advisory', 'virtualxid')"
        assert value(db, others, pid) == 0
        db.execute("SET statement_timeout = '5s'; SET lock_timeout = '1s'")
        db.execute("DELETE FROM crowded")
        db.execute("VACUUM crowded")
        assert value(db, "SELECT pg_relation_size('crowded')") == 0
        db.execute("CREATE INDEX CONCURRENTLY crowded_a ON crowded (a)")
        db.execute("ALTER TABLE crowded ADD COLUMN b int")
        db.execute("ALTER TABLE cronlock.run ADD COLUMN wider int")
        db.execute("ALTER TABLE cronlock.task ADD COLUMN wider int")
        migrate(database_url, "elsewhere")
        assert [holder[0] for holder in db.execute(GUARDS)] == [pid]

    def steps(run: Run) -> Steps:
        if is_async:
            yield asyncio.to_thread(work)
        else:
            work()

    outcome = await run_once(make_cron(guard_ping=PING), task_of(steps, is_async), mode="guard")
    assert outcome.failure is None
    assert outcome.status == "completed"


# -- what it is --------------------------------------------------------------------------------------------


@both
async def test_the_task_works_on_connections_of_its_own_while_the_lock_is_held(
    make_cron: Make, db: Db, database_url: str, is_async: bool
) -> None:
    db.execute("CREATE TABLE written (run_id bigint, fence bigint)")
    cron = make_cron()
    seen: list[Any] = []

    def work(run: Run) -> None:
        with psycopg.connect(database_url) as own:
            own.execute("INSERT INTO written VALUES (%s, %s)", (run.id, run.id))
            own.commit()  # visible at once, whatever becomes of the run
        seen.append((value(db, "SELECT count(*) FROM written"), len(holders(db, "once"))))
        run.check()

    def steps(run: Run) -> Steps:
        if is_async:
            yield asyncio.to_thread(work, run)
            yield asyncio.wait_for(again(), 5)
        else:
            work(run)
        return {"id": run.id}

    async def again() -> None:
        seen.append((await cron.run("once")).holder)

    outcome = await run_once(cron, task_of(steps, is_async), mode="guard")
    assert (outcome.status, outcome.result) == ("completed", f'{{"id":{outcome.run_id}}}')
    assert seen[0] == (1, 1)
    if is_async:
        assert seen[1].run_id == outcome.run_id
    assert value(db, "SELECT array_agg(run_id) FROM written") == [outcome.run_id]
    assert holders(db, "once") == []


async def test_a_guard_and_another_program_exclude_each_other(make_cron: Make, database_url: str, db: Db) -> None:
    entered = asyncio.Event()
    leave = asyncio.Event()
    cron = make_cron()

    @cron.task("once", mode="guard")
    async def once(run: Run) -> None:
        entered.set()
        await leave.wait()

    async with cron:
        async with held(database_url, "once") as pid:
            outcome = await cron.run("once")
            assert (outcome.reason, outcome.holder and outcome.holder.pid) == ("already_running", pid)
        running = asyncio.create_task(cron.run("once"))
        await entered.wait()
        assert value(db, "SELECT pg_try_advisory_xact_lock(hashtext('once')::bigint)") is False
        leave.set()
        assert (await running).status == "completed"
        assert value(db, "SELECT pg_try_advisory_xact_lock(hashtext('once')::bigint)") is True


@both
@pytest.mark.parametrize("name", ["connection", "session", "driver"])
async def test_a_guard_run_has_no_connection_to_hand_out(make_cron: Make, db: Db, name: str, is_async: bool) -> None:
    def steps(run: Run) -> Steps:
        with pytest.raises(NotInTransaction, match=rf"run\.{'connection' if name == 'session' else name} .* guard"):
            getattr(run, name)
        yield None

    assert (await run_once(make_cron(), task_of(steps, is_async), mode="guard")).status == "completed"


@both
async def test_an_error_fails_a_guard_run_and_what_it_committed_itself_stays(
    make_cron: Make, db: Db, database_url: str, is_async: bool
) -> None:
    db.execute("CREATE TABLE written (a int)")

    def steps(run: Run) -> Steps:
        with psycopg.connect(database_url, autocommit=True) as own:
            own.execute("INSERT INTO written VALUES (1)")
        raise ValueError("no")
        yield None

    outcome = await run_once(make_cron(), task_of(steps, is_async), mode="guard")
    assert outcome.failure is not None
    assert (outcome.status, outcome.failure.type) == ("failed", "ValueError")
    assert value(db, "SELECT count(*) FROM written") == 1
    assert holders(db, "once") == []


@both
async def test_a_guard_run_has_no_timeout_unless_it_is_given_one(make_cron: Make, db: Db, is_async: bool) -> None:
    def steps(run: Run) -> Steps:
        if is_async:
            yield asyncio.sleep(1)
        else:
            time.sleep(1)

    cron = make_cron(timeout="300ms")
    assert (await run_once(cron, task_of(steps, is_async), mode="guard")).status == "completed"
    started = time.monotonic()
    outcome = await run_once(make_cron(), task_of(steps, is_async), mode="guard", timeout="200ms")
    assert outcome.status == "timed_out"
    assert time.monotonic() - started < 2.5
    assert rows(db, "once") == [("completed", None), ("timed_out", None)]


async def test_a_thread_that_goes_on_after_its_timeout_keeps_the_lock_and_its_pings(make_cron: Make, db: Db) -> None:
    leave = threading.Event()
    refused: list[Exception] = []
    cron = make_cron(guard_ping=PING)

    @cron.task("once", mode="guard", timeout="200ms")
    def once(run: Run) -> None:
        leave.wait(20)
        try:
            run.check()
        except StatementRefused as error:
            refused.append(error)
            raise

    async with cron:
        outcome = await cron.run("once")
        assert outcome.status == "timed_out"
        await asyncio.sleep(PING * 5)
        assert len(holders(db, "once")) == 1
        assert (await cron.run("once")).reason == "already_running"
        leave.set()
        await until(lambda: not holders(db, "once"), "the lock is free")
    assert "timeout" in str(refused[0])
    assert rows(db, "once") == [("timed_out", None), ("skipped", "already_running")]


# -- what ends it ------------------------------------------------------------------------------------------


async def test_a_guard_whose_backend_is_ended_is_noticed_and_its_task_cancelled_within_a_second(
    make_cron: Make, db: Db
) -> None:
    cancelled: list[float] = []
    entered = asyncio.Event()
    cron = make_cron()

    @cron.task("once", mode="guard")
    async def once(run: Run) -> None:
        entered.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(time.monotonic())
            with pytest.raises(StatementRefused, match="gone"):
                run.check()
            raise

    async with serving(cron.app()) as client:
        calling = asyncio.create_task(client.get("/cron/once"))
        await entered.wait()
        ended = time.monotonic()
        end_holders(db)
        answer = await calling
        assert time.monotonic() - ended < 1.5
        assert cancelled[0] - ended < 1
    assert (answer.status_code, answer.json()["status"]) == (500, "lost")
    assert rows(db, "once") == [("lost", None)]


async def test_check_finds_the_lost_lock_before_anybody_else_does(make_cron: Make, db: Db) -> None:
    found: list[float] = []

    def once(run: Run) -> None:
        run.check()
        ended = time.monotonic()
        end_holders(db)
        while time.monotonic() < ended + 5:
            try:
                run.check()
            except (LockLost, StatementRefused):
                break
        found.append(time.monotonic() - ended)
        raise ValueError("not done")

    outcome = await run_once(make_cron(), once, mode="guard")
    assert found[0] < 0.5
    assert outcome.status == "lost"


async def test_a_link_that_stalls_without_an_error_ends_the_task_before_anybody_else_can_have_the_lock(
    make_cron: Make, db: Db, proxy: Proxy, proxied_url: str
) -> None:
    ping = 0.5
    ends: dict[str, float] = {}
    cron = make_cron(database_url=proxied_url, guard_ping=ping, recover_interval="1h")
    entered = asyncio.Event()

    @cron.task("once", mode="guard")
    async def once(run: Run) -> None:
        entered.set()
        try:
            await asyncio.sleep(60)
        finally:
            ends["code"] = time.monotonic()

    async with cron:
        calling = asyncio.create_task(cron.run("once"))
        await entered.wait()
        await until(lambda: any(b"SELECT 1" in message for message in proxy.heard), "it is pinged")
        proxy.stall()
        stalled = time.monotonic()
        await until(lambda: not holders(db, "once"), "the server has let go")
        ends["lock"] = time.monotonic()
        assert ends["code"] - stalled < 2 * ping + 0.5
        assert ends["code"] < ends["lock"], "the code was over before the lock was free"
        assert ends["lock"] - stalled < 3 * ping + 1
        outcome = await asyncio.wait_for(calling, 5)
        assert outcome.status == "lost"
        proxy.flow()
    await until(lambda: rows(db, "once") == [("lost", None)], "it is recorded")


async def test_check_refuses_in_a_thread_when_the_guard_is_silent(
    make_cron: Make, db: Db, proxy: Proxy, proxied_url: str
) -> None:
    told: list[float] = []
    entered = asyncio.Event()
    cron = make_cron(database_url=proxied_url, guard_ping="500ms", recover_interval="1h")
    loop = asyncio.get_running_loop()

    @cron.task("once", mode="guard")
    def once(run: Run) -> None:
        loop.call_soon_threadsafe(entered.set)
        while True:
            try:
                run.check()
            except (LockLost, StatementRefused):
                told.append(time.monotonic())
                raise
            time.sleep(0.01)

    async with cron:
        calling = asyncio.create_task(cron.run("once"))
        await entered.wait()
        proxy.stall()
        stalled = time.monotonic()
        await until(lambda: told, "check has refused")
        assert len(holders(db, "once")) == 1, "the server has not yet let go"
        assert told[0] - stalled < 1.5
        assert (await calling).status == "lost"
        proxy.cut("rst")
        proxy.flow()


async def test_check_refuses_in_a_thread_while_the_event_loop_is_blocked(make_cron: Make, db: Db) -> None:
    entered = threading.Event()
    told: list[tuple[str, int]] = []
    cron = make_cron(guard_ping="400ms")

    @cron.task("once", mode="guard")
    def once(run: Run) -> None:
        entered.set()
        while True:
            try:
                run.check()
            except (LockLost, StatementRefused) as error:
                told.append((type(error).__name__, len(holders(db, "once"))))
                raise
            time.sleep(0.01)

    async with cron:
        calling = asyncio.create_task(cron.run("once"))
        await until(entered.is_set, "it runs")
        time.sleep(2)
        assert told == [("LockLost", 1)], "before the server lets the lock go"
        assert (await calling).status == "lost"


async def test_a_blocked_event_loop_loses_the_lock_and_the_run_never_says_completed(make_cron: Make, db: Db) -> None:
    async def once(run: Run) -> str:
        time.sleep(PING * 6)
        return "done"

    outcome = await run_once(make_cron(guard_ping=PING), once, mode="guard")
    assert outcome.status == "lost"
    assert rows(db, "once") == [("lost", None)]


async def test_a_lock_that_is_lost_in_the_last_moment_is_not_completed(
    make_cron: Make, db: Db, proxy: Proxy, proxied_url: str
) -> None:
    cron = make_cron(database_url=proxied_url, recover_interval="1h")

    @cron.task("once", mode="guard")
    async def once(run: Run) -> str:
        return "done"

    async with cron:
        await cron.run("once")
        cut = proxy.cut_at(b"complete_run", is_forwarded=False)
        outcome = await cron.run("once")
        assert cut.done()
    assert outcome.status == "lost"
    assert rows(db, "once") == [("completed", None), ("lost", None)]


@both
async def test_a_guard_run_is_cancelled_from_outside(make_cron: Make, db: Db, is_async: bool) -> None:
    cron = make_cron()
    entered = threading.Event()

    def steps(run: Run) -> Steps:
        entered.set()
        while True:
            if is_async:
                yield asyncio.sleep(0.01)
            else:
                time.sleep(0.01)
            run.check()

    cron.task("once", mode="guard")(task_of(steps, is_async))
    async with cron:
        calling = asyncio.create_task(cron.run("once"))
        await until(entered.is_set, "it runs")
        db.execute("UPDATE cronlock.run SET cancel_requested_at = now(), cancel_requested_by = 'me'")
        outcome = await asyncio.wait_for(calling, 5)
        assert outcome.failure is not None
        assert (outcome.status, outcome.failure.message) == ("cancelled", "cancelled by me")
        await until(lambda: not holders(db, "once"), "the lock is free")


async def test_a_plain_guard_task_takes_no_connection_for_threads(make_cron: Make, db: Db) -> None:
    cron = make_cron(pool_size=1)

    def once(run: Run) -> int:
        return int(value(db, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'cronlock:once'"))

    outcome = await run_once(cron, once, mode="guard")
    assert outcome.result == "1"


async def test_a_second_server_takes_over_when_the_first_stalls_and_the_fence_has_grown(
    make_cron: Make, db: Db, proxy: Proxy, proxied_url: str
) -> None:
    db.execute("CREATE TABLE account (fence bigint); INSERT INTO account VALUES (0)")
    entered = asyncio.Event()
    refused: list[bool] = []

    def give(cron: Cronlock, wait: Callable[[Run], Any]) -> None:
        @cron.task("once", mode="guard")
        async def once(run: Run) -> None:
            db.execute("UPDATE account SET fence = %(id)s WHERE fence < %(id)s", {"id": run.id})
            await wait(run)

    async def stay(run: Run) -> None:
        entered.set()
        try:
            await asyncio.sleep(60)
        finally:  # code that will not hear: the fencing number keeps its effect out
            await asyncio.sleep(2.5)
            late = db.execute("UPDATE account SET fence = %(id)s WHERE fence < %(id)s RETURNING 1", {"id": run.id})
            refused.append(late.fetchone() is None)

    async def leave(run: Run) -> None:
        pass

    stalling = make_cron(database_url=proxied_url, guard_ping="300ms", recover_interval="1h")
    give(stalling, stay)
    healthy = make_cron()
    give(healthy, leave)
    async with stalling, healthy:
        first = asyncio.create_task(stalling.run("once"))
        await entered.wait()
        proxy.stall()
        await until(lambda: not holders(db, "once"), "the server has let go", 5)
        second = await healthy.run("once")
        assert second.status == "completed"
        assert (await first).status == "lost"
        await until(lambda: refused, "the late effect was tried")
        proxy.cut("rst")
        proxy.flow()
    assert refused == [True]
    assert value(db, "SELECT fence FROM account") == second.run_id
