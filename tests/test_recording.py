"""Records: many in one message, each of them once, and none that costs another its own."""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cronlock import Cronlock, Run, Unavailable, runs
from cronlock.recording import HEAD, Recorder
from tests import Db, Make, Steps, held, rows, task_of, until, value
from tests.proxy import Proxy

pytestmark = pytest.mark.anyio
both = pytest.mark.parametrize("is_async", [True, False], ids=["async", "thread"])


@pytest.fixture
async def proxy(database_url: str) -> AsyncIterator[Proxy]:
    parts = conninfo_to_dict(database_url)
    async with Proxy(str(parts["host"]), int(parts["port"] or 5432)) as proxy:
        yield proxy


@pytest.fixture
def make_proxied(make_cron: Make, database_url: str, proxy: Proxy) -> Make:
    """Makes a Cronlock that reaches the test's database through the proxy, with few duties of its own."""
    parts = {**conninfo_to_dict(database_url), "port": str(proxy.listening), "sslmode": "disable"}
    parts["gssencmode"] = "disable"

    def make(**settings: Any) -> Cronlock:
        return make_cron(database_url=make_conninfo("", **parts), recover_interval="1h", **settings)

    return make


async def settled(proxy: Proxy) -> None:
    """Wait until nothing has been said for a moment."""
    before = -1
    while before != len(proxy.heard):
        before = len(proxy.heard)
        await asyncio.sleep(0.1)


def round_trips(heard: list[bytes]) -> int:
    """How many of these messages wait for an answer: simple queries and syncs."""
    return sum(message[:1] in (b"Q", b"S") for message in heard)


def writing(heard: list[bytes]) -> int:
    """How many of these messages commit something that was written."""
    writes = (b"INSERT", b"UPDATE", b"EXECUTE", b"complete_run")
    return sum(b"COMMIT" in message and any(word in message for word in writes) for message in heard)


# -- what a call costs -------------------------------------------------------------------------------------


def untouched(run: Run) -> Steps:
    yield None


def with_a_statement(run: Run) -> Steps:
    yield run.driver.execute("INSERT INTO written VALUES (1)")


def failing(run: Run) -> Steps:
    yield run.driver.execute("INSERT INTO written VALUES (1)")
    raise ValueError("no")


@both
@pytest.mark.parametrize(
    ("steps", "status", "trips", "commits"),
    [(untouched, "completed", 3, 2), (with_a_statement, "completed", 4, 2), (failing, "failed", 5, 2)],
)
async def test_a_run_costs_few_round_trips_and_two_commits(
    make_proxied: Make, proxy: Proxy, db: Db, steps: Any, status: str, trips: int, commits: int, is_async: bool
) -> None:
    db.execute("CREATE TABLE written (a int)")
    cron = make_proxied(record_pool_size=1)  # one, so that it has been used before
    cron.task("once")(task_of(steps, is_async))
    async with cron:
        await cron.run("once")
        await settled(proxy)
        proxy.heard.clear()
        assert (await cron.run("once")).status == status
        await settled(proxy)
        heard = proxy.heard[:]
    assert round_trips(heard) <= trips, heard
    assert writing(heard) <= commits, heard


@both
async def test_a_skip_costs_three_round_trips_and_one_commit(
    make_proxied: Make, proxy: Proxy, db: Db, database_url: str, is_async: bool
) -> None:
    cron = make_proxied(record_pool_size=1)  # one, so that it has been used before
    cron.task("once")(task_of(untouched, is_async))
    async with cron:
        await cron.run("once")
        await settled(proxy)
        async with held(database_url, "once"):
            proxy.heard.clear()
            assert (await cron.run("once")).status == "skipped"
            await settled(proxy)
            heard = proxy.heard[:]
    assert round_trips(heard) <= 3, heard
    assert writing(heard) == 1, heard


async def test_a_skip_by_a_run_of_the_same_process_costs_one_round_trip(
    make_proxied: Make, proxy: Proxy, db: Db
) -> None:
    cron = make_proxied(record_pool_size=1)  # one, so that it has been used before
    running, go = asyncio.Event(), asyncio.Event()

    @cron.task("once")
    async def once(run: Run) -> None:
        running.set()
        await go.wait()

    async with cron:
        first = asyncio.create_task(cron.run("once"))
        await running.wait()
        await settled(proxy)
        proxy.heard.clear()
        assert (await cron.run("once")).status == "skipped"
        heard = [message for message in proxy.heard if b"cancel_requested" not in message]
        go.set()
        await first
    assert round_trips(heard) == writing(heard) == 1, heard


