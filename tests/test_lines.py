"""`run.log`: what is kept of it with a run of every end, and that it neither fails a task nor grows without bound."""

import asyncio
import logging
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cronlock import Cancel, Run
from cronlock.lines import FIRST, HEAD, LAST, LINE_LIMIT, TAIL, Lines, TaskLog
from cronlock.migrate import migrate
from tests import SECRET, Db, Make, Steps, end_holders, run_once, task_of, until, value
from tests.commands import served
from tests.conftest import make_url

pytestmark = pytest.mark.anyio
both = pytest.mark.parametrize("is_async", [True, False], ids=["async", "thread"])


def kept(db: Db, run_id: int | None = None) -> list[str] | None:
    """The lines of a run, or of the last one, without their times."""
    text = value(db, "SELECT log FROM cronlock.run WHERE id = coalesce(%s, id) ORDER BY id DESC LIMIT 1", run_id)
    return None if text is None else [line.partition(" ")[2] for line in text.splitlines()]


# -- ends ------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("error", "status"),
    [(None, "completed"), (ValueError("no"), "failed"), (Cancel("a holiday"), "cancelled"), (SystemExit(3), "failed")],
)
async def test_the_log_is_kept_with_a_run_however_it_ends(
    make_cron: Make, db: Db, error: BaseException | None, status: str, is_async: bool
) -> None:
    def steps(run: Run) -> Steps:
        run.log.info("the %s of %d", "first", 2)
        yield run.driver.execute("SELECT 1")
        run.log.warning("second")
        if error is not None:
            raise error

    assert (await run_once(make_cron(), task_of(steps, is_async))).status == status
    assert kept(db) == ["INFO the first of 2", "WARNING second"]
    (line, _) = value(db, "SELECT log FROM cronlock.run").splitlines()
    assert value(
        db, "SELECT %s::timestamptz BETWEEN started_at - '1s'::interval AND now() FROM cronlock.run", line[:24]
    )
    assert line[23] == "Z"


@both
async def test_the_log_of_a_run_that_ran_over_its_timeout_is_kept(make_cron: Make, db: Db, is_async: bool) -> None:
    def steps(run: Run) -> Steps:
        run.log.info("before")
        try:
            yield run.driver.execute("SELECT pg_sleep(30)")
        finally:
            run.log.error("stopped")

    assert (await run_once(make_cron(), task_of(steps, is_async), timeout="300ms")).status == "timed_out"
    assert kept(db) == ["INFO before", "ERROR stopped"]


@pytest.mark.parametrize("mode", ["transaction", "guard"])
async def test_the_log_of_a_run_that_lost_its_lock_is_kept(make_cron: Make, db: Db, mode: str) -> None:
    async def task(run: Run) -> None:
        run.log.info("before")
        await asyncio.to_thread(end_holders, db)
        await asyncio.sleep(30)

    assert (await run_once(make_cron(guard_ping="200ms"), task, mode=mode)).status == "lost"
    assert kept(db) == ["INFO before"]


async def test_the_log_is_kept_in_guard_mode(make_cron: Make, db: Db) -> None:
    async def task(run: Run) -> None:
        run.log.info("guarded 😀")

    assert (await run_once(make_cron(), task, mode="guard")).status == "completed"
    assert kept(db) == ["INFO guarded 😀"]


APP = """
import asyncio, time
from cronlock import Cronlock, Run
cron = Cronlock()

@cron.task("endless")
async def endless(run: Run) -> None:
    for number in range(10_000):
        run.log.info("step %d", number)
        run.progress(number, 10_000)
        await asyncio.sleep(0.05)
"""


