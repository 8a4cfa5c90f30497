"""Which schema the code works with: its own and the next one, in a server and in a command alike."""

import logging
from pathlib import Path

import pytest

from cronlock import Retry, Run, Unavailable, migrate, revision
from cronlock.errors import MigrationError
from cronlock.models import REVISION
from tests import Db, Make, rows, serving, value
from tests.commands import cronlock as command
from tests.working import APP, all_ended, live, working

pytestmark = pytest.mark.anyio

NEXT, FURTHER, BEFORE = (f"{int(REVISION) + step:04}" for step in (1, 2, -1))
REFUSED = {
    "an older one": ([BEFORE], "schema_behind", ["behind", BEFORE, REVISION, "run: cronlock migrate"]),
    "none": ([], "schema_behind", ["behind", "none", "run: cronlock migrate"]),
    "two ahead": ([FURTHER], "schema_ahead", ["ahead", FURTHER, REVISION, "deploy the newer cronlock"]),
    "an unknown id": (["abc"], "schema_unknown", ["'abc'", "CRONLOCK_SCHEMA"]),
    "another spelling of the next": ([f" {NEXT}"], "schema_unknown", ["none of cronlock's"]),
    "two heads": ([REVISION, NEXT], "schema_unknown", ["2 revisions at once", REVISION, NEXT, "one row"]),
}
"""The revisions that a schema is at, the reason of the 503, and what its message must name."""

refused = pytest.mark.parametrize(("found", "reason", "told"), REFUSED.values(), ids=REFUSED)


def set_revisions(db: Db, found: list[str]) -> None:
    """Let the schema be at these revisions."""
    db.execute("DELETE FROM cronlock.alembic_version")
    for one in found:
        db.execute("INSERT INTO cronlock.alembic_version VALUES (%s)", (one,))


@refused
async def test_a_server_answers_503_with_a_reason_and_what_to_do_and_serves_when_that_is_done(
    make_cron: Make, db: Db, found: list[str], reason: str, told: list[str]
) -> None:
    ran: list[int] = []
    cron = make_cron()

    @cron.task("nightly")
    async def nightly(run: Run) -> None:
        ran.append(run.id)

    set_revisions(db, found)
    async with serving(cron.app()) as client:
        answer = await client.get("/cron/nightly")
        assert (answer.status_code, answer.json()["reason"]) == (503, reason)
        assert int(answer.headers["retry-after"]) > 0
        for part in told:
            assert part in answer.json()["message"]
        assert (await client.get("/readyz")).status_code == 503
        assert ran == []
        set_revisions(db, [REVISION])
        assert (await client.get("/cron/nightly")).json()["status"] == "completed"
        assert (await client.get("/readyz")).status_code == 200


@refused
def test_a_command_is_refused_with_the_same_words_and_exit_code_5(
    db: Db, database_url: str, tmp_path: Path, found: list[str], reason: str, told: list[str]
) -> None:
    set_revisions(db, found)
    done = command("tasks", cwd=tmp_path, DATABASE_URL=database_url)
    assert (done.returncode, done.stdout) == (5, "")
    said = " ".join(done.stderr.split())
    with pytest.raises(Unavailable) as same:
        revision.require(found, REVISION, "cronlock")
    assert same.value.reason == reason
    for part in (*told, str(same.value)):
        assert part in said


def add_a_migration(db: Db) -> None:
    """What a migration after the newest one does: it adds, and what was there stays."""
    db.execute("ALTER TABLE cronlock.run ADD COLUMN wider integer NOT NULL DEFAULT 7")
    db.execute("ALTER TABLE cronlock.task ADD COLUMN wider text")
    db.execute("CREATE TABLE cronlock.another (id bigint PRIMARY KEY)")
    set_revisions(db, [NEXT])


