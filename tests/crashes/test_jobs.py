"""Workers that are killed, frozen, stopped, or cut off from the database in the middle of jobs."""

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests import Db, Make, until, value
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
