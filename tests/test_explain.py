"""One code for every kind of end, in the answer and in the row; one sentence with the facts."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from sqlalchemy.exc import IntegrityError

from cronlock import Cancel, Outcome, Retry, Run, explain, models, outcome, stats
from cronlock.execution import Stop
from cronlock.outcome import Failure
from cronlock.process import Process
from tests import Db, Make, end_holders, held, run_once, until, value
from tests.test_cli import write

pytestmark = pytest.mark.anyio


def row_of(url: str, run_id: int) -> dict[str, Any]:
    with psycopg.connect(url, autocommit=True) as connection:
        row = stats.run(connection, "cronlock", run_id)
    assert row is not None
    return row


def both_codes(url: str, ended: Outcome) -> tuple[str, str]:
    """The code of what was answered, and of its row."""
    return explain.code(ended), explain.explain(row_of(url, ended.run_id)).code


async def raises(run: Run) -> None:
    raise ValueError("no price")


async def asks_for_a_retry(run: Run) -> None:
    class Busy(Retry):
        """One of the user's own."""

    raise Busy("the supplier is busy", after=5)


async def cancels(run: Run) -> None:
    class Sunday(Cancel):
        """One of the user's own."""

    raise Sunday("no work on Sundays")


async def is_refused_a_statement(run: Run) -> None:
    await run.driver.execute("SELECT 1 / 0")


async def breaks_a_constraint(run: Run) -> None:
    await run.driver.execute("CREATE TABLE once (a int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    await run.driver.execute("INSERT INTO once VALUES (1), (1)")


async def breaks_a_constraint_through_sqlalchemy(run: Run) -> None:
    await run.connection.exec_driver_sql("CREATE TABLE once (a int UNIQUE)")
    with pytest.raises(IntegrityError) as caught:
        await run.connection.exec_driver_sql("INSERT INTO once VALUES (1), (1)")
    raise caught.value


async def meets_a_conflict(run: Run) -> None:
    await run.driver.execute("DO $$ BEGIN RAISE EXCEPTION 'deadlock' USING ERRCODE = '40P01'; END $$")


async def runs_into_a_statement_timeout(run: Run) -> None:
    await run.driver.execute("SET LOCAL statement_timeout = 20")
    await run.driver.execute("SELECT pg_sleep(5)")


async def commits(run: Run) -> None:
    await run.driver.commit()


async def commits_by_sql(run: Run) -> None:
    await run.driver.execute("COMMIT")


async def catches_an_sql_error(run: Run) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero):
        await run.driver.execute("SELECT 1 / 0")


async def takes_too_long(run: Run) -> None:
    await asyncio.sleep(30)


async def returns(run: Run) -> str:
    return "done"


ENDS: dict[Callable[[Run], Any], str] = {
    returns: "completed",
    raises: "task_raised",
    asks_for_a_retry: "retry_asked",
    cancels: "cancelled_by_task",
    is_refused_a_statement: "statement_failed",
    breaks_a_constraint: "constraint_violated",
    breaks_a_constraint_through_sqlalchemy: "constraint_violated",
    meets_a_conflict: "conflict",
    runs_into_a_statement_timeout: "statement_cancelled",
    commits: "transaction_refused",
    commits_by_sql: "transaction_ended",
    catches_an_sql_error: "transaction_ended",
    takes_too_long: "timed_out",
}


@pytest.mark.parametrize(("task", "code"), ENDS.items(), ids=lambda item: getattr(item, "__name__", item))
async def test_the_answer_and_the_row_have_the_same_code(
    make_cron: Make, database_url: str, task: Callable[[Run], Any], code: str
) -> None:
    ended = await run_once(make_cron(), task, timeout="700ms" if task is takes_too_long else "60s")
    assert both_codes(database_url, ended) == (code, code), ended


async def loses_its_lock(run: Run) -> None:
    run.cut()  # type: ignore[attr-defined]  # given by the test
    await asyncio.sleep(30)


@pytest.mark.parametrize("task", [returns, raises, cancels, takes_too_long, loses_its_lock])
async def test_what_became_of_the_work_of_a_guard_run_is_not_said_to_be_rolled_back(
    make_cron: Make, db: Db, database_url: str, task: Callable[[Run], Any]
) -> None:
    async def work(run: Run) -> Any:
        run.cut = lambda: end_holders(db)  # type: ignore[attr-defined]  # for loses_its_lock
        return await task(run)

    ended = await run_once(make_cron(), work, mode="guard", timeout="700ms")
    sentence = explain.explain(row_of(database_url, ended.run_id)).sentence
    assert sentence.endswith("held its lock to the end" if task is returns else "what it had committed itself stays")
    assert "rolled back" not in f"{sentence} {ended.failure}"


async def test_a_run_that_an_operator_ends_has_one_code(make_cron: Make, db: Db, database_url: str) -> None:
    async def waits(run: Run) -> None:
        db.execute("UPDATE cronlock.run SET cancel_requested_at = now(), cancel_requested_by = 'ana'")
        await asyncio.sleep(30)

    ended = await run_once(make_cron(), waits)
    assert both_codes(database_url, ended) == ("cancelled_by_operator",) * 2
    assert "ana" in explain.explain(row_of(database_url, ended.run_id)).sentence


