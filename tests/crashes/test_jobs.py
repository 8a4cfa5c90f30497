"""Workers that are killed, frozen, stopped, or cut off from the database in the middle of jobs."""

import asyncio
import json
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cronlock.embedded import Embedded
from cronlock.migrate import migrate
from tests import Db, Make, until, value
from tests.campaign.scenarios import FAKETIME, find_libfaketime
from tests.observing import in_transaction, is_quiet
from tests.proxy import Proxy
from tests.working import EFFECTS, Workers, all_ended, attempts, effects, ended, live, put, status, workers, working

pytestmark = pytest.mark.anyio

STARTS_AGAIN_WITHIN = 5.0
"""Seconds after which a job whose worker was killed has begun again, by default."""


@pytest.fixture(autouse=True)
def effect(db: Db) -> None:
    db.execute(EFFECTS)


@pytest.fixture
def start(database_url: str, tmp_path: Path) -> Iterator[Workers]:
    with workers(database_url, tmp_path) as started:
        yield started


def begun(db: Db, job_id: int) -> bool:
    """Whether a job is under way, and has begun what it does."""
    query = """SELECT EXISTS (SELECT FROM pg_stat_activity a WHERE a.application_name = 'cronlock:job ' || %(id)s
        AND a.datname = current_database() AND (a.query LIKE 'INSERT INTO effect%%' OR a.query LIKE '%%pg_sleep%%'))
        OR EXISTS (SELECT FROM effect WHERE job_id = %(id)s)"""
    row = db.execute(query, {"id": job_id}).fetchone()
    return bool(row and row[0])


KILLED = [("work", "python"), ("work", "sql"), ("work-in-thread", "python"), ("work-in-thread", "sql"),
          ("guarded", "python")]  # fmt: skip


@pytest.mark.parametrize(("task", "how"), KILLED)
async def test_a_job_whose_worker_is_killed_starts_again_within_5_s_and_its_effects_happen_once(
    start: Workers, db: Db, task: str, how: str
) -> None:
    first = start.start()
    (job,) = put(db, task, json.dumps({"how": how, "pause": 60, "once": True}))
    await until(lambda: begun(db, job), "it has begun")
    start.start()
    await until(lambda: value(db, "SELECT count(*) FROM cronlock.worker WHERE has_presence") == 2, "both are present")
    first.process.kill()
    killed = time.monotonic()
    await until(lambda: status(db, job) == ("completed", 2, None), "it has completed", 10)
    assert time.monotonic() - killed < STARTS_AGAIN_WITHIN + 0.5
    late = "SELECT extract(epoch FROM h.started_at - a.finished_at) FROM cronlock.job_history h, cronlock.job_attempt a"
    assert value(db, late) < 1
    assert attempts(db, job) == [(1, "lost", "WorkerLost")]
    left = [(1, "begun")] if task == "guarded" else []
    assert effects(db, job) == [*left, (2, "begun"), (2, "ended")]
    await until(lambda: value(db, "SELECT count(*) FROM cronlock.worker") == 1, "the dead one is forgotten", 5)
    await until(lambda: not in_transaction_but_presence(db), "nothing is left open", 2)


def in_transaction_but_presence(db: Db) -> list[tuple[Any, ...]]:
    return [session for session in in_transaction(db) if session[1] != "cronlock:worker"]


async def test_a_worker_killed_right_after_its_commit_has_completed_its_job(
    start: Workers, db: Db, database_url: str
) -> None:
    parts = conninfo_to_dict(database_url)
    async with Proxy(str(parts["host"]), int(parts["port"] or 0)) as proxy:
        through = make_conninfo(database_url, host="127.0.0.1", port=proxy.listening)
        first = start.start(DATABASE_URL=through, waits=False)
        await asyncio.to_thread(first.until_says, "working for ")
        committed = proxy.cut_at(b"complete_job", is_forwarded=True)
        committed.add_done_callback(lambda _: first.process.kill())
        (job,) = put(db, "work", json.dumps({"pause": 0.1}))
        await asyncio.wait_for(committed, 10)
    assert await all_ended(db) == {"completed": 1}
    start.start()
    await asyncio.sleep(1)
    assert effects(db, job) == [(1, "begun"), (1, "ended")]
    assert value(db, "SELECT result FROM cronlock.job_history") == '{"attempt":1}'


