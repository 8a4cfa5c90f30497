"""Occurrences: a delivery or a tick that has completed is not run again, by any server, ever after."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import psycopg
import pytest

from cronlock import Cancel, Cronlock, Run
from tests import AUTH, Db, Make, Steps, advisory_locks, end_holders, rows, serving, task_of, until, value
from tests.commands import cronlock, served

pytestmark = pytest.mark.anyio
both = pytest.mark.parametrize("is_async", [True, False], ids=["async", "thread"])
OCCURRENCES = "SELECT occurrence FROM cronlock.run ORDER BY id DESC LIMIT 1"


async def nothing(run: Run) -> None: ...


def told(db: Db, run_id: int) -> Any:
    """What a row says of its occurrence."""
    query = "SELECT status, reason, occurrence, attempt, blocked_by FROM cronlock.run WHERE id = %s"
    return db.execute(query, (run_id,)).fetchone()


# -- where it comes from ---------------------------------------------------------------------------------------

SCHEDULER = [("x-cloudscheduler-jobname", "nightly-eu"), ("x-cloudscheduler-scheduletime", "2026-11-30T12:00:00Z")]
NAMED: dict[str, tuple[list[tuple[str, str]], str | None]] = {
    "none": ([], None),
    "quoted": ([("idempotency-key", '"8e03978e-40d5"')], "8e03978e-40d5"),
    "bare": ([("idempotency-key", "8e03978e-40d5")], "8e03978e-40d5"),
    "escaped quotes": ([("idempotency-key", r'"a\"b\\c"')], r'a"b\c'),
    "quotes inside": ([("idempotency-key", 'a"b')], 'a"b'),
    "one quote": ([("idempotency-key", '"')], '"'),
    "spaces": ([("idempotency-key", '"  a b "')], "  a b "),
    "white space around": ([("idempotency-key", "  a  ")], "a"),
    "twice the same": ([("idempotency-key", "a"), ("Idempotency-Key", "a")], "a"),
    "255 characters": ([("idempotency-key", "x" * 255)], "x" * 255),
    "signs": ([("idempotency-key", "%s {} $1 ' ; -- \\")], "%s {} $1 ' ; -- \\"),
    "QStash": ([("upstash-message-id", "msg_7")], "msg_7"),
    "Cloud Scheduler": (SCHEDULER, "nightly-eu/2026-11-30T12:00:00+00:00"),
    "Cloud Scheduler with no time": (SCHEDULER[:1], None),
    "Cloud Scheduler with no name": (SCHEDULER[1:], None),
    "Cloud Scheduler with a time that is none": ([SCHEDULER[0], ("x-cloudscheduler-scheduletime", "soon")], None),
    "Cloud Scheduler with a time of no zone": (
        [SCHEDULER[0], ("x-cloudscheduler-scheduletime", "2026-11-30T12:00:00")],
        None,
    ),
    "Cloud Scheduler with a zone that the server does not know": (
        [SCHEDULER[0], ("x-cloudscheduler-scheduletime", "2026-11-30T12:00:00.123456789+20:00")],
        "nightly-eu/2026-11-29T16:00:00.123456+00:00",
    ),
    "Cloud Scheduler before all time": (
        [SCHEDULER[0], ("x-cloudscheduler-scheduletime", "0001-01-01T00:00+23:00")],
        None,
    ),
    "Cloud Scheduler in a year that not every time zone has": (
        [SCHEDULER[0], ("x-cloudscheduler-scheduletime", "0001-01-01T00:00Z")],
        None,
    ),
    "a key goes before QStash": ([("upstash-message-id", "msg_7"), ("idempotency-key", "a")], "a"),
    "QStash goes before Cloud Scheduler": ([*SCHEDULER, ("upstash-message-id", "msg_7")], "msg_7"),
    "Vercel names none": ([("x-vercel-cron-schedule", "* * * * *")], None),
}


@pytest.mark.parametrize("kind", NAMED)
async def test_the_occurrence_is_what_the_headers_name_in_this_order(make_cron: Make, db: Db, kind: str) -> None:
    headers, expected = NAMED[kind]
    cron = make_cron()

    async def sync(run: Run) -> str | None:
        return run.occurrence

    cron.task("sync")(sync)
    async with serving(cron.app()) as client:
        for status in ("completed", "completed" if expected is None else "skipped"):
            body = (await client.post("/cron/sync", headers=[*AUTH.items(), *headers])).json()
            assert body["status"] == status, body
            if status == "completed":
                assert body["result"] == expected
            assert value(db, OCCURRENCES) == expected
    if kind == "Cloud Scheduler":
        query = "SELECT DISTINCT scheduled_for = '2026-11-30 12:00+00' FROM cronlock.run"
        assert db.execute(query).fetchall() == [(True,)]


REFUSED = {
    "empty": [("idempotency-key", "")],
    "empty in quotes": [("idempotency-key", '""')],
    "blank": [("idempotency-key", "   ")],
    "256 characters": [("idempotency-key", "x" * 256)],
    "two": [("idempotency-key", "a"), ("idempotency-key", "b")],
    "not ASCII": [("idempotency-key", "é")],
    "a control character": [("idempotency-key", "a\x01b")],
    "QStash's too long": [("upstash-message-id", "x" * 256)],
}


@pytest.mark.parametrize("kind", REFUSED)
async def test_a_key_that_names_no_occurrence_is_400_and_nothing_runs(make_cron: Make, db: Db, kind: str) -> None:
    cron = make_cron()
    cron.task("sync")(nothing)
    headers = [(name.encode(), text.encode()) for name, text in [*AUTH.items(), *REFUSED[kind]]]
    async with serving(cron.app()) as client:
        answer = await client.post("/cron/sync", headers=headers)
    assert answer.status_code == 400, answer.text
    assert "dempotency-Key" in answer.json()["reason"] or "Upstash-Message-Id" in answer.json()["reason"]
    assert value(db, "SELECT count(*) FROM cronlock.run") == 0


@pytest.mark.parametrize("key", ["", "x" * 256, "a\0b", "a\nb", "\ud800", 7, b"a"])
async def test_a_key_from_code_that_names_no_occurrence_is_refused(make_cron: Make, db: Db, key: Any) -> None:
    cron = make_cron()
    cron.task("sync")(nothing)
    async with cron:
        with pytest.raises(ValueError, match="the idempotency key"):
            await cron.run("sync", idempotency_key=key)
        assert (await cron.run("sync", idempotency_key="Ärger 😀")).status == "completed"
        assert (await cron.run("sync", idempotency_key="Ärger 😀")).reason == "duplicate"


def test_the_command_names_an_occurrence(db: Db, database_url: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "from cronlock import Cronlock\ncron = Cronlock()\n@cron.task('sync')\ndef sync(run): return run.occurrence\n"
    )

    def run(*arguments: str) -> "tuple[int, Any, str]":
        done = cronlock("run", "shop:cron", "sync", *arguments, cwd=tmp_path, DATABASE_URL=database_url)
        return done.returncode, json.loads(done.stdout or "null"), done.stderr

    code, first, _ = run("--idempotency-key", "deploy-7")
    assert (code, first["status"], first["result"]) == (0, "completed", "deploy-7")
    code, second, _ = run("--idempotency-key", "deploy-7", "--fail-on-skip")
    assert (code, second["reason"], second["holder"]) == (6, "duplicate", {"runId": first["runId"]})
    code, nothing_ran, error = run("--idempotency-key", "")
    assert (code, nothing_ran) == (2, None)
    assert "1 to 255 characters" in error
    assert value(db, "SELECT count(*) FROM cronlock.run") == 2


# -- completed once --------------------------------------------------------------------------------------------

KINDS: list[dict[str, Any]] = [
    {},
    {"max_concurrent": 3},
    {"key": "{tenant}"},
    {"key": "{tenant}", "max_concurrent": 2},
    {"min_interval": "1ms"},
    {"mode": "guard"},
]


@pytest.mark.parametrize("options", KINDS, ids=str)
async def test_what_has_completed_is_a_duplicate_everywhere_and_days_later(
    make_cron: Make, db: Db, options: dict[str, Any]
) -> None:
    ran: list[int] = []

    async def sync(run: Run) -> None:
        ran.append(run.id)

    async def call(key: str) -> Any:
        cron = make_cron()
        cron.task("sync", **options)(sync)
        async with serving(cron.app()) as client:  # a server of its own each time
            answer = await client.get("/cron/sync?tenant=acme&on_skip=409", headers={"idempotency-key": key})
            return answer.status_code, answer.json()

    _, first = await call("one")
    assert first["status"] == "completed"
    for _ in range(2):
        code, body = await call("one")
        assert (code, body["reason"], body["holder"]) == (409, "duplicate", {"runId": first["runId"]})
        assert told(db, body["runId"]) == ("skipped", "duplicate", "one", 1, first["runId"])
    assert (await call("two"))[1]["status"] == "completed"
    db.execute(
        "UPDATE cronlock.run SET started_at = now() - '20 days'::interval, finished_at = now() - '20 days'::interval"
    )
    assert (await call("one"))[1]["holder"] == {"runId": first["runId"]}
    assert len(ran) == 2
    assert advisory_locks(db) == 0


async def test_an_occurrence_is_remembered_as_long_as_its_run_is_kept(make_cron: Make, db: Db) -> None:
    cron = make_cron()
    cron.task("sync")(nothing)
    async with cron:
        first = await cron.run("sync", idempotency_key="one")
        assert (await cron.run("sync", idempotency_key="one")).reason == "duplicate"
        db.execute("DELETE FROM cronlock.run WHERE id = %s", (first.run_id,))
        again = await cron.run("sync", idempotency_key="one")
        assert again.status == "completed"
        assert told(db, again.run_id) == ("completed", None, "one", 1, None)


async def test_an_occurrence_belongs_to_its_task(make_cron: Make, db: Db) -> None:
    cron = make_cron()
    for name in ("one", "two"):
        cron.task(name, lock="shared")(nothing)
    async with cron:
        outcomes = [await cron.run(name, idempotency_key="a") for name in ("one", "two", "one")]
    assert [outcome.reason for outcome in outcomes] == [None, None, "duplicate"]


@pytest.mark.parametrize("schema", ["cronlock", "other"])
async def test_installations_in_one_database_do_not_know_each_others_occurrences(
    make_cron: Make, db: Db, database_url: str, schema: str
) -> None:
    """The same key, at the same moment, in two namespaces: nobody waits for the other."""
    from cronlock.migrate import migrate

    if schema != "cronlock":
        migrate(database_url, schema)
    crons = [make_cron(namespace="blue"), make_cron(namespace="green", schema_name=schema)]
    running, go = asyncio.Event(), asyncio.Event()

    async def sync(run: Run) -> None:
        running.set()
        await go.wait()

    crons[0].task("sync")(sync)
    crons[1].task("sync" if schema == "other" else "sync-too")(nothing)
    async with crons[0], crons[1]:
        first = asyncio.create_task(crons[0].run("sync", idempotency_key="one"))
        await running.wait()
        second = await crons[1].run("sync" if schema == "other" else "sync-too", idempotency_key="one")
        assert second.status == "completed"
        go.set()
        assert (await first).status == "completed"


@both
@pytest.mark.parametrize("options", KINDS[:4], ids=str)
async def test_the_same_occurrence_twice_at_once_runs_once(
    make_cron: Make, db: Db, options: dict[str, Any], is_async: bool
) -> None:
    """Over two servers, though there is a free slot; afterwards it is a duplicate."""
    crons = [make_cron(), make_cron()]
    inside: list[int] = []

    def steps(run: Run) -> Steps:
        inside.append(run.id)
        yield run.driver.execute("SELECT pg_advisory_lock_shared(1, 1)")

    for cron in crons:
        cron.task("sync", **options)(task_of(steps, is_async))
    db.execute("SELECT pg_advisory_lock(1, 1)")
    payload = {"tenant": "acme"}
    async with crons[0], crons[1]:
        first = asyncio.create_task(crons[0].run("sync", payload, idempotency_key="one"))
        await until(lambda: inside, "it runs")
        for cron in (*crons, *crons):
            other = await cron.run("sync", payload, idempotency_key="one")
            assert (other.status, other.reason) == ("skipped", "already_running")
            assert other.holder is not None
            assert other.holder.run_id == inside[0]
            assert other.holder.started_at is not None
            assert told(db, other.run_id) == ("skipped", "already_running", "one", 1, inside[0])
        db.execute("SELECT pg_advisory_unlock(1, 1)")
        assert (await first).status == "completed"
        for cron in crons:
            other = await cron.run("sync", payload, idempotency_key="one")
            assert (other.reason, other.holder and other.holder.run_id) == ("duplicate", inside[0])
    assert len(inside) == 1


@pytest.mark.parametrize("is_full", [False, True])
async def test_an_occurrence_has_a_lock_of_its_own_beside_the_slot(
    make_cron: Make, db: Db, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    """Whoever asked before the first run was there must not have the free slot."""
    crons = [make_cron(), make_cron()]
    inside: list[int] = []
    go, begun = asyncio.Event(), asyncio.Event()

    async def sync(run: Run) -> None:
        inside.append(run.id)
        await go.wait()

    for cron in crons:
        cron.task("sync", max_concurrent=1 if is_full else 2)(sync)
    async with crons[0], crons[1]:
        attempts = (await crons[1].open()).runner.attempts

        async def ask(*arguments: Any) -> None:
            await begun.wait()

        monkeypatch.setattr(attempts.skips, "ask", ask)  # it has seen nobody
        calls = [asyncio.create_task(crons[1].run("sync", idempotency_key="one")) for _ in range(20)]
        first = asyncio.create_task(crons[0].run("sync", idempotency_key="one"))
        await until(lambda: inside, "one runs")
        begun.set()
        await asyncio.wait(calls, timeout=10)
        go.set()
        others = await asyncio.gather(*calls)
        assert (await first).status == "completed"
    assert len(inside) == 1
    assert {(other.reason, other.holder and other.holder.run_id) for other in others} == {
        ("already_running", inside[0])
    }


async def test_an_occurrence_may_be_named_like_the_key_of_a_run(make_cron: Make, db: Db) -> None:
    cron = make_cron()
    go = asyncio.Event()

    async def sync(run: Run) -> None:
        if run.occurrence is None:
            await go.wait()

    cron.task("sync", key="{tenant}")(sync)
    async with cron:
        keeping = asyncio.create_task(cron.run("sync", {"tenant": "acme"}))
        await until(lambda: rows(db, "sync"), "the first run began")
        other = await cron.run("sync", {"tenant": "globex"}, idempotency_key="acme")
        go.set()
        assert (other.status, (await keeping).status) == ("completed", "completed")


async def test_a_run_never_goes_on_under_the_lock_of_another_occurrence(make_cron: Make, db: Db) -> None:
    """The first caller goes while a connection is waited for, and the next one has another occurrence."""
    cron = make_cron(pool_size=1)
    running, go = asyncio.Event(), asyncio.Event()

    async def busy(run: Run) -> None:
        running.set()
        await go.wait()

    async def sync(run: Run) -> list[bool]:
        query = "SELECT pg_try_advisory_xact_lock(hashtextextended('sync' || chr(31) || %s, 1))"
        return [value(db, query, key) for key in ("one", "two")]

    cron.task("busy")(busy)
    cron.task("sync")(sync)
    async with cron:
        keeping = asyncio.create_task(cron.run("busy"))
        await running.wait()
        process = await cron.open()
        calls = [asyncio.create_task(cron.run("sync", idempotency_key=key)) for key in ("one", "two")]
        await until(lambda: process.database.runs.get_stats()["requests_waiting"], "a connection is waited for")
        (gate,) = [gate for gate in process.runner.attempts.gates.values() if gate.attempts]
        assert not gate.waiting, "both are in one attempt"
        calls[0].cancel()
        await asyncio.wait(calls[:1])
        go.set()
        await keeping
        assert (await calls[1]).result == "[true,false]"


async def test_another_occurrence_has_the_free_slot_though_it_waited_behind_the_same(make_cron: Make, db: Db) -> None:
    """One attempt answers for those of its own occurrence only."""
    crons = [make_cron() for _ in range(2)]
    inside: list[str | None] = []
    go = asyncio.Event()

    async def sync(run: Run) -> None:
        inside.append(run.occurrence)
        await go.wait()

    for cron in crons:
        cron.task("sync", max_concurrent=3)(sync)
    async with crons[0], crons[1]:
        first = asyncio.create_task(crons[0].run("sync", idempotency_key="a"))
        await until(lambda: inside, "it runs")
        calls = [asyncio.create_task(crons[1].run("sync", idempotency_key=key)) for key in "aabaca"]
        await until(lambda: len(inside) == 3, "b and c run")
        go.set()
        outcomes = await asyncio.gather(first, *calls)
    assert sorted(str(key) for key in inside) == ["a", "b", "c"]
    assert Counter(outcome.status for outcome in outcomes) == {"completed": 3, "skipped": 4}


@pytest.mark.parametrize("slots", [1, 4])
async def test_sixty_deliveries_of_one_message_on_three_servers_are_one_run(
    make_cron: Make, db: Db, slots: int
) -> None:
    crons = [make_cron(pool_size=5) for _ in range(3)]
    for cron in crons:
        cron.task("sync", max_concurrent=slots)(nothing)
    async with serving(crons[0].app()) as a, serving(crons[1].app()) as b, serving(crons[2].app()) as c:
        clients = (a, b, c)
        for turn in range(4):
            answers = await asyncio.gather(
                *(clients[n % 3].post("/cron/sync", headers={"upstash-message-id": f"msg-{turn}"}) for n in range(60))
            )
            assert {answer.status_code for answer in answers} == {200}
            bodies = [answer.json() for answer in answers]
            (ran,) = [body["runId"] for body in bodies if body["status"] == "completed"]
            skips = [body for body in bodies if body["status"] == "skipped"]
            assert len(skips) == 59
            assert {body["reason"] for body in skips} <= {"duplicate", "already_running"}
            assert {body["holder"]["runId"] for body in skips} == {ran}
    assert value(db, "SELECT count(*) FROM cronlock.run WHERE status = 'completed'") == 4
    assert value(db, "SELECT count(*) FROM cronlock.run") == 240
    assert advisory_locks(db) == 0


# -- not completed: again --------------------------------------------------------------------------------------


@both
async def test_what_did_not_complete_may_run_again_and_is_counted(make_cron: Make, db: Db, is_async: bool) -> None:
    cron = make_cron()
    attempts: list[int] = []
    keys: set[str] = set()

    def steps(run: Run) -> Steps:
        attempts.append(run.attempt)
        keys.add(run.effect_key("charge"))
        if run.attempt == 1:
            raise ValueError("no")
        if run.attempt == 2:
            raise Cancel("not now")
        if run.attempt == 3:
            yield run.driver.execute("SELECT pg_sleep(30)")
        if run.attempt == 4:
            end_holders(db)
            yield run.driver.execute("SELECT 1")

    cron.task("sync", timeout="500ms")(task_of(steps, is_async))
    async with cron:
        outcomes = [await cron.run("sync", idempotency_key="one") for _ in range(6)]
        other = await cron.run("sync", idempotency_key="two")
    statuses = [outcome.status for outcome in outcomes]
    assert statuses == ["failed", "cancelled", "timed_out", "lost", "completed", "skipped"]
    assert attempts == [1, 2, 3, 4, 5, 1]
    assert other.status == "failed"
    assert len(keys) == 2, "one for each occurrence"
    stored = db.execute("SELECT attempt FROM cronlock.run WHERE occurrence = 'one' AND status <> 'skipped' ORDER BY id")
    assert [attempt for (attempt,) in stored.fetchall()] == [1, 2, 3, 4, 5]
    holder = outcomes[5].holder
    assert holder is not None
    assert holder.run_id == outcomes[4].run_id


APP = """
import asyncio
from cronlock import Cronlock, Run
cron = Cronlock()