async def test_a_run_that_a_shutdown_ends_has_one_code(make_cron: Make, database_url: str) -> None:
    cron, running = make_cron(), asyncio.Event()

    @cron.task("endless")
    async def endless(run: Run) -> None:
        running.set()
        await asyncio.sleep(30)

    async with cron:
        call = asyncio.create_task(cron.run("endless"))
        await running.wait()
        await cron.drain(0)
        ended = await call
        assert both_codes(database_url, ended) == ("shutting_down",) * 2


async def test_a_run_that_loses_its_connection_has_one_code(make_cron: Make, db: Db, database_url: str) -> None:
    async def endless(run: Run) -> None:
        end_holders(db)
        await asyncio.sleep(30)

    ended = await run_once(make_cron(recover_interval="1h"), endless)
    assert both_codes(database_url, ended) == ("connection_lost",) * 2
    sentence = explain.explain(row_of(database_url, ended.run_id)).sentence
    assert "saw, at latest" in sentence  # the row is written when the database can be reached again
    assert "and with it the lock, was gone" in sentence


async def test_skips_have_their_reason_as_their_code(make_cron: Make, db: Db, database_url: str) -> None:
    cron = make_cron()
    cron.task("once")(returns)
    async with cron:
        async with held(database_url, "once"):
            locked = await cron.run("once")
        db.execute("UPDATE cronlock.task SET paused_at = now()")
        paused = await cron.run("once")
    assert both_codes(database_url, locked) == ("already_running",) * 2
    assert both_codes(database_url, paused) == ("paused",) * 2


async def test_a_run_that_others_find_lost_and_one_whose_caller_went_say_so(
    make_cron: Make, db: Db, database_url: str
) -> None:
    cron = make_cron(recover_interval="200ms")
    cron.task("once")(returns)
    async with cron:
        process: Process = await cron.open()
        await process.readiness.require()
        lost = write(db, task="dead", status="running", backend_pid=1)
        await until(lambda: db.execute("SELECT 1 FROM cronlock.run WHERE status = 'lost'").fetchone(), "the timer")
    assert explain.explain(row_of(database_url, lost)).code == "process_gone"
    assert explain.code_of("cancelled", None, "Unavailable", None) == "not_started"


def test_somebody_elses_error_of_the_same_name_is_not_taken_for_ours() -> None:
    foreign = type("Retry", (Exception,), {"__module__": "celery.exceptions"})
    kept = outcome.failure(foreign("again"), str)
    assert kept.type == "celery.exceptions.Retry"
    assert explain.code(Outcome("failed", "t", 1, 2, failure=kept)) == "task_raised"
    assert outcome.failure(Retry("again"), str).type == "Retry"


def test_every_type_that_has_a_code_is_kept_from_others() -> None:
    assert set(outcome.OWN_TYPES) == {*explain.FAILED, *explain.CANCELLED, *explain.LOST, "Cancel"}
    assert Stop("cancelled", "x").failure().type in explain.CANCELLED


def test_every_status_and_reason_has_a_code() -> None:
    found = {explain.code_of(status, None, None, None) for status in models.RUN_STATUSES if status != "skipped"}
    found |= {explain.code_of("skipped", reason, None, None) for reason in models.SKIP_REASONS}
    assert found <= set(explain.CODES)
    assert len(explain.CODES) == len(set(explain.CODES))


def test_the_http_page_names_every_code() -> None:
    from tests.test_docs import names_of_rows, page, section

    assert names_of_rows(section(page("http"), "## Codes")) == set(explain.CODES)


# -- sentences -------------------------------------------------------------------------------------------------


def sentence(url: str, run_id: int) -> str:
    return explain.explain(row_of(url, run_id)).sentence


def skipped(db: Db, at: str, **facts: Any) -> int:
    return write(db, status="skipped", **{"reason": "already_running", "started_at": f"2026-01-01 {at}+00", **facts})


def test_a_holder_that_goes_on_blocking_is_told_from_an_occasional_skip(db: Db, database_url: str) -> None:
    holder = write(db, started_at="2026-01-01 10:00:00+00", status="running", backend_pid=1)
    skips = [skipped(db, f"10:0{minute}:00", blocked_by=holder) for minute in range(1, 7)]
    assert "in a row" not in sentence(database_url, skips[1])
    told = sentence(database_url, skips[5])
    assert told.endswith("it is still running; the task was skipped 6 times in a row by this holder, for 5 min 0 s")


def test_skips_in_a_row_are_those_of_one_foreign_holder_since_the_last_run(db: Db, database_url: str) -> None:
    stuck = {"holder_pid": 77, "holder_application": "psql"}
    for minute in range(3):
        skipped(db, f"09:0{minute}:00", **stuck)
    write(db, started_at="2026-01-01 09:30:00+00")
    skipped(db, "10:00:00", holder_pid=78, holder_application="psql")
    last = [skipped(db, f"10:0{minute}:00", **stuck) for minute in range(1, 5)][-1]
    assert "skipped 4 times in a row by this holder, for 3 min 0 s" in sentence(database_url, last)


