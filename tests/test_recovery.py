"""The timer's duties: old rows go in batches, lost runs are closed, a changed schema is noticed."""

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cronlock import Cronlock, Run, Unavailable, jobs, recovery, runs
from cronlock.models import REVISION
from cronlock.process import Process
from tests import until, value
from tests.commands import Running, cronlock, environment
from tests.working import live, put, working

pytestmark = pytest.mark.anyio
Make = Callable[..., Cronlock]
Db = psycopg.Connection[tuple[Any, ...]]

OLD = """
INSERT INTO cronlock.run (nonce, task, status, reason, trigger, started_at, finished_at, instance, host, pid,
    lock_key, lock_classid, lock_objid)
SELECT gen_random_uuid(), %(task)s, %(status)s, CASE WHEN %(status)s = 'skipped' THEN 'already_running' END, 'http',
    now() - %(age)s::interval, CASE WHEN %(status)s <> 'running' THEN now() - %(age)s::interval END,
    gen_random_uuid(), 'gone', 1, 7, 0, 7 FROM generate_series(1, %(n)s)
"""


def old(db: Db, task: str, status: str, age: str, n: int = 1) -> None:
    """Write rows as they would have been written `age` ago."""
    db.execute(OLD, {"task": task, "status": status, "age": age, "n": n})


async def forever(cron: Cronlock) -> None:
    async with asyncio.timeout(10):
        while True:
            await cron.run("nightly")


def counts(db: Db) -> dict[tuple[str, str], int]:
    rows = db.execute("SELECT task, status, count(*) FROM cronlock.run GROUP BY task, status").fetchall()
    return {(task, status): number for task, status, number in rows}


@asynccontextmanager
async def connected(cron: Cronlock) -> AsyncIterator[Process]:
    """Its connections without its timer, so that nothing happens but what the test does."""
    process = Process(cron.settings, cron.tasks)
    await process.runner.spawn(process.database.open())
    try:
        await process.readiness.require()
        yield process
    finally:
        await process.close(0)


async def test_rows_older_than_their_retention_are_pruned_but_never_a_tasks_last_run(make_cron: Make, db: Db) -> None:
    old(db, "a", "skipped", "8 days", 3)
    old(db, "a", "skipped", "6 days", 2)
    old(db, "a", "completed", "29 days", 3)
    old(db, "a", "failed", "29 days", 1)
    old(db, "a", "completed", "1 day", 1)
    old(db, "rare", "lost", "200 days", 1)
    old(db, "rare", "failed", "100 days", 1)
    old(db, "paused", "skipped", "8 days", 2)
    async with connected(make_cron()) as process:
        assert await recovery.prune(process.database, process.runner.statements) == (9, None)
        assert await recovery.prune(process.database, process.runner.statements) == (0, None)
    assert counts(db) == {
        ("a", "skipped"): 2,
        ("a", "failed"): 1,
        ("a", "completed"): 1,
        ("rare", "failed"): 1,
    }


async def test_the_last_completed_run_of_a_task_stays_behind_later_failures(make_cron: Make, db: Db) -> None:
    old(db, "a", "completed", "120 days", 2)
    old(db, "a", "failed", "100 days", 3)
    old(db, "a", "skipped", "9 days", 2)
    async with connected(make_cron()) as process:
        assert await recovery.prune(process.database, process.runner.statements) == (5, None)
    assert db.execute("SELECT id, status FROM cronlock.run ORDER BY id").fetchall() == [(2, "completed"), (5, "failed")]


async def test_pruning_goes_window_by_window_and_stops_where_all_is_young(
    make_cron: Make, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "WINDOW", 10)
    old(db, "a", "skipped", "9 days", 25)
    old(db, "a", "completed", "1 hour", 40)
    found, after = [], 0
    async with connected(make_cron()) as process:
        while True:
            deleted, following = await recovery.prune(process.database, process.runner.statements, after)
            found.append((deleted, following))
            if following is None:
                break
            after = following
        # The third window still has old rows in it; of the fourth all are young.
        assert found == [(10, 10), (10, 20), (5, 30), (0, None)]
        assert db.execute("SELECT min(id) FROM cronlock.run").fetchone() == (26,)


