"""Connections that end, stall or lie: what the caller is told, what is recorded and what is kept must agree."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import text

from cronlock import Cronlock, Run, closing
from tests import Db, Make, Steps, held, serving, task_of, until
from tests.observing import is_quiet, locks, statuses
from tests.proxy import PROXY, Proxy, end

pytestmark = pytest.mark.anyio

CLOSING = b'"complete_run"'
FIRST_USE = b"pg_catalog.version()"
OPENING = b"pg_try_advisory_xact_lock"
BEGINNING = b'"backend_pid":'
ENDING = b'"status":"failed"'

kinds = pytest.mark.parametrize("is_async", [True, False], ids=["async", "thread"])


@pytest.fixture
async def proxy(database_url: str) -> AsyncIterator[Proxy]:
    parts = conninfo_to_dict(database_url)
    async with Proxy(str(parts["host"]), int(parts["port"] or 5432)) as proxy:
        yield proxy


@pytest.fixture
def proxied_url(database_url: str, proxy: Proxy) -> str:
    """The test's database, through the proxy."""
    parts = conninfo_to_dict(database_url)
    login = f"{parts['user']}:{parts.get('password') or ''}"
    return f"postgresql://{login}@127.0.0.1:{proxy.listening}/{parts['dbname']}?sslmode=disable"


@pytest.fixture
def make_proxied(make_cron: Make, proxied_url: str) -> Make:
    """Makes a Cronlock that reaches the test's database through the proxy."""

    def make(**settings: Any) -> Cronlock:
        return make_cron(**{"database_url": proxied_url, **settings})

    return make


def nothing(run: Run) -> Steps:
    """A task that touches nothing."""
    yield from ()


def writes(db: Db) -> list[int]:
    """The ids of the runs whose work was committed."""
    return [run for (run,) in db.execute("SELECT run_id FROM effect ORDER BY run_id").fetchall()]


@pytest.fixture
def effect(db: Db) -> None:
    db.execute("CREATE TABLE effect (run_id bigint)")


def end_backend(db: Db) -> None:
    """End the session that holds the lock, as an administrator or a failover does."""
    db.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND pid <> pg_backend_pid()"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )


@kinds
async def test_a_statement_of_sqlalchemy_that_finds_the_connection_broken_logs_no_traceback(
    make_cron: Make, db: Db, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    cron = make_cron()

    def slow(run: Run) -> Steps:
        yield run.connection.execute(text("SELECT pg_sleep(30)"))

    cron.task("slow")(task_of(slow, is_async))
    async with cron:
        asked = asyncio.create_task(cron.run("slow"))
        await until(lambda: locks(db), "the lock is held")
        await asyncio.sleep(0.3)  # the statement runs
        end_backend(db)
        outcome = await asked
    assert outcome.status == "lost"
    assert [record.getMessage() for record in caplog.records if record.name.startswith("sqlalchemy")] == []


@kinds
@pytest.mark.parametrize("doing", ["sql", "python"])
async def test_a_run_whose_backend_was_ended_is_lost_and_its_code_is_stopped_within_a_second(
    make_cron: Make, db: Db, effect: None, is_async: bool, doing: str
) -> None:
    cron = make_cron()
    told: list[str] = []
    is_over = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(run: Run) -> Steps:
        yield run.driver.execute("INSERT INTO effect VALUES (%s)", (run.id,))
        told.append("wrote")
        try:
            for _ in range(300):
                if doing == "sql":
                    yield run.driver.execute("SELECT pg_sleep(30)")
                elif is_async:
                    yield asyncio.sleep(0.1)
                else:
                    time.sleep(0.1)
                    run.check()
            told.append("went on")
        except BaseException as error:
            told.append(type(error).__name__)
            raise
        finally:
            loop.call_soon_threadsafe(is_over.set)

    cron.task("slow", lock="slow")(task_of(slow, is_async))

    @cron.task("next", lock="slow")
    async def next(run: Run) -> None:
        await run.driver.execute("INSERT INTO effect VALUES (%s)", (run.id,))

    async with serving(cron.app()) as client:
        call = asyncio.create_task(client.get("/cron/slow"))
        await until(lambda: told, "it wrote")
        if doing == "sql":
            await until(lambda: locks(db)[0][2] == "active", "it is in its statement")
        ended = time.monotonic()
        end_backend(db)
        answer = await call
        assert time.monotonic() - ended < 1.5
        await asyncio.wait_for(is_over.wait(), 1)
        assert answer.status_code == 500
        assert answer.json()["status"] == "lost"
        assert told[1] in ({"AdminShutdown", "OperationalError"} if doing == "sql" else {"CancelledError", "LockLost"})
        assert statuses(db, "slow") == ["lost"]
        after = await client.get("/cron/next")
        assert after.json()["status"] == "completed"
        assert writes(db) == [after.json()["runId"]]
    assert is_quiet(db)


@kinds
@pytest.mark.parametrize("is_touched", [True, False], ids=["with work", "without work"])
@pytest.mark.parametrize("is_forwarded", [True, False], ids=["after", "before"])
async def test_a_connection_cut_around_the_commit_gives_one_truth_to_caller_row_and_effect(
    make_proxied: Make, proxy: Proxy, db: Db, effect: None, is_async: bool, is_touched: bool, is_forwarded: bool
) -> None:
    cron = make_proxied()

    def work(run: Run) -> Steps:
        if is_touched:
            yield run.driver.execute("INSERT INTO effect VALUES (%s)", (run.id,))
        return "done"

    cron.task("work")(task_of(work, is_async))
    async with serving(cron.app()) as client:
        cut = proxy.cut_at(CLOSING, is_forwarded=is_forwarded)
        answer = await client.get("/cron/work")
        assert cut.done()
        expected = "completed" if is_forwarded else "lost"
        assert answer.json()["status"] == expected
        assert answer.status_code == (200 if is_forwarded else 500)
        if is_forwarded:
            assert answer.json()["result"] == "done"
        assert statuses(db) == [expected]
        assert writes(db) == ([answer.json()["runId"]] if is_forwarded and is_touched else [])
        assert (await client.get("/cron/work")).json()["status"] == "completed"
        await until(lambda: is_quiet(db), "everything is given back")


async def test_connections_cut_at_any_moment_never_let_answer_row_and_effect_differ(
    make_proxied: Make, proxy: Proxy, db: Db, effect: None
) -> None:
    cron = make_proxied()

    @cron.task("awaiting")
    async def awaiting(run: Run) -> None:
        await run.driver.execute("INSERT INTO effect VALUES (%s)", (run.id,))

    @cron.task("blocking")
    def blocking(run: Run) -> None:
        run.driver.execute("INSERT INTO effect VALUES (%s)", (run.id,))

    seed = random.randrange(10**6)
    chance = random.Random(seed)
    answered: dict[int, str] = {}
    async with serving(cron.app()) as client:
        await client.get("/cron/awaiting")
        for number in range(40):
            how = chance.choice(("fin", "rst"))
            timer = asyncio.get_running_loop().call_later(chance.uniform(0, 0.012), proxy.cut, how)
            answer = await client.get("/cron/awaiting" if number % 2 else "/cron/blocking")
            timer.cancel()
            assert answer.status_code in (200, 500, 503), answer.text
            if "cronlock-run-id" in answer.headers:
                answered[int(answer.headers["cronlock-run-id"])] = answer.json()["status"]
        await until(lambda: is_quiet(db), "everything is given back")
        assert (await client.get("/cron/awaiting")).status_code == 200
        await until(lambda: statuses(db).count("running") == 0, "every run has ended")
    recorded: dict[int, str] = dict(db.execute("SELECT id, status FROM cronlock.run").fetchall())
    assert {run: recorded[run] for run in answered} == answered, f"seed {seed}"
    assert writes(db) == sorted(run for run, status in recorded.items() if status == "completed"), f"seed {seed}"


@pytest.mark.parametrize("is_forwarded", [True, False], ids=["after", "before"])
@pytest.mark.parametrize("needle", [BEGINNING, ENDING], ids=["beginning", "ending"])
async def test_a_record_whose_connection_was_cut_is_written_once(
    make_proxied: Make, proxy: Proxy, db: Db, effect: None, needle: bytes, is_forwarded: bool
) -> None:
    cron = make_proxied()

    @cron.task("failing")
    async def failing(run: Run) -> None:
        await run.driver.execute("INSERT INTO effect VALUES (%s)", (run.id,))
        raise ValueError("asked to fail")

    async with serving(cron.app()) as client:
        cut = proxy.cut_at(needle, is_forwarded=is_forwarded)
        started = time.monotonic()
        answer = await client.get("/cron/failing")
        assert cut.done()
        assert time.monotonic() - started < 2
        assert (answer.status_code, answer.json()["status"]) == (500, "failed")
        row = db.execute("SELECT id, status, error_type FROM cronlock.run").fetchall()
        assert row == [(answer.json()["runId"], "failed", "ValueError")]
        assert writes(db) == []
        assert is_quiet(db)


@kinds
@pytest.mark.parametrize("is_forwarded", [True, False], ids=["after", "before"])
async def test_an_opening_whose_connection_was_cut_is_tried_again(
    make_proxied: Make, proxy: Proxy, db: Db, is_async: bool, is_forwarded: bool
) -> None:
    cron = make_proxied()
    cron.task("work")(task_of(nothing, is_async))
    async with serving(cron.app()) as client:
        cut = proxy.cut_at(OPENING, is_forwarded=is_forwarded)
        answer = await client.get("/cron/work")
        assert cut.done()
        # Where the server has taken the lock for nobody, it may not have noticed yet.
        while is_forwarded and answer.status_code == 503 and answer.json()["reason"] == "undecided":
            answer = await client.get("/cron/work")
        assert answer.json()["status"] == "completed"
        await until(lambda: is_quiet(db), "everything is given back")


async def test_all_connections_dead_at_once_are_replaced_before_anybody_notices(
    make_proxied: Make, proxy: Proxy, db: Db
) -> None:
    cron = make_proxied()

    @cron.task("work")
    async def work(run: Run) -> None: ...

    @cron.task("blocking")
    def blocking(run: Run) -> None: ...

    async with serving(cron.app()) as client:
        for _ in range(3):
            await asyncio.gather(*(client.get(f"/cron/{name}") for name in ("work", "blocking")))
            assert proxy.cut("fin") >= 3
            answers = [await client.get(f"/cron/{name}") for name in ("work", "blocking")]
            assert [answer.json()["status"] for answer in answers] == ["completed", "completed"]


async def test_a_port_that_refuses_answers_503_and_is_used_again_when_it_is_open(
    make_proxied: Make, proxy: Proxy, db: Db
) -> None:
    cron = make_proxied(acquire_timeout="500ms")
    cron.task("work")(task_of(nothing, True))
    async with serving(cron.app()) as client:
        assert (await client.get("/cron/work")).status_code == 200
        await proxy.refuse()
        proxy.cut("rst")
        answers = [await client.get("/cron/work") for _ in range(3)]
        assert {answer.status_code for answer in answers} == {503}
        await proxy.accept()
        opened = time.monotonic()
        while (await client.get("/cron/work")).status_code != 200:
            assert time.monotonic() - opened < 5


def tasks() -> int:
    """How many tasks the event loop has, the proxy's own left out."""
    return sum(task.get_name() != PROXY for task in asyncio.all_tasks())


@kinds
async def test_a_connection_cut_at_its_first_use_costs_one_call_and_no_connection(
    make_proxied: Make, proxy: Proxy, db: Db, is_async: bool
) -> None:
    cron = make_proxied(pool_size=1)
    cron.task("work")(task_of(nothing, is_async))
    for _ in range(3):
        cut = proxy.cut_at(FIRST_USE, is_forwarded=False)
        async with serving(cron.app()) as client:
            assert cut.done()
            codes = [(await client.get("/cron/work")).status_code for _ in range(3)]
            assert codes == [200, 200, 200]


async def test_on_a_stalled_link_every_call_gets_its_503_and_nothing_piles_up(
    make_proxied: Make, proxy: Proxy, db: Db
) -> None:
    cron = make_proxied(acquire_timeout="500ms")

    @cron.task("blocking")
    def blocking(run: Run) -> None: ...

    async def awaiting(run: Run) -> None: ...

    for number in range(9):
        cron.task(f"task-{number}")(awaiting)
    names = [task.name for task in cron.tasks]
    async with serving(cron.app()) as client:
        await asyncio.gather(*(client.get(f"/cron/{name}") for name in names))
        before = tasks()
        proxy.stall()
        counts = []

        async def one(name: str) -> float:
            started = time.monotonic()
            answer = await client.get(f"/cron/{name}")
            assert answer.status_code == 503, answer.text
            assert int(answer.headers["retry-after"]) > 0
            return time.monotonic() - started

        for _ in range(5):
            took = await asyncio.gather(*(one(name) for name in names * 4))
            assert max(took) < 1.9
            counts.append(tasks())
        assert max(counts) < before + 40
        assert counts[-1] <= counts[0] + 5
        proxy.flow()
        flowed = time.monotonic()
        while (await client.get("/cron/task-0")).status_code != 200:
            assert time.monotonic() - flowed < 3
            await asyncio.sleep(0.05)
        answers = await asyncio.gather(*(client.get(f"/cron/{name}") for name in names))
        assert {answer.json()["status"] for answer in answers} == {"completed"}
        await until(lambda: is_quiet(db), "everything is given back")
        await until(lambda: tasks() <= before + 2, "nothing is left running")


@kinds
async def test_a_timeout_on_a_stalled_link_is_answered_in_time_and_commits_nothing(
    make_proxied: Make, proxy: Proxy, db: Db, effect: None, is_async: bool
) -> None:
    cron = make_proxied()

    def slow(run: Run) -> Steps:
        yield run.driver.execute("INSERT INTO effect VALUES (%s)", (run.id,))
        loop.call_soon_threadsafe(proxy.stall)
        yield run.driver.execute("SELECT 1")

    loop = asyncio.get_running_loop()
    cron.task("slow", timeout="1s")(task_of(slow, is_async))
    async with serving(cron.app()) as client:
        started = time.monotonic()
        answer = await client.get("/cron/slow")
        assert time.monotonic() - started < 2.3
        assert (answer.status_code, answer.json()["status"]) == (504, "timed_out")
        proxy.flow()
        await until(lambda: is_quiet(db), "everything is given back", 15)
        await until(lambda: statuses(db) == ["timed_out"], "it is recorded", 15)
        assert writes(db) == []


async def test_a_commit_without_an_answer_is_told_as_unknown_and_recorded_as_it_went(
    make_proxied: Make, proxy: Proxy, db: Db, effect: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closing, "CLOSE_WAIT", 0.5)
    cron = make_proxied()

    @cron.task("work")
    async def work(run: Run) -> None:
        await run.driver.execute("INSERT INTO effect VALUES (%s)", (run.id,))
        proxy.stall()

    async with serving(cron.app()) as client:
        started = time.monotonic()
        answer = await client.get("/cron/work")
        assert time.monotonic() - started < 2
        assert (answer.status_code, answer.json()["reason"]) == (503, "outcome_unknown")
        proxy.flow()
        await until(lambda: statuses(db) == ["completed"], "the commit went through", 5)
        assert len(writes(db)) == 1
        await until(lambda: is_quiet(db), "everything is given back")


async def test_a_commit_that_never_gets_an_answer_is_given_up_and_settled_by_its_row(
    make_proxied: Make, proxy: Proxy, db: Db, effect: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closing, "CLOSE_MARGIN", 0.0)
    monkeypatch.setattr(closing, "RECORD_WAIT", 0.5)
    cron = make_proxied()

    def server_notices() -> None:
        for link in proxy.links:
            end(link.server, "rst")

    @cron.task("work", timeout="1s")
    async def work(run: Run) -> None:
        await run.driver.execute("INSERT INTO effect VALUES (%s)", (run.id,))
        proxy.forget()
        asyncio.get_running_loop().call_later(0.5, server_notices)

    async with serving(cron.app()) as client:
        await asyncio.sleep(0.5)  # the timer's first duties are done, and both connections for records are free
        started = time.monotonic()
        answer = await client.get("/cron/work")
        assert (answer.status_code, answer.json()["status"]) == (500, "lost")
        assert time.monotonic() - started < 5
        assert statuses(db) == ["lost"]
        assert writes(db) == []


async def test_when_only_records_stall_the_call_gets_its_503_in_time_and_nothing_is_run(
    make_cron: Make, proxied_url: str, proxy: Proxy, db: Db
) -> None:
    cron = make_cron(direct_url=proxied_url, pooler="transaction", acquire_timeout="1s")
    called: list[int] = []

    @cron.task("work")
    async def work(run: Run) -> None:
        called.append(run.id)

    async with serving(cron.app()) as client:
        await client.get("/cron/work")
        proxy.stall()
        started = time.monotonic()
        answer = await client.get("/cron/work")
        assert answer.status_code == 503
        assert time.monotonic() - started < 1.9
        await until(lambda: not locks(db), "the lock is free", 5)
        proxy.flow()
        flowed = time.monotonic()
        while (answer := await client.get("/cron/work")).status_code != 200:
            assert time.monotonic() - flowed < 5
        await until(lambda: "running" not in statuses(db), "every run has ended")
        assert len(called) == 2
        assert set(statuses(db)) <= {"completed", "cancelled", "lost"}


async def test_connections_that_the_network_forgot_are_replaced(make_proxied: Make, proxy: Proxy, db: Db) -> None:
    cron = make_proxied(acquire_timeout="500ms", pool_size=2)

    @cron.task("awaiting")
    async def awaiting(run: Run) -> None: ...

    @cron.task("blocking")
    def blocking(run: Run) -> None: ...

    async with serving(cron.app()) as client:
        for name in ("awaiting", "blocking"):
            await client.get(f"/cron/{name}")
        proxy.forget()
        forgotten = time.monotonic()
        for name in ("awaiting", "blocking"):
            while (answer := await client.get(f"/cron/{name}")).status_code != 200:
                assert answer.status_code == 503
                assert time.monotonic() - forgotten < 8
            assert answer.json()["status"] == "completed"


async def test_a_read_only_server_runs_nothing_and_is_used_again_when_it_can_write(make_cron: Make, db: Db) -> None:
    cron = make_cron(recover_interval="1s")
    called: list[int] = []

    @cron.task("work")
    async def work(run: Run) -> None:
        called.append(run.id)

    name = db.info.dbname
    reconnect = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
        " AND pid <> pg_backend_pid()"
    )
    async with serving(cron.app()) as client:
        assert (await client.get("/cron/work")).status_code == 200
        db.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
        db.execute(reconnect)
        answers = [await client.get("/cron/work") for _ in range(10)]
        assert {answer.status_code for answer in answers} == {503}
        assert {answer.json()["reason"] for answer in answers} == {"read_only"}
        assert len(called) == 1
        assert locks(db) == []
        while (await client.get("/readyz")).status_code != 503:  # the timer has looked
            await asyncio.sleep(0.05)
        db.execute(f'ALTER DATABASE "{name}" RESET default_transaction_read_only')  # holds for new sessions
        changed = time.monotonic()
        while (await client.get("/cron/work")).status_code != 200:
            assert time.monotonic() - changed < 5
            await asyncio.sleep(0.05)
        assert len(called) == 2