async def test_a_worker_killed_before_its_ends_are_written_loses_what_had_no_transaction_and_nothing_else(
    start: Workers, db: Db, database_url: str
) -> None:
    parts = conninfo_to_dict(database_url)
    async with Proxy(str(parts["host"]), int(parts["port"] or 0)) as proxy:
        through = make_conninfo(database_url, host="127.0.0.1", port=proxy.listening)
        first = start.start(DATABASE_URL=through, waits=False)
        await asyncio.to_thread(first.until_says, "working for ")
        dropped = proxy.cut_at(b"EXECUTE cronlock_end(", is_forwarded=False)
        dropped.add_done_callback(lambda _: first.process.kill())
        (job,) = put(db, "guarded", json.dumps({"pause": 0.1}))
        await asyncio.wait_for(dropped, 10)
        assert status(db, job) == ("processing", 1, None)
        await asyncio.to_thread(start.start)
        assert await all_ended(db) == {"completed": 1}
    # Its own commits stand: this is what "at least once" means for what is outside of the job's transaction.
    assert effects(db, job) == [(1, "begun"), (1, "ended"), (2, "begun"), (2, "ended")]


@pytest.mark.parametrize("task", ["work", "work-in-thread", "guarded"])
@pytest.mark.parametrize("how", ["python", "sql"])
async def test_a_worker_frozen_past_its_lease_cannot_commit_when_it_thaws_and_works_on(
    start: Workers, db: Db, task: str, how: str
) -> None:
    # Case Q01: the lease is 2 s, the worker is frozen for 6.
    first = start.start(CRONLOCK_LEASE="2s", CRONLOCK_PRESENCE_GRACE="2s")
    (job,) = put(db, task, json.dumps({"how": how, "pause": 2, "once": True}))
    await until(lambda: begun(db, job), "it has begun")
    first.send(signal.SIGSTOP)
    frozen = time.monotonic()
    second = start.start(CRONLOCK_LEASE="2s", CRONLOCK_PRESENCE_GRACE="2s")
    await until(lambda: status(db, job) == ("completed", 2, None), "the other one has done it", 8)
    await until(lambda: not any(str(job) in session[1] for session in in_transaction(db)), "its backend is ended", 2)
    await asyncio.sleep(max(0.0, frozen + 6 - time.monotonic()))
    first.send(signal.SIGCONT)
    first.until_says("was lost", 5)
    assert status(db, job) == ("completed", 2, None)
    left = [(1, "begun")] if task == "guarded" else []
    assert effects(db, job) == [*left, (2, "begun"), (2, "ended")]
    assert attempts(db, job) == [(1, "lost", "WorkerLost")]
    second.send(signal.SIGTERM)
    assert second.ends() == 0
    (other,) = put(db, "work")
    await until(lambda: status(db, other) == ("completed", 1, None), "the thawed one works on", 5)


async def test_a_job_that_kills_every_worker_fails_in_the_end_and_takes_no_healthy_one_with_it(
    start: Workers, db: Db, caplog: pytest.LogCaptureFixture
) -> None:
    # Case Q05: three workers that are started again whenever they end.
    (job,) = put(db, "killer", most=3)
    put(db, "brief", jobs=100)
    limits = {"CRONLOCK_PRESENCE_GRACE": "2s", "CRONLOCK_WORKER_CONCURRENCY": "4"}
    running = [start.start(waits=False, **limits) for _ in range(3)]
    until_at = time.monotonic() + 50
    while live(db):
        assert time.monotonic() < until_at, (ended(db), status(db, job))
        for place, worker in enumerate(running):
            if worker.process.poll() is not None:
                running[place] = start.start(waits=False, **limits)
        await asyncio.sleep(0.1)
    assert ended(db) == {"completed": 100, "failed": 1}
    assert status(db, job) == ("failed", 3, "WorkerLost")
    assert "in attempt 3 of 3" in value(db, "SELECT error_message FROM cronlock.job_history WHERE id = %s", job)
    assert attempts(db, job) == [(attempt, "lost", "WorkerLost") for attempt in (1, 2, 3)]
    assert effects(db, job) == [(1, "begun"), (2, "begun"), (3, "begun")]