async def test_a_pruner_goes_past_rows_that_another_has_locked(make_cron: Make, database_url: str, db: Db) -> None:
    old(db, "a", "skipped", "9 days", 25)
    async with connected(make_cron()) as process:
        with psycopg.connect(database_url) as other:
            other.execute("DELETE FROM cronlock.run WHERE id <= 10")
            async with asyncio.timeout(2):
                assert await recovery.prune(process.database, process.runner.statements) == (15, None)
            other.rollback()
        assert await recovery.prune(process.database, process.runner.statements) == (10, None)


async def test_two_pruners_at_once_delete_every_old_row_once(make_cron: Make, db: Db) -> None:
    old(db, "a", "skipped", "9 days", 30_000)
    old(db, "a", "completed", "1 hour")

    async def walk(process: Process) -> int:
        total, after = 0, 0
        while True:
            deleted, following = await recovery.prune(process.database, process.runner.statements, after)
            total += deleted
            if following is None:
                return total
            after = following

    async with connected(make_cron()) as one, connected(make_cron()) as another:
        totals = await asyncio.gather(walk(one), walk(another))
        assert sum(totals) + await walk(one) == 30_000
    assert counts(db) == {("a", "completed"): 1}


async def test_the_timer_goes_on_with_its_walk_and_rests_at_its_end(
    make_cron: Make, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "WINDOW", 10)
    monkeypatch.setattr(recovery, "PRUNE_WINDOWS", 2)
    monkeypatch.setattr(recovery, "PRUNE_PAUSE", 0.0)
    old(db, "a", "skipped", "9 days", 45)
    old(db, "a", "completed", "1 hour")
    cron = make_cron(recover_interval="50ms")
    async with cron:
        async with asyncio.timeout(10):
            while counts(db) != {("a", "completed"): 1}:
                await asyncio.sleep(0.02)
        async with asyncio.timeout(10):
            while cron.metrics.registry.get_sample_value("cronlock_pruned_rows_total") != 45:
                await asyncio.sleep(0.02)
        old(db, "a", "skipped", "9 days", 1)
        await asyncio.sleep(0.3)
        assert counts(db) == {("a", "completed"): 1, ("a", "skipped"): 1}, "it rests for an hour"


async def test_a_close_ends_the_timer_in_the_moment_in_which_it_gets_its_connection(make_cron: Make) -> None:
    """In Python 3.11 asyncio.wait_for, by which a pool waits, gives the connection and forgets the cancellation."""
    cron = make_cron(recover_interval="1h", record_pool_size=1)
    process = await cron.open()
    async with process.database.recording():
        async with asyncio.timeout(10):
            while not process.database.records.get_stats()["requests_waiting"]:
                await asyncio.sleep(0.01)
    async with asyncio.timeout(10):
        await cron.close()


async def test_a_duty_that_the_end_interrupts_leaves_its_connection_as_it_was(
    make_cron: Make, db: Db, caplog: pytest.LogCaptureFixture
) -> None:
    cron = make_cron(recover_interval="1h", record_pool_size=1)
    async with cron:
        database = (await cron.open()).database
        duty = asyncio.create_task(recovery.transact(database, b"SELECT pg_sleep(30)"))
        sleeps = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()"
        async with asyncio.timeout(10):
            while not value(db, sleeps):
                await asyncio.sleep(0.01)
        duty.cancel()
        await asyncio.wait((duty,))
        assert await recovery.transact(database, b"SELECT 1") == [(1,)]
    assert [record.getMessage() for record in caplog.records if record.name == "psycopg.pool"] == []


