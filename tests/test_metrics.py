"""What is counted and told to Prometheus, and that nothing that is called adds a series."""

import asyncio
import random
import re
import timeit
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cronlock import Cronlock, Retry, Run, stats
from cronlock.metrics import DECISION_BUCKETS, Metrics
from cronlock.outcome import Outcome
from cronlock.reporting import Report
from cronlock.tasks import Registry
from tests import SECRET, Db, Make, end_holders, held, serving, until
from tests.test_cli import register, running, write
from tests.test_docs import names_of_rows, page, section
from tests.working import working

pytestmark = pytest.mark.anyio

READ = "a-reading-secret-0123456789"
CRON = {"authorization": f"Bearer {SECRET}"}
NIGHTLY = {"task": "nightly", "status": "completed"}
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def cron(make_cron: Make) -> Cronlock:
    cron = make_cron(admin_read_secret=READ)

    @cron.task("nightly")
    async def nightly(run: Run) -> str:
        return "done"

    @cron.task("failing")
    def failing(run: Run) -> None:
        raise ValueError(f"error {random.random()}")

    return cron


@asynccontextmanager
async def watching(cron: Cronlock) -> AsyncIterator[httpx2.AsyncClient]:
    async with serving(cron.app()) as client:
        client.headers["authorization"] = f"Bearer {READ}"
        yield client


async def scrape(client: httpx2.AsyncClient) -> Samples:
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    return samples(answer.text)


