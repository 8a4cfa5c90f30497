"""Which errors are worth another attempt, how long it waits, and what is kept of those that failed."""

import itertools
import random
import urllib.error
from datetime import timedelta
from email.message import Message
from typing import Any

import httpx2
import psycopg
import pytest
from psycopg import errors
from psycopg_pool import PoolTimeout
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as SqlTimeout

from cronlock import Cancel, LockLost, Retry, Run, Unavailable, retry
from cronlock.errors import IdempotencyKeyInUse, RegistrationError
from tests import Db, Make, until, value
from tests.working import all_ended, attempts, status, working


def http(code: int, **headers: str) -> httpx2.HTTPStatusError:
    request = httpx2.Request("GET", "http://supplier.example")
    return httpx2.HTTPStatusError("no", request=request, response=httpx2.Response(code, headers=headers))


RequestsConnectionError = type("ConnectionError", (Exception,), {"__module__": "requests.exceptions"})
AioConnectionError = type("ClientConnectionError", (Exception,), {"__module__": "aiohttp.client_exceptions"})
OfAsyncpg = type("ConnectionDoesNotExistError", (Exception,), {"__module__": "asyncpg.exceptions", "sqlstate": "08003"})
OfRequests = type("HTTPError", (Exception,), {"__module__": "requests.exceptions"})


def of_requests(code: int) -> Any:
    error: Any = OfRequests("no")
    error.response = type("Response", (), {"status_code": code, "headers": {"retry-after": "7"}})()
    return error


def wrapped(error: Exception) -> DBAPIError:
    return DBAPIError("SELECT 1", None, error)


TRANSIENT = {
    "a timeout": TimeoutError(),
    "asyncio's timeout": TimeoutError(),
    "a refused connection": ConnectionRefusedError(),
    "a reset": ConnectionResetError(),
    "Retry": Retry("later"),
    "a deadlock": errors.DeadlockDetected("x"),
    "a conflict": errors.SerializationFailure("x"),
    "an operator": errors.AdminShutdown("x"),
    "a cancelled statement": errors.QueryCanceled("x"),
    "too many connections": errors.TooManyConnections("x"),
    "a full disk": errors.DiskFull("x"),
    "a broken connection": psycopg.OperationalError("the connection is closed"),
    "no pooled connection": PoolTimeout("x"),
    "one of SQLAlchemy's pool": SqlTimeout("x"),
    "a wrapped conflict": wrapped(errors.SerializationFailure("x")),
    "a wrapped broken connection": OperationalError("SELECT 1", None, psycopg.OperationalError("closed")),
    "asyncpg's": OfAsyncpg("x"),
    "a wrapped one of asyncpg's": wrapped(OfAsyncpg("x")),
    "429": http(429),
    "500": http(500),
    "503": http(503),
    "503 of requests": of_requests(503),
    "503 of urllib": urllib.error.HTTPError("http://a.example", 503, "no", Message(), None),
    "httpx2's connection": httpx2.ConnectError("x"),
    "httpx2's timeout": httpx2.ReadTimeout("x"),
    "requests' connection": RequestsConnectionError("x"),
    "aiohttp's connection": AioConnectionError("x"),
    "urllib's": urllib.error.URLError("x"),
    "no database": Unavailable("database_unavailable", "x"),
    "a lost lease": LockLost("x"),
    "a key in use": IdempotencyKeyInUse("k"),
}
FINAL = {
    "a fault of the code": ValueError("x"),
    "Cancel": Cancel(),
    "a duplicate": errors.UniqueViolation("x"),
    "a wrapped duplicate": wrapped(errors.UniqueViolation("x")),
    "bad SQL": errors.SyntaxError("x"),
    "no such table": errors.UndefinedTable("x"),
    "a division": errors.DivisionByZero("x"),
    "404": http(404),
    "422": http(422),
    "404 of requests": of_requests(404),
    "SystemExit": SystemExit(503),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "an exit code": type("Odd", (Exception,), {"code": 3})(),
}


