"""Cases of transactions (TX): whole scenarios over HTTP."""

import asyncio
import time

import pytest

from cronlock import Run
from tests import Db, Make, advisory_locks, end_holders, rows, serving, until, value

pytestmark = pytest.mark.anyio


async def test_work_is_gone_however_a_run_fails_and_its_row_is_there_and_counted(
    make_cron: Make, db: Db, effect: None
) -> None:
    """T02: it raises; its COMMIT fails; its connection is ended."""
    db.execute("CREATE TABLE parent (a int PRIMARY KEY)")
    db.execute("CREATE TABLE orphan (a int CONSTRAINT has_parent REFERENCES parent DEFERRABLE INITIALLY DEFERRED)")
    cron = make_cron()
    seen: list[str] = []

    @cron.task("failing")
    async def failing(run: Run, payload: dict[str, str]) -> None:
        await run.driver.execute("INSERT INTO effect VALUES (%s)", (run.id,))
        seen.append(value(db, "SELECT status FROM cronlock.run WHERE id = %s AND started_at < now()", run.id))
        if payload["how"] == "raises":
            raise ValueError("on purpose")
        if payload["how"] == "commit":
            await run.driver.execute("INSERT INTO orphan VALUES (7)")
        if payload["how"] == "connection":
            end_holders(db)

    async with serving(cron.app()) as client:
        for how in ("raises", "commit", "connection"):
            answer = await client.get(f"/cron/failing?how={how}")
            assert answer.status_code == 500, how
    assert seen == ["running"] * 3
    assert value(db, "SELECT count(*) FROM effect") == 0
    query = "SELECT status, error_type, error_sqlstate, finished_at > started_at FROM cronlock.run ORDER BY id"
    ended = db.execute(query).fetchall()
    assert ended[0] == ("failed", "ValueError", None, True)
    assert ended[1] == ("failed", "ForeignKeyViolation", "23503", True)
    assert (ended[2][0], ended[2][3]) == ("lost", True)
    health = db.execute("SELECT completed, failed, lost, last_status FROM cronlock.task_health").fetchone()
    assert health == (0, 2, 1, "lost")


async def test_an_orphan_that_only_the_commit_finds_is_a_500_that_names_the_constraint(
    make_cron: Make, db: Db, effect: None
) -> None:
    """T05: and the answer of a good run never comes before its commit."""
    db.execute("CREATE TABLE parent (a int PRIMARY KEY)")
    db.execute("CREATE TABLE orphan (a int CONSTRAINT has_parent REFERENCES parent DEFERRABLE INITIALLY DEFERRED)")
    db.execute(
        """CREATE FUNCTION slowly() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN PERFORM pg_sleep(0.5); RETURN NULL; END $$;
        CREATE CONSTRAINT TRIGGER slowly AFTER INSERT ON effect DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION slowly()"""
    )
    cron = make_cron()

    @cron.task("orphan")
    def orphan(run: Run) -> str:
        run.driver.execute("INSERT INTO orphan VALUES (7)")
        return "done"

    @cron.task("good")
    async def good(run: Run) -> str:
        await run.driver.execute("INSERT INTO effect VALUES (%s)", (run.id,))
        return "done"

    async with serving(cron.app()) as client:
        answer = await client.get("/cron/orphan")
        assert answer.status_code == 500
        assert answer.json()["status"] == "failed"
        assert "has_parent" in answer.json()["error"]["message"]
        assert "result" not in answer.json()
        began = time.monotonic()
        answer = await client.get("/cron/good")
        assert time.monotonic() - began > 0.5, "what is deferred belongs to the commit"
        assert (answer.status_code, value(db, "SELECT count(*) FROM effect")) == (200, 1)
    assert rows(db, "orphan") == [("failed", None)]
    assert value(db, "SELECT count(*) FROM orphan") == 0
    assert value(db, "SELECT result FROM cronlock.run WHERE task = 'orphan'") is None


@pytest.mark.parametrize("how", ["awaiting", "in a thread", "in a statement"])
async def test_a_run_over_its_timeout_is_a_504_in_time_and_the_next_call_runs(
    make_cron: Make, db: Db, effect: None, how: str
) -> None:
    """T07: a thread cannot be stopped, so its lock is free when it has returned; what it returns is ignored."""
    cron = make_cron()
    returned: list[str] = []

    @cron.task("async", lock="slow", timeout="1s")
    async def awaiting(run: Run) -> str:
        await run.driver.execute("INSERT INTO effect VALUES (%s)", (run.id,))
        await (asyncio.sleep(5) if how == "awaiting" else run.driver.execute("SELECT pg_sleep(5)"))
        return "ok"

    @cron.task("plain", lock="slow", timeout="1s")
    def plain(run: Run) -> str:
        run.driver.execute("INSERT INTO effect VALUES (%s)", (run.id,))
        time.sleep(5)
        returned.append("ok")
        return "ok"

    @cron.task("next", lock="slow")
    async def following(run: Run) -> None: ...

    name = "plain" if how == "in a thread" else "async"
    async with serving(cron.app()) as client:
        began = time.monotonic()
        answer = await client.get(f"/cron/{name}")
        assert 1 <= time.monotonic() - began < 2
        assert (answer.status_code, answer.json()["status"]) == (504, "timed_out")
        if how == "in a thread":
            assert (await client.get("/cron/next")).json()["reason"] == "already_running"
            assert value(db, "SELECT stopping_at IS NOT NULL FROM cronlock.lock_holder") is True
            await until(lambda: returned, "the thread returns", 6)
        await until(lambda: advisory_locks(db) == 0, "the lock is free", 1)
        # Until its end is recorded the server itself says that it runs.
        runner = (await cron.open()).runner
        await until(lambda: not runner.active, "its end is recorded", 1)
        assert (await client.get("/cron/next")).json()["status"] == "completed"
    assert rows(db, name) == [("timed_out", None)]
    assert value(db, "SELECT result FROM cronlock.run WHERE task = %s", name) is None
    assert value(db, "SELECT count(*) FROM effect") == 0
