"""Many callers of one lock at one moment: one run at a time, and nobody is skipped for nothing."""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import text

from cronlock import Cronlock, Outcome, Run, Unavailable
from tests import Db, Make, Steps, advisory_locks, held, rows, task_of, until, value

pytestmark = pytest.mark.anyio
both = pytest.mark.parametrize("is_async", [True, False], ids=["async", "thread"])


@dataclass
class Answer:
    """One call: when it was made and answered (monotonic seconds), and how."""

    asked: float
    answered: float
    outcome: Outcome


async def ask(cron: Cronlock, name: str) -> Answer:
    asked = time.monotonic()
    outcome = await cron.run(name)
    return Answer(asked, time.monotonic(), outcome)


def nobody_was_skipped_for_nothing(answers: list[Answer]) -> None:
    """The run that a skip names was going on at some moment between its question and its answer."""
    calls = {answer.outcome.run_id: answer for answer in answers}
    for answer in answers:
        if answer.outcome.status != "skipped":
            continue
        assert answer.outcome.reason == "already_running"
        assert answer.outcome.holder is not None
        assert answer.outcome.holder.run_id is not None
        run = calls[answer.outcome.holder.run_id]
        assert run.outcome.status != "skipped"
        assert answer.asked <= run.answered, "the run had ended before it was asked"
        assert run.asked <= answer.answered, "the run began after it was answered"


