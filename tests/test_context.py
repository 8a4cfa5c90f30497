"""What a task sees: its payload, its results on the way out, its progress, whether its lock is still there."""

import asyncio
import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from typing import Annotated, Any
from uuid import UUID

import pytest
from pydantic import BaseModel, Field
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from cronlock import LockLost, PayloadInvalid, Run
from cronlock.jsontext import clip
from tests import SECRET, Db, Make, Steps, end_holders, holders, rows, run_once, task_of, until, value

pytestmark = pytest.mark.anyio
both = pytest.mark.parametrize("is_async", [True, False], ids=["async", "thread"])

CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@dataclass
class Point:
    x: int
    at: datetime


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


def mark(text: str) -> Callable[[Any], bool]:
    return lambda result: text in json.dumps(result)


RESULTS: dict[str, tuple[Any, Callable[[Any], bool]]] = {
    "none": (None, lambda result: result is None),
    "NaN": ([math.nan, math.inf, -math.inf], lambda result: result == ["NaN", "Infinity", "-Infinity"]),
    "huge": ("x" * 1_000_000, mark("truncated")),
    "huge list": (list(range(1_000_000)), mark("truncated")),
    "cyclic": (CYCLE, mark("inside itself")),
    "NUL": ("a\0b", lambda result: result == "a\ufffdb"),
    "lone surrogates": ("a\ud83d", lambda result: result == "a\ufffd"),
    "emoji": ("😀", lambda result: result == "😀"),
    "quotes": ("it's \\ \" 'E' %s %% {} $1 ; --", lambda result: result == "it's \\ \" 'E' %s %% {} $1 ; --"),
    "decimal": ({"total": Decimal("1.10")}, lambda result: result == {"total": "1.10"}),
    "large integer": (2**63 + 1, lambda result: result == 2**63 + 1),
    "endless integer": (10**5000, mark("not serialisable")),
    "uuid": (UUID(int=7), lambda result: result == str(UUID(int=7))),
    "dataclass": (Point(1, datetime(2026, 1, 1, tzinfo=UTC)), lambda result: result["x"] == 1),
    "bytes": (b"\xff", lambda result: isinstance(result, str)),
    "any object": (object(), mark("not serialisable")),
    "an object that cannot be shown": ({"a": Broken()}, mark("not serialisable")),
    "a coroutine function": (run_once, mark("not serialisable")),
    "deep": (json.loads("[" * 900 + "]" * 900), mark("levels deep")),
    "a key that is no string": ({1: 2, (1, 2): 3}, lambda result: result["1"] == 2),
}


@both
@pytest.mark.parametrize("kind", RESULTS)
async def test_a_run_completes_whatever_its_task_returns(make_cron: Make, db: Db, kind: str, is_async: bool) -> None:
    returned, is_told = RESULTS[kind]

    def steps(run: Run) -> Steps:
        yield run.driver.execute("CREATE TABLE written (a int)")
        return returned

    outcome = await run_once(make_cron(), task_of(steps, is_async))
    assert outcome.status == "completed"
    assert is_told(json.loads(outcome.result) if outcome.result else None)
    assert value(db, "SELECT result FROM cronlock.run") == outcome.result
    assert value(db, "SELECT to_regclass('written')") == "written"
    assert len(outcome.result or "") < 70_000


@both
async def test_progress_is_visible_from_outside_while_the_task_runs(make_cron: Make, db: Db, is_async: bool) -> None:
    query = "SELECT progress_done, progress_total FROM cronlock.run WHERE status = 'running'"

    def is_seen(done: int, total: int | None) -> bool:
        return db.execute(query).fetchone() == (done, total)

    async def awaiting(run: Run) -> None:
        for done, total in ((1, None), (2, 10), (3, 10)):
            run.progress(done, total)
            await until(partial(is_seen, done, total), f"progress {done}")

    def plain(run: Run) -> None:
        for done, total in ((1, None), (2, 10), (3, 10)):
            run.progress(done, total)
            asyncio.run(until(partial(is_seen, done, total), f"progress {done}"))

    outcome = await run_once(make_cron(), awaiting if is_async else plain)
    assert outcome.failure is None
    assert db.execute("SELECT status, progress_done FROM cronlock.run").fetchone() == ("completed", 3)


@both
async def test_progress_that_cannot_be_recorded_fails_neither_the_run_nor_others(
    make_cron: Make, db: Db, is_async: bool
) -> None:
    def steps(run: Run) -> Steps:
        run.progress(10**30, -(10**30))
        run.progress(5)
        yield run.driver.execute("SELECT 1")

    cron = make_cron()
    cron.task("large")(task_of(steps, is_async))
    cron.task("other")(task_of(steps, is_async))
    async with cron:
        outcomes = await asyncio.gather(cron.run("large"), cron.run("other"))
        assert {outcome.status for outcome in outcomes} == {"completed"}
        assert (await cron.run("large")).status == "completed"