def old_jobs(db: Db, status: str, age: str, number: int = 1, *, tries: int = 0, waited: str = "0") -> None:
    """Write jobs that ended `age` ago, and were enqueued `waited` before; with so many attempts that failed."""
    db.execute(
        """WITH made AS (
               INSERT INTO cronlock.job_history (id, task, queue, priority, payload, trigger, max_attempts, attempts,
                   losses, enqueued_at, run_at, finished_at, status)
               SELECT nextval('cronlock.job_id'), 'a', 'default', 0, '{}', 'http', 5, 1, 0,
                      now() - %s::interval - %s::interval, now() - %s::interval, now() - %s::interval, %s
                 FROM generate_series(1, %s) RETURNING id)
           INSERT INTO cronlock.job_attempt (job_id, attempt, status)
           SELECT m.id, n, 'failed' FROM made m, generate_series(1, %s) n""",
        (age, waited, age, age, status, number, tries),
    )


def old_keys(db: Db, number: int, left: str) -> None:
    """Write idempotency keys that expire in `left`."""
    db.execute(
        """INSERT INTO cronlock.idempotency_key (task, key, fingerprint, job_id, expires_at)
           SELECT 'a', %s || n, '', 1, now() + %s::interval FROM generate_series(1, %s) n""",
        (left, left, number),
    )


def job_counts(db: Db) -> dict[str, int]:
    return dict(db.execute("SELECT status, count(*) FROM cronlock.job_history GROUP BY status").fetchall())


async def test_ended_jobs_their_attempts_and_expired_keys_are_pruned_by_every_timer(make_cron: Make, db: Db) -> None:
    old_jobs(db, "completed", "30 days", 20, tries=2)
    old_jobs(db, "completed", "27 days", 3, tries=1)
    old_jobs(db, "failed", "30 days", 4, tries=5)
    old_jobs(db, "cancelled", "91 days", 5)
    old_keys(db, 7, "-1 s")
    old_keys(db, 2, "1 h")
    cron = make_cron(recover_interval="100ms")
    async with cron:
        async with asyncio.timeout(10):
            while cron.metrics.registry.get_sample_value("cronlock_pruned_rows_total") != 32:
                await asyncio.sleep(0.02)
    assert job_counts(db) == {"completed": 3, "failed": 4}
    attempts = (
        "SELECT count(*), count(h.id) FROM cronlock.job_attempt a LEFT JOIN cronlock.job_history h ON h.id = job_id"
    )
    assert db.execute(attempts).fetchone() == (23, 23)
    assert value(db, "SELECT count(*) FROM cronlock.idempotency_key") == 2


async def test_jobs_that_waited_long_hide_no_old_ones_behind_them(make_cron: Make, db: Db) -> None:
    """A window full of jobs that ended today is not the end, if they were enqueued long ago."""
    old_jobs(db, "completed", "1 hour", jobs.WINDOW, waited="200 days")
    old_jobs(db, "completed", "100 days", 5)
    old_jobs(db, "completed", "1 hour", 2 * jobs.WINDOW)
    old_jobs(db, "completed", "100 days", 1)  # as none can be: behind those that were enqueued just now
    async with make_cron(recover_interval="1h") as cron:
        database = (await cron.open()).database
        windows, after = 0, 0
        while True:
            _, following = await recovery.prune_jobs(database, after)
            windows += 1
            if following is None:
                break
            after = following
    assert windows == 3
    assert value(db, "SELECT count(*) FROM cronlock.job_history WHERE finished_at < now() - interval '1 day'") == 1


async def test_two_pruners_of_jobs_and_keys_at_once_delete_each_once(make_cron: Make, db: Db) -> None:
    old_jobs(db, "completed", "30 days", 4000, tries=1)
    old_keys(db, 4000, "-1 s")
    async with make_cron(recover_interval="1h", record_pool_size=4) as cron:
        database = (await cron.open()).database
        found = await asyncio.gather(
            *(recovery.prune_jobs(database) for _ in range(3)), *(recovery.prune_keys(database) for _ in range(3))
        )
    assert sum(number for number, _ in found) <= 8000
    left = value(db, "SELECT count(*) FROM cronlock.job_history") + value(
        db, "SELECT count(*) FROM cronlock.idempotency_key"
    )
    assert sum(number for number, _ in found) + left == 8000