@pytest.mark.parametrize("what", TRANSIENT)
def test_what_may_pass_by_itself_is_tried_again(what: str) -> None:
    assert retry.is_transient(TRANSIENT[what])


@pytest.mark.parametrize("what", FINAL)
def test_what_will_not_pass_is_not_tried_again(what: str) -> None:
    assert not retry.is_transient(FINAL[what])


def test_a_list_of_the_tasks_own_widens_and_narrows() -> None:
    assert retry.is_transient(KeyError("x"), (LookupError,))
    assert not retry.is_transient(ValueError("x"), (LookupError,))
    assert not retry.is_transient(TimeoutError(), (LookupError,))
    assert not retry.is_transient(http(503), ())
    # What is no fault of the task's, and what it asks for, is not for its list to say.
    for always in (errors.SerializationFailure("x"), OfAsyncpg("x"), Retry(), LockLost("x")):
        assert retry.is_transient(always, (LookupError,))
    assert not retry.is_transient(Cancel(), (Exception,))


@pytest.mark.parametrize("attempt", [0, 1, 30, 31, 62, 63, 64, 1023, 1100, 2000])
@pytest.mark.parametrize("base", [10.0, 0.1, 0.0, 1e-9, 3600.0])
def test_a_delay_lies_between_nothing_and_its_limit_at_every_attempt(attempt: int, base: float) -> None:
    # Case Q17.
    random.seed(17)
    limit = min(3600.0, base * 2.0 ** min(max(0, attempt - 1), 1000))
    found = [retry.delay(attempt, base, 3600.0) for _ in range(2000)]
    assert min(found) >= min(0.05, 3600.0)
    assert max(found) <= max(limit, 0.05) + 1e-6
    if limit > 1:
        assert max(found) > 0.9 * limit
        assert min(found) < 0.1 * limit + 0.05


def test_delays_grow_until_the_cap_and_stay_there() -> None:
    random.seed(17)
    means = [sum(retry.delay(n, 1.0, 64.0) for _ in range(3000)) / 3000 for n in range(1, 12)]
    for before, after in itertools.pairwise(means[:7]):
        assert after > 1.5 * before
    assert all(28 < mean < 36 for mean in means[6:])


@pytest.mark.parametrize(("base", "cap"), [(-1.0, 1.0), (1.0, -1.0), (float("nan"), 1.0), (1.0, float("nan"))])
def test_a_base_or_a_cap_that_is_negative_or_no_number_is_refused(base: float, cap: float) -> None:
    with pytest.raises(ValueError, match="numbers of seconds"):
        retry.delay(1, base, cap)


@pytest.mark.parametrize("option", ["retry_delay", "retry_cap"])
@pytest.mark.parametrize("wrong", [-1, 0, "soon", timedelta(days=-1), float("nan"), True])
def test_a_wrong_delay_is_refused_at_registration(make_cron: Make, option: str, wrong: Any) -> None:
    with pytest.raises(RegistrationError, match=option):
        make_cron().task("work", **{option: wrong})(lambda run: None)


@pytest.mark.parametrize("wrong", [ValueError("x"), "ValueError", [1], int, 5])
def test_what_is_no_exception_type_is_refused_at_registration(make_cron: Make, wrong: Any) -> None:
    with pytest.raises(RegistrationError, match="retry_on must be exception types"):
        make_cron().task("work", retry_on=wrong)(lambda run: None)