def test_more_skips_than_are_counted_are_said_to_be_more(db: Db, database_url: str) -> None:
    holder = write(db, status="running", backend_pid=1, started_at="2026-01-01 10:00+00")
    db.execute(
        """INSERT INTO cronlock.run (nonce, task, status, reason, trigger, started_at, finished_at, instance, host, pid,
               lock_name, lock_key, lock_classid, lock_objid, blocked_by)
        SELECT gen_random_uuid(), 'sync', 'skipped', 'already_running', 'http', '2026-01-01 10:00+00'::timestamptz
               + n * interval '1 second', now(), gen_random_uuid(), 'web-1', 1, 'sync', 1, 0, 1, %s
          FROM generate_series(1, 1500) n""",
        (holder,),
    )
    last = int(value(db, "SELECT max(id) FROM cronlock.run"))
    assert "skipped 1,000 or more times in a row by this holder, for 24 min 59 s" in sentence(database_url, last)


def test_a_late_run_and_a_late_skip_say_when_they_were_due(db: Db, database_url: str) -> None:
    due = {"scheduled_for": "2026-01-01 10:00+00"}
    late = write(db, started_at="2026-01-01 10:04:12+00", finished_at="2026-01-01 10:04:13+00", **due)
    assert "; it began 4 min 12 s after 2026-01-01T10:00:00+00:00, when it was due" in sentence(database_url, late)
    assert "the call came 4 min 12 s after" in sentence(database_url, skipped(db, "10:04:12", holder_pid=7, **due))
    in_time = write(db, started_at="2026-01-01 10:00:00.4+00", **due)
    assert "due" not in sentence(database_url, in_time)


def test_a_duplicate_and_a_call_too_soon_name_the_earlier_run(db: Db, database_url: str) -> None:
    first = write(db, started_at="2026-01-01 10:00:00+00", finished_at="2026-01-01 10:00:03+00")
    twice = skipped(db, "10:00:30", reason="duplicate", occurrence="2026-01-01T10:00Z", blocked_by=first)
    assert sentence(database_url, twice) == (
        f"skipped: its occurrence 2026-01-01T10:00Z already had a run: run {first}, started 30.0 s before on host"
        " web-1; it had ended completed 27.0 s before"
    )
    soon = skipped(db, "10:02:03", reason="too_soon", blocked_by=first)
    assert sentence(database_url, soon).startswith("skipped: the last completed run was not long enough ago")
    assert sentence(database_url, soon).endswith("it had ended completed 2 min 0 s before")
    assert "pruned" in sentence(database_url, skipped(db, "10:03:00", reason="too_soon", blocked_by=4711))


def test_a_holder_without_a_process_is_named_as_what_it_is(db: Db, database_url: str) -> None:
    assert "prepared transaction" in sentence(database_url, skipped(db, "10:00:00"))


@pytest.mark.parametrize(
    ("facts", "code", "told"),
    [
        ({"status": "failed", "error_type": "Unrecordable"}, "unrecordable", "refused the record of its end"),
        ({"status": "failed", "error_type": "LockLost", "error_message": "x"}, "row_changed", "LockLost: x"),
        (
            {"status": "failed", "error_type": "UniqueViolation", "error_message": "once", "error_sqlstate": "23505"},
            "constraint_violated",
            "failed: UniqueViolation: once (SQLSTATE 23505); what it wrote was rolled back",
        ),
        ({"status": "failed"}, "task_raised", "failed: its error was not written; what"),
    ],
)
def test_rows_that_only_others_can_have_written_are_explained(
    db: Db, database_url: str, facts: dict[str, Any], code: str, told: str
) -> None:
    found = explain.explain(row_of(database_url, write(db, **facts)))
    assert found.code == code
    assert told in found.sentence


def test_a_failure_of_every_database_kind_has_a_code() -> None:
    for state, code in {"23505": "constraint_violated", "40001": "conflict", "57014": "statement_cancelled"}.items():
        assert explain.code(Outcome("failed", "t", 1, 1, failure=Failure("E", "m", sqlstate=state))) == code
    assert explain.refused("22012") == "statement_failed"


def test_a_run_in_every_state_of_running_is_explained(db: Db, database_url: str) -> None:
    plain = write(db, status="running", backend_pid=1)
    assert re.fullmatch(r"running for .+ in process 123 on web-1", sentence(database_url, plain))
    asked = write(db, status="running", backend_pid=1, cancel_requested_at="now", cancel_requested_by="ana")
    assert sentence(database_url, asked).endswith("; ana asked for its end")
    stopping = write(db, status="running", backend_pid=1, stopping_at="now", progress_done=3)
    assert ", 3 of unknown done; it was told to stop" in sentence(database_url, stopping)