class Exclusive:
    """A task that notices company, and counts its runs in a row that only it writes."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.inside = 0
        self.most = 0
        self.ids: list[int] = []

    def steps(self, run: Run) -> Steps:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.ids.append(run.id)
        try:
            cursor = yield run.driver.execute("SELECT n FROM counter")
            row = yield cursor.fetchone()
            yield run.driver.execute("SELECT pg_sleep(%s)", (self.seconds,))
            yield run.connection.execute(text(f"UPDATE counter SET n = {row[0] + 1}"))
        finally:
            self.inside -= 1


@pytest.fixture
def counter(db: Db) -> Db:
    """An observer of a table `counter` with one row, n = 0."""
    db.execute("CREATE TABLE counter (n int); INSERT INTO counter VALUES (0)")
    return db


@both
async def test_sixty_calls_at_once_on_three_instances_run_one_at_a_time(
    make_cron: Make, counter: Db, is_async: bool
) -> None:
    task = Exclusive(0.02)
    crons = [make_cron(pool_size=5) for _ in range(3)]
    for cron in crons:
        cron.task("once")(task_of(task.steps, is_async))
    answers: list[Answer] = []
    async with crons[0], crons[1], crons[2]:
        for _ in range(5):
            answers += await asyncio.gather(*(ask(crons[number % 3], "once") for number in range(60)))
    statuses = Counter(answer.outcome.status for answer in answers)
    assert task.most == 1
    assert statuses.keys() <= {"completed", "skipped"}
    assert statuses["completed"] == value(counter, "SELECT n FROM counter") >= 5
    assert task.ids == sorted(task.ids), "ids grow in the order of the lock"
    nobody_was_skipped_for_nothing(answers)
    overlapping = """SELECT count(*) FROM cronlock.run a JOIN cronlock.run b
        ON a.id < b.id AND a.status = 'completed' AND b.status = 'completed' AND a.finished_at > b.started_at"""
    assert value(counter, overlapping) == 0
    recorded = Counter(status for status, _ in rows(counter, "once"))
    assert recorded == statuses
    assert advisory_locks(counter) == 0


@both
async def test_a_fast_task_called_all_the_time_is_never_skipped_for_nothing(
    make_cron: Make, counter: Db, is_async: bool
) -> None:
    """With a task this short nearly every attempt meets an opening or a close."""
    task = Exclusive(0)
    crons = [make_cron(pool_size=5) for _ in range(3)]
    for cron in crons:
        cron.task("once")(task_of(task.steps, is_async))
    answers: list[Answer] = []

    async def caller(cron: Cronlock) -> None:
        for _ in range(25):
            answers.append(await ask(cron, "once"))

    async with crons[0], crons[1], crons[2]:
        await asyncio.gather(*(caller(crons[number % 3]) for number in range(12)))
    statuses = Counter(answer.outcome.status for answer in answers)
    assert task.most == 1
    assert statuses.keys() <= {"completed", "skipped"}
    assert statuses["completed"] == value(counter, "SELECT n FROM counter")
    assert task.ids == sorted(task.ids)
    nobody_was_skipped_for_nothing(answers)


async def test_two_tasks_with_one_lock_never_run_at_once(make_cron: Make, counter: Db) -> None:
    task = Exclusive(0.005)
    crons = [make_cron(pool_size=5) for _ in range(2)]
    for cron in crons:
        cron.task("awaiting", lock="shared")(task_of(task.steps, True))
        cron.task("plain", lock="shared")(task_of(task.steps, False))
    names = ("awaiting", "plain")
    async with crons[0], crons[1]:
        calls = [ask(crons[number % 2], names[number // 2 % 2]) for number in range(80)]
        answers = await asyncio.gather(*calls)
        for _ in range(10):
            answers += await asyncio.gather(*(ask(crons[number % 2], names[number // 2 % 2]) for number in range(4)))
    assert task.most == 1
    ran = Counter(answer.outcome.task for answer in answers if answer.outcome.status == "completed")
    assert sum(ran.values()) == value(counter, "SELECT n FROM counter")
    nobody_was_skipped_for_nothing(answers)


async def test_a_call_that_comes_during_an_attempt_joins_the_next_one(
    make_cron: Make, db: Db, database_url: str
) -> None:
    """Its answer must not be older than its question: the lock is freed in between."""
    cron = make_cron()
    cron.task("once")(lambda run: None)
    async with cron:
        assert (await cron.run("once")).status == "completed"
        db.execute("BEGIN; LOCK TABLE cronlock.run IN SHARE MODE")  # the record of the first skip waits
        async with held(database_url, "once"):
            early = asyncio.create_task(cron.run("once"))
            waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'cronlock.run'::regclass"
            await until(lambda: value(db, waits), "the first attempt was refused and is recorded")
        late = asyncio.create_task(cron.run("once"))
        await asyncio.sleep(0.02)
        assert not early.done()
        db.execute("COMMIT")
        assert (await early).status in ("skipped", "completed")
        assert (await late).status == "completed" or (await early).status == "completed"


async def test_those_who_joined_a_leader_whose_task_is_paused_go_to_a_new_attempt(make_cron: Make, db: Db) -> None:
    cron = make_cron()
    cron.task("first", lock="shared")(lambda run: None)
    cron.task("second", lock="shared")(lambda run: None)
    async with cron:
        await (await cron.open()).readiness.require()
        db.execute("UPDATE cronlock.task SET paused_at = now() WHERE name = 'first'")
        names = ("first", "second", "first", "second")
        outcomes = await asyncio.gather(*(cron.run(name) for name in names))
    reasons = [(outcome.status, outcome.reason) for outcome in outcomes]
    assert reasons[0] == reasons[2] == ("skipped", "paused")
    assert ("completed", None) in (reasons[1], reasons[3])
    assert set(reasons[1::2]) <= {("completed", None), ("skipped", "already_running")}
    assert value(db, "SELECT count(*) FROM cronlock.run WHERE task = 'first' AND status <> 'skipped'") == 0


async def test_those_who_joined_a_leader_that_cannot_be_recorded_go_to_a_new_attempt(make_cron: Make, db: Db) -> None:
    db.execute("ALTER TABLE cronlock.run ADD CONSTRAINT never CHECK (task <> 'first') NOT VALID")
    cron = make_cron()
    ran: list[str] = []
    cron.task("first", lock="shared")(lambda run: ran.append("first"))
    cron.task("second", lock="shared")(lambda run: ran.append("second"))
    async with cron:
        answers = await asyncio.gather(*(cron.run(name) for name in ("first", "second")), return_exceptions=True)
        assert isinstance(answers[0], Unavailable)
        assert isinstance(answers[1], Outcome)
        assert answers[1].status == "completed"
        assert (await cron.run("second")).status == "completed"
        assert advisory_locks(db) == 0
    assert ran == ["second", "second"]


async def test_those_who_joined_a_leader_that_has_gone_go_to_a_new_attempt(make_cron: Make, db: Db) -> None:
    cron = make_cron()
    ran: list[str] = []
    cron.task("first", lock="shared")(lambda run: ran.append("first"))
    cron.task("second", lock="shared")(lambda run: ran.append("second"))
    async with cron:
        assert (await cron.run("second")).status == "completed"
        db.execute("BEGIN; LOCK TABLE cronlock.run IN SHARE MODE")  # the leader's row waits
        calls = [asyncio.create_task(cron.run(name)) for name in ("first", "second")]
        waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'cronlock.run'::regclass"
        await until(lambda: value(db, waits), "the leader has the lock and is recorded")
        calls[0].cancel()
        await asyncio.wait(calls[:1])
        db.execute("COMMIT")
        assert (await calls[1]).status == "completed"
        await until(lambda: rows(db, "first") == [("cancelled", None)], "the leader's row is ended")
    assert ran == ["second", "second"]


async def test_a_call_never_runs_on_the_connection_that_was_opened_for_another_task(make_cron: Make, db: Db) -> None:
    """The first caller goes while a connection is waited for; who joined has another kind of task and other limits."""
    cron = make_cron(pool_size=1)
    running, go = asyncio.Event(), asyncio.Event()

    async def busy(run: Run) -> None:
        running.set()
        await go.wait()

    def plain(run: Run) -> list[Any]:
        return list(run.driver.execute("SELECT current_setting('application_name')").fetchone())

    cron.task("busy")(busy)
    cron.task("first", lock="shared", timeout="1s")(busy)
    cron.task("second", lock="shared", timeout="50s")(plain)
    async with cron:
        keeping = asyncio.create_task(cron.run("busy"))
        await running.wait()
        calls = [asyncio.create_task(cron.run(name)) for name in ("first", "second")]
        process = await cron.open()
        await until(lambda: process.database.runs.get_stats()["requests_waiting"], "a connection is waited for")
        calls[0].cancel()
        await asyncio.wait(calls[:1])
        go.set()
        assert (await keeping).status == "completed"
        outcome = await calls[1]
    assert outcome.failure is None
    assert outcome.result == '["cronlock:second"]'
    assert rows(db, "first") == []


async def test_runs_of_different_locks_do_not_wait_for_each_other(make_cron: Make, db: Db) -> None:
    cron = make_cron(pool_size=10)
    inside = asyncio.Barrier(8)

    async def meeting(run: Run) -> None:
        await asyncio.wait_for(inside.wait(), 10)

    for number in range(8):
        cron.task(f"task-{number}")(meeting)
    async with cron:
        outcomes = await asyncio.gather(*(cron.run(f"task-{number}") for number in range(8)))
    assert {outcome.status for outcome in outcomes} == {"completed"}


@both
async def test_a_run_sees_what_the_run_before_it_committed(make_cron: Make, counter: Db, is_async: bool) -> None:
    crons = [make_cron(pool_size=3) for _ in range(2)]
    task = Exclusive(0)
    for cron in crons:
        cron.task("once")(task_of(task.steps, is_async))
    async with crons[0], crons[1]:
        for number in range(60):
            outcome = await crons[number % 2].run("once")
            assert outcome.status == "completed", outcome
            assert value(counter, "SELECT n FROM counter") == number + 1