async def test_a_read_only_server_grants_no_lock_even_if_records_can_be_written(
    make_cron: Make, database_url: str, db: Db
) -> None:
    read_only = f"{database_url}?options=-cdefault_transaction_read_only%3Don"
    cron = make_cron(database_url=read_only, direct_url=database_url, pooler="transaction")
    called: list[int] = []

    @cron.task("work")
    async def work(run: Run) -> None:
        called.append(run.id)

    async with serving(cron.app()) as client:
        answer = await client.get("/cron/work")
        assert (answer.status_code, answer.json()["reason"]) == (503, "read_only")
    assert called == []
    assert statuses(db) == []


@kinds
async def test_six_tasks_on_a_pool_of_two_all_end(make_cron: Make, db: Db, is_async: bool) -> None:
    cron = make_cron(pool_size=2, record_pool_size=1)

    def work(run: Run) -> Steps:
        yield run.driver.execute("SELECT pg_sleep(0.2)")
        run.progress(1, 2)
        yield run.driver.execute("SELECT pg_sleep(0.1)")

    for number in range(6):
        cron.task(f"task-{number}")(task_of(work, is_async))
    async with serving(cron.app()) as client:
        started = time.monotonic()
        answers = await asyncio.gather(*(client.get(f"/cron/task-{number}") for number in range(6)))
        assert {answer.json()["status"] for answer in answers} == {"completed"}
        assert time.monotonic() - started < 3
    assert statuses(db) == ["completed"] * 6