async def test_pruning_touches_no_live_job_however_old_and_goes_past_rows_that_another_has_locked(
    make_cron: Make, database_url: str, db: Db
) -> None:
    put(db, "a", jobs=3)
    db.execute(
        "INSERT INTO cronlock.job_waiting SELECT id, task, queue, priority, payload, trigger, occurrence,"
        " idempotency_key, cron_key, max_attempts, attempts, losses, enqueued_at, now() FROM cronlock.job"
    )
    db.execute(
        "UPDATE cronlock.job SET id = nextval('cronlock.job_id'), lease_token = CASE WHEN id > 1 THEN"
        " gen_random_uuid() END, lease_until = CASE WHEN id > 1 THEN now() + interval '1 h' END"
    )
    for table in ("job", "job_waiting"):
        db.execute(f"UPDATE cronlock.{table} SET enqueued_at = now() - interval '3 years', run_at = now()")
    old_jobs(db, "completed", "2 years", 20, tries=1)
    async with connected(make_cron()) as process:
        with psycopg.connect(database_url) as other:
            other.execute("SELECT FROM cronlock.job_history ORDER BY id LIMIT 8 FOR UPDATE")
            async with asyncio.timeout(2):
                assert await recovery.prune_jobs(process.database) == (12, None)
            other.rollback()
        assert await recovery.prune_jobs(process.database) == (8, None)
    left = {name: value(db, f"SELECT count(*) FROM cronlock.{name}") for name in ("job", "job_waiting", "job_attempt")}
    assert left == {"job": 3, "job_waiting": 3, "job_attempt": 0}


async def test_jobs_are_pruned_window_by_window_the_oldest_first(
    make_cron: Make, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "WINDOW", 10)
    old_jobs(db, "completed", "30 days", 25)
    old_jobs(db, "completed", "1 hour", 40)
    found, after = [], 0
    async with connected(make_cron()) as process:
        while True:
            deleted, following = await recovery.prune_jobs(process.database, after)
            found.append((deleted, following, value(db, "SELECT min(id) FROM cronlock.job_history")))
            if following is None:
                break
            after = following
    assert found == [(10, 10, 11), (10, 20, 21), (5, 30, 26), (0, None, 26)]


@pytest.mark.stress
@pytest.mark.timeout(900)
async def test_a_million_old_jobs_go_in_short_transactions_while_a_queue_works(
    make_cron: Make, database_url: str, db: Db, tmp_path: Path
) -> None:
    """Two commands prune; one is ended in the middle, and the other goes on. Claims are not late for it."""
    old_jobs(db, "completed", "100 days", 900_000)
    old_jobs(db, "failed", "100 days", 100_000, tries=1)
    put(db, "nobody", jobs=10)
    db.execute("VACUUM ANALYZE cronlock.job_history")
    db.execute(f"ALTER DATABASE {db.info.dbname} SET statement_timeout = '5s'")
    left = "SELECT min(id) FROM cronlock.job_history WHERE task = 'a'"
    cron = make_cron(recover_interval="1h")
    cron.task("nightly", mode="guard")(lambda run: None)
    env = environment(DATABASE_URL=database_url)

    async def work() -> None:
        await cron.enqueue(None, "nightly")
        await asyncio.sleep(0.05)

    async with working(cron):
        with Running("prune", cwd=tmp_path, env=env) as first, Running("prune", cwd=tmp_path, env=env) as second:
            while (reached := value(db, left) or 0) < 200_000:
                await work()
            first.send(signal.SIGTERM)
            assert first.ends() != 0
            assert (value(db, left) or reached) >= reached, "what it deleted stays deleted"
            while second.process.poll() is None:
                await work()
            assert second.process.returncode == 0, second.said
        await until(lambda: live(db) == 10, "all but those that nobody has a task for")
    # What the first had locked when it was ended, the second has passed over.
    again = cronlock("prune", "--json", cwd=tmp_path, DATABASE_URL=database_url)
    assert json.loads(again.stdout)["rows"] <= jobs.WINDOW
    assert job_counts(db).keys() == {"completed"}
    late = "SELECT percentile_disc(0.95) WITHIN GROUP (ORDER BY started_at - run_at) FROM cronlock.job_history"
    assert value(db, late).total_seconds() < 0.5
    assert value(db, "SELECT count(*) FROM cronlock.job_attempt") == 0


