"""`key="{tenant}"`: what it may say, how it is filled, and that each value has a lock of its own and no other."""

import asyncio
import dataclasses
import logging
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from enum import Enum
from itertools import count
from typing import Any
from uuid import UUID

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, SecretStr, computed_field

from cronlock import PayloadInvalid, RegistrationError, Run
from cronlock.attempts import GATES
from cronlock.errors import ConfigError
from cronlock.gate import Gate
from cronlock.keys import LONGEST, Key
from cronlock.migrate import migrate
from tests import Db, Make, Steps, advisory_locks, held, rows, serving, task_of, until, value
from tests.conftest import make_url

pytestmark = pytest.mark.anyio
both = pytest.mark.parametrize("is_async", [True, False], ids=["async", "thread"])
numbers = count(1)
KEYED = "hashtextextended(%s || chr(31) || %s, 0)"
"""The formula for people with psql: the lock's name, chr(31), the key."""


class Sync(BaseModel):
    tenant: str
    region: str = "eu"

    @computed_field  # type: ignore[prop-decorator]  # as pydantic documents it
    @property
    def shard(self) -> str:
        return self.tenant[:1]


class Loose(BaseModel):
    model_config = ConfigDict(extra="allow")


class Colour(Enum):
    RED = "red"


async def nothing(run: Run) -> None: ...


# -- what it may say -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "fields"),
    [
        ("{tenant}", ("tenant",)),
        ("tenant-{tenant}", ("tenant",)),
        ("{region}/{tenant}", ("region", "tenant")),
        ("{tenant}/{tenant}", ("tenant",)),
        ("{{{tenant}}}", ("tenant",)),
        ("{Mandant_ß}", ("Mandant_ß",)),
    ],
)
def test_a_template_names_fields(said: str, fields: tuple[str, ...]) -> None:
    assert Key.parse(said).fields == fields


@pytest.mark.parametrize(
    "said",
    ["", "tenant", "{}", "{0}", "{tenant.id}", "{tenant[id]}", "{tenant!r}", "{tenant:>10}", "{tenant:{width}}",
     "{tenant", "tenant}", "{{tenant}}", "{ tenant }", "{tenant}\0", "{tenant}\ud800", "{tenant}\n", "{tenant}\x1f",
     "{t}" + "x" * LONGEST, 7, b"{tenant}", ["{tenant}"]],
)  # fmt: skip
def test_a_template_that_names_no_field_or_anything_else_stops_the_registration(make_cron: Make, said: Any) -> None:
    with pytest.raises(ConfigError):
        Key.parse(said)
    with pytest.raises(RegistrationError, match=r"'nightly'.*key=.*such as key='{tenant}'"):
        make_cron().task("nightly", key=said)(nothing)


def test_a_field_that_the_model_does_not_have_is_named_at_the_registration(make_cron: Make) -> None:
    async def sync(run: Run, payload: Sync) -> None: ...

    with pytest.raises(RegistrationError) as refused:
        make_cron().task("sync", key="{region}/{tennant}")(sync)
    for text in ("'sync'", "names tennant,", "Sync", "region, shard, tenant"):
        assert text in str(refused.value)
    make_cron().task("sync", key="{region}/{shard}")(sync)


def test_a_model_that_takes_any_field_and_a_task_with_no_model_may_name_any(make_cron: Make) -> None:
    async def loose(run: Run, payload: Loose) -> None: ...
    async def plain(run: Run, payload: dict[str, Any]) -> None: ...

    cron = make_cron()
    cron.task("loose", key="{anything}")(loose)
    cron.task("plain", key="{anything}")(plain)
    cron.task("none", key="{anything}")(nothing)
    assert {task.key.fields for task in cron.tasks if task.key} == {("anything",)}


def test_a_lock_that_is_a_number_has_no_keys(make_cron: Make) -> None:
    with pytest.raises(RegistrationError, match=r"'nightly'.*a number is one lock"):
        make_cron().task("nightly", lock=42, key="{tenant}")(nothing)


