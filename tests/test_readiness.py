"""Readiness: what a look asks for, and what becomes of calls meanwhile."""

import psycopg
import pytest

from cronlock import Run, Unavailable, runs
from cronlock.process import Process
from cronlock.tasks import Task
from tests import Db, Make, until

pytestmark = pytest.mark.anyio


async def empty(run: Run) -> None:
    """A task."""


async def test_calls_are_answered_while_a_look_waits(make_cron: Make, database_url: str, db: Db) -> None:
    cron = make_cron(recover_interval="1h")
    cron.task("nightly")(empty)
    async with cron:
        assert (await cron.run("nightly")).status == "completed"
        process = await cron.open()
        with psycopg.connect(database_url) as other:
            other.execute("LOCK TABLE cronlock.task IN SHARE MODE")  # tasks can be read, but not registered
            looking = process.runner.spawn(process.readiness.look())
            waiting = "SELECT 1 FROM pg_locks WHERE NOT granted AND relation = 'cronlock.task'::regclass"
            await until(lambda: db.execute(waiting).fetchone(), "the look waits")
            assert (await cron.run("nightly")).status == "completed"
            assert not looking.done()
            other.rollback()
        await looking
        assert process.readiness.is_ready


async def test_a_look_that_fails_ends_the_readiness_until_one_succeeds(make_cron: Make, db: Db) -> None:
    cron = make_cron(recover_interval="1h")
    cron.task("nightly")(empty)
    async with cron:
        assert (await cron.run("nightly")).status == "completed"
        readiness = (await cron.open()).readiness
        (revision,) = db.execute("SELECT version_num FROM cronlock.alembic_version").fetchone() or ("",)
        db.execute("UPDATE cronlock.alembic_version SET version_num = 'ffff'")
        with pytest.raises(Unavailable, match="ffff"):
            await readiness.look()
        assert not readiness.is_ready
        with pytest.raises(Unavailable, match="ffff"):
            await cron.run("nightly")
        db.execute("UPDATE cronlock.alembic_version SET version_num = %s", (revision,))
        assert (await cron.run("nightly")).status == "completed"


async def test_a_look_asks_only_for_keys_that_are_not_known(make_cron: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    lock_keys = runs.lock_keys

    def seen(tasks: list[Task]) -> bytes:
        asked.append([task.name for task in tasks])
        return lock_keys(tasks)

    monkeypatch.setattr(runs, "lock_keys", seen)
    cron = make_cron()
    cron.task("nightly", max_concurrent=2)(empty)
    cron.task("per-tenant", key="{tenant}")(empty)
    process = Process(cron.settings, cron.tasks)  # without its timer, which looks too
    await process.runner.spawn(process.database.open())
    try:
        await process.readiness.look()
        known = dict(process.runner.attempts.lock_keys)
        assert {name: len(keys) for name, keys in known.items()} == {"nightly": 2, "per-tenant": 0}
        await process.readiness.look()
        cron.task("weekly")(empty)
        await process.readiness.look()
        after = process.runner.attempts.lock_keys
        assert {name: len(keys) for name, keys in after.items()} == {"nightly": 2, "per-tenant": 0, "weekly": 1}
        assert {name: after[name] for name in known} == known
    finally:
        await process.close(0)
    assert asked == [["nightly", "per-tenant"], ["weekly"]]