async def test_the_log_of_a_killed_process_is_kept_up_to_a_second_before(
    db: Db, database_url: str, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(APP)
    import httpx2

    from tests import AUTH

    with served(tmp_path, DATABASE_URL=database_url) as (server, url):
        async with httpx2.AsyncClient(timeout=30, headers=AUTH) as client:
            calling = asyncio.create_task(client.get(f"{url}/cron/endless"))
            await until(
                lambda: kept(db) is not None if value(db, "SELECT count(*) FROM cronlock.run") else None, "a log"
            )
            await asyncio.sleep(1.5)
            server.process.kill()
            server.process.wait()
            with pytest.raises(httpx2.HTTPError):
                await calling
    db.execute("SELECT pg_sleep(0.5)")
    lines = kept(db)
    assert lines is not None
    last = value(db, "SELECT progress_done FROM cronlock.run")
    assert lines == [f"INFO step {number}" for number in range(len(lines))]
    assert len(lines) > 15
    assert last - len(lines) < 25, "within about a second, at 20 lines in each"


async def test_the_log_is_seen_within_about_a_second_while_the_task_runs(make_cron: Make, db: Db) -> None:
    seen: list[float] = []

    def is_kept(word: str) -> bool:
        return f"INFO {word}" in (kept(db) or [])

    async def task(run: Run) -> None:
        for word in ("first", "second", "third"):
            run.log.info(word)
            said = time.monotonic()
            await until(partial(is_kept, word), word, 3)
            seen.append(time.monotonic() - said)

    assert (await run_once(make_cron(), task)).failure is None
    assert max(seen) < 1.6


async def test_progress_and_log_do_not_overwrite_each_other_nor_the_end(make_cron: Make, db: Db) -> None:
    query = "SELECT progress_done, progress_total, log FROM cronlock.run"

    def is_seen(done: int | None, total: int | None, word: str | None) -> bool:
        row = db.execute(query).fetchone()
        return row is not None and row[:2] == (done, total) and (row[2] or "").endswith(word or "")

    async def task(run: Run) -> None:
        run.progress(1, 10)
        await until(lambda: is_seen(1, 10, None), "progress alone")
        run.log.info("one")
        await until(lambda: is_seen(1, 10, "INFO one"), "a log leaves the progress")
        run.progress(2, 10)
        await until(lambda: is_seen(2, 10, "INFO one"), "progress leaves the log")
        run.log.info("two")
        run.progress(3)
        await until(lambda: is_seen(3, None, "INFO two"), "both")
        for number in range(500):
            run.log.info("line %d", number)
            run.progress(number)

    assert (await run_once(make_cron(), task)).status == "completed"
    lines = kept(db)
    assert lines is not None
    assert lines[:2] == ["INFO one", "INFO two"]
    assert lines[-1] == "INFO line 499"


# -- bounds ----------------------------------------------------------------------------------------------------


@both
async def test_the_first_and_the_last_lines_of_a_hundred_thousand_are_kept(
    make_cron: Make, db: Db, is_async: bool
) -> None:
    peaks: list[int] = []

    def steps(run: Run) -> Steps:
        logging.getLogger("cronlock.task").setLevel(logging.CRITICAL)
        tracemalloc.start()
        for number in range(100_000):
            run.log.info("line %d", number)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        yield run.driver.execute("SELECT 1")

    try:
        assert (await run_once(make_cron(), task_of(steps, is_async), timeout="60s")).status == "completed"
    finally:
        logging.getLogger("cronlock.task").setLevel(logging.NOTSET)
    lines = kept(db)
    assert lines is not None
    assert lines[:FIRST] == [f"INFO line {number}" for number in range(FIRST)]
    assert lines[-LAST:] == [f"INFO line {number}" for number in range(100_000 - LAST, 100_000)]
    assert len(lines) == FIRST + 1 + LAST
    assert f"... {100_000 - FIRST - LAST} lines left out ..." in value(db, "SELECT log FROM cronlock.run")
    assert peaks[0] < 5_000_000


def lines_of(*messages: str, scrub: Callable[[str], str] = str) -> str:
    lines = Lines(scrub)
    for message in messages:
        lines.add(logging.INFO, message)
    return lines.text() or ""


def test_exactly_as_many_lines_as_are_kept_have_no_mark() -> None:
    messages = [str(number) for number in range(FIRST + LAST)]
    assert "left out" not in lines_of(*messages)
    assert "... 1 lines left out ..." in lines_of(*messages, "one more")


def test_long_lines_are_cut_and_many_of_them_too() -> None:
    assert len(lines_of("x" * 1_000_000)) < LINE_LIMIT + 50
    text = lines_of(*(f"{number} " + "x" * 1_000_000 for number in range(FIRST + LAST)))
    assert len(text) < HEAD + TAIL + 100
    first, mark, last = text.partition(" characters left out ...")
    assert mark
    assert first.startswith("2")
    assert " INFO 0 x" in first
    assert f" INFO {FIRST + LAST - 1} x" in last


def test_nothing_logged_is_no_text() -> None:
    assert Lines(str).text() is None


def test_secrets_are_taken_out_before_a_line_is_cut() -> None:
    text = lines_of("x" * (LINE_LIMIT - 10) + SECRET, scrub=lambda text: text.replace(SECRET, "***"))
    assert SECRET[:4] not in text


async def test_secrets_are_not_kept(make_cron: Make, db: Db) -> None:
    async def task(run: Run) -> None:
        run.log.info("with %s", SECRET)
        run.log.info("https://u:hunter22@db/?token=abcdef and Bearer sk_test_x")
        try:
            raise ValueError(SECRET)
        except ValueError:
            run.log.exception("it failed")

    await run_once(make_cron(), task)
    text = value(db, "SELECT log FROM cronlock.run")
    for secret in (SECRET, "hunter22", "abcdef", "sk_test_x"):
        assert secret not in text
    assert "it failed: ValueError: " in text


# -- whatever is logged ----------------------------------------------------------------------------------------


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class Silent(logging.Handler):
    """As a program's own handler: whatever it cannot format it leaves out."""

    def handleError(self, record: logging.LogRecord) -> None: ...

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.format(record)
        except Exception:
            self.handleError(record)


@pytest.fixture
def silent() -> Iterator[Silent]:
    """The task's logger has a handler of its own, and pytest's, which raises, is left out."""
    logger = logging.getLogger("cronlock.task")
    handler = Silent()
    logger.addHandler(handler)
    logger.propagate = False
    yield handler
    logger.propagate = True
    logger.removeHandler(handler)


ODD: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "no such place": (("%s and %s", 1), {}, "INFO '%s and %s' 1"),
    "a number that is none": (("%d", "x"), {}, "INFO '%d' 'x'"),
    "percent alone": (("100%",), {}, "INFO 100%"),
    "percent with arguments": (("100%", 1), {}, "INFO '100%' 1"),
    "names": (("%(a)s", {"a": 1}), {}, "INFO 1"),
    "no such name": (("%(a)s", {"b": 1}), {}, "INFO '%(a)s' {'b': 1}"),
    "no text": ((7,), {}, "INFO 7"),
    "none": ((None,), {}, "INFO None"),
    "empty": (("",), {}, "INFO"),
    "lines": (("a\nb\r\nc\x85d\u2028e",), {}, "INFO a b c d e"),
    "NUL": (("a\0b",), {}, "INFO a\ufffdb"),
    "half a surrogate pair": (("a\ud800b",), {}, "INFO a\ufffdb"),
    "quotes": (("it's \\ \" E' ; -- $1 {}",), {}, "INFO it's \\ \" E' ; -- $1 {}"),
    "a message that cannot be read": ((Unreadable(),), {}, "INFO <Unreadable>"),
    "an argument that cannot be read": (("%s", Unreadable()), {}, "INFO '%s' <Unreadable>"),
    "an error": (("it",), {"exc_info": ValueError("no")}, "INFO it: ValueError: no"),
    "an error that cannot be read": (("it",), {"exc_info": Unreadable()}, "INFO it: Unreadable: <Unreadable>"),
    "an error as a tuple": (("it",), {"exc_info": (ValueError, ValueError("no"), None)}, "INFO it: ValueError: no"),
    "no error": (("it",), {"exc_info": True}, "INFO it"),
    "no error as a tuple": (("it",), {"exc_info": (None, None, None)}, "INFO it"),
}