def samples(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of(found: Samples, name: str, **labels: str) -> float | None:
    return found.get((name, frozenset(labels.items())))


async def test_runs_skips_and_refusals_are_counted(cron: Cronlock, database_url: str) -> None:
    async with watching(cron) as client:
        for task in ("nightly", "nightly", "failing"):
            await client.get(f"/cron/{task}", headers=CRON)
        async with held(database_url, "nightly"):
            await client.get("/cron/nightly", headers=CRON)
        await client.get("/cron/nightly")  # with the read secret
        del client.headers["authorization"]
        for _ in range(3):
            await client.get("/cron/nightly")
            await client.get("/admin/runs")
        client.headers["authorization"] = f"Bearer {READ}"
        found = await scrape(client)
    assert of(found, "cronlock_runs_total", task="nightly", status="completed") == 2
    assert of(found, "cronlock_runs_total", task="failing", status="failed") == 1
    assert of(found, "cronlock_runs_total", task="failing", status="lost") == 0
    assert of(found, "cronlock_starts_total", task="nightly") == 2
    assert of(found, "cronlock_skips_total", task="nightly", reason="already_running") == 1
    assert of(found, "cronlock_run_duration_seconds_count", task="nightly") == 2
    assert of(found, "cronlock_run_duration_seconds_bucket", task="nightly", le="+Inf") == 2
    assert of(found, "cronlock_decision_seconds_count", decision="run") == 3
    assert of(found, "cronlock_decision_seconds_count", decision="skip") == 1
    assert of(found, "cronlock_unauthorized_total", scope="cron", reason="mismatch") == 1
    assert of(found, "cronlock_unauthorized_total", scope="cron", reason="missing") == 3
    assert of(found, "cronlock_unauthorized_total", scope="admin", reason="missing") == 3
    assert of(found, "cronlock_pool_max_connections", pool="admin") == 2
    assert of(found, "cronlock_pool_used_connections", pool="admin") == 0
    assert (of(found, "cronlock_pool_open_connections", pool="records") or 0) >= 1


async def test_twenty_calls_without_and_twenty_with_a_wrong_secret_are_told_apart_in_no_body(cron: Cronlock) -> None:
    async with watching(cron) as client:
        answers = [
            await client.get("/cron/nightly", headers={"authorization": header} if header else {})
            for header in ["Bearer wrong-token-0123456789"] * 20
        ]
        del client.headers["authorization"]
        answers += [await client.get("/cron/nightly") for _ in range(20)]
        client.headers["authorization"] = f"Bearer {READ}"
        found = await scrape(client)
    assert {(answer.status_code, answer.content) for answer in answers} == {(401, b'{"status":"unauthorized"}')}
    assert of(found, "cronlock_unauthorized_total", scope="cron", reason="mismatch") == 20
    assert of(found, "cronlock_unauthorized_total", scope="cron", reason="missing") == 20


async def test_503_is_counted_by_its_reason(cron: Cronlock, make_cron: Make) -> None:
    async with watching(cron) as client:
        await cron.drain(0)
        assert (await client.get("/cron/nightly", headers=CRON)).status_code == 503
        found = await scrape(client)
    assert of(found, "cronlock_unavailable_total", reason="shutting_down") == 1


async def test_the_database_says_how_the_tasks_stand(cron: Cronlock, database_url: str, db: Db) -> None:
    async with watching(cron) as client:
        await client.get("/cron/nightly", headers=CRON)
        db.execute("UPDATE cronlock.run SET started_at = to_timestamp(1000), finished_at = to_timestamp(1002)")
        db.execute("UPDATE cronlock.task SET paused_at = now() WHERE name = 'failing'")
        write(db, task="nightly", status="failed", started_at="1970-01-01 01:00+00")
        write(db, task="nightly", status="skipped", reason="paused")
        write(db, task="failing", status="lost")
        write(db, task="failing", status="lost", finished_at="2020-01-01")
        with running(database_url, db, task="nightly", application="cronlock:nightly") as run_id:
            db.execute(
                "UPDATE cronlock.run SET started_at = now() - interval '1 hour', stopping_at = now() WHERE id = %s",
                (run_id,),
            )
            write(db, task="failing", status="running", backend_pid=1)
            found = await scrape(client)
        after = await scrape(client)
    assert of(found, "cronlock_up") == 1
    assert of(found, "cronlock_running", task="nightly") == 1
    assert of(found, "cronlock_running", task="failing") == 0, "its lock is gone"
    assert (of(found, "cronlock_longest_run_seconds", task="nightly") or 0) == pytest.approx(3600, abs=60)
    assert of(found, "cronlock_stopping") == 1
    assert of(found, "cronlock_unclosed") in (0, 1)
    assert (of(after, "cronlock_running", task="nightly"), of(after, "cronlock_stopping")) == (0, 0)
    assert of(found, "cronlock_paused", task="failing") == 1
    assert of(found, "cronlock_paused", task="nightly") == 0
    assert of(found, "cronlock_last_completed_timestamp_seconds", task="nightly") == 1002
    assert of(found, "cronlock_last_completed_timestamp_seconds", task="failing") is None
    assert (of(found, "cronlock_last_started_timestamp_seconds", task="nightly") or 0) > 1e9
    assert of(found, "cronlock_lost_last_day") == 1
    assert (of(found, "cronlock_run_bytes") or 0) > 8192
    assert of(found, "cronlock_skipped_in_a_row_seconds", task="nightly") == 0


async def test_the_database_says_how_the_queues_stand(cron: Cronlock, db: Db) -> None:
    cron.task("slow", queue="slow")(lambda run: None)
    register(db, "elsewhere")
    db.execute(
        """INSERT INTO cronlock.worker (id, host, pid, queues, tasks, concurrency, presence_key, is_idle, seen_until)
           VALUES (gen_random_uuid(), 'a', 1, '{default}', '{nightly}', 10, 1, true, now() + interval '1 min'),
                  (gen_random_uuid(), 'b', 2, '{slow}', '{slow}', 10, 2, false, now() - interval '1 s')"""
    )
    db.execute(
        """INSERT INTO cronlock.job (task, queue, payload, trigger, max_attempts, run_at)
           SELECT task, queue, '{}', 'http', 5, now() - make_interval(secs => age)
             FROM (VALUES ('nightly', 'default', 5), ('nightly', 'default', 70), ('slow', 'slow', 3),
                          ('elsewhere', 'default', 1), ('unheard-of', 'secret-queue', 9)) j(task, queue, age)"""
    )
    db.execute(
        """INSERT INTO cronlock.job (task, queue, payload, trigger, max_attempts, lease_token, lease_until)
           SELECT 'nightly', 'default', '{}', 'http', 5, gen_random_uuid(), now() + make_interval(secs => left_s)
             FROM (VALUES (60), (-1)) j(left_s)"""
    )
    db.execute(
        """INSERT INTO cronlock.job_waiting (id, task, queue, payload, trigger, max_attempts, run_at)
           SELECT 1000 + n, 'nightly', 'default', '{}', 'http', 5, now() + interval '1 h'
             FROM generate_series(1, 3) n"""
    )
    db.execute(
        """INSERT INTO cronlock.job_history (id, task, queue, priority, payload, trigger, max_attempts, attempts,
               losses, enqueued_at, run_at, finished_at, status)
           SELECT 2000 + n, 'nightly', 'default', 0, '{}', 'http', 5, 5, 0, now(), now(),
                  now() - make_interval(hours => 10 * n), 'failed' FROM generate_series(1, 4) n"""
    )
    async with watching(cron) as client:
        found = await scrape(client)
        text = (await client.get("/metrics")).text
    assert "secret-queue" not in text, "labels are registered names"
    assert "unheard-of" not in text
    assert of(found, "cronlock_jobs", queue="default", status="queued") == 3
    assert of(found, "cronlock_jobs", queue="default", status="processing") == 2
    assert of(found, "cronlock_jobs", queue="slow", status="queued") == 1
    assert of(found, "cronlock_jobs", queue="other", status="queued") == 1
    assert of(found, "cronlock_jobs_overdue", queue="default") == 1
    assert of(found, "cronlock_jobs_waiting", queue="default") == 3
    assert (of(found, "cronlock_queue_age_seconds", queue="default") or 0) == pytest.approx(70, abs=5)
    without = {name: of(found, "cronlock_jobs_without_worker", task=name) for name in ("slow", "elsewhere", "other")}
    assert without == {"slow": 1, "elsewhere": 1, "other": 1}
    assert of(found, "cronlock_jobs_without_worker", task="nightly") is None
    states = {state: of(found, "cronlock_workers", state=state) for state in ("all", "idle", "draining")}
    assert states == {"all": 1, "idle": 1, "draining": 0}
    assert of(found, "cronlock_jobs_failed_last_day") == 2
    assert (of(found, "cronlock_job_history_bytes") or 0) > 8192


async def test_what_a_worker_does_is_counted(cron: Cronlock, db: Db) -> None:
    @cron.task("odd", max_attempts=3, retry_delay=0.01)
    async def odd(run: Run) -> None:
        if run.attempt < 3:
            raise Retry(after=0)

    async with watching(cron) as client, working(cron):
        first = await client.post("/jobs/odd", headers={**CRON, "idempotency-key": "a"})
        assert first.status_code == 202
        await client.post("/jobs/odd", headers={**CRON, "idempotency-key": "a"})
        await client.post("/jobs/failing", headers=CRON)
        await client.post("/jobs/nightly?delay=300ms", headers=CRON)
        await until(lambda: db.execute("SELECT count(*) FROM cronlock.job_history").fetchone() == (3,), "all end")
        await until(lambda: cron.metrics.registry.get_sample_value("cronlock_jobs_ended_total", NIGHTLY), "it is told")
        found = await scrape(client)
    assert of(found, "cronlock_enqueued_total", task="odd", duplicate="false") == 1
    assert of(found, "cronlock_enqueued_total", task="odd", duplicate="true") == 1
    assert of(found, "cronlock_jobs_ended_total", task="odd", status="completed") == 1
    assert of(found, "cronlock_jobs_ended_total", task="failing", status="failed") == 1
    assert of(found, "cronlock_job_retries_total", task="odd") == 2
    assert of(found, "cronlock_job_start_seconds_count", task="odd") == 3
    assert of(found, "cronlock_job_finish_seconds_count", task="odd") == 1
    assert (of(found, "cronlock_job_start_seconds_sum", task="nightly") or 9) < 0.3, "from when it was due"
    assert (of(found, "cronlock_job_finish_seconds_sum", task="nightly") or 0) >= 0.3, "from when it was enqueued"
    assert of(found, "cronlock_leases_lost_total") == 0


async def test_a_lost_lease_and_a_recovery_are_counted(cron: Cronlock, db: Db) -> None:
    gate = asyncio.Event()

    @cron.task("held", mode="guard")
    async def held_open(run: Run) -> None:
        await gate.wait()

    async with watching(cron), working(cron):
        await cron.enqueue(None, "held")
        taken = "SELECT count(*) FROM cronlock.job WHERE lease_token IS NOT NULL"
        await until(lambda: db.execute(taken).fetchone() == (1,), "it is taken")
        db.execute("UPDATE cronlock.job SET lease_until = now() - interval '1 s', lease_token = gen_random_uuid()")
        registry = cron.metrics.registry
        gate.set()
        await until(lambda: registry.get_sample_value("cronlock_leases_lost_total"), "the loss is counted")
        await until(lambda: registry.get_sample_value("cronlock_job_recoveries_total"), "the recovery is counted", 30)


async def test_skips_in_a_row_count_for_as_long_as_their_holder_is_there(
    cron: Cronlock, database_url: str, db: Db
) -> None:
    name = "cronlock_skipped_in_a_row_seconds"
    async with watching(cron) as client:
        async with held(database_url, "nightly") as pid:
            for _ in range(2):
                assert (await client.get("/cron/nightly", headers=CRON)).json()["holder"]["pid"] == pid
            db.execute(
                "UPDATE cronlock.run SET started_at = started_at - interval '5 min' WHERE id = (SELECT min(id) FROM"
                " cronlock.run)"
            )
            assert (of(await scrape(client), name, task="nightly") or 0) == pytest.approx(300, abs=10)
        assert of(await scrape(client), name, task="nightly") == 0, "the holder is gone"
        with running(database_url, db, task="nightly", application="cronlock:nightly") as run_id:
            for ago in (400, 100):
                facts: dict[str, Any] = {"task": "nightly", "status": "skipped", "reason": "already_running"}
                skip = write(db, blocked_by=run_id, **facts)
                db.execute(
                    "UPDATE cronlock.run SET started_at = now() - make_interval(secs => %s) WHERE id = %s", (ago, skip)
                )
            assert (of(await scrape(client), name, task="nightly") or 0) == pytest.approx(300, abs=1)
            db.execute("UPDATE cronlock.run SET status = 'failed', finished_at = now() WHERE id = %s", (run_id,))
            assert of(await scrape(client), name, task="nightly") == 0, "the holder has ended"
        assert of(await scrape(client), name, task="failing") == 0


async def test_the_timer_says_once_who_is_in_the_way_and_again_when_the_time_has_doubled(
    make_cron: Make, database_url: str, db: Db, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[Any]:
        return [record for record in caplog.records if record.__dict__.get("event") == "task.blocked"]

    cron = make_cron(recover_interval="50ms")
    cron.task("nightly")(lambda run: None)
    register(db, "elsewhere")
    async with cron, held(database_url, "nightly") as pid:
        await cron.run("nightly")
        await cron.run("nightly")
        await asyncio.sleep(0.3)
        assert told() == [], "an occasional skip is no news"
        earlier = "UPDATE cronlock.run SET started_at = started_at - interval '%s s' WHERE id = 1"
        db.execute(earlier % 61)
        await until(told, "it is said")
        assert "nightly has been skipped for 1 min 1 s in a row: database backend" in told()[0].getMessage()
        assert (told()[0].holderPid, told()[0].task) == (pid, "nightly")
        await asyncio.sleep(0.3)
        assert len(told()) == 1
        db.execute(earlier % 62)
        await until(lambda: len(told()) == 2, "it has doubled")


async def test_a_killed_run_is_not_running_is_lost_once_and_no_part_of_the_usual_duration(
    cron: Cronlock, db: Db
) -> None:
    @cron.task("endless")
    async def endless(run: Run) -> None:
        end_holders(db)
        await asyncio.sleep(30)

    async with watching(cron) as client:
        for _ in range(3):
            assert (await client.get("/cron/endless", headers=CRON)).json()["status"] == "lost"
        found = await scrape(client)
    assert of(found, "cronlock_running", task="endless") == 0
    assert of(found, "cronlock_lost_last_day") == 3
    assert of(found, "cronlock_runs_total", task="endless", status="lost") == 3
    assert db.execute("SELECT p50_duration FROM cronlock.task_health WHERE task = 'endless'").fetchone() == (None,)


async def test_a_daily_task_that_is_skipped_three_days_has_not_completed(cron: Cronlock, db: Db) -> None:
    async with watching(cron) as client:
        await client.get("/cron/nightly", headers=CRON)
        db.execute(
            "UPDATE cronlock.run SET started_at = now() - interval '4 days', finished_at = now() - interval '4 days'"
        )
        for days in (3, 2, 1):
            skip = write(db, task="nightly", status="skipped", reason="already_running", holder_pid=1)
            db.execute(
                "UPDATE cronlock.run SET started_at = now() - make_interval(days => %s) WHERE id = %s", (days, skip)
            )
        before = await scrape(client)
        found = {row["task"]: row for row in await (await cron.open()).inspector.ask(stats.tasks)}
    completed = of(before, "cronlock_last_completed_timestamp_seconds", task="nightly")
    started = of(before, "cronlock_last_started_timestamp_seconds", task="nightly")
    (now,) = db.execute("SELECT extract(epoch FROM now())::float8").fetchone() or (0,)
    assert completed is not None
    assert started is not None
    assert now - completed > 3.9 * 86400
    assert now - started > 3.9 * 86400
    assert found["nightly"]["skip_rate"] == 0.75


async def test_snapshots_are_told_by_who_has_them(cron: Cronlock, database_url: str) -> None:
    async with watching(cron) as client:
        with psycopg.connect(database_url, application_name="psql") as other:
            other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            other.execute("SELECT 1")
            with psycopg.connect(database_url, autocommit=True) as busy:
                for number in range(20):
                    busy.execute(f"CREATE TEMP TABLE t{number} ()")
            found = await scrape(client)
        after = await scrape(client)
    name = "cronlock_oldest_xmin_transactions"
    assert (of(found, name, held_by="other") or 0) >= 20
    assert of(after, name, held_by="other") == 0
    assert of(found, name, held_by="prepared") == 0


async def test_without_a_database_a_scrape_says_so_and_keeps_the_counters(make_cron: Make) -> None:
    cron = make_cron(admin_read_secret=READ, database_url="postgresql://nobody@127.0.0.1:1/x", acquire_timeout="100ms")
    cron.task("nightly")(lambda run: None)
    async with watching(cron) as client, asyncio.timeout(10):
        assert (await client.get("/cron/nightly", headers=CRON)).status_code == 503
        found = await scrape(client)
    assert of(found, "cronlock_up") == 0
    assert of(found, "cronlock_running", task="nightly") is None
    assert of(found, "cronlock_unavailable_total", reason="database_unavailable") == 1
    assert of(found, "cronlock_starts_total", task="nightly") == 0


async def test_a_database_that_is_slow_holds_a_scrape_for_two_seconds_at_most(
    cron: Cronlock, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats, "GAUGES_TIMEOUT", 300)
    async with watching(cron) as client:
        with psycopg.connect(database_url) as other:
            other.execute("LOCK TABLE cronlock.task IN ACCESS EXCLUSIVE MODE")
            assert of(await scrape(client), "cronlock_up") == 0
        assert of(await scrape(client), "cronlock_up") == 1


async def test_the_two_seconds_are_for_all_that_a_scrape_asks_and_not_for_each_question(
    cron: Cronlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats, "GAUGES_TIMEOUT", 500)
    for name, columns in (("tasks", "'nightly' AS task, false AS is_paused, 1 AS last_started, 1 AS last_completed"),
                          ("lost", "0 AS lost"), ("rows", "0 AS rows, 0 AS bytes")):  # fmt: skip
        monkeypatch.setitem(stats.GAUGES, name, f"SELECT {columns} FROM pg_sleep(0.2)")
    async with watching(cron) as client:
        assert of(await scrape(client), "cronlock_up") == 0
        monkeypatch.setattr(stats, "GAUGES_TIMEOUT", 2000)
        assert of(await scrape(client), "cronlock_up") == 1


async def test_whatever_is_called_adds_no_series(cron: Cronlock) -> None:
    paths = (
        "/cron/{}",
        "/admin/{}",
        "/admin/runs/{}",
        "/{}",
        "/metrics/{}",
        "/cron/nightly?{}=1",
        "/admin/runs?task={}",
    )
    secrets = (None, SECRET, READ, "wrong")
    draw = random.Random(7)
    async with watching(cron) as client:
        for task in ("failing", "nightly"):
            await client.get(f"/cron/{task}", headers=CRON)
        before = await scrape(client)
        for number in range(400):
            secret = draw.choice(secrets)
            client.headers["authorization"] = f"Bearer {secret}"
            if secret is None:
                del client.headers["authorization"]
            name = f"{draw.randbytes(6).hex()}-{number}"
            await client.request(draw.choice(("GET", "POST", "PUT", "BREW")), draw.choice(paths).format(name))
        for _ in range(20):
            await client.get("/cron/failing", headers=CRON)  # each with a message of its own
        client.headers["authorization"] = f"Bearer {READ}"
        after = await scrape(client)
    assert set(after) == set(before)
    assert len(after) < 250
    assert sum(after.values()) > sum(before.values())


async def test_each_cronlock_has_counters_of_its_own_that_outlive_its_connections(
    cron: Cronlock, make_cron: Make
) -> None:
    other = make_cron(admin_read_secret=READ)
    other.task("nightly")(lambda run: None)
    for _ in range(2):
        async with cron:
            await cron.run("nightly")
    async with watching(other) as client:
        assert of(await scrape(client), "cronlock_starts_total", task="nightly") == 0
    async with watching(cron) as client:
        assert of(await scrape(client), "cronlock_starts_total", task="nightly") == 2
    assert cron.metrics.registry.get_sample_value("cronlock_starts_total", {"task": "nightly"}) == 2


async def test_a_scrape_is_told_in_the_format_it_asks_for(cron: Cronlock) -> None:
    async with watching(cron) as client:
        plain = await client.get("/metrics")
        assert plain.headers["content-type"].startswith("text/plain; version=")
        opened = await client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
        assert opened.headers["content-type"].startswith("application/openmetrics-text")
        assert opened.text.endswith("# EOF\n")


async def test_a_retry_is_a_failed_run_and_no_503_of_ours(cron: Cronlock) -> None:
    @cron.task("later")
    async def later(run: Run) -> None:
        raise Retry(after=1)

    async with watching(cron) as client:
        assert (await client.get("/cron/later", headers=CRON)).status_code == 503
        found = await scrape(client)
    assert of(found, "cronlock_runs_total", task="later", status="failed") == 1
    assert not [name for name, _ in found if name == "cronlock_unavailable_total"]


async def test_the_page_names_every_metric(cron: Cronlock) -> None:
    async with watching(cron) as client:
        await cron.drain(0)
        await client.get("/cron/nightly", headers=CRON)
        text = (await client.get("/metrics")).text
    shown = set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))
    told = names_of_rows(section(page("watching"), "## What this process counted"))
    told |= names_of_rows(section(page("watching"), "## What the database says"))
    assert told == {name for name in shown if not name.endswith("_created")}


