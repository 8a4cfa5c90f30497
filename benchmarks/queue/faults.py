"""PostgreSQL is restarted and backends are killed while jobs run: what became of every job."""

import time
from typing import Any

import psycopg

from benchmarks.arms import Wrong
from benchmarks.queue.systems import GUARD, TRANSACTION
from benchmarks.queue.table import surroundings
from benchmarks.queue.workers import Place, Worker, place
from benchmarks.rig import Rig
from benchmarks.table import SHORT, today

JOBS = 20_000
JOBS_SHORT = 1_000
KILLED = 5
WITHIN = 240.0
KILL = """
SELECT pg_terminate_backend(pid) FROM (
    SELECT pid FROM pg_stat_activity
     WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
     ORDER BY random() LIMIT %s) AS chosen
"""
"""Whatever those backends are doing: claiming, renewing leases, listening, or a job's own transaction."""


def report(command: str, *, is_short: bool) -> str:
    """Do it, and say what was found; raises `Wrong` if jobs are left, or if PostgreSQL is not ours to restart."""
    jobs = JOBS_SHORT if is_short else JOBS
    with Rig(has_redis=False) as rig:
        if rig.embedded is None:
            return "Restart of PostgreSQL in mid-run: not made, since DATABASE_URL names somebody else's server."
        with place(rig, GUARD) as found:
            return (f"{SHORT}\n\n" if is_short else "") + _run(rig, found, jobs, command)


def _run(rig: Rig, place: Place, jobs: int, command: str) -> str:
    place.tell("many", "0", str(jobs), core=place.core, system=TRANSACTION, BENCHMARK_TASK="effect")
    place.tell("many", "0", str(jobs), core=place.core, system=GUARD)
    began = time.monotonic()
    with Worker(place, GUARD), Worker(place, GUARD):
        killed = 0
        for part in (0.15, 0.3):
            _await(place, 2 * jobs, part)
            killed += len(place.connection.execute(KILL, (KILLED,)).fetchall())
        _await(place, 2 * jobs, 0.5)
        place.close()
        rig.restart()
        place.connection = _connect(place.url)
        _await(place, 2 * jobs, 1.0)
        took = time.monotonic() - began
    found = place.connection.execute("SELECT status, count(*) FROM cronlock.job_history GROUP BY 1").fetchall()
    statuses = {str(status): int(count) for status, count in found}
    rows, distinct = (place.count(f"SELECT count({what}) FROM effect") for what in ("*", "DISTINCT n"))
    again = place.count("SELECT count(*) FROM cronlock.job_history WHERE attempts > 1")
    is_kept = statuses == {"completed": 2 * jobs} and rows == distinct == jobs
    lines = [
        f"Made on {today()} with `{command}`: {2 * jobs:,} jobs, half of which write one row in their own transaction, "
        f"two workers; {killed} random backends killed, and PostgreSQL restarted once, while they ran.",
        "",
        "| what | found | to reach | reached |",
        "|---|---:|---:|---|",
        f"| jobs by their end | {', '.join(f'{count:,} {status}' for status, count in sorted(statuses.items()))} "
        f"| {2 * jobs:,} completed | {_yes(statuses == {'completed': 2 * jobs})} |",
        f"| rows that the jobs wrote | {rows:,} | {jobs:,} | {_yes(rows == jobs)} |",
        f"| jobs whose row is there twice | {rows - distinct:,} | 0 | {_yes(rows == distinct)} |",
        f"| jobs of more than one attempt | {again:,} | - | - |",
        f"| seconds until all had ended | {took:.0f} | - | - |",
        "",
        surroundings(rig),
    ]
    if not is_kept:
        lines.insert(1, "**A promise was broken.**")
    return "\n".join(lines)


def _yes(is_reached: bool) -> str:
    return "yes" if is_reached else "**no**"


def _await(place: Place, jobs: int, part: float) -> None:
    """Until this part of the jobs has ended."""
    until = time.monotonic() + WITHIN
    while (ended := place.count("SELECT count(*) FROM cronlock.job_history")) < jobs * part:
        if time.monotonic() > until:
            raise Wrong(f"{ended} of {jobs} jobs had ended after {WITHIN:g} s: {place.log.read_text()[-3000:]}")
        time.sleep(0.05)


def _connect(url: str) -> "psycopg.Connection[Any]":
    until = time.monotonic() + 30
    while True:
        try:
            return psycopg.connect(url, autocommit=True)
        except psycopg.OperationalError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