@both
@pytest.mark.parametrize("kind", ODD)
async def test_whatever_is_logged_never_fails_the_task(
    make_cron: Make, db: Db, silent: Silent, kind: str, is_async: bool
) -> None:
    args, kwargs, expected = ODD[kind]

    def steps(run: Run) -> Steps:
        run.log.info(*args, **kwargs)
        yield run.driver.execute("CREATE TABLE written (a int)")

    outcome = await run_once(make_cron(), task_of(steps, is_async))
    assert outcome.failure is None
    lines = kept(db)
    assert lines is not None
    assert lines[0].rstrip() == expected
    assert len(lines) == 1
    assert value(db, "SELECT to_regclass('written')") == "written"


@both
async def test_debug_is_kept_only_where_it_is_enabled(make_cron: Make, db: Db, is_async: bool) -> None:
    def steps(run: Run) -> Steps:
        run.log.debug("hidden")
        run.log.info("shown")
        logging.getLogger("cronlock.task").setLevel(logging.DEBUG)
        run.log.debug("shown, too")
        logging.getLogger("cronlock.task").setLevel(logging.CRITICAL)
        run.log.info("kept, though no handler sees it")
        yield None

    try:
        await run_once(make_cron(), task_of(steps, is_async))
    finally:
        logging.getLogger("cronlock.task").setLevel(logging.NOTSET)
    assert kept(db) == ["INFO shown", "DEBUG shown, too", "INFO kept, though no handler sees it"]