def test_what_the_other_side_asks_for_is_waited_for() -> None:
    assert retry.after(http(429, **{"retry-after": "30"}), 1) == 30
    assert retry.after(of_requests(503), 1) == 7
    assert retry.after(http(429, **{"retry-after": "999999"}), 1, 1.0, 60.0) == 60
    assert 0 < retry.after(http(429, **{"retry-after": "-5"}), 1) < 1
    assert retry.after(http(429, **{"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}), 1, 1.0) <= 1
    assert retry.after(Retry(after=timedelta(minutes=2)), 5) == 120


@pytest.mark.anyio
async def test_a_job_is_tried_until_it_works_and_every_failed_attempt_is_kept(make_cron: Make, db: Db) -> None:
    cron = make_cron()

    @cron.task("work", mode="guard", retry_delay="10ms", retry_cap="50ms")
    async def work(run: Run) -> int:
        if run.attempt == 1:
            raise TimeoutError("the supplier is slow")
        if run.attempt == 2:
            raise errors.SerializationFailure("could not serialize")
        return run.attempt

    async with working(cron):
        job = await cron.enqueue(None, "work")
        assert await all_ended(db) == {"completed": 1}
    assert status(db, job.job_id) == ("completed", 3, None)
    assert attempts(db, job.job_id) == [(1, "failed", "TimeoutError"), (2, "failed", "SerializationFailure")]
    query = "SELECT error_message, error_sqlstate, error_traceback LIKE '%%Traceback%%' FROM cronlock.job_attempt"
    assert db.execute(f"{query} ORDER BY attempt").fetchall() == [
        ("the supplier is slow", None, True), ("could not serialize", "40001", True),
    ]  # fmt: skip


@pytest.mark.anyio
@pytest.mark.parametrize("most", [1, 3])
async def test_a_job_has_failed_when_its_attempts_are_used_up(make_cron: Make, db: Db, most: int) -> None:
    cron = make_cron()

    @cron.task("work", mode="guard", max_attempts=most, retry_delay="10ms")
    async def work(run: Run) -> None:
        raise ConnectionError(f"attempt {run.attempt}")

    async with working(cron):
        job = await cron.enqueue(None, "work")
        assert await all_ended(db) == {"failed": 1}
    assert status(db, job.job_id) == ("failed", most, "ConnectionError")
    assert value(db, "SELECT error_message FROM cronlock.job_history") == f"attempt {most}"
    assert attempts(db, job.job_id) == [(n, "failed", "ConnectionError") for n in range(1, most + 1)]


@pytest.mark.anyio
async def test_retry_and_cancel_say_how_a_job_goes_on(make_cron: Make, db: Db) -> None:
    cron = make_cron()

    @cron.task("later")
    async def later(run: Run) -> None:
        await run.driver.execute("CREATE TABLE left_behind (a int)")
        raise Retry("not ready", after=30)

    @cron.task("never")
    async def never(run: Run) -> None:
        await run.driver.execute("CREATE TABLE left_behind (a int)")
        raise Cancel("nobody wants it")

    async with working(cron):
        waits = await cron.enqueue(None, "later")
        ended = await cron.enqueue(None, "never")
        await until(lambda: value(db, "SELECT count(*) FROM cronlock.job_waiting") == 1, "it waits")
        await until(lambda: status(db, ended.job_id) == ("cancelled", 1, "Cancel"), "it is cancelled")
    assert status(db, waits.job_id) == ("queued", 1, None)
    assert value(db, "SELECT run_at - clock_timestamp() BETWEEN interval '20 s' AND interval '30 s'"
                     " FROM cronlock.job_waiting") is True  # fmt: skip
    assert attempts(db, waits.job_id) == [(1, "failed", "Retry")]
    assert attempts(db, ended.job_id) == [(1, "cancelled", "Cancel")]
    assert value(db, "SELECT to_regclass('left_behind')") is None


@pytest.mark.anyio
async def test_a_key_for_effects_is_the_same_in_every_attempt_and_another_in_every_job(make_cron: Make, db: Db) -> None:
    cron = make_cron()
    seen: dict[int, list[str]] = {}

    @cron.task("work", mode="guard", retry_delay="10ms")
    async def work(run: Run) -> None:
        seen.setdefault(run.id, []).append(run.effect_key("charge"))
        if run.attempt < 3:
            raise TimeoutError

    async with working(cron):
        for _ in range(2):
            await cron.enqueue(None, "work")
        assert await all_ended(db) == {"completed": 2}
    assert [len(keys) for keys in seen.values()] == [3, 3]
    assert [len(set(keys)) for keys in seen.values()] == [1, 1]
    assert len({keys[0] for keys in seen.values()}) == 2