async def test_a_job_that_is_to_be_cancelled_when_its_worker_dies_is_not_run_again(start: Workers, db: Db) -> None:
    first = start.start(CRONLOCK_PRESENCE_GRACE="2s")
    (job,) = put(db, "guarded", json.dumps({"pause": 60}))
    await until(lambda: begun(db, job), "it has begun")
    first.send(signal.SIGSTOP)
    db.execute("UPDATE cronlock.job SET cancel_requested_at = now(), cancel_requested_by = 'ana'")
    first.process.kill()
    start.start(CRONLOCK_PRESENCE_GRACE="2s")
    await until(lambda: status(db, job) == ("cancelled", 1, "CancelAsked"), "it is cancelled", 8)
    assert effects(db, job) == [(1, "begun")]


async def test_where_there_is_no_presence_the_lease_decides(start: Workers, db: Db) -> None:
    first = start.start(CRONLOCK_LEASE="3s")
    (job,) = put(db, "guarded", json.dumps({"pause": 60, "once": True}))
    await until(lambda: begun(db, job), "it has begun")
    db.execute("DELETE FROM cronlock.worker")  # not even a row of it
    until_at = value(db, "SELECT lease_until FROM cronlock.job")
    first.process.kill()
    start.start(CRONLOCK_LEASE="3s")
    await until(lambda: status(db, job) == ("completed", 2, None), "it has completed", 10)
    late = "SELECT started_at BETWEEN %(until)s AND %(until)s + interval '3 s' FROM cronlock.job_history"
    assert db.execute(late, {"until": until_at}).fetchone() == (True,)


async def test_a_job_that_its_living_worker_has_dropped_is_found_by_its_lease(make_cron: Make, db: Db) -> None:
    cron = make_cron(lease="2s")

    @cron.task("guarded", mode="guard")
    async def guarded(run: Any) -> None:
        pass

    async with working(cron), working(make_cron(lease="2s")) as other:
        query = """INSERT INTO cronlock.job (task, queue, payload, trigger, max_attempts, attempts, worker,
                lease_token, lease_until) VALUES ('guarded', 'default', '{}', 'manual', 5, 1, %s, gen_random_uuid(),
                clock_timestamp() + interval '1 s') RETURNING id"""
        job = value(db, query, other.worker.id)  # as a claim leaves it whose worker never heard of it
        await until(lambda: status(db, job) == ("completed", 2, None), "it has completed", 6)


async def test_nothing_runs_twice_when_a_living_worker_loses_its_presence(start: Workers, db: Db) -> None:
    # At presence_grace = 3 s it has the lock again long before another one believes that it is gone.
    for _ in range(2):
        start.start()
    made = put(db, "guarded", json.dumps({"pause": 8}), jobs=4)
    await until(lambda: value(db, "SELECT count(*) FROM effect") == 4, "all have begun")
    for _ in range(3):
        db.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'cronlock:worker'"
                   " AND datname = current_database()")  # fmt: skip
        await asyncio.sleep(1.5)
    assert await all_ended(db, 12) == {"completed": 4}
    assert [effects(db, job) for job in made] == [[(1, "begun"), (1, "ended")]] * 4