def test_tasks_of_one_lock_must_have_the_same_key(make_cron: Make) -> None:
    cron = make_cron()
    cron.task("one", lock="shared", key="{tenant}")(nothing)
    cron.task("two", lock="shared", key="{tenant}")(nothing)
    for key in (None, "{customer}"):
        with pytest.raises(RegistrationError, match=r"'one' and 'three' have one lock \('shared'\)"):
            cron.task("three", lock="shared", key=key)(nothing)


def test_a_lock_name_with_the_separator_is_refused_where_a_key_follows_it(make_cron: Make) -> None:
    """ "a" with the key "b\\x1fc" and "a\\x1fb" with the key "c" would be one lock."""
    with pytest.raises(RegistrationError, match=r"'nightly'.*chr\(31\)"):
        make_cron().task("nightly", lock="a\x1fb", key="{tenant}")(nothing)


# -- how it is filled ------------------------------------------------------------------------------------------

FILLED: list[tuple[Any, str]] = [
    ("acme", "acme"),
    (7, "7"),
    ("7", "7"),
    (True, "True"),
    (Colour.RED, "red"),
    (UUID(int=7), str(UUID(int=7))),
    ("Ärger 😀 \\ 'x' %s {0} ; --", "Ärger 😀 \\ 'x' %s {0} ; --"),
    (" ", " "),
    ("x" * LONGEST, "x" * LONGEST),
    ("😀" * LONGEST, "😀" * LONGEST),
]


@pytest.mark.parametrize(("given_value", "key"), FILLED)
def test_a_key_is_filled_with_plain_values(given_value: Any, key: str) -> None:
    assert Key.parse("{tenant}").fill({"tenant": given_value}) == key


@dataclasses.dataclass
class Order:
    tenant: str


def test_fields_come_from_a_mapping_a_model_or_any_object() -> None:
    key = Key.parse("{tenant}")
    assert key.fill({"tenant": "acme"}) == key.fill(Sync(tenant="acme")) == key.fill(Order("acme")) == "acme"
    assert Key.parse("{shard}-{region}").fill(Sync(tenant="acme")) == "a-eu"
    assert key.fill(Loose.model_validate({"tenant": 7})) == "7"


class Unreadable:
    def __str__(self) -> str:
        raise RuntimeError("no words")


REFUSED: list[tuple[str, Any, str]] = [
    ("null", None, "missing"),
    ("empty", "", "value_error"),
    ("NUL", "a\0b", "value_error"),
    ("lone surrogate", "a\ud800", "value_error"),
    ("list", ["acme"], "value_error"),
    ("object", {"id": 1}, "value_error"),
    ("set", {"acme"}, "value_error"),
    ("bytes", b"acme", "value_error"),
    ("bytearray", bytearray(b"acme"), "value_error"),
    ("model", Sync(tenant="acme"), "value_error"),
    ("dataclass", Order("acme"), "value_error"),
    ("secret, which is shown as stars", SecretStr("acme"), "value_error"),
    ("201 characters", "x" * 201, "value_error"),
    ("a number that Python does not write", 10**5000, "value_error"),
    ("what raises", Unreadable(), "value_error"),
]