@cron.task("sync", max_concurrent=2)
async def sync(run: Run, payload: dict) -> str:
    await asyncio.sleep(float(payload.get("lasts", 0)))
    return [run.attempt, run.effect_key("charge")]
"""


async def test_an_occurrence_whose_process_was_killed_runs_again_at_once(
    db: Db, database_url: str, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(APP)
    settings = {"DATABASE_URL": database_url, "CRONLOCK_RECOVER_INTERVAL": "1h"}
    headers = {**AUTH, "idempotency-key": "one"}
    async with httpx2.AsyncClient(timeout=30, headers=headers) as client:
        with served(tmp_path, **settings) as (server, url):
            call = asyncio.create_task(client.get(f"{url}/cron/sync?lasts=60"))
            await until(lambda: value(db, "SELECT count(*) FROM cronlock.run WHERE status = 'running'"), "it runs")
            server.process.kill()
            server.process.wait()
            await asyncio.gather(call, return_exceptions=True)
        await until(lambda: advisory_locks(db) == 0, "the lock is free", 3)
        with served(tmp_path, **settings) as (_, url):
            body = (await client.get(f"{url}/cron/sync")).json()
            again = (await client.get(f"{url}/cron/sync")).json()
    assert (body["status"], body["result"][0]) == ("completed", 2)
    assert (again["reason"], again["holder"]) == ("duplicate", {"runId": body["runId"]})
    assert rows(db, "sync") == [("lost", None), ("completed", None), ("skipped", "duplicate")]


async def test_the_index_is_the_last_word(make_cron: Make, db: Db) -> None:
    """The locks are taken away by hand: two runs of one occurrence go on, and the second cannot complete."""
    crons = [make_cron(), make_cron()]
    inside: list[int] = []
    go = [asyncio.Event(), asyncio.Event()]

    async def sync(run: Run) -> None:
        inside.append(run.id)
        await run.driver.execute("INSERT INTO written VALUES (%s)", (run.id,))
        await go[len(inside) - 1].wait()

    db.execute("CREATE TABLE written (run bigint)")
    for cron, lock in zip(crons, ("a", "b"), strict=True):
        cron.task("sync", lock=lock)(sync)
    # As if the locks of an occurrence were not there: each server thinks of another installation's.
    object.__setattr__(crons[1].tasks.get("sync"), "namespace", "nowhere")
    async with crons[0], crons[1]:
        first = asyncio.create_task(crons[0].run("sync", idempotency_key="one"))
        await until(lambda: len(inside) == 1, "one runs")
        db.execute("UPDATE cronlock.run SET occurrence = 'hidden'")
        second = asyncio.create_task(crons[1].run("sync", idempotency_key="one"))
        await until(lambda: len(inside) == 2, "both run")
        db.execute("UPDATE cronlock.run SET occurrence = 'one'")
        go[1].set()
        assert (await second).status == "completed"
        go[0].set()
        outcome = await first
    assert outcome.status == "failed"
    assert outcome.failure is not None
    assert outcome.failure.type == "LockLost"
    assert "occurrence" in outcome.failure.message
    assert db.execute("SELECT run FROM written").fetchall() == [(inside[1],)]
    assert sorted(rows(db, "sync")) == [("completed", None), ("failed", None)]


def test_the_index_refuses_a_second_completed_row(db: Db) -> None:
    insert = """INSERT INTO cronlock.run (nonce, task, status, trigger, occurrence, finished_at, instance, host, pid,
            lock_key, lock_classid, lock_objid)
        VALUES (gen_random_uuid(), 'sync', %s, 'http', 'one', now(), gen_random_uuid(), 'h', 1, 1, 1, 1)"""
    for status in ("failed", "completed", "failed"):
        db.execute(insert, (status,))
    with pytest.raises(psycopg.errors.UniqueViolation, match="run_occurrence_key"):
        db.execute(insert, ("completed",))


async def test_paused_wins_over_duplicate(make_cron: Make, db: Db) -> None:
    cron = make_cron()
    cron.task("sync")(nothing)
    async with cron:
        await cron.run("sync", idempotency_key="one")
        db.execute("UPDATE cronlock.task SET paused_at = now()")
        paused = await cron.run("sync", idempotency_key="one")
        assert (paused.reason, paused.holder) == ("paused", None)


async def test_what_was_skipped_does_not_use_up_its_occurrence(make_cron: Make, db: Db, database_url: str) -> None:
    from tests import held

    cron = make_cron()
    cron.task("sync")(nothing)
    async with cron:
        async with held(database_url, "sync"):
            assert (await cron.run("sync", idempotency_key="one")).reason == "already_running"
        again = await cron.run("sync", idempotency_key="one")
        assert again.status == "completed"
        assert told(db, again.run_id) == ("completed", None, "one", 1, None)


# -- effect keys -----------------------------------------------------------------------------------------------


async def test_effect_keys_are_the_same_for_an_occurrence_and_differ_else(make_cron: Make, db: Db) -> None:
    made: list[str] = []

    async def sync(run: Run) -> None:
        made.append(run.effect_key("charge"))
        assert run.effect_key("charge") == made[-1]
        assert run.effect_key("refund") != made[-1]
        raise ValueError("again")

    async def calls(cron: Cronlock) -> list[str]:
        made.clear()
        for name in ("one", "two"):
            cron.task(name)(sync)
        async with cron:
            for name in ("one", "two"):
                for key in ("a", "b", None, None):
                    await cron.run(name, idempotency_key=key)
        return list(made)

    first, second = await calls(make_cron()), await calls(make_cron())
    assert len(set(first)) == 8
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, True, False, False] * 2
    assert not {*first} & {*await calls(make_cron(namespace="staging"))}


def test_an_effect_key_is_the_same_in_every_process_and_version(db: Db, database_url: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "from cronlock import Cronlock\ncron = Cronlock()\n"
        "@cron.task('sync')\ndef sync(run): return run.effect_key('charge:7')\n"
    )
    arguments = ("run", "shop:cron", "sync", "--idempotency-key", "one")
    done = cronlock(*arguments, cwd=tmp_path, DATABASE_URL=database_url)
    assert json.loads(done.stdout)["result"] == "ebf0b171-229c-5a1f-8465-50231821188d"