def old_words(db: Db, number: int, age: str, *, is_delivered: bool) -> None:
    """Write invalidations of `age` ago."""
    db.execute(
        """INSERT INTO cronlock.invalidation (target, keys, tags, paths, task, created_at, delivered_at)
           SELECT 'site-' || n %% 3, '{k}', '{}', '{}', 'a', now() - %s::interval, CASE WHEN %s THEN now() END
             FROM generate_series(1, %s) n""",
        (age, is_delivered, number),
    )


def test_the_command_prunes_invalidations_window_by_window_past_those_that_are_locked(
    database_url: str, db: Db, tmp_path: Path
) -> None:
    old_words(db, 1500, "8 days", is_delivered=True)
    old_words(db, 700, "8 days", is_delivered=False)
    old_words(db, 30, "1 day", is_delivered=False)

    def prune(*arguments: str) -> Any:
        done = cronlock("prune", *arguments, "--json", cwd=tmp_path, DATABASE_URL=database_url)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        return found["rows"], {each["status"]: each["rows"] for each in found["invalidationsByStatus"]}

    assert prune("--dry-run") == (2200, {"delivered": 1500, "undelivered": 700})
    assert value(db, "SELECT count(*) FROM cronlock.invalidation") == 2230
    with psycopg.connect(database_url) as other:
        other.execute("SELECT FROM cronlock.invalidation ORDER BY id LIMIT 10 FOR UPDATE")
        assert prune() == (2190, {"delivered": 1490, "undelivered": 700})
        other.rollback()
    shown = cronlock("prune", "--dry-run", cwd=tmp_path, DATABASE_URL=database_url)
    assert shown.stdout == "10 rows would be deleted (10 delivered invalidations)\n"
    shown = cronlock("prune", cwd=tmp_path, DATABASE_URL=database_url, CRONLOCK_RETENTION_INVALIDATED="1h")
    assert shown.stdout == "40 rows deleted (10 delivered, 30 undelivered invalidations)\n"


def test_the_command_counts_deletes_and_says_what(database_url: str, db: Db, tmp_path: Path) -> None:
    old(db, "a", "skipped", "9 days", 12_000)
    old(db, "a", "timed_out", "100 days", 3)
    old(db, "a", "failed", "1 hour")

    def prune(*arguments: str) -> Any:
        done = cronlock("prune", *arguments, "--json", cwd=tmp_path, DATABASE_URL=database_url)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    old_jobs(db, "completed", "30 days", 7000)
    old_jobs(db, "completed", "20 days", 10)
    old_jobs(db, "failed", "100 days", 2)
    old_keys(db, 6000, "-1 s")
    by_status = [{"status": "skipped", "rows": 12_000}, {"status": "timed_out", "rows": 3}]
    jobs_by_status = [{"status": "completed", "rows": 7000}, {"status": "failed", "rows": 2}]
    found = {"byStatus": by_status, "jobsByStatus": jobs_by_status, "invalidationsByStatus": []}
    assert prune("--dry-run") == {"rows": 25_005, "isDryRun": True, "keys": 6000, **found}
    assert value(db, "SELECT count(*) FROM cronlock.idempotency_key") == 6000
    assert counts(db)["a", "skipped"] == 12_000
    assert job_counts(db) == {"completed": 7010, "failed": 2}
    assert prune() == {"rows": 25_005, "isDryRun": False, "keys": 6000, **found}
    assert job_counts(db) == {"completed": 10}
    assert counts(db) == {("a", "failed"): 1}
    old_jobs(db, "cancelled", "100 days", 1)
    old_keys(db, 2, "-1 s")
    shown = cronlock("prune", cwd=tmp_path, DATABASE_URL=database_url)
    assert shown.stdout == "3 rows deleted (1 cancelled jobs; 2 idempotency keys)\n"
    shown = cronlock("prune", cwd=tmp_path, DATABASE_URL=database_url, CRONLOCK_RETENTION_FAILED="1ms")
    assert shown.stdout == "0 rows deleted\n", "the last run stays whatever its age"