async def test_records_still_go_to_logging_with_the_facts_and_the_callers_own(
    make_cron: Make, db: Db, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cronlock.task")

    async def task(run: Run) -> None:
        run.log.info("for %s", "acme", extra={"tenant": "acme", "task": "not this"})
        run.log.log(logging.ERROR, "by another way", stacklevel=1)
        helped(run.log)

    def helped(log: TaskLog) -> None:
        log.info("of the caller", stacklevel=2)

    outcome = await run_once(make_cron(), task)
    records = [record for record in caplog.records if record.name == "cronlock.task"]
    assert [record.getMessage() for record in records] == ["for acme", "by another way", "of the caller"]
    for record in records:
        assert record.__dict__["task"] == "once"
        assert record.__dict__["runId"] == outcome.run_id
        assert record.__dict__["instance"]
        assert (record.filename, record.funcName) == ("test_lines.py", "task")
    assert records[0].__dict__["tenant"] == "acme"


@both
async def test_many_threads_log_into_one_run(make_cron: Make, db: Db, is_async: bool) -> None:
    """Also at the first word of all, when the log is made."""
    start = threading.Barrier(8)

    def steps(run: Run) -> Steps:
        def work(number: int) -> None:
            start.wait()
            for line in range(10):
                run.log.info("%d-%d", number, line)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        yield run.driver.execute("SELECT 1")

    assert (await run_once(make_cron(), task_of(steps, is_async))).failure is None
    lines = kept(db)
    assert sorted(lines or []) == sorted(f"INFO {number}-{line}" for number in range(8) for line in range(10))


async def test_a_log_that_two_threads_ask_for_at_once_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what one of them says is lost."""
    from types import SimpleNamespace

    made = threading.Barrier(2)
    real = Lines.__init__

    def slow(self: Lines, scrub: Callable[[str], str]) -> None:
        try:
            made.wait(0.5)
        except threading.BrokenBarrierError:
            pass
        real(self, scrub)

    monkeypatch.setattr(Lines, "__init__", slow)
    call: Any = SimpleNamespace(task=SimpleNamespace(name="once"), key=None, payload=None, occurrence=None)
    execution: Any = SimpleNamespace(
        call=call, seat=None, run_id=1, attempt=1, instance="i", lines=None, has_logged=True
    )
    nobody: Any = None
    run = Run(execution, str, lambda said: None, nobody, nobody)
    threads = [threading.Thread(target=lambda word=word: run.log.info(word)) for word in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(line.split()[-1] for line in execution.lines.text().splitlines()) == ["one", "two"]


# -- what the database makes of it -----------------------------------------------------------------------------


@both
async def test_a_log_is_kept_whatever_the_task_has_set(make_cron: Make, db: Db, is_async: bool) -> None:
    def steps(run: Run) -> Steps:
        run.log.info("Ärger \\ 'x' 😀")
        yield run.driver.execute("SET standard_conforming_strings = off; SET client_encoding = 'latin1'")

    outcome = await run_once(make_cron(), task_of(steps, is_async))
    assert outcome.failure is None
    assert kept(db) == ["INFO Ärger \\ 'x' 😀"]


@pytest.fixture(params=["LATIN1", "SQL_ASCII"])
def narrow_url(server_url: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """A migrated database that does not hold every character."""
    name = f"cronlock_{request.param.lower()}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING {request.param} LOCALE 'C'")
        try:
            yield make_url(server_url, name) + "?client_encoding=UTF8"
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@both
@pytest.mark.parametrize("is_failing", [False, True])
async def test_a_log_that_the_database_cannot_hold_is_kept_escaped_and_fails_nothing(
    make_cron: Make, narrow_url: str, is_async: bool, is_failing: bool
) -> None:
    migrate(narrow_url, "cronlock")

    def steps(run: Run) -> Steps:
        run.log.info("in 東京, 😀")
        yield run.driver.execute("SELECT 1")
        if is_failing:
            raise ValueError("no")

    outcome = await run_once(make_cron(database_url=narrow_url), task_of(steps, is_async))
    assert outcome.status == ("failed" if is_failing else "completed"), outcome
    with psycopg.connect(narrow_url) as db:
        assert kept(db) == ["INFO in \\u6771\\u4eac, \\U0001f600"]


async def test_an_error_that_the_database_cannot_hold_does_not_keep_its_run_open(
    make_cron: Make, narrow_url: str
) -> None:
    migrate(narrow_url, "cronlock")

    async def task(run: Run) -> None:
        raise ValueError("in 東京")

    assert (await asyncio.wait_for(run_once(make_cron(database_url=narrow_url), task), 15)).status == "failed"
    with psycopg.connect(narrow_url) as db:
        assert value(db, "SELECT status FROM cronlock.run") == "failed"


async def test_a_task_that_never_logs_pays_nothing_for_it(make_cron: Make, db: Db) -> None:
    made: list[Any] = []

    async def task(run: Run) -> None:
        made.append(run._execution.lines)

    await run_once(make_cron(), task)
    assert made == [None]
    assert value(db, "SELECT log FROM cronlock.run") is None