async def test_progress_said_very_often_costs_few_messages(make_cron: Make, db: Db) -> None:
    cron = make_cron()
    counted: list[int] = []

    async def counting(run: Run) -> None:
        recorder = (await cron.open()).recorder
        before = recorder.messages
        for done in range(1000):
            run.progress(done, 1000)
        await until(lambda: value(db, "SELECT progress_done FROM cronlock.run") == 999, "the last is written")
        counted.append(recorder.messages - before)

    outcome = await run_once(cron, counting)
    assert outcome.failure is None
    assert counted[0] < 10


class Report(BaseModel):
    user_id: int
    kind: Annotated[str, Field(max_length=5)] = "daily"


@both
async def test_a_payload_arrives_as_the_annotated_type_or_is_refused_before_anything_runs(
    make_cron: Make, db: Db, is_async: bool
) -> None:
    seen: list[Report] = []

    async def awaiting(run: Run, payload: Report) -> None:
        assert run.payload is payload
        seen.append(payload)

    def plain(run: Run, payload: Report) -> None:
        assert run.payload is payload
        seen.append(payload)

    cron = make_cron()
    cron.task("report")(awaiting if is_async else plain)
    async with cron:
        for bad in ({}, {"user_id": "x"}, {"user_id": 1, "kind": "too long"}):
            with pytest.raises(PayloadInvalid) as refused:
                await cron.run("report", bad)
            assert refused.value.fields
        assert (await cron.run("report", {"user_id": "7"})).status == "completed"
    assert seen == [Report(user_id=7)]
    assert rows(db, "report") == [("completed", None)]


async def test_a_task_is_handed_objects_of_its_own_kind(make_cron: Make, db: Db) -> None:
    cron = make_cron()
    seen: dict[str, list[bool]] = {}

    @cron.task("awaiting")
    async def awaiting(run: Run) -> None:
        seen["awaiting"] = [isinstance(run.connection, AsyncConnection), isinstance(run.session, AsyncSession)]
        assert run.connection is run.connection
        assert run.session is run.session

    @cron.task("plain")
    def plain(run: Run) -> None:
        seen["plain"] = [isinstance(run.connection, Connection), isinstance(run.session, Session)]
        assert run.connection is run.connection
        assert run.session is run.session

    async with cron:
        for name in ("awaiting", "plain"):
            assert (await cron.run(name)).failure is None
    assert seen == {"awaiting": [True, True], "plain": [True, True]}


@both
async def test_check_says_that_the_lock_is_lost(make_cron: Make, db: Db, is_async: bool) -> None:
    seen: list[Any] = []

    def steps(run: Run) -> Steps:
        run.check()
        end_holders(db)
        assert not holders(db, "once")
        try:
            run.check()
        except LockLost as error:
            seen.append(error)
            raise
        yield

    outcome = await run_once(make_cron(), task_of(steps, is_async))
    assert len(seen) == 1
    assert outcome.status == "lost"


@both
async def test_log_lines_of_a_task_carry_its_name_and_its_run(
    make_cron: Make, db: Db, caplog: pytest.LogCaptureFixture, is_async: bool
) -> None:
    caplog.set_level(logging.INFO)

    def steps(run: Run) -> Steps:
        run.log.info("halfway")
        yield

    outcome = await run_once(make_cron(), task_of(steps, is_async))
    (record,) = [record for record in caplog.records if record.message == "halfway"]
    assert (record.__dict__["task"], record.__dict__["runId"]) == ("once", outcome.run_id)


@both
@pytest.mark.parametrize(
    "message",
    [
        "a\0b",
        "a\ud800b",
        "\udfff",
        "x" * 1_000_000,
        "it's \\ %s {} \n\t\x01 😀",
        "\ufeff\u202e",
        f"the secret is {SECRET}",
    ],
    ids=["NUL", "surrogate", "low surrogate", "1 MB", "quotes", "marks", "secret"],
)
async def test_an_error_of_any_text_is_recorded_clean_cut_and_without_secrets(
    make_cron: Make, db: Db, message: str, is_async: bool
) -> None:
    def steps(run: Run) -> Steps:
        yield run.driver.execute("CREATE TABLE written (a int)")
        raise ValueError(message)

    outcome = await run_once(make_cron(), task_of(steps, is_async))
    assert outcome.status == "failed"
    row = db.execute("SELECT error_type, error_message, error_traceback FROM cronlock.run").fetchone()
    assert row is not None
    kind, told, trace = row
    assert kind == "ValueError"
    assert outcome.failure is not None
    assert told == outcome.failure.message
    assert 0 < len(told) <= 500
    assert len(trace) <= 16_000
    for text in (told, trace):
        assert SECRET not in text
    if SECRET not in message:
        assert told == clip(message, 500)


async def test_progress_that_is_no_number_is_left_out_and_fails_nothing(make_cron: Make) -> None:
    cron = make_cron()

    @cron.task("talkative")
    async def talkative(run: Run) -> str:
        for done, total in (("half", None), (None, 3), (float("nan"), None), (1, "many")):
            run.progress(done, total)  # type: ignore[arg-type]  # what untyped code may say
        return "done"

    async with cron:
        assert (await cron.run("talkative")).status == "completed"
