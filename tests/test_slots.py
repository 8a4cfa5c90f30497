"""`max_concurrent=N`: N runs of a lock at once, never one more, and nobody is skipped while a slot is free."""

import asyncio
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import pytest

from cronlock import RegistrationError, Run
from tests import AUTH, Db, Make, Steps, advisory_locks, held, rows, serving, task_of, until, value
from tests.commands import served

pytestmark = pytest.mark.anyio
both = pytest.mark.parametrize("is_async", [True, False], ids=["async", "thread"])


async def nothing(run: Run) -> None: ...


class Waiting:
    """A task whose runs wait until they are let go."""

    def __init__(self) -> None:
        self.inside: list[int] = []
        self.go = asyncio.Event()

    async def __call__(self, run: Run) -> None:
        self.inside.append(run.id)
        await self.go.wait()


# -- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [0, -1, 101, 2.0, "2", True, None])
def test_a_number_of_slots_that_is_none_stops_the_registration(make_cron: Make, slots: Any) -> None:
    with pytest.raises(RegistrationError, match=r"'nightly': max_concurrent must be a whole number from 1 to 100"):
        make_cron().task("nightly", max_concurrent=slots)(nothing)


def test_a_lock_that_is_a_number_has_one_slot(make_cron: Make) -> None:
    with pytest.raises(RegistrationError, match=r"'nightly'.*a number is one lock"):
        make_cron().task("nightly", lock=42, max_concurrent=2)(nothing)
    make_cron().task("nightly", lock=42, max_concurrent=1)(nothing)


def test_tasks_of_one_lock_must_have_as_many_slots(make_cron: Make) -> None:
    cron = make_cron()
    cron.task("one", max_concurrent=2)(nothing)
    with pytest.raises(RegistrationError, match=r"'one' and 'two' have one lock \('one'\).*same max_concurrent"):
        cron.task("two", lock="one")(nothing)
    cron.task("three", lock="one", max_concurrent=2)(nothing)
    assert [task.name for task in cron.tasks] == ["one", "three"]


@pytest.mark.parametrize("key", [None, "{tenant}"])
async def test_a_slot_that_has_the_name_of_another_lock_stops_the_start(
    make_cron: Make, db: Db, key: str | None
) -> None:
    cron = make_cron()
    cron.task("sync", max_concurrent=3, key=key)(nothing)
    cron.task("other", lock="sync#3", key=key)(nothing)
    with pytest.raises(RegistrationError, match=r"'sync' .*'other' \(lock 'sync#3'\)"):
        async with serving(cron.app()):
            pass
    await cron.close()
    fine = make_cron()
    fine.task("sync", max_concurrent=3, key=key)(nothing)
    fine.task("other", lock="sync#4", key=key)(nothing)
    async with serving(fine.app()):
        pass


async def test_a_slot_whose_key_is_that_of_another_name_stops_the_start(make_cron: Make, db: Db) -> None:
    """The hash of a name has 32 bits; one of these nine million pairs shares a key by way of one of a hundred slots."""
    query = """SELECT a.n, b.n
         FROM generate_series(1, 3000) a(n), generate_series(1, 3000) b(n), generate_series(2, 100) s
        WHERE hashtext('task-' || a.n || '#' || s) = hashtext('lock-' || b.n) LIMIT 1"""
    db.execute("SET enable_nestloop = off")
    row = db.execute(query).fetchone()
    assert row is not None
    cron = make_cron()
    cron.task(f"task-{row[0]}", max_concurrent=100)(nothing)
    cron.task(f"lock-{row[1]}")(nothing)
    with pytest.raises(RegistrationError, match=f"task-{row[0]}"):
        async with serving(cron.app()):
            pass
    await cron.close()


# -- N and no more ---------------------------------------------------------------------------------------------


@both
async def test_as_many_calls_as_there_are_slots_run_and_the_next_is_skipped(
    make_cron: Make, db: Db, is_async: bool
) -> None:
    crons = [make_cron() for _ in range(2)]
    go = asyncio.Event()
    ids: list[int] = []

    def steps(run: Run) -> Steps:
        ids.append(run.id)
        yield run.driver.execute("SELECT pg_advisory_lock_shared(1, 1)")  # until it is let go

    for cron in crons:
        cron.task("sync", max_concurrent=3)(task_of(steps, is_async))
    db.execute("SELECT pg_advisory_lock(1, 1)")
    async with crons[0], crons[1]:
        calls = [asyncio.create_task(crons[number % 2].run("sync")) for number in range(3)]
        await until(lambda: len(ids) == 3, "three run")
        for _ in range(2):
            for cron in crons:
                skipped = await cron.run("sync")
                assert (skipped.status, skipped.reason) == ("skipped", "already_running")
                assert skipped.holder is not None
                assert skipped.holder.run_id in ids
        shown = db.execute(
            "SELECT lock_key, lock_name, task FROM cronlock.lock_holder WHERE run_id IS NOT NULL ORDER BY run_id"
        ).fetchall()
        db.execute("SELECT pg_advisory_unlock(1, 1)")
        assert {call.status for call in await asyncio.gather(*calls)} == {"completed"}
        go.set()
    keys = [value(db, "SELECT hashtext(%s)::bigint", name) for name in ("sync", "sync#2", "sync#3")]
    assert sorted(shown) == sorted((key, "sync", "sync") for key in keys)
    assert advisory_locks(db) == 0
    assert rows(db, "sync") == [("completed", None)] * 3 + [("skipped", "already_running")] * 4