async def test_sigterm_lets_a_long_job_end_with_its_lease_kept_and_takes_no_new_one(start: Workers, db: Db) -> None:
    # Case Q04: lease 2 s, 8 s to go, another worker beside it all the time.
    first = start.start(CRONLOCK_LEASE="2s", CRONLOCK_DRAIN_TIMEOUT="30s")
    (job,) = put(db, "guarded", json.dumps({"pause": 8}))
    await until(lambda: begun(db, job), "it has begun")
    start.start(CRONLOCK_LEASE="2s")
    first.send(signal.SIGTERM)
    first.until_says("draining")
    more = put(db, "brief", jobs=20)
    shortest = 2.0
    until_at = time.monotonic() + 12
    while status(db, job) == ("processing", 1, None):
        left = db.execute(
            "SELECT extract(epoch FROM lease_until - clock_timestamp())::float8 FROM cronlock.job WHERE id = %s", (job,)
        ).fetchone()
        shortest = min(shortest, left[0] if left else shortest)
        assert time.monotonic() < until_at
        await asyncio.sleep(0.05)
    assert first.ends() == 0
    assert status(db, job) == ("completed", 1, None)
    assert effects(db, job) == [(1, "begun"), (1, "ended")]
    assert shortest > 0.5, "its lease was renewed well before it ran out"
    takers = "SELECT count(DISTINCT worker) FROM cronlock.job_history WHERE id = ANY (%s)"
    assert value(db, takers, more) == 1
    query = (
        "SELECT count(*) FROM cronlock.job_history WHERE id = ANY (%s) AND worker = (SELECT worker FROM"
        " cronlock.job_history WHERE id = %s)"
    )
    assert value(db, query, more, job) == 0


async def test_a_cancel_is_honoured_while_its_worker_drains(start: Workers, db: Db) -> None:
    first = start.start(CRONLOCK_DRAIN_TIMEOUT="30s")
    (job,) = put(db, "work", json.dumps({"pause": 50}))
    await until(lambda: begun(db, job), "it has begun")
    first.send(signal.SIGTERM)
    first.until_says("draining")
    db.execute("UPDATE cronlock.job SET cancel_requested_at = now(), cancel_requested_by = 'ana'")
    asked = time.monotonic()
    assert first.ends() == 0
    assert time.monotonic() - asked < 4
    assert status(db, job) == ("cancelled", 1, "CancelAsked")
    assert "ana" in value(db, "SELECT error_message FROM cronlock.job_history")
    assert effects(db, job) == []
    assert is_quiet(db)


@pytest.mark.parametrize("task", ["work", "guarded"])
async def test_a_second_sigterm_gives_back_at_once_and_costs_no_attempt(start: Workers, db: Db, task: str) -> None:
    first = start.start()
    (job,) = put(db, task, json.dumps({"pause": 50}))
    await until(lambda: begun(db, job), "it has begun")
    first.send(signal.SIGTERM)
    first.until_says("draining")
    await asyncio.sleep(0.5)
    assert status(db, job) == ("processing", 1, None)
    first.send(signal.SIGTERM)
    asked = time.monotonic()
    assert first.ends() == 0
    assert time.monotonic() - asked < 3
    assert status(db, job) == ("queued", 0, None)
    assert attempts(db, job) == []
    assert value(db, "SELECT count(*) FROM cronlock.worker") == 0
    assert is_quiet(db)
    start.start()
    await until(lambda: status(db, job) == ("processing", 1, None), "another one takes it at once", 2)


async def test_what_outlasts_the_drain_timeout_is_given_back_though_its_thread_does_not_return(
    start: Workers, db: Db
) -> None:
    first = start.start(CRONLOCK_DRAIN_TIMEOUT="500ms")
    jobs = [put(db, task, json.dumps({"pause": 50}))[0] for task in ("work-in-thread", "work")]
    for job in jobs:
        await until(lambda: begun(db, job), "it has begun")  # noqa: B023
    first.send(signal.SIGTERM)
    assert first.ends(12) == 0
    assert [status(db, job) for job in jobs] == [("queued", 0, None)] * 2
    await until(lambda: is_quiet(db), "nothing is left open", 2)
    assert value(db, "SELECT count(*) FROM effect") == 0


# -- the database goes away, or some of its sessions do ----------------------------------------------------------


@contextmanager
def own_server() -> Iterator[tuple[Embedded, str]]:
    """A server that may be restarted, and a migrated database on it with the table of effects."""
    directory = Path(tempfile.mkdtemp(prefix="cronlock-jobs-"))
    directory.chmod(0o755)  # root's server runs as another user, who must get through
    try:
        with Embedded(directory / "server", settings={"max_connections": "60", "fsync": "off"}) as server:
            migrate(server.url, "cronlock")
            with psycopg.connect(server.url, autocommit=True) as db:
                db.execute(EFFECTS)
            yield server, server.url
    finally:
        shutil.rmtree(directory)