ROW = {"task": "once", "lock_name": "once", "lock_key": 1, "backend_pid": 1, "trigger": "http", "status": "failed"}


@pytest.mark.parametrize("kind", runs.RECORDS, ids=lambda kind: kind.split()[0] + str(runs.RECORDS.index(kind)))
async def test_a_plan_that_is_made_for_empty_tables_and_kept_never_scans_all_runs(db: Db, kind: str) -> None:
    statements = runs.Statements("cronlock", runs.Instance(uuid4(), "host", 1, None))
    ask(db, statements.prepare())
    ask(db, HEAD + b"SET LOCAL plan_cache_mode = force_generic_plan")
    row = ROW | {"nonce": str(uuid4()), "reason": "already_running"}
    plan = "\n".join(line for (line,) in ask(db, b"EXPLAIN " + statements.execute(kind, [row])))
    ask(db, b"ROLLBACK")
    assert " on run" in plan
    # Neither row by row, nor by way of a whole index as a hash or a merge would.
    assert not re.search(r"Seq Scan on run|Hash Join|Merge Join", plan), plan
    for scan in re.finditer(r"Index (?:Only )?Scan using (\w+) on run.*\n(.*)", plan):
        assert "Index Cond" in scan[2] or scan[1] == "run_running_idx", plan


def ask(db: Db, message: bytes) -> list[tuple[Any, ...]]:
    """The rows of the last statement of a message."""
    cursor = psycopg.ClientCursor(db).execute(message)
    cursor.set_result(-1)
    return cursor.fetchall() if cursor.description else []


async def test_a_record_that_waits_too_long_is_given_up(make_cron: Make) -> None:
    cron = make_cron(database_url="postgresql://nobody@127.0.0.1:1/none")
    async with cron:
        recorder = (await cron.open()).recorder
        started = time.monotonic()
        early = recorder.put(runs.SKIP, {"nonce": str(uuid4())}, started + 0.1)
        late = recorder.put(runs.SKIP, {"nonce": str(uuid4())}, started + 0.4)
        with pytest.raises(Unavailable, match="in time"):
            await early
        assert 0.1 <= time.monotonic() - started < 0.3
        assert not late.done()
        with pytest.raises(Unavailable, match="in time"):
            await late
        assert time.monotonic() - started >= 0.4


@pytest.mark.parametrize("holder", ["another program", "this process", "another process"])
async def test_skips_that_wait_at_one_moment_share_their_messages_and_commits(
    make_proxied: Make, make_cron: Make, proxy: Proxy, db: Db, database_url: str, holder: str
) -> None:
    cron, other = make_proxied(), make_cron()
    running, go = asyncio.Event(), asyncio.Event()

    async def task(run: Run) -> None:
        running.set()
        await go.wait()

    cron.task("once")(task)
    other.task("once")(task)
    async with cron, other, held(database_url, "once" if holder == "another program" else "nothing"):
        first = None
        if holder != "another program":
            first = asyncio.create_task((cron if holder == "this process" else other).run("once"))
            await running.wait()
        process = await cron.open()
        await process.readiness.require()
        recorder = process.recorder
        await settled(proxy)  # what a process says at its start is no part of this
        proxy.heard.clear()
        before = recorder.messages
        outcomes = await asyncio.gather(*(cron.run("once") for _ in range(300)))
        await settled(proxy)
        heard = proxy.heard[:]
        messages = recorder.messages - before
        go.set()
        if first is not None:
            assert (await first).status == "completed"
    assert {(outcome.status, outcome.reason) for outcome in outcomes} == {("skipped", "already_running")}
    assert len({outcome.run_id for outcome in outcomes}) == 300
    assert value(db, "SELECT count(*) FROM cronlock.run WHERE reason = 'already_running'") == 300
    assert messages <= 6
    assert writing(heard) <= 6, len(heard)
    assert round_trips(heard) <= 20, len(heard)
    assert value(db, "SELECT count(DISTINCT xmin::text) FROM cronlock.run WHERE status = 'skipped'") <= 6


# -- each once ---------------------------------------------------------------------------------------------


def skip(**facts: Any) -> dict[str, Any]:
    row = {
        "nonce": str(uuid4()),
        "task": "some",
        "reason": "already_running",
        "lock_name": "some",
        "lock_key": 7,
        "trigger": "manual",
        "caller": "test",
        "blocked_by": None,
    }
    return {**row, **facts}


@pytest.fixture
async def recorder(make_cron: Make) -> AsyncIterator[Recorder]:
    async with make_cron() as cron:
        process = await cron.open()
        await process.readiness.require()
        yield process.recorder