def test_a_distribution_counts_every_value_in_its_bucket() -> None:
    metrics = Metrics(Registry())
    for milliseconds in (0, 1, 2, 3, 5001, 5000):
        metrics.skipped("t", "paused", milliseconds)
    buckets = {
        bound: metrics.registry.get_sample_value(
            "cronlock_decision_seconds_bucket", {"decision": "skip", "le": str(bound)}
        )
        for bound in (*DECISION_BUCKETS, "+Inf")
    }
    assert (buckets[0.001], buckets[0.0025], buckets[0.005], buckets[5.0], buckets["+Inf"]) == (2, 3, 4, 5, 6)
    total = metrics.registry.get_sample_value("cronlock_decision_seconds_sum", {"decision": "skip"})
    assert total == pytest.approx(10.007)


def test_counting_a_skip_costs_far_less_than_its_line() -> None:
    report = Report("me", Metrics(Registry()))
    outcome = Outcome("skipped", "nightly", 7, 3, reason="already_running")
    metrics = Metrics(Registry())
    counting = min(timeit.repeat(lambda: metrics.skipped("nightly", "already_running", 3), number=20_000, repeat=5))
    telling = min(timeit.repeat(lambda: report.facts(outcome, 1), number=20_000, repeat=5))
    assert counting < 3 * telling