def assert_all_completed_once(db: Db, made: list[int]) -> None:
    """Every job has completed, and its transactional effects are there once."""
    assert ended(db) == {"completed": len(made)}
    assert live(db) == 0
    twice = "SELECT job_id, count(*) FROM effect GROUP BY 1 HAVING count(*) <> 2"
    assert db.execute(twice).fetchall() == []
    assert value(db, "SELECT count(DISTINCT job_id) FROM effect") == len(made)


@pytest.mark.parametrize("how", ["restart", "kill"])
async def test_a_restart_in_mid_run_leaves_every_job_completed_and_none_twice(tmp_path: Path, how: str) -> None:
    with own_server() as (machine, url), workers(url, tmp_path) as start:
        for _ in range(2):
            start.start(CRONLOCK_MAX_ATTEMPTS="5")
        with psycopg.connect(url, autocommit=True) as db:
            made = [job for task in ("work", "work-in-thread") for job in put(db, task, '{"pause": 0.1}', jobs=150)]
            await until(lambda: ended(db).get("completed", 0) > 40, "some are done")
        await asyncio.to_thread(machine.kill if how == "kill" else machine.stop)
        await asyncio.sleep(0.5)
        await asyncio.to_thread(machine.start)
        back = time.monotonic()
        with psycopg.connect(url, autocommit=True) as db:
            before = ended(db).get("completed", 0)
            await until(lambda: ended(db).get("completed", 0) > before, "it goes on", 5)
            await until(lambda: live(db) == 0, "all have ended", 40)
            assert time.monotonic() - back < 40
            assert_all_completed_once(db, made)
            said = "".join(worker.said for worker in start.all)
            assert said.count("Traceback") == 0
            assert len(said.splitlines()) < 2000


async def test_five_random_sessions_ended_again_and_again_leave_every_job_completed_and_none_twice(
    start: Workers, db: Db
) -> None:
    for _ in range(2):
        start.start(CRONLOCK_LEASE="5s")
    made = [job for task in ("work", "work-in-thread") for job in put(db, task, '{"pause": 0.05}', jobs=250, most=20)]
    chance = random.Random(4)
    for _ in range(6):
        await asyncio.sleep(0.4)
        query = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        pids = [pid for (pid,) in db.execute(query).fetchall()]
        for pid in chance.sample(pids, min(5, len(pids))):
            db.execute("SELECT pg_terminate_backend(%s)", (pid,))
    await until(lambda: live(db) == 0, "all have ended", 40)
    assert_all_completed_once(db, made)
    assert all(worker.process.poll() is None for worker in start.all)


async def test_eight_workers_at_serializable_lose_no_update(start: Workers, db: Db) -> None:
    db.execute("CREATE TABLE counter AS SELECT id, 0 AS n FROM generate_series(1, 3) id")
    db.execute("ALTER TABLE counter ADD PRIMARY KEY (id)")
    made = put(db, "bump", jobs=80, most=100)
    for _ in range(8):
        start.start("--concurrency", "2", waits=False)
    await until(lambda: live(db) == 0, "all have ended", 60)
    assert ended(db) == {"completed": len(made)}
    assert db.execute("SELECT n FROM counter").fetchall() == [(80,)] * 3
    kept = "SELECT count(*) FROM cronlock.job_attempt WHERE error_sqlstate = '40001' AND status = 'failed'"
    assert value(db, kept) > 5
    assert value(db, "SELECT count(*) FROM cronlock.job_attempt WHERE error_sqlstate IS DISTINCT FROM '40001'") == 0


OLD = """
from cronlock import Cronlock, Run
cron = Cronlock()

@cron.task("known", mode="guard")
async def known(run: Run) -> str:
    return "old"
"""
NEW = (
    OLD.replace('"old"', '"new"')
    + """
@cron.task("added", mode="guard")
async def added(run: Run) -> str:
    return "new"
"""
)


