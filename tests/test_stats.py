"""Whoever looks reads by index: a storm of skips, and a long history, slow no list, page or scrape down."""

import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from cronlock import stats
from tests import Db, value
from tests.test_cli import register

FILL = """
INSERT INTO cronlock.run (nonce, task, status, reason, trigger, started_at, finished_at, instance, host, pid, lock_name,
    lock_key, lock_classid, lock_objid, blocked_by)
SELECT gen_random_uuid(), %(task)s || (n %% %(tasks)s), %(status)s,
       CASE WHEN %(status)s = 'skipped' THEN 'already_running' END, 'http',
       now() - %(age)s::interval + n * interval '1 ms',
       now() - %(age)s::interval + n * interval '1 ms', gen_random_uuid(), 'web-1', 1, 'x', 7, 0, 7, %(by)s
  FROM generate_series(1, %(rows)s) n
"""

LOOKS: dict[str, Callable[[psycopg.Connection[Any]], Any]] = {
    "tasks": lambda db: stats.tasks(db, "cronlock"),
    "runs": lambda db: stats.runs(db, "cronlock"),
    "of a task": lambda db: stats.runs(db, "cronlock", task="t-1"),
    "of the task that is skipped": lambda db: stats.runs(db, "cronlock", task="storm-0"),
    "its completed ones": lambda db: stats.runs(db, "cronlock", task="storm-0", status="completed"),
    "all completed ones": lambda db: stats.runs(db, "cronlock", status="completed"),
    "all that run": lambda db: stats.runs(db, "cronlock", status="running"),
    "an early page": lambda db: stats.runs(db, "cronlock", before=500),
    "a run": lambda db: stats.run(db, "cronlock", 17),
    "the last skip": lambda db: stats.run(db, "cronlock", value(db, "SELECT max(id) FROM cronlock.run")),
    "the first skip": lambda db: stats.run(
        db,
        "cronlock",
        value(db, "SELECT blocked_by + 1 FROM cronlock.run WHERE id = (SELECT max(id) FROM cronlock.run)"),
    ),
    "locks": lambda db: stats.locks(db, "cronlock"),
    "blocked": lambda db: stats.read(db, stats.BLOCKED, "cronlock"),
    **{
        f"gauge {name}": lambda db, text=text: stats.read(db, text, "cronlock")  # type: ignore[misc]
        for name, text in stats.GAUGES.items()
    },
}


def put(db: Db, task: str, tasks: int, status: str, age: str, rows: int, by: int | None = None) -> None:
    """Write rows as they would have been written `age` ago."""
    db.execute(FILL, {"task": task, "tasks": tasks, "status": status, "age": age, "rows": rows, "by": by})


def fill(db: Db, skips: int, completed: int, tasks: int) -> None:
    """A history of many tasks, then a task whose last completed run is followed by nothing but skips."""
    register(db, *(f"t-{number}" for number in range(tasks)), "storm-0")
    db.execute(
        FILL, {"task": "t-", "tasks": tasks, "status": "completed", "age": "20 days", "by": None, "rows": completed}
    )
    put(db, "t-", tasks, "completed", "20 days", completed)
    put(db, "storm-", 1, "completed", "2 days", 200)
    put(db, "storm-", 1, "skipped", "1 day", skips, value(db, "SELECT max(id) FROM cronlock.run"))
    db.execute("VACUUM ANALYZE cronlock.run")


def reads(db: Db) -> tuple[int, int]:
    """How often the table run has been read from one end to the other, and how many rows were read by index."""
    db.execute("SELECT pg_stat_force_next_flush()")
    query = "SELECT seq_scan, idx_tup_fetch FROM pg_stat_all_tables WHERE relid = 'cronlock.run'::regclass"
    row = db.execute(query).fetchone()
    assert row is not None
    return row


def test_no_look_reads_the_table_from_one_end_to_the_other(db: Db) -> None:
    fill(db, 40_000, 20_000, 20)
    for name, look in LOOKS.items():
        if name == "gauge lost":
            continue  # it has no index; see the figures in the next test
        before, fetched = reads(db)
        look(db)
        after, more = reads(db)
        assert (after, more - fetched < 10_000) == (before, True), (name, more - fetched)


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_after_a_million_skips_every_look_takes_less_than_half_a_second(db: Db) -> None:
    fill(db, 1_000_000, 300_000, 200)
    for name, look in LOOKS.items():
        durations = []
        for _ in range(5):
            started = time.perf_counter()
            look(db)
            durations.append(time.perf_counter() - started)
        assert min(durations) < 0.5, name