@pytest.mark.parametrize(("refused_value", "kind"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
@pytest.mark.parametrize("said", ["{region}/{tenant}", "{tenant}/{region}", "{tenant}"])
def test_a_value_that_no_key_can_be_made_of_is_refused_by_its_fields_name(
    refused_value: Any, kind: str, said: str
) -> None:
    with pytest.raises(PayloadInvalid) as refused:
        Key.parse(said).fill({"tenant": refused_value, "region": "eu"})
    ((field, message, found),) = [tuple(problem.values()) for problem in refused.value.fields]
    assert (field, found) == ("tenant", kind)
    assert "key" in message
    assert len(message) < 120


BAD = [
    ("{}", "missing"),
    ('{"tenant": null}', "missing"),
    ('{"tenant": ""}', "value_error"),
    ('{"tenant": ["acme"]}', "value_error"),
    ('{"tenant": {"id": 1}}', "value_error"),
    ('{"tenant": "' + "x" * 201 + '"}', "value_error"),
]


@pytest.mark.parametrize(("body", "kind"), BAD)
async def test_over_http_it_is_422_and_nothing_is_written(make_cron: Make, db: Db, body: str, kind: str) -> None:
    cron = make_cron()
    cron.task("sync", key="{tenant}")(nothing)
    async with serving(cron.app()) as client:
        answer = await client.post("/cron/sync", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 422, answer.text
        assert answer.json()["status"] == "unprocessable"
        assert [(field["field"], field["type"]) for field in answer.json()["fields"]] == [("tenant", kind)]
        assert (await client.get("/cron/sync?tenant=")).status_code == 422
        assert (await client.get("/cron/sync?tenant=a%00b")).status_code == 400, "as any NUL in a query"
    assert value(db, "SELECT count(*) FROM cronlock.run") == 0
    assert advisory_locks(db) == 0


# -- which lock it is ------------------------------------------------------------------------------------------


@asynccontextmanager
async def held_key(url: str, name: str, key: str) -> AsyncIterator[int]:
    """Another program holds the lock of this name and key, by the formula of the docs."""
    async with await psycopg.AsyncConnection.connect(url, application_name="psql") as connection:
        cursor = await connection.execute(
            f"SELECT pg_try_advisory_xact_lock({KEYED}), pg_backend_pid()",
            (name, key),
        )
        row = await cursor.fetchone()
        assert row is not None
        assert row[0] is True
        yield row[1]
        await connection.rollback()


@both
@pytest.mark.parametrize("key", ["acme", "Ärger 😀 \\ 'x' %s ; --", "x" * 200, "\x1f", "a\nb", "\\x61"])
async def test_the_lock_of_a_key_is_the_one_that_psql_takes_by_the_formula(
    make_cron: Make, db: Db, database_url: str, key: str, is_async: bool
) -> None:
    def steps(run: Run) -> Steps:
        query = f"SELECT pg_try_advisory_xact_lock({KEYED})"
        assert value(db, query, "sync", key) is False, "it is held"
        assert value(db, query, "sync", "another") is True
        assert run.key == key
        yield None

    cron = make_cron()
    cron.task("sync", key="{tenant}")(task_of(steps, is_async))
    async with cron:
        outcome = await cron.run("sync", {"tenant": key})
        assert outcome.failure is None
        async with held_key(database_url, "sync", key) as pid:
            for _ in range(2):  # by an attempt, and by asking first
                skipped = await cron.run("sync", {"tenant": key})
                assert (skipped.status, skipped.reason) == ("skipped", "already_running")
                assert skipped.holder is not None
                assert skipped.holder.pid == pid
            assert (await cron.run("sync", {"tenant": "another"})).status == "failed", "its task wants the other key"
        async with held(database_url, "sync"):
            assert (await cron.run("sync", {"tenant": key})).status == "completed", "the name alone is another lock"
    seen = db.execute("SELECT status, key FROM cronlock.run WHERE status <> 'failed' ORDER BY id").fetchall()
    assert seen == [("completed", key), ("skipped", key), ("skipped", key), ("completed", key)]
    numbers = "SELECT count(*) FROM cronlock.run WHERE lock_key <> hashtextextended(lock_name || chr(31) || key, 0)"
    assert value(db, numbers) == 0, "skips and runs name the same number"


async def test_a_key_is_the_same_under_a_role_that_reads_strings_the_old_way(
    make_cron: Make, db: Db, database_url: str
) -> None:
    cron = make_cron(database_url=f"{database_url}?options=-c%20standard_conforming_strings%3Doff")
    cron.task("sync", key="{tenant}")(nothing)
    async with cron:
        assert (await cron.run("sync", {"tenant": "Ärger \\ 'x'"})).status == "completed"
        async with held_key(database_url, "sync", "Ärger \\ 'x'"):
            assert (await cron.run("sync", {"tenant": "Ärger \\ 'x'"})).status == "skipped"


async def test_the_namespace_is_part_of_a_keys_lock(make_cron: Make, database_url: str) -> None:
    cron = make_cron(namespace="blue")
    cron.task("sync", key="{tenant}")(nothing)
    async with cron:
        async with held_key(database_url, "sync", "acme"):
            assert (await cron.run("sync", {"tenant": "acme"})).status == "completed"
        async with held_key(database_url, "blue:sync", "acme"):
            assert (await cron.run("sync", {"tenant": "acme"})).status == "skipped"


async def test_seven_and_the_text_seven_are_one_lock_on_every_server(make_cron: Make, db: Db) -> None:
    crons = [make_cron(), make_cron()]
    running, go = asyncio.Event(), asyncio.Event()

    async def sync(run: Run) -> None:
        running.set()
        await go.wait()

    for cron in crons:
        cron.task("sync", key="{tenant}")(sync)
    async with crons[0], crons[1], serving(crons[1].app()) as client:
        first = asyncio.create_task(crons[0].run("sync", {"tenant": 7}))
        await running.wait()
        answers = [
            (await client.get("/cron/sync?tenant=7")).json(),
            (await client.post("/cron/sync", json={"tenant": 7})).json(),
            (await client.post("/cron/sync", json={"tenant": "7"})).json(),
        ]
        run_id = value(db, "SELECT id FROM cronlock.run WHERE status = 'running'")
        go.set()
        assert (await first).status == "completed"
    assert [(body["status"], body["holder"]["runId"]) for body in answers] == [("skipped", run_id)] * 3


async def test_the_runs_of_different_keys_do_not_wait_for_each_other(make_cron: Make, db: Db) -> None:
    crons = [make_cron(pool_size=10) for _ in range(2)]
    inside = asyncio.Barrier(12)

    async def sync(run: Run) -> str | None:
        await asyncio.wait_for(inside.wait(), 10)
        return run.key

    for cron in crons:
        cron.task("sync", key="{tenant}")(sync)
    async with crons[0], crons[1]:
        outcomes = await asyncio.gather(*(crons[n % 2].run("sync", {"tenant": f"t-{n}"}) for n in range(12)))
    assert {outcome.status for outcome in outcomes} == {"completed"}
    assert {outcome.result for outcome in outcomes} == {f'"t-{n}"' for n in range(12)}


async def test_the_view_shows_the_holder_of_a_key(make_cron: Make, db: Db) -> None:
    cron = make_cron()

    async def sync(run: Run) -> list[Any]:
        query = "SELECT task, lock_name, run_id, lock_key FROM cronlock.lock_holder"
        return [list(row) for row in db.execute(query).fetchall()]

    cron.task("sync", key="{tenant}")(sync)
    async with cron:
        outcome = await cron.run("sync", {"tenant": "acme"})
    key = value(db, f"SELECT {KEYED}", "sync", "acme")
    assert outcome.result == f'[["sync","sync",{outcome.run_id},{key}]]'
    assert value(db, "SELECT lock_key FROM cronlock.task") is None, "its runs share no lock"
    assert value(db, "SELECT options ->> 'key' FROM cronlock.task") == "{tenant}"


@pytest.fixture
async def at_once(make_cron: Make) -> AsyncIterator[Any]:
    """Runs two keys at the same moment on two servers; gives the statuses."""
    crons = [make_cron(), make_cron()]
    inside: list[asyncio.Event] = []
    leave = asyncio.Event()

    async def sync(run: Run) -> None:
        inside[0].set()
        await leave.wait()

    for cron in crons:
        cron.task("sync", key="{tenant}")(sync)
    async with crons[0], crons[1]:

        async def two(one: str, other: str) -> list[str]:
            inside[:] = [asyncio.Event()]
            leave.clear()
            first = asyncio.create_task(crons[0].run("sync", {"tenant": one}))
            await inside[0].wait()
            second = asyncio.create_task(crons[1].run("sync", {"tenant": other}))
            done, _ = await asyncio.wait((second,), timeout=0.3 if one != other else 5)
            leave.set()
            assert (one == other) == bool(done)
            return [(await first).status, (await second).status]

        yield two


texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=200)
near = st.sampled_from(["a", "b", "A", "á", "a\u0301", " a", "a ", "a#2", "\x1f", "a\x1fb", "7", "07", "7.0", "\\x61"])


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(one=near | texts, other=near | texts)
def test_two_keys_exclude_each_other_if_they_are_equal_and_never_else(one: str, other: str, db: Db) -> None:
    """Over the whole of Unicode: what the server is sent gives one number for each text."""
    from cronlock.locks import text_of

    def number(key: str) -> int:
        query = b"SELECT hashtextextended(concat('sync'::text, chr(31), " + text_of(key) + b"), 0)"
        row = psycopg.ClientCursor(db).execute(query).fetchone()
        assert row is not None
        return int(row[0])

    assert number(one) == value(db, f"SELECT {KEYED}", "sync", one)
    assert (number(one) == number(other)) is (one == other)


@pytest.mark.parametrize(
    ("one", "other"), [("a", "b"), ("a", "a"), ("a", "A"), ("á", "a\u0301"), ("7", "07"), ("a", "a ")]
)
async def test_two_servers_keep_equal_keys_apart_and_no_others(at_once: Any, one: str, other: str) -> None:
    second = "skipped" if one == other else "completed"
    assert await at_once(one, other) == ["completed", second]


def test_two_hundred_thousand_tenants_have_as_many_locks(db: Db) -> None:
    """With 32 bits some would share one."""
    query = """SELECT count(DISTINCT {}) FROM generate_series(1, 200000) n"""
    assert value(db, query.format("hashtextextended('sync' || chr(31) || 'tenant-' || n, 0)")) == 200_000
    assert value(db, query.format("hashtext('sync' || chr(31) || 'tenant-' || n)")) < 200_000


async def test_tasks_that_share_a_lock_exclude_each_other_key_by_key(make_cron: Make, db: Db) -> None:
    cron, other = make_cron(), make_cron()
    running, go = asyncio.Event(), asyncio.Event()

    async def waiting(run: Run) -> None:
        running.set()
        await go.wait()

    for app in (cron, other):
        app.task("one", lock="shared", key="{tenant}")(waiting)
        app.task("two", lock="shared", key="{tenant}")(nothing)
    async with cron, other:
        first = asyncio.create_task(cron.run("one", {"tenant": "a"}))
        await running.wait()
        for app in (cron, other):
            assert (await app.run("two", {"tenant": "a"})).status == "skipped"
            assert (await app.run("two", {"tenant": "b"})).status == "completed"
        go.set()
        assert (await first).status == "completed"


# -- a database that does not hold every text ------------------------------------------------------------------


@pytest.fixture
def latin1_url(server_url: str) -> Iterator[str]:
    """A migrated database in LATIN1."""
    name = f"cronlock_latin1_{next(numbers)}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING LATIN1 LOCALE 'C'")
        try:
            yield make_url(server_url, name)
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


OPTIONS: list[dict[str, Any]] = [{}, {"min_interval": "1ms"}, {"max_concurrent": 2}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
async def test_a_key_that_the_database_cannot_hold_is_422(
    make_cron: Make, latin1_url: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    migrate(latin1_url, "cronlock")
    cron = make_cron(database_url=latin1_url)

    async def sync(run: Run) -> str | None:
        return run.key

    cron.task("sync", key="{tenant}", **options)(sync)
    async with serving(cron.app()) as client:
        answer = await client.get("/cron/sync?tenant=Ärger")
        assert answer.json()["result"] == "Ärger"
        for headers in ({}, {"idempotency-key": "one"}):
            for _ in range(2):
                answer = await client.get("/cron/sync?tenant=東京", headers=headers)
                assert answer.status_code == 422, answer.text
                (field,) = answer.json()["fields"]
                assert field["field"] == "tenant"
                assert "database" in field["message"]
        answer = await client.get("/cron/sync?tenant=fine", headers={"idempotency-key": "one"})
        assert answer.json()["status"] == "completed"
    with psycopg.connect(latin1_url) as latin1:
        assert [key for (key,) in latin1.execute("SELECT key FROM cronlock.run ORDER BY id")] == ["Ärger", "fine"]
        assert advisory_locks(latin1) == 0


async def test_an_occurrence_that_the_database_cannot_hold_is_said_to_be_it(make_cron: Make, latin1_url: str) -> None:
    migrate(latin1_url, "cronlock")
    cron = make_cron(database_url=latin1_url)
    cron.task("sync", key="{tenant}")(nothing)
    cron.task("plain")(nothing)
    async with cron:
        for name, payload in (("sync", {"tenant": "acme"}), ("plain", {})):
            with pytest.raises(PayloadInvalid) as refused:
                await cron.run(name, payload, idempotency_key="東京")
            assert [field["field"] for field in refused.value.fields] == ["idempotency_key"]


# -- gates -----------------------------------------------------------------------------------------------------


async def test_gates_do_not_grow_with_the_keys(make_cron: Make, db: Db) -> None:
    """100,000 keys: what is kept of them is bounded, in number and in memory."""
    cron = make_cron()
    cron.task("sync", key="{tenant}")(nothing)
    async with cron:
        assert (await cron.run("sync", {"tenant": "first"})).status == "completed"
        attempts = (await cron.open()).runner.attempts
        most = 0
        task = cron.tasks.get("sync")
        tracemalloc.start()
        try:
            for number in range(100_000):
                attempts.gate_of(task, f"tenant-{number}")
                most = max(most, len(attempts.gates))
            kept, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most <= 2 * GATES
        assert peak < 4_000_000, (kept, peak)
        for number in range(3 * GATES // 10):  # through the whole of it
            assert (await cron.run("sync", {"tenant": f"again-{number}"})).status == "completed"
        assert len(attempts.gates) <= 2 * GATES


@pytest.mark.parametrize("is_contended", [True, False])
async def test_a_call_whose_gate_was_let_go_while_it_asked_joins_the_one_of_that_moment(
    make_cron: Make, db: Db, database_url: str, is_contended: bool
) -> None:
    """Else one lock had two gates, and what one of them knows the other would not."""
    cron = make_cron()
    may_end = asyncio.Event()
    may_end.set()

    @cron.task("sync", key="{tenant}", min_interval=None if is_contended else "1ms")
    async def waiting(run: Run) -> None:
        await may_end.wait()

    made: list[Gate] = []
    async with cron:
        await cron.run("sync", {"tenant": "x"})
        may_end.clear()
        attempts = (await cron.open()).runner.attempts
        attempts.gates.clear()
        async with held_key(database_url, "sync", "x"):
            assert (await cron.run("sync", {"tenant": "x"})).status == "skipped"
            (gate,) = attempts.gates.values()
            db.execute("BEGIN; LOCK TABLE cronlock.run IN SHARE MODE")  # the question waits
            call = asyncio.create_task(cron.run("sync", {"tenant": "x"}))
            waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'cronlock.run'::regclass"
            await until(lambda: value(db, waits), "the call asks first")
        task = cron.tasks.get("sync")
        made.extend(attempts.gate_of(task, f"other-{number}") for number in range(3 * GATES))
        of_that_moment = attempts.gate_of(task, "x")
        assert of_that_moment is not gate, "nobody used it"
        db.execute("COMMIT")
        await until(lambda: of_that_moment.running, "it runs")
        may_end.set()
        assert (await call).status == "completed"


async def test_a_task_with_no_other_option_than_a_key_says_one_line_a_run(
    make_cron: Make, db: Db, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cronlock.run")
    cron = make_cron()
    cron.task("sync", key="{tenant}")(nothing)
    async with cron:
        await cron.run("sync", {"tenant": "acme"})
    assert [record.getMessage() for record in caplog.records] == ["sync started", "sync completed"]
    assert rows(db, "sync") == [("completed", None)]
    key = value(db, f"SELECT {KEYED}", "sync", "acme")
    assert {record.__dict__["lockKey"] for record in caplog.records} == {key}