async def test_100_calls_cancelled_at_any_moment_leave_pool_and_server_as_they_were(
    make_cron: Make, db: Db, effect: None, caplog: pytest.LogCaptureFixture
) -> None:
    cron = make_cron(pool_size=4)

    async def awaiting(run: Run) -> None:
        await run.driver.execute("INSERT INTO effect VALUES (%s)", (run.id,))
        await asyncio.sleep(0.01)
        await run.driver.execute("INSERT INTO effect VALUES (%s)", (run.id,))

    def blocking(run: Run) -> None:
        run.driver.execute("INSERT INTO effect VALUES (%s)", (run.id,))
        time.sleep(0.01)
        run.driver.execute("INSERT INTO effect VALUES (%s)", (run.id,))

    for number in range(10):
        cron.task(f"task-{number}")(awaiting if number % 2 else blocking)
    chance = random.Random(7)
    async with serving(cron.app()) as client:
        for _ in range(10):
            calls = [asyncio.create_task(client.get(f"/cron/task-{number}")) for number in range(10)]
            for call in calls:
                asyncio.get_running_loop().call_later(chance.uniform(0, 0.08), call.cancel)
            await asyncio.wait(calls)
        await until(lambda: is_quiet(db), "everything is given back")
        await until(lambda: "running" not in statuses(db), "every run has ended")
        # Each run has both of its rows or none, and the row of the run says which.
        twice = db.execute("SELECT run_id, count(*) FROM effect GROUP BY 1 ORDER BY 1").fetchall()
        recorded: dict[int, str] = dict(db.execute("SELECT id, status FROM cronlock.run").fetchall())
        assert twice == [(run, 2) for run, status in sorted(recorded.items()) if status == "completed"]
        assert len(twice) > 10
        # What began was not stopped by its caller's going; what had not begun says so.
        told = "SELECT DISTINCT status, error_type FROM cronlock.run WHERE status NOT IN ('completed', 'skipped')"
        assert set(db.execute(told).fetchall()) <= {("cancelled", "Unavailable")}
        started = time.monotonic()
        answers = await asyncio.gather(*(client.get(f"/cron/task-{number}") for number in range(10)))
        assert {answer.json()["status"] for answer in answers} == {"completed"}
        assert time.monotonic() - started < 2
        sessions = db.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        ).fetchone()
        assert sessions is not None
        assert sessions[0] <= 4 + 4 + 2
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def memory() -> int:
    """The resident memory of this process in KiB (Linux)."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1])


async def test_200_calls_into_a_black_hole_are_503_in_time_while_probes_answer_and_memory_stays(
    make_proxied: Make, proxy: Proxy, db: Db
) -> None:
    cron = make_proxied(acquire_timeout="2s")
    for number in range(10):
        cron.task(f"task-{number}")(task_of(nothing, is_async=number % 2 == 0))
    async with serving(cron.app()) as client:
        await asyncio.gather(*(client.get(f"/cron/task-{number}") for number in range(10)))
        proxy.stall()

        async def one(path: str) -> tuple[int, float]:
            began = time.monotonic()
            return (await client.get(path)).status_code, time.monotonic() - began

        seen: list[tuple[int, int]] = []
        for _ in range(5):
            calls = [one(f"/cron/task-{number % 10}") for number in range(40)]
            answers = await asyncio.gather(*calls, one("/healthz"), one("/readyz"))
            assert {code for code, _ in answers[:40]} == {503}
            assert max(took for _, took in answers) < 4
            assert answers[40][0] == 200
            assert answers[40][1] < 1
            seen.append((memory(), tasks()))
        (first, waiting), (last, still_waiting) = seen[0], seen[-1]
        assert last - first < 8 * 1024
        assert still_waiting <= waiting + 5
        proxy.flow()
        flowed = time.monotonic()
        while (await client.get("/cron/task-0")).status_code != 200:
            assert time.monotonic() - flowed < 3
            await asyncio.sleep(0.05)
        answers = await asyncio.gather(*(one(f"/cron/task-{number}") for number in range(10)), one("/readyz"))
        assert {code for code, _ in answers} == {200}
        await until(lambda: is_quiet(db), "everything is given back")


async def nobody(run: Run) -> None:
    """A task that does nothing."""


def seen(db: Db) -> list[tuple[str, str | None]]:
    """(status, reason) of every run, in order."""
    return db.execute("SELECT status, reason FROM cronlock.run ORDER BY id").fetchall()


@pytest.mark.parametrize("options", [{}, {"max_concurrent": 2}], ids=["plain", "slots"])
async def test_a_run_that_others_closed_as_lost_before_it_began_is_no_skip(
    make_proxied: Make, make_cron: Make, proxy: Proxy, db: Db, options: dict[str, Any]
) -> None:
    cron = make_proxied(record_pool_size=1, recover_interval="1h")
    cron.task("once", **options)(nobody)
    async with serving(cron.app()) as client:
        assert (await client.get("/cron/once")).json()["status"] == "completed"
        cut = proxy.cut_at(BEGINNING, is_forwarded=True)
        cut.add_done_callback(lambda _: proxy.stall())
        calling = asyncio.create_task(client.get("/cron/once"))
        await cut
        await until(lambda: "running" in statuses(db), "it is recorded")
        end_backend(db)  # the session of its lock broke as well
        async with serving(make_cron(recover_interval="200ms").app()):
            await until(lambda: "lost" in statuses(db), "somebody has closed it")
        proxy.flow()
        answer = await calling
    assert (answer.status_code, answer.json()["reason"]) == (503, "database_unavailable")
    assert seen(db) == [("completed", None), ("lost", None)]


@pytest.mark.parametrize("options", [{}, {"max_concurrent": 2}], ids=["plain", "slots"])
async def test_a_skip_whose_answer_was_lost_is_the_only_row_of_its_call_though_its_holder_has_gone(
    make_proxied: Make, proxy: Proxy, db: Db, database_url: str, options: dict[str, Any]
) -> None:
    cron = make_proxied(record_pool_size=1, recover_interval="1h")
    cron.task("once", **options)(nobody)
    async with serving(cron.app()) as client:
        async with held(database_url, "once"), held(database_url, "once#2"):
            assert (await client.get("/cron/once")).json()["status"] == "skipped"
            await asyncio.sleep(1.1)  # an attempt is made again
            cut = proxy.cut_at(b'"lock_name":"once"', is_forwarded=True)
            cut.add_done_callback(lambda _: proxy.stall())
            calling = asyncio.create_task(client.get("/cron/once"))
            await cut
            await until(lambda: len(seen(db)) == 2, "it is recorded")
        proxy.flow()
        answer = await calling
    assert answer.json()["status"] == "skipped"
    assert seen(db) == [("skipped", "already_running")] * 2