JOBS = """
INSERT INTO cronlock.job_history (id, task, queue, priority, payload, trigger, max_attempts, attempts, losses,
       enqueued_at, run_at, started_at, finished_at, status, error_type, error_message)
SELECT nextval('cronlock.job_id'), 't-' || n %% 200, 'default', 0, jsonb_build_object('text', repeat('x', 2000)),
       'http', 5, 1, 0, now() - interval '20 days' + n * interval '1 ms', now(), now(),
       now() - interval '20 days' + n * interval '1 ms', CASE WHEN n %% 24 = 0 THEN 'failed' ELSE 'completed' END,
       CASE WHEN n %% 24 = 0 THEN 'ValueError' END, CASE WHEN n %% 24 = 0 THEN 'on purpose' END
  FROM generate_series(1, %(ended)s) n;
INSERT INTO cronlock.job_attempt (job_id, attempt, status)
SELECT h.id, 1, 'failed' FROM cronlock.job_history h WHERE h.status = 'failed';
INSERT INTO cronlock.job (task, queue, payload, trigger, max_attempts)
SELECT 't-' || n %% 200, 'default', jsonb_build_object('text', repeat('x', 2000)), 'http', 5
  FROM generate_series(1, %(live)s) n;
INSERT INTO cronlock.job_waiting (id, task, queue, payload, trigger, max_attempts, run_at)
SELECT nextval('cronlock.job_id'), 't-' || n %% 200, 'default', '{}', 'http', 5, now() + interval '1 day'
  FROM generate_series(1, %(live)s) n
"""

JOB_LOOKS: dict[str, Callable[[psycopg.Connection[Any]], Any]] = {
    "jobs": lambda db: stats.list_jobs(db, "cronlock"),
    "an early page": lambda db: stats.list_jobs(db, "cronlock", before=500),
    "the last page": lambda db: stats.list_jobs(db, "cronlock", before=20),
    "those that failed": lambda db: stats.list_jobs(db, "cronlock", status="failed"),
    "those that completed": lambda db: stats.list_jobs(db, "cronlock", status="completed"),
    "queued ones": lambda db: stats.list_jobs(db, "cronlock", status="queued"),
    "of a task": lambda db: stats.list_jobs(db, "cronlock", task="t-7"),
    "of a task that has none": lambda db: stats.list_jobs(db, "cronlock", task="none"),
    "its failed ones": lambda db: stats.list_jobs(db, "cronlock", task="t-7", status="failed"),
    "of a queue": lambda db: stats.list_jobs(db, "cronlock", queue="default"),
    "a job": lambda db: stats.job(db, "cronlock", 24),
    "workers": lambda db: stats.workers(db, "cronlock"),
    "all gauges": lambda db: stats.gauges(db, "cronlock"),
}


def fill_jobs(db: Db, ended: int, live: int) -> None:
    """Jobs of 200 tasks with long payloads: those that ended, one in 24 of which failed, and those that are live."""
    with psycopg.ClientCursor(db) as cursor:
        cursor.execute(JOBS, {"ended": ended, "live": live})
    for table in ("job_history", "job_attempt", "job", "job_waiting"):
        db.execute(f"VACUUM ANALYZE cronlock.{table}")


def test_no_look_at_jobs_reads_all_that_have_ended(db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "HISTORY_LOOK", 2000)
    fill_jobs(db, 40_000, 200)
    query = """SELECT sum(seq_scan), sum(idx_tup_fetch) FROM pg_stat_all_tables
        WHERE relid IN ('cronlock.job_history'::regclass, 'cronlock.job_attempt'::regclass)"""
    for name, look in JOB_LOOKS.items():
        found = []
        for does_look in (False, True):
            if does_look:
                look(db)
            db.execute("SELECT pg_stat_force_next_flush()")
            found.append(db.execute(query).fetchone())
        (before, fetched), (after, more) = found  # type: ignore[misc]
        assert (after, more - fetched <= 4000) == (before, True), (name, after - before, more - fetched)


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_with_a_million_jobs_every_look_takes_less_than_half_a_second(db: Db) -> None:
    fill_jobs(db, 990_000, 5_000)
    for name, look in JOB_LOOKS.items():
        durations = []
        for _ in range(5):
            started = time.perf_counter()
            look(db)
            durations.append(time.perf_counter() - started)
        assert sorted(durations)[-2] < 0.5, name


def test_completed_runs_of_all_tasks_are_listed_in_order_and_in_pages(db: Db) -> None:
    fill(db, 10, 100, 7)
    db.execute("DELETE FROM cronlock.task WHERE name = 't-3'")
    expected = db.execute("SELECT id FROM cronlock.run WHERE status = 'completed' ORDER BY id DESC").fetchall()
    found: list[tuple[int]] = []
    before = None
    while page := stats.runs(db, "cronlock", status="completed", before=before, limit=23):
        found += [(row["run_id"],) for row in page]
        before = page[-1]["run_id"]
    assert found == expected