POISONS: dict[str, dict[str, Any]] = {
    "NUL": {"caller": "a\0b"},
    "lone surrogate": {"caller": "a\ud800"},
    "an unknown reason": {"reason": "because"},
    "a number too large": {"lock_key": 2**63},
    "a nonce that is none": {"nonce": "none"},
    "no task": {"task": None},
    "what JSON cannot hold": {"caller": object()},
    "NaN": {"blocked_by": float("nan")},
}


@pytest.mark.parametrize("poison", POISONS)
async def test_a_record_that_is_refused_costs_no_other_its_own(recorder: Recorder, db: Db, poison: str) -> None:
    good = [skip(task=f"good-{number}") for number in range(20)]
    written = [recorder.put(runs.SKIP, row) for row in good[:10]]
    bad = recorder.put(runs.SKIP, skip(**POISONS[poison]))
    written += [recorder.put(runs.SKIP, row) for row in good[10:]]
    answers = await asyncio.wait_for(asyncio.gather(*written, bad, return_exceptions=True), 20)
    assert isinstance(answers.pop(), Unavailable)
    ids = [answer[1] for answer in answers]  # type: ignore[index]
    names = db.execute("SELECT id, task FROM cronlock.run ORDER BY id").fetchall()
    assert sorted(names) == sorted(zip(ids, [row["task"] for row in good], strict=True))
    assert (await recorder.put(runs.SKIP, skip())) is not None


async def test_an_end_that_is_refused_is_written_without_what_was_refused(make_cron: Make, db: Db) -> None:
    cron = make_cron()

    @cron.task("once")
    async def once(run: Run) -> None:
        process = await cron.open()
        nonce = str(value(db, "SELECT nonce FROM cronlock.run WHERE id = %s", run.id))
        row = {"nonce": nonce, "status": "failed", "error_type": "E", "error_message": "a\0b"}
        await process.recorder.put(runs.END, row)

    async with cron:
        await cron.run("once")
    told = db.execute("SELECT status, error_type, error_message FROM cronlock.run").fetchone()
    assert told == ("failed", "Unrecordable", None)


class OddState(Exception):
    sqlstate = object()


@both
async def test_an_error_with_an_odd_sqlstate_is_recorded(make_cron: Make, db: Db, is_async: bool) -> None:
    def steps(run: Run) -> Steps:
        yield None
        raise OddState("odd")

    cron = make_cron()
    cron.task("once")(task_of(steps, is_async))
    async with cron:
        assert (await cron.run("once")).status == "failed"
    assert db.execute("SELECT error_type, error_sqlstate FROM cronlock.run").fetchone() == ("OddState", None)


@pytest.mark.parametrize("is_forwarded", [True, False], ids=["the answer is lost", "the message is lost"])
@pytest.mark.parametrize("record", ["running", "skipped", "failed"])
@pytest.mark.parametrize("slots", [1, 2])
async def test_a_record_whose_connection_breaks_is_written_once(
    make_proxied: Make, proxy: Proxy, db: Db, database_url: str, record: str, is_forwarded: bool, slots: int
) -> None:
    cron = make_proxied(record_pool_size=1)
    ran: list[int] = []

    @cron.task("once", max_concurrent=slots)
    async def once(run: Run) -> None:
        ran.append(run.id)
        if record == "failed":
            raise ValueError("no")

    needle = b'"status":"failed"' if record == "failed" else b'"nonce":"'
    names = ("once", "once#2") if record == "skipped" else ("nothing", "at all")
    async with cron, held(database_url, names[0]), held(database_url, names[1]):
        await (await cron.open()).readiness.require()
        cut = proxy.cut_at(needle, is_forwarded=is_forwarded)
        outcome = await cron.run("once")
        assert cut.done()
    expected = {"running": "completed", "skipped": "skipped", "failed": "failed"}[record]
    assert outcome.status == expected
    assert value(db, "SELECT count(*) FROM cronlock.run") == 1
    assert db.execute("SELECT id, status FROM cronlock.run").fetchone() == (outcome.run_id, expected)
    assert value(db, "SELECT attempt FROM cronlock.run") == 1
    assert len(ran) == (0 if record == "skipped" else 1)