async def test_calls_that_wait_at_one_moment_get_every_free_slot(make_cron: Make, db: Db) -> None:
    cron = make_cron(pool_size=10)
    task = Waiting()
    cron.task("sync", max_concurrent=5)(task)
    async with cron:
        calls = [asyncio.create_task(cron.run("sync")) for _ in range(40)]
        await until(lambda: sum(call.done() for call in calls) == 35, "all but five are skipped")
        assert len(task.inside) == 5
        assert value(db, "SELECT count(*) FROM cronlock.run WHERE status = 'running'") == 5
        task.go.set()
        outcomes = await asyncio.gather(*calls)
    assert Counter(outcome.status for outcome in outcomes) == {"completed": 5, "skipped": 35}
    first = min(task.inside)
    assert {outcome.holder.run_id for outcome in outcomes if outcome.holder} <= set(task.inside)
    assert first in task.inside


async def test_a_program_that_holds_a_slot_takes_one_away_and_no_more(
    make_cron: Make, db: Db, database_url: str
) -> None:
    cron = make_cron()
    task = Waiting()
    cron.task("sync", max_concurrent=2)(task)
    async with cron, held(database_url, "sync#2") as pid:
        first = asyncio.create_task(cron.run("sync"))
        await until(lambda: task.inside, "the first slot is free")
        for _ in range(2):
            skipped = await cron.run("sync")
            assert skipped.status == "skipped"
            assert skipped.holder is not None
            assert skipped.holder.run_id == task.inside[0]
        task.go.set()
        assert (await first).status == "completed"
        async with held(database_url, "sync"):
            skipped = await cron.run("sync")
            assert skipped.holder is not None
            assert skipped.holder.application_name == "psql"
    assert pid
    assert rows(db, "sync")[-1] == ("skipped", "already_running")


async def test_a_slot_that_becomes_free_is_taken_by_the_next_call_at_once(make_cron: Make, db: Db) -> None:
    """Also within the second in which a refused lock is asked about first."""
    crons = [make_cron() for _ in range(2)]
    task = Waiting()
    brief = asyncio.Event()

    async def steps(run: Run, payload: dict[str, Any]) -> None:
        task.inside.append(run.id)
        await (brief if payload else task.go).wait()

    for cron in crons:
        cron.task("sync", max_concurrent=2)(steps)
    async with crons[0], crons[1]:
        calls = [asyncio.create_task(crons[0].run("sync")), asyncio.create_task(crons[0].run("sync", {"brief": 1}))]
        await until(lambda: len(task.inside) == 2, "both slots are taken")
        assert (await crons[1].run("sync")).status == "skipped"
        brief.set()
        assert (await calls[1]).status == "completed"
        assert [(await cron.run("sync", {"brief": 1})).status for cron in crons] == ["completed"] * 2
        task.go.set()
        assert (await calls[0]).status == "completed"


async def test_a_full_lock_is_skipped_from_memory_and_one_with_a_free_slot_never(make_cron: Make, db: Db) -> None:
    cron = make_cron()
    task = Waiting()
    cron.task("sync", max_concurrent=2)(task)
    async with cron:
        calls = [asyncio.create_task(cron.run("sync"))]
        await until(lambda: task.inside, "one runs")
        process = await cron.open()
        (gate,) = process.runner.attempts.gates.values()
        assert not gate.is_full
        calls.append(asyncio.create_task(cron.run("sync")))
        await until(lambda: len(task.inside) == 2, "two run")
        assert gate.is_full
        before = process.recorder.messages
        skipped = await cron.run("sync")
        assert skipped.status == "skipped"
        assert process.recorder.messages == before + 1
        task.go.set()
        await asyncio.gather(*calls)
        assert gate.running == []


async def test_a_lock_with_slots_and_keys_has_as_many_slots_for_each_key(make_cron: Make, db: Db) -> None:
    crons = [make_cron() for _ in range(2)]
    task = Waiting()
    for cron in crons:
        cron.task("sync", max_concurrent=2, key="{tenant}")(task)
    async with crons[0], crons[1]:
        calls = [
            asyncio.create_task(crons[number % 2].run("sync", {"tenant": tenant}))
            for number, tenant in enumerate("aabb")
        ]
        await until(lambda: len(task.inside) == 4, "two of each")
        for tenant in "ab":
            for cron in crons:
                assert (await cron.run("sync", {"tenant": tenant})).status == "skipped"
        keys = "SELECT array_agg(DISTINCT lock_key ORDER BY lock_key) FROM cronlock.run WHERE status = 'running'"
        expected = """SELECT array_agg(k ORDER BY k) FROM (SELECT hashtextextended(n || chr(31) || t, 0) AS k
            FROM unnest(ARRAY['sync', 'sync#2']) n, unnest(ARRAY['a', 'b']) t) k"""
        assert value(db, keys) == value(db, expected)
        task.go.set()
        await asyncio.gather(*calls)