async def test_two_versions_of_an_app_share_a_queue_and_each_takes_what_it_knows(
    start: Workers, db: Db, tmp_path: Path
) -> None:
    # Case Q16.
    (tmp_path / "old.py").write_text(OLD)
    (tmp_path / "new.py").write_text(NEW)
    beside: dict[str, Any] = {"PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}"}
    old, new = start.start(app="old:cron", **beside), start.start(app="new:cron", **beside)
    made = put(db, "added", jobs=50) + put(db, "known", jobs=50)
    assert await all_ended(db) == {"completed": 100}
    assert value(db, "SELECT count(*) FROM cronlock.job_history WHERE task = 'added' AND result = '\"new\"'") == 50
    assert value(db, "SELECT max(attempts) FROM cronlock.job_history WHERE id = ANY (%s)", made) == 1
    new.send(signal.SIGTERM)
    assert new.ends() == 0
    rolled_back = put(db, "added", jobs=20)
    put(db, "known", jobs=20)
    await until(lambda: live(db) == 20, "what the old one knows is done")
    await asyncio.sleep(1.5)
    left = db.execute("SELECT status, attempts FROM cronlock.job_status WHERE id = ANY (%s)", (rolled_back,)).fetchall()
    assert left == [("queued", 0)] * 20
    assert old.process.poll() is None
    start.start(app="new:cron", **beside)
    assert await all_ended(db) == {"completed": 140}


async def test_workers_whose_clocks_are_hours_off_keep_the_databases_time(start: Workers, db: Db) -> None:
    for hours in (5, -3):
        skewed: dict[str, Any] = {"LD_PRELOAD": str(find_libfaketime()), "FAKETIME": f"{hours:+d}h", **FAKETIME}
        # Four jobs at once need both of them.
        start.start("--concurrency", "2", CRONLOCK_LEASE="3s", CRONLOCK_PRESENCE_GRACE="2s", **skewed)
    began = value(db, "SELECT clock_timestamp()")
    slow = put(db, "guarded", '{"pause": 5}', jobs=4)
    put(db, "work", jobs=50)
    assert await all_ended(db, 12) == {"completed": 54}
    assert [effects(db, job) for job in slow] == [[(1, "begun"), (1, "ended")]] * 4
    assert value(db, "SELECT count(DISTINCT worker) FROM cronlock.job_history") == 2
    times = """SELECT count(*) FROM cronlock.job_history WHERE NOT (%(began)s <= enqueued_at AND
        enqueued_at <= started_at AND started_at <= finished_at AND finished_at <= clock_timestamp())"""
    row = db.execute(times, {"began": began}).fetchone()
    assert row == (0,)
    said = start.all[0].said
    assert said


async def test_leases_are_renewed_in_time_under_load(start: Workers, db: Db) -> None:
    # Case Q02: lease 3 s, a job of 12 s, other jobs all the time; never less than half of the lease is left.
    worker = start.start("--concurrency", "20", CRONLOCK_LEASE="3s")
    (job,) = put(db, "guarded", '{"pause": 12}')
    await until(lambda: begun(db, job), "it has begun")
    left = []
    until_at = time.monotonic() + 15
    query = "SELECT extract(epoch FROM lease_until - clock_timestamp())::float8 FROM cronlock.job WHERE id = %s"
    while (row := db.execute(query, (job,)).fetchone()) is not None:
        left.append(row[0])
        put(db, "brief", jobs=10)
        assert time.monotonic() < until_at
        await asyncio.sleep(0.05)
    assert status(db, job) == ("completed", 1, None)
    assert min(left) > 1.5, min(left)
    assert await all_ended(db, 20)
    assert worker.process.poll() is None


async def test_a_lease_or_a_grace_that_makes_no_sense_stops_the_start(start: Workers) -> None:
    for name in ("CRONLOCK_LEASE", "CRONLOCK_PRESENCE_GRACE"):
        given: dict[str, Any] = {name: "500ms"}
        worker = start.start(waits=False, **given)
        assert worker.ends() == 2
        assert name in worker.said
        assert "too short" in worker.said
