"""What a task invalidates is told after its commit, at least once, in order per key, and is in nobody's way."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from sqlalchemy import text

from cronlock import (
    ConfigError,
    Cronlock,
    Invalidation,
    Notify,
    Outcome,
    PayloadError,
    RegistrationError,
    Run,
    StatementRefused,
    VersionTable,
    Webhook,
    invalidation,
)
from cronlock.context import MAKING
from cronlock.database import Database
from cronlock.migrate import migrate
from cronlock.targets import heard, payloads, said, signature
from tests import Db, Make, advisory_locks, run_once, serving, task_of, until, value
from tests.receiver import HOOK_SECRET, is_signed, receiving
from tests.telling import tell_all
from tests.working import working

pytestmark = pytest.mark.anyio
BOTH = pytest.mark.parametrize("is_async", [True, False], ids=["async", "thread"])


async def run_as(kind: str, cron: Cronlock, db: Db, name: str, payload: dict[str, Any] | None = None) -> str:
    """Run a task as a run, or as a job to its end; how it ended."""
    if kind == "run":
        return (await cron.run(name, payload)).status
    job = await cron.enqueue(None, name, payload)
    query = "SELECT status FROM cronlock.job_history WHERE id = %s"
    row = await until(lambda: db.execute(query, (job.job_id,)).fetchone(), f"the job of {name}", 20)
    return str(row[0])


@asynccontextmanager
async def going(kind: str, cron: Cronlock) -> AsyncIterator[None]:
    """What runs it: the process alone, or with a worker."""
    if kind == "run":
        async with cron:
            yield
    else:
        async with cron, working(cron, drain=5):
            yield


def waiting(db: Db, target: str | None = None) -> int:
    """How many rows are not delivered."""
    query = "SELECT count(*) FROM cronlock.invalidation WHERE delivered_at IS NULL AND target = coalesce(%s, target)"
    return int(value(db, query, target))


def listed(db: Db) -> list[tuple[Any, ...]]:
    """(keys, tags, paths) of all rows, oldest first."""
    return db.execute("SELECT keys, tags, paths FROM cronlock.invalidation ORDER BY id").fetchall()


class Told:
    """A callable target that keeps what it is told."""

    def __init__(self) -> None:
        self.changes: list[Invalidation] = []

    def __call__(self, change: Invalidation) -> None:
        self.changes.append(change)

    @property
    def keys(self) -> list[str]:
        """All keys in the order in which they came."""
        return [key for change in self.changes for key in change.keys]


def has_last(told: Told, key: str) -> bool:
    """Whether this was told last."""
    return told.keys[-1:] == [key]


def has_version(db: Db, number: int) -> bool:
    """Whether the tag `reports` has this version."""
    row = db.execute("SELECT version FROM cronlock.cache_version WHERE key = 'reports'").fetchone()
    return row == (number,)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def make(make_cron: Make, told: Told) -> Make:
    """Makes a Cronlock with the target `told`."""

    def make(**settings: Any) -> Cronlock:
        cron = make_cron(**{"webhook_secret": HOOK_SECRET, **settings})
        cron.target("told", told)
        return cron

    return make


# -- what a task says -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["run", "job"])
@pytest.mark.parametrize("mode", ["transaction", "guard"])
@BOTH
async def test_what_a_task_says_is_told_after_its_commit_in_every_mode(
    make: Make, db: Db, told: Told, kind: str, mode: str, is_async: bool
) -> None:
    cron = make()

    def steps(run: Run) -> Any:
        run.invalidate("report:42", "report:43", tags=["reports"], paths=["/reports"])
        if mode == "transaction":
            yield run.driver.execute("SELECT 1")
        run.invalidate("last")
        return {"cacheKeys": ["returned", "report:42"], "rows": 3}

    cron.task("saying", mode=mode)(task_of(steps, is_async))
    async with going(kind, cron):
        assert await run_as(kind, cron, db, "saying") == "completed"
        await until(lambda: told.keys[-1:] == ["report:42"] or "returned" in told.keys, "everything is told")
        await until(lambda: waiting(db) == 0, "it is written down")
    assert set(told.keys) == {"report:42", "report:43", "last", "returned"}
    assert [tag for change in told.changes for tag in change.tags] == ["reports"]
    assert [path for change in told.changes for path in change.paths] == ["/reports"]
    column = "run_id" if kind == "run" else "job_id"
    query = f"SELECT DISTINCT target, task, {column} IS NOT NULL, attempts, last_error FROM cronlock.invalidation"
    assert db.execute(query).fetchall() == [("told", "saying", True, 1, None)]
    assert value(db, "SELECT num_nonnulls(run_id, job_id) FROM cronlock.invalidation LIMIT 1") == 1


@pytest.mark.parametrize("kind", ["run", "job"])
async def test_a_task_that_touches_no_connection_says_it_in_the_message_that_ends_it(
    make: Make, db: Db, told: Told, kind: str
) -> None:
    cron = make()

    @cron.task("plain")
    async def plain(run: Run) -> None:
        run.invalidate("one")

    @cron.task("returning")
    def returning(run: Run) -> dict[str, Any]:
        return {"cacheKeys": ["two"]}

    async with going(kind, cron):
        assert await run_as(kind, cron, db, "plain") == "completed"
        assert await run_as(kind, cron, db, "returning") == "completed"
        await until(lambda: told.keys == ["one", "two"], "both are told")


@pytest.mark.parametrize("kind", ["run", "job"])
@BOTH
async def test_what_is_rolled_back_has_said_nothing(make: Make, db: Db, told: Told, kind: str, is_async: bool) -> None:
    """A savepoint of SQLAlchemy, of psycopg, of raw SQL, of the session; a statement that fails in one."""
    cron = make()

    def steps(run: Run) -> Any:
        nested = yield run.connection.begin_nested()
        run.invalidate("no-1")
        yield nested.rollback()
        run.invalidate("yes-1")
        nested = yield run.connection.begin_nested()
        run.invalidate("yes-2")
        yield nested.commit()
        yield run.driver.execute("SAVEPOINT mine")
        run.invalidate("no-2")
        yield run.driver.execute("SELECT 1")
        run.invalidate("no-3")
        yield run.driver.execute("ROLLBACK TO SAVEPOINT mine")
        run.invalidate("yes-3")
        yield run.driver.execute("SAVEPOINT failing")
        try:
            yield run.driver.execute("SELECT 1/0")
        except psycopg.Error:
            run.invalidate("no-4")
        yield run.driver.execute("ROLLBACK TO SAVEPOINT failing")
        yield run.session.execute(text("SELECT 1"))
        run.invalidate("no-5")
        yield run.session.rollback()
        yield run.session.execute(text("SELECT 1"))
        run.invalidate("yes-4")
        yield run.session.commit()
        run.invalidate("yes-5")

    if not is_async:  # a plain generator cannot have an error thrown into it by `task_of`

        def plain(run: Run) -> None:
            for name, is_kept in (("no-1", False), ("yes-1", True)):
                nested = run.connection.begin_nested()
                run.invalidate(name)
                nested.commit() if is_kept else nested.rollback()
            run.driver.execute("SAVEPOINT mine")
            run.invalidate("no-2")
            run.driver.execute("SELECT 1")
            run.invalidate("no-3")
            run.driver.execute("ROLLBACK TO SAVEPOINT mine")
            run.invalidate("yes-3")
            run.driver.execute("SAVEPOINT failing")
            with suppress(psycopg.Error):
                run.driver.execute("SELECT 1/0")
            run.invalidate("no-4")
            run.driver.execute("ROLLBACK TO SAVEPOINT failing")
            run.session.execute(text("SELECT 1"))
            run.invalidate("no-5")
            run.session.rollback()
            run.invalidate("yes-5")

        cron.task("nested")(plain)
        expected = ["yes-1", "yes-3", "yes-5"]
    else:
        cron.task("nested")(task_of(steps, True))
        expected = [f"yes-{number}" for number in range(1, 6)]
    async with going(kind, cron):
        assert await run_as(kind, cron, db, "nested") == "completed"
        await until(lambda: told.keys[-1:] == expected[-1:], "what stays is told")
        await until(lambda: waiting(db) == 0, "it is written down")
    assert told.keys == expected


async def test_a_task_under_another_search_path_and_encoding_says_any_text(make: Make, db: Db, told: Told) -> None:
    cron = make()
    hostile = ['a"b', "back\\slash", "it's", "{curly}", "NULL", "%s %b {0}", "日本", "😀", " ", "\x01\x7f", "a,b", "\n"]
    db.execute("CREATE SCHEMA hostile")
    db.execute("CREATE FUNCTION hostile.unnest(text[]) RETURNS SETOF text LANGUAGE sql AS 'SELECT ''wrong''::text'")

    @cron.task("odd")
    async def odd(run: Run) -> dict[str, Any]:
        await run.driver.execute("SET search_path = hostile, pg_catalog")
        await run.driver.execute("SET client_encoding = 'LATIN1'")
        await run.driver.execute("SET standard_conforming_strings = off")
        run.invalidate(*hostile, tags=hostile, paths=hostile)
        await run.driver.execute("SELECT 1")
        return {"cacheKeys": hostile}

    async with cron:
        outcome = await cron.run("odd")
        assert outcome.status == "completed", outcome.failure
        await until(lambda: waiting(db) == 0 and told.changes, "it is told")
    assert told.changes[0].tags == tuple(hostile)
    assert set(told.keys) == set(hostile)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"keys": [""]}, "not empty"),
        ({"keys": [7]}, "not int"),
        ({"tags": "reports"}, "a list of texts, not str"),
        ({"tags": None}, "not NoneType"),
        ({"paths": [b"/"]}, "not bytes"),
        ({"paths": {"/": 1}}, "not dict"),
        ({"keys": ["x" * 1001]}, "at most 1000 characters"),
        ({"keys": ["日" * 700]}, "at most 2000 bytes"),
        ({"keys": ["a\0b"]}, "NUL"),
        ({"keys": ["\ud800"]}, "lone surrogate"),
        ({"keys": [str(number) for number in range(900)], "tags": [str(number) for number in range(101)]}, "at most"),
    ],
)
async def test_what_is_no_key_is_refused_at_once_and_fails_the_run_only_if_it_is_not_caught(
    make: Make, db: Db, told: Told, given: dict[str, Any], why: str
) -> None:
    seen: list[str] = []

    async def saying(run: Run) -> None:
        with pytest.raises(PayloadError, match=why) as caught:
            run.invalidate(*given.get("keys", ()), **{name: given[name] for name in ("tags", "paths") if name in given})
        seen.append(str(caught.value))

    assert (await run_once(make(), saying)).status == "completed"
    assert seen
    assert listed(db) == []


async def test_the_limits_themselves_are_allowed(make: Make, db: Db, told: Told) -> None:
    many = [f"{number:04d}" + "k" * 996 for number in range(1000)]

    async def saying(run: Run) -> None:
        run.invalidate(*many)
        run.invalidate()
        run.invalidate("x", "x")

    assert (await run_once(make(), saying)).status == "completed"
    assert sorted(len(row[0]) for row in listed(db)) == [1, 1000]


@pytest.mark.parametrize("kind", ["run", "job"])
@pytest.mark.parametrize("mode", ["transaction", "guard"])
@pytest.mark.parametrize("wrong", [["ok", ""], "report:42", [7], 5])
async def test_wrong_cache_keys_in_what_a_task_returns_fail_it_and_undo_its_work(
    make: Make, db: Db, told: Told, kind: str, mode: str, wrong: Any
) -> None:
    cron = make()

    @cron.task("wrong", mode=mode)
    async def returning(run: Run) -> dict[str, Any]:
        run.invalidate("said")
        return {"cacheKeys": wrong}

    async with going(kind, cron):
        assert await run_as(kind, cron, db, "wrong") == "failed"
    assert listed(db) == []


@pytest.mark.parametrize("returned", [None, {"cacheKeys": None}, {"cacheKeys": []}, {"rows": 1}, ["cacheKeys"], 3])
async def test_what_a_task_returns_without_keys_says_nothing(make: Make, db: Db, told: Told, returned: Any) -> None:
    async def returning(run: Run) -> Any:
        return returned

    assert (await run_once(make(), returning)).status == "completed"
    assert listed(db) == []


async def test_a_run_that_has_ended_can_say_nothing_more(make: Make, db: Db) -> None:
    kept: list[Run] = []

    async def keeping(run: Run) -> None:
        kept.append(run)

    await run_once(make(), keeping)
    with pytest.raises(StatementRefused, match="has ended"):
        kept[0].invalidate("late")


async def test_a_failed_cancelled_or_timed_out_run_says_nothing(make: Make, db: Db, told: Told) -> None:
    from cronlock import Cancel, Retry

    cron = make()

    @cron.task("ending", timeout="300ms")
    async def ending(run: Run, payload: dict[str, str]) -> None:
        run.invalidate("no")
        await run.driver.execute("SELECT 1")
        run.invalidate("never")
        if payload["how"] == "slow":
            await asyncio.sleep(5)
        raise {"fails": ValueError("x"), "cancels": Cancel("x"), "retries": Retry("x")}[payload["how"]]

    async with cron:
        ends = [(await cron.run("ending", {"how": how})).status for how in ("fails", "cancels", "retries", "slow")]
        assert ends == ["failed", "cancelled", "failed", "timed_out"]
    assert listed(db) == []
    assert told.changes == []


async def test_all_threads_and_tasks_of_a_run_are_heard(make: Make, db: Db, told: Told) -> None:
    def steps(run: Run) -> None:
        def work(number: int) -> None:
            for key in range(50):
                run.invalidate(f"{number}-{key}")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            run.driver.execute("SELECT 1")

    assert (await run_once(make(), steps)).status == "completed"
    keys = [key for row in listed(db) for key in row[0]]
    assert sorted(keys) == sorted(f"{number}-{key}" for number in range(8) for key in range(50))
    assert MAKING.acquire(timeout=1)
    MAKING.release()


async def test_what_is_said_in_the_middle_of_a_copy_or_a_pipeline_is_written_after_it(
    make: Make, db: Db, told: Told
) -> None:
    async def copying(run: Run) -> None:
        await run.driver.execute("CREATE TEMP TABLE t (a int)")
        async with run.driver.cursor() as cursor, cursor.copy("COPY t FROM STDIN") as copy:
            for number in range(3):
                run.invalidate(f"copy-{number}")
                await copy.write_row((number,))
        async with run.driver.pipeline():
            await run.driver.execute("SELECT 1")
            run.invalidate("pipeline")
            await run.driver.execute("SELECT 2")
        cursor = await run.driver.execute("SELECT count(*) FROM t")
        assert await cursor.fetchone() == (3,)

    outcome = await run_once(make(), copying)
    assert outcome.status == "completed", outcome.failure
    assert sorted(key for row in listed(db) for key in row[0]) == ["copy-0", "copy-1", "copy-2", "pipeline"]


async def test_a_statement_that_is_given_up_while_what_was_said_is_written_leaves_a_good_connection(
    make: Make, db: Db, told: Told
) -> None:
    """The task's own timeout comes in the middle of our message."""
    cron = make()

    @cron.task("impatient")
    async def impatient(run: Run) -> None:
        db.execute("BEGIN; LOCK TABLE cronlock.invalidation")
        run.invalidate("written")
        asyncio.get_running_loop().call_later(0.4, lambda: db.execute("COMMIT"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await run.driver.execute("SELECT 1")
        cursor = await run.driver.execute("SELECT 7")
        assert await cursor.fetchone() == (7,)

    async with cron:
        outcome = await cron.run("impatient")
        assert outcome.status == "completed", outcome.failure
        await until(lambda: told.keys == ["written"], "it is told")


async def test_a_run_that_says_nothing_sends_nothing_for_it(
    make: Make, db: Db, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cronlock import locks

    closings: list[bytes] = []
    real = locks.Closing.message

    def kept(self: locks.Closing, *values: Any) -> bytes:
        closings.append(real(self, *values))
        return closings[-1]

    monkeypatch.setattr(locks.Closing, "message", kept)

    async def silent(run: Run) -> None:
        await run.driver.execute("SELECT 1")

    await run_once(make(), silent)
    assert closings
    assert not any(b"invalidation" in closing for closing in closings)


async def test_without_a_target_nothing_is_written_and_it_is_said_once(
    make_cron: Make, db: Db, caplog: pytest.LogCaptureFixture
) -> None:
    cron = make_cron()

    @cron.task("saying")
    async def saying(run: Run) -> None:
        run.invalidate("nobody")

    async with cron:
        assert [(await cron.run("saying")).status for _ in range(3)] == ["completed"] * 3
    assert listed(db) == []
    said = [record for record in caplog.records if getattr(record, "event", "") == "invalidation.no_target"]
    assert len(said) == 1


# -- targets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "to", "why"),
    [
        ("Next", VersionTable(), "a name has 1 to 40"),
        ("", VersionTable(), "a name has 1 to 40"),
        ("next", "https://shop.example", "not 'https"),
        ("next", Webhook, "not the class Webhook"),
        ("told", VersionTable(), "registered twice"),
    ],
)
def test_a_target_that_is_none_is_refused(make: Make, name: str, to: Any, why: str) -> None:
    with pytest.raises(RegistrationError, match=why):
        make().target(name, to)


@pytest.mark.parametrize("url", ["", "shop.example", "ftp://shop.example", "https://", "https://a:b@shop.example", 7])
def test_a_webhook_needs_a_web_address_without_a_password(url: Any) -> None:
    with pytest.raises(RegistrationError, match="with no user and password"):
        Webhook(url)


def test_a_webhook_with_a_secret_that_will_not_do_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigError, match="has 9 characters") as caught:
        Webhook("https://shop.example", secret="too-short")
    assert "too-short" not in str(caught.value)


@pytest.mark.parametrize("timeout", ["0s", "11m", "soon", -1])
def test_a_timeout_that_is_none_is_refused(timeout: Any) -> None:
    with pytest.raises(RegistrationError, match="a target's timeout"):
        Webhook("https://shop.example", timeout=timeout)


@pytest.mark.parametrize("channel", ["", "a b", "x" * 64, 'a"b', 7])
def test_a_channel_that_is_none_is_refused(channel: Any) -> None:
    with pytest.raises(RegistrationError, match="a channel has"):
        Notify(channel)


async def test_a_webhook_without_any_secret_stops_the_start(make_cron: Make) -> None:
    cron = make_cron()
    cron.target("next", Webhook("https://shop.example/api/revalidate"))
    with pytest.raises(ConfigError, match="CRONLOCK_WEBHOOK_SECRET"):
        async with cron:
            pass


def test_the_signature_is_that_of_the_documentation_and_of_every_secret() -> None:
    body = b'{"keys":["a"]}'
    header = signature(["first-secret-0123456789", HOOK_SECRET], int(time.time()), body)
    assert is_signed(header, body)
    assert is_signed(header, body, "first-secret-0123456789")
    assert not is_signed(header, body + b" ")
    assert not is_signed(header, body, "another-secret-012345")
    # openssl: printf '1700000000.{}' | openssl dgst -sha256 -hmac 0123456789abcdef
    known = "e4f8e2ecae2295b2ddb2f0b5584c8275e226c0ebe9b3b819e70156bb67122e3e"
    assert signature(["0123456789abcdef"], 1700000000, b"{}") == f"t=1700000000,v1={known}"


async def test_a_webhook_gets_keys_tags_and_paths_signed(make: Make, db: Db) -> None:
    async with receiving() as receiver:
        cron = make()
        cron.target("next", Webhook(f"{receiver.url}/api/revalidate"))

        @cron.task("saying")
        async def saying(run: Run) -> None:
            run.invalidate("k", tags=["t", "日本"], paths=["/p"])

        async with cron:
            await cron.run("saying")
            await until(lambda: receiver.bodies, "it came")
            await until(lambda: waiting(db) == 0, "it is written down")
    assert receiver.bodies == [{"keys": ["k"], "tags": ["t", "日本"], "paths": ["/p"]}]
    assert receiver.forged == 0
    assert receiver.paths == ["/api/revalidate"]
    headers = receiver.headers[0]
    assert headers["content-type"] == "application/json"
    assert headers["user-agent"].startswith("cronlock/")
    assert headers["cronlock-delivery"] == str(
        value(db, "SELECT max(id) FROM cronlock.invalidation WHERE target='next'")
    )


@pytest.mark.parametrize("answer", [301, 302, 303, 307, 308])
async def test_a_redirect_is_a_failure_and_is_never_followed(make: Make, db: Db, answer: int) -> None:
    async with receiving(answer=answer) as receiver:
        cron = make()
        cron.target("next", Webhook(f"{receiver.url}/api"))

        @cron.task("saying")
        async def saying(run: Run) -> None:
            run.invalidate(tags=["t"])

        async with cron:
            await cron.run("saying")
            query = "SELECT attempts, last_error FROM cronlock.invalidation WHERE target = 'next' AND attempts > 0"
            row = await until(lambda: db.execute(query).fetchone(), "it failed")
            assert row[1].startswith(f"answered {answer}, a redirect")
    assert set(receiver.paths) == {"/api"}


@pytest.mark.parametrize("answer", [500, 503, 404, 401, 429, "close", "hang", "trickle"])
async def test_whatever_a_target_answers_for_a_while_everything_comes_in_order_after_that(
    make: Make, db: Db, told: Told, answer: int | str
) -> None:
    async with receiving(answer=answer) as receiver:
        cron = make()
        cron.target("next", Webhook(receiver.url, timeout="300ms"))

        @cron.task("saying")
        async def saying(run: Run, payload: dict[str, Any]) -> None:
            run.invalidate(f"key-{payload['number']}", tags=[f"tag-{payload['number'] % 3}"])

        async with cron:
            began = time.monotonic()
            for number in range(9):
                assert (await cron.run("saying", {"number": number})).status == "completed"
            assert time.monotonic() - began < 2
            await until(lambda: len(told.keys) == 9, "another target has all of them meanwhile", 3)
            await until(lambda: len(receiver.tries) >= 2, "it was tried again")
            assert receiver.bodies == []
            assert waiting(db, "next") == 9
            receiver.answer = 200
            await until(lambda: waiting(db, "next") == 0, "all is told", 20)
    assert receiver.told("keys") == [f"key-{number}" for number in range(9)]
    query = "SELECT min(attempts), bool_or(last_error IS NOT NULL) FROM cronlock.invalidation WHERE target = 'next'"
    attempts, has_error = db.execute(query).fetchone() or (0, False)
    assert attempts >= 1
    assert has_error
    target = "SELECT attempts, retry_at, last_error FROM cronlock.invalidation_target WHERE name = 'next'"
    assert db.execute(target).fetchone() == (0, None, None)


async def test_a_target_that_is_down_for_an_hour_is_asked_ever_more_seldom_and_costs_a_line_each_time(
    make: Make, db: Db, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pauses are those of an hour; only how long a second lasts is not."""
    delays: list[float] = []
    real = invalidation.Statements.fill

    def hurried(self: Any, statement: str, **values: Any) -> bytes:
        if statement is invalidation.FAILED:
            delays.append(values["delay"])
            values["delay"] = 0.001
        return bytes(real(self, statement, **values))

    monkeypatch.setattr(invalidation.Statements, "fill", hurried)
    async with receiving(answer=500) as receiver:
        cron = make()
        cron.target("next", Webhook(receiver.url))

        @cron.task("saying")
        async def saying(run: Run) -> None:
            run.invalidate("key")

        async with cron:
            await cron.run("saying")
            await until(lambda: len(delays) >= 12, "it failed twelve times", 20)
    assert all(0.5 * min(60, 2**place) <= delay <= min(60, 2**place) for place, delay in enumerate(delays))
    lines = [record for record in caplog.records if getattr(record, "event", "") == "invalidation.failed"]
    assert len(lines) == len(delays)
    assert "answered 500" in lines[0].getMessage()
    assert "key" not in receiver.told("keys")


async def test_a_hanging_target_holds_no_lock_no_transaction_and_no_answer(make: Make, db: Db, told: Told) -> None:
    async with receiving(answer="hang") as receiver:
        cron = make()
        cron.target("next", Webhook(receiver.url, timeout="25s"))

        @cron.task("saying")
        async def saying(run: Run) -> None:
            await run.driver.execute("SELECT 1")
            run.invalidate("key")

        async with serving(cron.app()) as client:
            began = time.monotonic()
            answer = await client.get("/cron/saying")
            assert answer.json()["status"] == "completed"
            assert time.monotonic() - began < 1
            await until(lambda: receiver.tries, "it hangs")
            assert advisory_locks(db) == 0
            query = """SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
                AND pid <> pg_backend_pid() AND state LIKE 'idle in transaction%%'"""
            assert value(db, query) == 0
            assert (await client.get("/cron/saying")).json()["status"] == "completed"
            closing = time.monotonic()
        assert time.monotonic() - closing < 6  # a drain does not wait for it


async def test_one_process_at_a_time_has_a_target_and_what_comes_meanwhile_shares_a_request(
    make_cron: Make, db: Db
) -> None:
    async with receiving(pause=0.3) as receiver:
        crons = [make_cron(webhook_secret=HOOK_SECRET) for _ in range(3)]
        seen: list[int] = []
        receiver.came = lambda body: seen.append(receiver.open_now)
        for cron in crons:
            cron.target("next", Webhook(receiver.url))

            @cron.task("saying", max_concurrent=50)
            async def saying(run: Run, payload: dict[str, Any]) -> None:
                run.invalidate(str(payload["number"]))

        async with crons[0], crons[1], crons[2]:
            calls = [crons[number % 3].run("saying", {"number": number}) for number in range(30)]
            assert {outcome.status for outcome in await asyncio.gather(*calls)} == {"completed"}
            await until(lambda: waiting(db) == 0, "all is told", 20)
    assert sorted(receiver.told("keys"), key=int) == [str(number) for number in range(30)]
    assert len(receiver.bodies) <= 10
    gaps = [later - earlier for earlier, later in zip(receiver.tries, receiver.tries[1:], strict=False)]
    assert min(gaps, default=1) >= 0.28  # never two at once


async def test_what_one_process_cannot_tell_another_one_does(make_cron: Make, db: Db) -> None:
    """A frozen deliverer: its lease runs out, and when it thaws it writes nothing."""
    async with receiving(answer="hang") as receiver:
        frozen, other = (make_cron(webhook_secret=HOOK_SECRET) for _ in range(2))
        for cron in (frozen, other):
            cron.target("next", Webhook(receiver.url, timeout="60s"))

        @frozen.task("saying")
        async def saying(run: Run) -> None:
            run.invalidate("key")

        async with frozen:
            await frozen.run("saying")
            await until(lambda: receiver.tries, "the first one hangs")
            db.execute("UPDATE cronlock.invalidation_target SET lease_token = gen_random_uuid(), lease_until = now()")
            receiver.answer = 200
            async with other:
                await until(lambda: receiver.bodies, "the other one tells it", 8)
                await until(lambda: waiting(db) == 0, "and writes it down")
                await until(lambda: receiver.open_now <= 1, "the first one has given up", 5)
    assert value(db, "SELECT attempts FROM cronlock.invalidation") == 1


# -- callables --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "thread"])
async def test_a_callable_that_raises_is_told_again(make: Make, db: Db, is_async: bool) -> None:
    cron = make()
    raised: list[BaseException] = [ValueError("no password=hunter2secret"), SystemExit(3), KeyError("x")]
    came: list[Invalidation] = []

    def purge(change: Invalidation) -> None:
        if raised:
            raise raised.pop(0)
        came.append(change)

    async def awaited(change: Invalidation) -> None:
        purge(change)

    cron.target("cdn", awaited if is_async else purge)

    @cron.task("saying")
    async def saying(run: Run) -> None:
        run.invalidate("key")

    async with cron:
        await cron.run("saying")
        query = "SELECT last_error FROM cronlock.invalidation WHERE target = 'cdn' AND last_error IS NOT NULL"
        (error,) = await until(lambda: db.execute(query).fetchone(), "it failed")
        assert error.startswith("ValueError: no password=")
        assert "hunter2secret" not in error
        await until(lambda: came, "it is told at last", 20)
    assert came == [Invalidation(keys=("key",))]


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "thread"])
async def test_a_callable_that_never_returns_is_called_once_and_is_in_nobodys_way(
    make: Make, db: Db, told: Told, is_async: bool
) -> None:
    cron = make()
    calls: list[Invalidation] = []
    end = threading.Event()

    async def stubborn(change: Invalidation) -> None:
        calls.append(change)
        while not end.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)

    def blocking(change: Invalidation) -> None:
        calls.append(change)
        end.wait(30)

    cron.target("stuck", stubborn if is_async else blocking, timeout="100ms")

    @cron.task("saying")
    async def saying(run: Run, payload: dict[str, Any]) -> None:
        run.invalidate(str(payload["number"]))

    async with cron:
        try:
            for number in range(3):
                await cron.run("saying", {"number": number})
                await until(partial(has_last, told, str(number)), "the other target is told")
            query = "SELECT last_error FROM cronlock.invalidation_target WHERE name = 'stuck'"
            await until(lambda: value(db, query), "it is said")
            assert value(db, query) == "it has not returned within 0.1 s"
            await asyncio.sleep(2.5)  # its pause is over
            assert len(calls) == 1
            assert waiting(db, "stuck") == 3
        finally:
            end.set()
        await until(lambda: waiting(db, "stuck") == 0, "all is told once it returns", 20)
    assert [key for change in calls for key in change.keys][-3:] == ["0", "1", "2"]


async def test_a_callable_may_be_decorated_and_runs_no_rules_of_a_task(make: Make, db: Db) -> None:
    cron = make()
    seen: list[str] = []

    @cron.target("cdn")
    async def purge(change: Invalidation) -> None:
        outcome = await cron.run("other")
        seen.append(outcome.status)

    @cron.task("other")
    async def other(run: Run) -> None:
        await run.driver.execute("SELECT 1")

    @cron.task("saying")
    async def saying(run: Run) -> None:
        run.invalidate("key")

    async with cron:
        await cron.run("saying")
        await until(lambda: seen == ["completed"], "it could run a task")
    assert callable(purge)


# -- NOTIFY and the version table -------------------------------------------------------------------------------


async def test_a_subscriber_hears_what_is_said_and_that_it_may_have_missed_something(make: Make, db: Db) -> None:
    cron = make()
    cron.target("caches", Notify())
    heard: list[Invalidation] = []
    big = [f"{number:03d}" + "日" * 600 for number in range(20)]

    @cron.task("saying")
    async def saying(run: Run, payload: dict[str, Any]) -> None:
        run.invalidate(*payload["keys"], tags=["t"], paths=["/p"])

    async def listen() -> None:
        async for change in cron.subscribe():
            heard.append(change)

    async with cron:
        listening = asyncio.create_task(listen())
        await until(lambda: heard, "it begins with a gap")
        assert heard.pop() == Invalidation(has_gap=True)
        await cron.run("saying", {"keys": ["one"]})
        await until(lambda: heard, "it is heard")
        assert heard.pop() == Invalidation(("one",), ("t",), ("/p",))
        await cron.run("saying", {"keys": big})
        await until(lambda: sum(len(change.keys) for change in heard) == 20, "pieces of less than 8000 bytes")
        assert [key for change in heard for key in change.keys] == big
        assert [path for change in heard for path in change.paths] == ["/p"]
        heard.clear()
        db.execute("SELECT pg_notify('cronlock_invalidation', 'something else')")
        await until(lambda: heard, "what cannot be read is a gap")
        assert heard.pop().has_gap
        ended = """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
            WHERE query LIKE 'LISTEN%%' AND datname = current_database()"""
        db.execute(ended)
        await until(lambda: heard, "a gap after the outage")
        assert heard.pop().has_gap
        await cron.run("saying", {"keys": ["two"]})
        await until(lambda: heard and heard[-1].keys == ("two",), "and it goes on")
        listening.cancel()
        with suppress(asyncio.CancelledError):
            await listening


async def test_subscribing_through_a_pooler_needs_the_direct_url(make_cron: Make) -> None:
    with pytest.raises(ConfigError, match="CRONLOCK_DIRECT_URL"):
        await anext(aiter(make_cron(pooler="transaction").subscribe()))


def test_pieces_of_a_notification_fit_and_lose_nothing() -> None:
    change = said(["\x01" * 1000, *("k" * size for size in range(1, 900))], ["t"], ["/"])
    pieces = payloads(change)
    assert max(len(piece.encode()) for piece in pieces) < 8000
    found = [heard(piece) for piece in pieces]
    assert not any(one.has_gap for one in found)
    assert sorted(key for one in found for key in one.keys) == sorted(change.keys)
    assert [one.tags for one in found if one.tags] == [("t",)]
    assert len(payloads(Invalidation(("a",)))) == 1


async def test_the_version_of_a_key_rises_at_delivery_and_not_in_the_task(make: Make, db: Db) -> None:
    cron = make()
    cron.target("versions", VersionTable())
    seen: list[dict[str, int]] = []

    @cron.task("saying", max_concurrent=3)
    async def saying(run: Run) -> None:
        run.invalidate("report:42", tags=["reports"])
        await run.driver.execute("SELECT 1")
        # Another one of the same key need not wait for this one's transaction.
        query = "SELECT count(*) FROM pg_locks WHERE relation = 'cronlock.cache_version'::regclass"
        assert value(db, query) == 0
        seen.append(await cron.cache_versions(run.driver, "report:42"))

    async with cron:
        assert await cron.cache_versions(None, "report:42", "reports", "other") == {
            "report:42": 0, "reports": 0, "other": 0
        }  # fmt: skip
        for number in (1, 2):
            assert (await cron.run("saying")).status == "completed"
            await until(partial(has_version, db, number), "it rises")
        assert await cron.cache_versions(None, "report:42", "reports") == {"report:42": 2, "reports": 2}
    assert seen == [{"report:42": 0}, {"report:42": 1}]


async def test_versions_are_read_over_every_kind_of_connection(make: Make, db: Db, database_url: str) -> None:
    from sqlalchemy import create_engine
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
    from sqlalchemy.orm import Session, scoped_session, sessionmaker

    db.execute("INSERT INTO cronlock.cache_version (key, version) VALUES ('a', 7)")
    cron, expected = make(), {"a": 7, "b": 0}
    url = database_url.replace("postgresql://", "postgresql+psycopg://")
    engine = create_async_engine(url)
    async with engine.connect() as connection, AsyncSession(engine) as session:
        assert await cron.cache_versions(connection, "a", "b") == expected
        assert await cron.cache_versions(session, "a", "b") == expected
    scope = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
    assert await cron.cache_versions(scope, "a", "b") == expected
    await scope.remove()
    await engine.dispose()
    plain = create_engine(url)
    with plain.connect() as sync_connection, Session(plain) as sync_session:
        assert cron.cache_versions_sync(sync_connection, "a", "b") == expected
        assert cron.cache_versions_sync(sync_session, "a", "b") == expected
    sync_scope = scoped_session(sessionmaker(plain))
    assert cron.cache_versions_sync(sync_scope, "a", "b") == expected
    sync_scope.remove()
    plain.dispose()
    with psycopg.connect(database_url) as driver:
        driver.execute("CREATE SCHEMA hostile; SET search_path = hostile")
        assert cron.cache_versions_sync(driver, "a", "b") == expected
    async with await psycopg.AsyncConnection.connect(database_url) as driver_async:
        assert await cron.cache_versions(driver_async, "a", "b") == expected
    with pytest.raises(TypeError, match="cache_versions_sync"):
        await cron.cache_versions(object(), "a")
    with pytest.raises(TypeError, match="psycopg"):
        cron.cache_versions_sync(object(), "a")
    with pytest.raises(PayloadError):
        await cron.cache_versions(None, "")


# -- a receiver in Node, as the page shows it -------------------------------------------------------------------

SERVER = """
import http from "node:http";
import { POST } from "./route.mjs";
import { pages, render } from "next/cache";

const server = http.createServer(async (incoming, answer) => {
  const parts = [];
  for await (const part of incoming) parts.push(part);
  if (incoming.method === "GET") return answer.end(render(incoming.url));
  const request = new Request("http://localhost" + incoming.url, {
    method: incoming.method, headers: incoming.headers, body: Buffer.concat(parts),
  });
  const response = await POST(request);
  answer.writeHead(response.status, Object.fromEntries(response.headers));
  answer.end(Buffer.from(await response.arrayBuffer()));
});
server.listen(0, "127.0.0.1", () => console.log(server.address().port));
"""

CACHE = """
export const pages = new Map();
let made = 0;
export function render(url) {
  if (!pages.has(url)) pages.set(url, `${url} ${++made}`);
  return pages.get(url);
}
export function revalidateTag(tag, profile) {
  if (profile === undefined) throw new Error("revalidateTag without a profile is deprecated");
  pages.delete(`/tagged/${tag}`);
}
export function revalidatePath(path) { pages.delete(path); }
"""


@pytest.fixture
def next_app(project: Path, tmp_path: Path) -> Iterator[str]:
    """A small Node server with the route handler of docs/invalidation.md, and a cache in place of Next.js's own."""
    if (node := shutil.which("node")) is None:
        if os.environ.get("CRONLOCK_NO_NODE"):
            pytest.skip("CRONLOCK_NO_NODE is set")
        pytest.fail("node is needed for this test; set CRONLOCK_NO_NODE=1 to do without it")
    page = (project / "docs" / "invalidation.md").read_text()
    found = re.search(r"```js\n// app/api/revalidate/route\.js\n(.+?)```", page, re.DOTALL)
    assert found is not None
    (tmp_path / "route.mjs").write_text(found[1])
    (tmp_path / "server.mjs").write_text(SERVER)
    package = tmp_path / "node_modules" / "next"
    package.mkdir(parents=True)
    (package / "package.json").write_text(json.dumps({"type": "module", "exports": {"./cache": "./cache.js"}}))
    (package / "cache.js").write_text(CACHE)
    environment = {**os.environ, "CRONLOCK_WEBHOOK_SECRET": HOOK_SECRET}
    command = [node, str(tmp_path / "server.mjs")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


async def test_the_route_handler_of_the_page_verifies_the_signature_and_revalidates(
    make: Make, db: Db, next_app: str
) -> None:
    cron = make()
    cron.target("next", Webhook(f"{next_app}/api/revalidate"))

    @cron.task("saying")
    async def saying(run: Run) -> None:
        run.invalidate(tags=["reports", "größe"], paths=["/about"])

    async with cron, httpx2.AsyncClient(base_url=next_app) as pages:
        urls = ("/tagged/reports", "/about", "/tagged/other")
        before = [(await pages.get(url)).text for url in urls]
        assert [(await pages.get(url)).text for url in urls] == before
        await cron.run("saying")
        await until(lambda: waiting(db, "next") == 0, "it is told")
        after = [(await pages.get(url)).text for url in urls]
        assert [old != new for old, new in zip(before, after, strict=True)] == [True, True, False]

        body = b'{"keys":[],"tags":["other"],"paths":[]}'
        now = int(time.time())
        for header in (
            None, "", "t=,v1=", "nonsense", signature([HOOK_SECRET], now - 3600, body),
            signature(["another-secret-012345"], now, body), signature([HOOK_SECRET], now, body + b" "),
            f"t={now},v1=00",
        ):  # fmt: skip
            headers = {} if header is None else {"Cronlock-Signature": header}
            answer = await pages.post("/api/revalidate", content=body, headers=headers)
            assert answer.status_code == 401, header
        assert (await pages.get("/tagged/other")).text == after[2]
        good = {"Cronlock-Signature": signature(["an-old-secret-0123456789", HOOK_SECRET], now, body)}
        assert (await pages.post("/api/revalidate", content=body, headers=good)).status_code == 204
        assert (await pages.get("/tagged/other")).text != after[2]


# -- watching and pruning ---------------------------------------------------------------------------------------


async def test_the_metrics_show_what_waits_for_whom_and_what_failed(make: Make, db: Db) -> None:
    async with receiving(answer=500) as receiver:
        cron = make(admin_secret="an-admin-secret-for-tests-0123456789")
        cron.target("next", Webhook(receiver.url))

        @cron.task("saying")
        async def saying(run: Run) -> None:
            run.invalidate("key")

        async with serving(cron.app()) as client:
            await client.get("/cron/saying")
            await until(lambda: waiting(db, "told") == 0 and receiver.tries, "one took it, the other did not")
            await until(
                lambda: value(db, "SELECT attempts FROM cronlock.invalidation_target WHERE name = 'next'") > 0, "noted"
            )
            db.execute("UPDATE cronlock.invalidation SET created_at = now() - interval '90 s' WHERE target = 'next'")
            headers = {"authorization": "Bearer an-admin-secret-for-tests-0123456789"}
            page = (await client.get("/metrics", headers=headers)).text
    assert 'cronlock_invalidations_waiting{target="next"} 1.0' in page
    assert 'cronlock_invalidations_waiting{target="told"} 0.0' in page
    oldest = re.search(r'cronlock_invalidation_oldest_seconds\{target="next"\} ([\d.]+)', page)
    assert oldest is not None
    assert 90 <= float(oldest[1]) < 120
    assert 'cronlock_invalidation_oldest_seconds{target="told"} 0.0' in page
    assert 'cronlock_invalidations_delivered_total{target="told"} 1.0' in page
    assert re.search(r'cronlock_invalidation_failures_total\{target="next"\} [1-9]', page)


async def test_old_rows_are_pruned_and_those_of_a_target_that_nobody_has_are_told_of_and_given_up(
    make: Make, db: Db, caplog: pytest.LogCaptureFixture
) -> None:
    db.execute(
        """INSERT INTO cronlock.invalidation (target, keys, tags, paths, task, created_at, delivered_at)
        SELECT t.target, '{k}', '{}', '{}', 'old', now() - t.age, CASE WHEN t.target = 'told' THEN now() - t.age END
          FROM (VALUES ('told', interval '8 days'), ('told', '6 days'), ('gone', '8 days'), ('gone', '1 hour'),
                       ('long-gone', '9 days')) t(target, age), generate_series(1, 1200)
         ORDER BY t.age DESC;
        INSERT INTO cronlock.invalidation_target (name, kind, seen_at)
        VALUES ('gone', 'webhook', now() - interval '2 hours'), ('long-gone', 'webhook', now() - interval '9 days')"""
    )
    cron = make(recover_interval="100ms")
    async with cron:
        counts = "SELECT target, count(*) FROM cronlock.invalidation GROUP BY target ORDER BY target"
        left = [("gone", 1200), ("told", 1200)]
        await until(lambda: db.execute(counts).fetchall() == left, "what is old is gone", 20)
        events = [getattr(record, "event", "") for record in caplog.records]
        await until(
            lambda: any(getattr(r, "event", "") == "invalidation.no_process" for r in caplog.records), "it is said"
        )
    assert "invalidation.given_up" in [*events, *(getattr(record, "event", "") for record in caplog.records)]
    given_up = {record.target for record in caplog.records if getattr(record, "event", "") == "invalidation.given_up"}  # type: ignore[attr-defined]
    assert given_up == {"gone", "long-gone"}
    unseen = [record for record in caplog.records if getattr(record, "event", "") == "invalidation.no_process"]
    assert [record.target for record in unseen] == ["gone"]  # type: ignore[attr-defined]
    names = "SELECT name FROM cronlock.invalidation_target ORDER BY name"
    assert [row[0] for row in db.execute(names).fetchall()] == ["gone", "told"]


async def test_what_waits_is_found_by_its_index_whatever_was_delivered_before(make: Make, db: Db) -> None:
    db.execute(
        """INSERT INTO cronlock.invalidation (target, keys, tags, paths, task, delivered_at)
        SELECT 'told', '{k}', '{}', '{}', 'old', now() FROM generate_series(1, 20000)"""
    )
    cron = make()
    statements = invalidation.statements("cronlock")
    query = statements.fill(invalidation.WAITING, name="told")
    db.execute("SET enable_seqscan = off")
    for prepare in ("SELECT 1", "ANALYZE cronlock.invalidation"):
        db.execute(prepare)
        plan = "\n".join(row[0] for row in db.execute(b"EXPLAIN " + query).fetchall())
        assert "invalidation_waiting_idx" in plan
        assert "Sort" not in plan
    assert cron.targets.names == ["told"]


async def test_deliveries_go_on_after_the_database_was_away(make: Make, db: Db, told: Told) -> None:
    cron = make()

    @cron.task("saying")
    async def saying(run: Run, payload: dict[str, Any]) -> None:
        run.invalidate(str(payload["number"]))

    async with cron:
        await cron.run("saying", {"number": 1})
        await until(lambda: told.keys == ["1"], "the first one")
        db.execute(
            """SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
            WHERE datname = current_database() AND pid <> pg_backend_pid()"""
        )
        outcome: Outcome = await cron.run("saying", {"number": 2})
        assert outcome.status == "completed"
        await until(lambda: told.keys[-1:] == ["2"], "the second one", 10)


async def test_the_deliverer_needs_no_connection_of_runs_or_records(
    make: Make, db: Db, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    cron = make(pool_size=1, record_pool_size=1)
    asked: list[str] = []
    real = Database.recording

    def counted(self: Database) -> Any:
        asked.append("recording")
        return real(self)

    @cron.task("saying")
    async def saying(run: Run) -> None:
        run.invalidate("key")

    async with cron:
        await cron.run("saying")
        await until(lambda: waiting(db) == 0, "the first one")
        db.execute(
            """INSERT INTO cronlock.invalidation (target, keys, tags, paths, task)
            VALUES ('told', '{by-hand}', '{}', '{}', 'none')"""
        )
        monkeypatch.setattr(Database, "recording", counted)
        await until(lambda: told.keys[-1:] == ["by-hand"], "found by the look each second", 5)
        assert asked == []


# -- surroundings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "anyio_backend", [("asyncio", {"use_uvloop": True}), ("asyncio", {"use_uvloop": False})], ids=["uvloop", "asyncio"]
)
async def test_every_kind_of_target_is_told_in_either_event_loop(
    anyio_backend: Any, make_cron: Make, database_url: str, db: Db
) -> None:
    is_uvloop = type(asyncio.get_running_loop()).__module__.startswith("uvloop")
    assert is_uvloop == anyio_backend[1]["use_uvloop"]
    async with await psycopg.AsyncConnection.connect(database_url) as listener:
        await tell_all(make_cron(), db, listener, "日本:")


@pytest.fixture(params=["LATIN1", "SQL_ASCII"])
def other_url(server_url: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """A migrated database whose encoding is another one."""
    name = f"other_encoding_{os.getpid()}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING {request.param} LOCALE 'C'")
        try:
            url = make_conninfo(server_url, dbname=name)
            migrate(url, "cronlock")
            yield url
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


async def test_every_kind_of_target_is_told_from_a_database_of_another_encoding(
    other_url: str, make_cron: Make
) -> None:
    with psycopg.connect(other_url, autocommit=True, client_encoding="UTF8") as db:
        async with await psycopg.AsyncConnection.connect(other_url, client_encoding="UTF8") as listener:
            await tell_all(make_cron(database_url=other_url), db, listener, "bücher:")