@pytest.mark.stress
@pytest.mark.timeout(900)
async def test_a_million_old_rows_go_in_short_transactions_while_calls_go_on(
    make_cron: Make, database_url: str, db: Db, tmp_path: Path
) -> None:
    """Two commands prune; one is killed in the middle, and the other goes on."""
    for number in range(50):
        old(db, f"rare-{number}", "completed", "300 days")
    for status, number in (("skipped", 800_000), ("completed", 150_000), ("failed", 50_000)):
        old(db, "busy", status, "200 days", number)
    old(db, "busy", "skipped", "1 hour", 5000)
    db.execute("ANALYZE cronlock.run")
    db.execute(f"ALTER DATABASE {db.info.dbname} SET statement_timeout = '5s'")
    first_left = "SELECT min(id) FROM cronlock.run WHERE task = 'busy'"
    cron = make_cron(recover_interval="1h")
    cron.task("nightly")(lambda run: None)
    env = environment(DATABASE_URL=database_url)
    durations: list[float] = []

    async def call() -> None:
        started = time.monotonic()
        assert (await cron.run("nightly")).status == "completed"
        durations.append(time.monotonic() - started)
        await asyncio.sleep(0.05)

    async with cron:
        with Running("prune", cwd=tmp_path, env=env) as first, Running("prune", cwd=tmp_path, env=env) as second:
            while (reached := value(db, first_left)) < 200_000:
                await call()
            first.send(signal.SIGTERM)
            assert first.ends() != 0
            assert value(db, first_left) >= reached, "what it deleted stays deleted"
            while second.process.poll() is None:
                await call()
            assert second.process.returncode == 0, second.said
    # What the first had locked when it was ended, the second has passed over.
    again = cronlock("prune", "--json", cwd=tmp_path, DATABASE_URL=database_url)
    assert json.loads(again.stdout)["rows"] <= runs.WINDOW
    assert sorted(durations)[len(durations) * 95 // 100] < 0.5
    found = counts(db)
    assert sum(number for (task, _), number in found.items() if task.startswith("rare-")) == 50
    assert {key: number for key, number in found.items() if key[0] == "busy"} == {
        ("busy", "skipped"): 5000,
        ("busy", "completed"): 1,
        ("busy", "failed"): 1,
    }


async def test_a_run_that_runs_is_neither_pruned_nor_lost_while_a_dead_one_is_closed(make_cron: Make, db: Db) -> None:
    cron = make_cron()
    gate, running = asyncio.Event(), asyncio.Event()

    @cron.task("slow")
    async def slow(run: Run) -> None:
        running.set()
        await gate.wait()

    old(db, "dead", "running", "300 days")
    async with cron:
        call = asyncio.create_task(cron.run("slow"))
        await running.wait()
        process = await cron.open()
        db.execute("UPDATE cronlock.run SET started_at = now() - interval '300 days'")
        lost = await recovery.recover(process.database, process.runner.statements)
        await recovery.prune(process.database, process.runner.statements)
        assert [row[1] for row in lost] in (["dead"], [])  # or the timer was first
        assert counts(db) == {("slow", "running"): 1, ("dead", "lost"): 1}
        gate.set()
        assert (await call).status == "completed"


async def test_the_timer_closes_lost_runs_and_notices_a_changed_schema(make_cron: Make, db: Db) -> None:
    cron = make_cron(recover_interval="100ms")

    @cron.task("nightly")
    async def nightly(run: Run) -> None: ...

    async with cron:
        assert (await cron.run("nightly")).status == "completed"
        old(db, "dead", "running", "1 hour")
        db.execute("UPDATE cronlock.alembic_version SET version_num = '9999'")
        try:
            with pytest.raises(Unavailable, match="revision 9999"):
                await forever(cron)
        finally:
            db.execute(f"UPDATE cronlock.alembic_version SET version_num = '{REVISION}'")
        async with asyncio.timeout(10):
            while ("dead", "lost") not in counts(db):
                await asyncio.sleep(0.02)
        assert (await cron.run("nightly")).status == "completed"