# -- ends ------------------------------------------------------------------------------------------------------

APP = """
import asyncio
from cronlock import Cronlock, Run
cron = Cronlock()

@cron.task("sync", max_concurrent=2)
async def sync(run: Run, payload: dict) -> None:
    await asyncio.sleep(float(payload.get("lasts", 0)))
"""


async def test_a_killed_process_frees_its_slots(db: Db, database_url: str, make_cron: Make, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APP)
    cron = make_cron(recover_interval="1h")
    cron.task("sync", max_concurrent=2)(nothing)
    async with cron, httpx2.AsyncClient(timeout=30, headers=AUTH) as client:
        with served(tmp_path, DATABASE_URL=database_url, CRONLOCK_RECOVER_INTERVAL="1h") as (server, url):
            calls = [asyncio.create_task(client.get(f"{url}/cron/sync?lasts=60")) for _ in range(2)]
            await until(lambda: value(db, "SELECT count(*) FROM cronlock.run WHERE status = 'running'") == 2, "two run")
            assert (await cron.run("sync")).status == "skipped"
            server.process.kill()
            server.process.wait()
            await asyncio.gather(*calls, return_exceptions=True)
        await until(lambda: advisory_locks(db) == 0, "the slots are free", 3)
        assert (await cron.run("sync")).status == "completed"
    assert ("lost", None) in rows(db, "sync"), "the one that had the slot"


async def test_a_lost_run_keeps_nobody_out_of_its_slot(make_cron: Make, db: Db, database_url: str) -> None:
    cron = make_cron(recover_interval="1h")
    cron.task("sync", max_concurrent=2)(nothing)
    async with cron, held(database_url, "sync"):
        await (await cron.open()).readiness.require()
        db.execute(
            """INSERT INTO cronlock.run (nonce, task, status, trigger, instance, host, pid, backend_pid, lock_name,
                   lock_key, lock_classid, lock_objid)
               SELECT gen_random_uuid(), 'sync', 'running', 'http', gen_random_uuid(), 'gone', 1, 999999999, 'sync',
                   k, (k >> 32) & 4294967295, k & 4294967295 FROM (SELECT hashtext('sync#2')::bigint AS k) k"""
        )
        assert (await cron.run("sync")).status == "completed"
    assert rows(db, "sync") == [("lost", None), ("completed", None)]


async def test_a_slot_whose_holder_has_no_row_yet_is_no_reason_to_skip(
    make_cron: Make, db: Db, database_url: str
) -> None:
    cron = make_cron()
    cron.task("sync", max_concurrent=2)(nothing)
    async with cron, held(database_url, "sync"):
        async with held(database_url, "sync#2", application="cronlock:sync"):
            call = asyncio.create_task(cron.run("sync"))
            asked = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            await until(lambda: value(db, asked), "it asks again and again")
            await asyncio.sleep(0.2)
            assert not call.done()
        assert (await call).status == "completed"


async def test_paused_wins_with_slots(make_cron: Make, db: Db) -> None:
    cron = make_cron()
    task = Waiting()
    cron.task("sync", max_concurrent=2)(task)
    async with cron:
        calls = [asyncio.create_task(cron.run("sync")) for _ in range(2)]
        await until(lambda: len(task.inside) == 2, "both run")
        db.execute("UPDATE cronlock.task SET paused_at = now()")
        other = make_cron()
        other.task("sync", max_concurrent=2)(task)
        async with other:
            assert (await other.run("sync")).reason == "paused"
        task.go.set()
        await asyncio.gather(*calls)
        assert (await cron.run("sync")).reason == "paused"
        db.execute("UPDATE cronlock.task SET paused_at = NULL")
        assert (await cron.run("sync")).status == "completed"


async def test_a_lock_of_a_hundred_slots_can_be_taken_whole(
    make_cron: Make, db: Db, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    cron = make_cron(pool_size=100)
    task = Waiting()
    cron.task("sync", max_concurrent=100)(task)
    async with cron:
        calls = [asyncio.create_task(cron.run("sync")) for _ in range(101)]
        await until(lambda: len(task.inside) == 100, "a hundred run", 30)
        (done,), _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        assert done.result().status == "skipped"
        task.go.set()
        outcomes = await asyncio.gather(*calls)
    assert Counter(outcome.status for outcome in outcomes) == {"completed": 100, "skipped": 1}