async def test_a_group_whose_connection_breaks_is_written_once(
    make_proxied: Make, proxy: Proxy, db: Db, database_url: str
) -> None:
    cron = make_proxied()
    cron.task("once")(lambda run: None)
    async with cron, held(database_url, "once"):
        await (await cron.open()).readiness.require()
        cut = proxy.cut_at(b'"nonce":"', is_forwarded=True)
        outcomes = await asyncio.gather(*(cron.run("once") for _ in range(100)))
        assert cut.done()
    assert len({outcome.run_id for outcome in outcomes}) == 100
    assert value(db, "SELECT count(*) FROM cronlock.run") == 100


# -- when it cannot write ----------------------------------------------------------------------------------


async def test_the_queue_is_bounded_except_for_ends(make_cron: Make, db: Db) -> None:
    cron = make_cron(record_queue_size=5, record_pool_size=1)

    async with cron:
        process = await cron.open()
        await process.readiness.require()
        recorder = process.recorder
        for _ in range(2):  # the room comes back
            db.execute("BEGIN; LOCK TABLE cronlock.run IN ACCESS EXCLUSIVE MODE")
            under_way = recorder.put(runs.SKIP, skip())
            await until(lambda: waiting(db), "the first message waits for the table")
            queued = [recorder.put(runs.SKIP, skip()) for _ in range(5)]
            with pytest.raises(Unavailable) as refused:
                recorder.put(runs.SKIP, skip())
            assert refused.value.reason == "recording_queue_full"
            end = recorder.put(runs.END, {"nonce": str(uuid4()), "status": "failed"})
            db.execute("COMMIT")
            answers = await asyncio.gather(under_way, *queued)
            assert all(answer is not None for answer in answers)
            assert await end is None, "there is no such run"
    assert value(db, "SELECT count(*) FROM cronlock.run") == 12


def waiting(db: Db) -> bool:
    query = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'cronlock.run'::regclass"
    return bool(value(db, query))


async def test_a_table_that_is_locked_for_longer_than_a_record_waits_loses_nothing(make_cron: Make, db: Db) -> None:
    """As a migration does it; lock_timeout is 3 s. Whoever was answered has its row, and nobody waits for ever."""
    cron = make_cron(acquire_timeout="4s")
    cron.task("once")(lambda run: None)
    cron.task("other")(lambda run: None)

    async def call(name: str) -> str:
        try:
            return (await cron.run(name)).status
        except Unavailable as error:
            return error.reason

    async with cron:
        await cron.run("once")
        db.execute("BEGIN; LOCK TABLE cronlock.run IN ACCESS EXCLUSIVE MODE")
        started = asyncio.get_running_loop().time()
        calls = [asyncio.create_task(call(name)) for name in ("once", "other", "once", "other")]
        await until(lambda: waiting(db), "a record waits for the table")
        await asyncio.wait(calls, timeout=3.6)
        db.execute("COMMIT")
        answers = await asyncio.gather(*calls)
        assert asyncio.get_running_loop().time() - started < 6
        assert set(answers) <= {"completed", "skipped", "database_unavailable", "undecided"}
        process = await cron.open()
        await until(lambda: not process.runner.active, "nothing runs")
        for name in ("once", "other"):
            assert (await cron.run(name)).status == "completed"
    states = {status for (status,) in db.execute("SELECT DISTINCT status FROM cronlock.run").fetchall()}
    assert states <= {"completed", "skipped", "cancelled"}
    completed = value(db, "SELECT count(*) FROM cronlock.run WHERE status = 'completed'")
    assert completed == 3 + answers.count("completed")


async def test_what_is_queued_when_the_process_closes_is_written(make_cron: Make, db: Db) -> None:
    cron = make_cron()
    async with cron:
        process = await cron.open()
        await process.readiness.require()
        queued = [process.recorder.put(runs.SKIP, skip()) for _ in range(50)]
    assert all(future.done() for future in queued)
    assert value(db, "SELECT count(*) FROM cronlock.run") == 50


async def test_a_failure_is_recorded_before_the_lock_is_free(make_cron: Make, db: Db) -> None:
    """Whoever takes the lock next finds the outcome written."""
    db.execute(
        """CREATE TABLE seen (locks bigint);
        CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO public.seen SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = NEW.backend_pid
                AND database = (SELECT oid FROM pg_database WHERE datname = current_database());
            RETURN NULL;
        END $$;
        CREATE TRIGGER look AFTER UPDATE ON cronlock.run FOR EACH ROW EXECUTE FUNCTION look()"""
    )
    cron = make_cron()

    @cron.task("once")
    async def once(run: Run) -> None:
        raise ValueError("no")

    async with cron:
        assert (await cron.run("once")).status == "failed"
    assert rows(db, "once") == [("failed", None)]
    assert db.execute("SELECT locks FROM seen").fetchall() == [(1,)]