async def test_code_before_the_newest_migration_goes_on_while_that_is_rolled_out_and_says_so_once(
    make_cron: Make, db: Db, database_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    running, started_after = make_cron(recover_interval="100ms"), make_cron(recover_interval="100ms")
    for cron in (running, started_after):

        @cron.task("nightly")
        async def nightly(run: Run) -> None:
            await run.driver.execute("SELECT 1")

        @cron.task("failing")
        def failing(run: Run) -> None:
            run.driver.execute("SELECT 1")
            raise ValueError("on purpose")

    def told() -> list[logging.LogRecord]:
        return [record for record in caplog.records if getattr(record, "event", "") == "schema.next"]

    async with serving(running.app()) as before:
        assert (await before.get("/cron/nightly")).json()["status"] == "completed"
        assert told() == []
        add_a_migration(db)
        async with serving(started_after.app()) as after:
            for client in (before, after):
                assert (await client.get("/cron/nightly")).json()["status"] == "completed"
                assert (await client.get("/cron/failing")).json()["status"] == "failed"
                assert (await client.get("/readyz")).status_code == 200
            process, other = await running.open(), await started_after.open()
            for _ in range(3):
                await process.readiness.look()
                await other.readiness.look()
    assert len(told()) == 2  # one of each process
    assert NEXT in told()[0].getMessage()
    assert REVISION in told()[0].getMessage()
    assert rows(db, "nightly") == [("completed", None)] * 3
    assert command("runs", "list", cwd=tmp_path, DATABASE_URL=database_url).returncode == 0
    assert command("recover", cwd=tmp_path, DATABASE_URL=database_url).returncode == 0


JOBS = """
INSERT INTO cronlock.job (id, task, queue, payload, trigger, max_attempts, attempts, lease_token, lease_until, worker)
SELECT nextval('cronlock.job_id'), (ARRAY['work', 'failing', 'flaky'])[n % 3 + 1], 'default', '{}', 'manual', 5, n % 2,
       CASE n % 2 WHEN 1 THEN gen_random_uuid() END, CASE n % 2 WHEN 1 THEN now() - interval '1 s' END,
       CASE n % 2 WHEN 1 THEN gen_random_uuid() END
  FROM generate_series(1, 400) n;
INSERT INTO cronlock.job_waiting (id, task, queue, payload, trigger, max_attempts, run_at)
SELECT nextval('cronlock.job_id'), 'work', 'default', '{}', 'http', 5, now() FROM generate_series(1, 300);
INSERT INTO cronlock.job_history (id, task, queue, priority, payload, trigger, max_attempts, attempts, losses,
       enqueued_at, run_at, status)
SELECT nextval('cronlock.job_id'), 'work', 'default', 0, '{}', 'http', 5, 5, 0, now(), now(),
       (ARRAY['completed', 'failed', 'cancelled'])[n % 3 + 1]
  FROM generate_series(1, 300) n;
"""
"""A thousand jobs: queued, dropped by a worker that is gone, waiting, and each way to end."""


async def test_workers_before_the_newest_migration_end_a_thousand_jobs_while_that_is_rolled_out(
    make_cron: Make, db: Db, caplog: pytest.LogCaptureFixture
) -> None:
    running, started_after = make_cron(), make_cron()
    for cron in (running, started_after):

        @cron.task("work")
        async def work(run: Run) -> None:
            await run.driver.execute("SELECT 1")

        @cron.task("failing", mode="guard")
        async def failing(run: Run) -> None:
            raise ValueError("on purpose")

        @cron.task("flaky", mode="guard")
        async def flaky(run: Run) -> None:
            if run.attempt < 3:
                raise Retry(after=0.01)

    async with working(running):
        await running.enqueue_many(None, "work", [{}] * 5)  # every statement of this worker is prepared by now
        await all_ended(db)
        db.execute("TRUNCATE cronlock.job_history")
        for table in ("job", "job_waiting", "job_history", "job_attempt", "idempotency_key", "worker"):
            db.execute(f"ALTER TABLE cronlock.{table} ADD COLUMN wider integer NOT NULL DEFAULT 7")
        add_a_migration(db)
        async with working(started_after), serving(started_after.app()) as client:
            db.execute(JOBS)
            first = await client.post("/jobs/work", headers={"idempotency-key": "one"})
            again = await client.post("/jobs/work", headers={"idempotency-key": "one"})
            assert (first.status_code, again.json()) == (202, {**first.json(), "duplicate": True})
            await running.enqueue_many(None, "work", [{}] * 99, delay="50ms")
            assert await all_ended(db, 30) == {"completed": 766, "failed": 234, "cancelled": 100}
            told = await client.get(f"/jobs/{first.json()['jobId']}")
            assert told.json()["status"] == "completed"
    by = "SELECT count(DISTINCT worker) FROM cronlock.job_history WHERE worker IS NOT NULL"
    assert value(db, by) == 2
    assert [record.getMessage() for record in caplog.records if record.name == "cronlock.worker"] == []


@refused
async def test_neither_an_enqueue_nor_a_worker_begins_with_another_schema(
    make_cron: Make, db: Db, database_url: str, tmp_path: Path, found: list[str], reason: str, told: list[str]
) -> None:
    set_revisions(db, found)
    cron = make_cron()
    cron.task("work")(lambda run: None)
    async with serving(cron.app()) as client:
        answer = await client.post("/jobs/work")
        assert (answer.status_code, answer.json()["reason"]) == (503, reason)
    done = command("worker", APP, cwd=tmp_path, DATABASE_URL=database_url)
    assert done.returncode == 5
    for part in told:
        assert part in " ".join(done.stderr.split())
    assert live(db) == 0
    assert value(db, "SELECT count(*) FROM cronlock.worker") == 0


def test_migrating_with_the_code_before_leaves_the_next_revision_and_refuses_one_further_ahead(
    db: Db, database_url: str
) -> None:
    set_revisions(db, [NEXT])
    done = migrate.migrate(database_url, "cronlock")
    assert (done.before, done.after) == (NEXT, NEXT)
    set_revisions(db, [FURTHER])
    with pytest.raises(MigrationError, match=f"{FURTHER}.*ahead of this code"):
        migrate.migrate(database_url, "cronlock")
    assert db.execute("SELECT version_num FROM cronlock.alembic_version").fetchall() == [(FURTHER,)]


@pytest.mark.parametrize(
    ("found", "is_next"),
    [
        ("0003", True),
        ("0002", False),
        ("0004", False),
        ("3", False),
        ("00003", False),
        ("٠٠٠٣", False),
        ("000³", False),
    ],
)
def test_only_the_number_right_after_is_the_next_one(found: str, is_next: bool) -> None:
    assert revision.is_next(found, "0002") is is_next


@pytest.mark.parametrize("own", ["0001", "0042"])
def test_the_own_revision_is_not_the_next_one(own: str) -> None:
    assert revision.require([own], own, "cronlock") is False
    assert revision.require([f"{int(own) + 1:04}"], own, "cronlock") is True


def test_every_migration_has_the_number_after_the_one_before_it(project: Path) -> None:
    numbers = sorted(path.name.split("_")[0] for path in (project / "migrations" / "versions").glob("*.py"))
    assert numbers == [f"{place:04}" for place in range(1, len(numbers) + 1)]
    assert numbers[-1] == REVISION
