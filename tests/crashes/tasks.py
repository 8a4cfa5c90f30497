"""The tasks of jobs for workers in processes of their own, which tests kill, freeze and stop.

What an attempt does is written into the table `effect`: by tasks in transaction mode in that transaction, by those in
guard mode at once.
"""

import asyncio
import os
import time
from typing import Any

import psycopg
from psycopg import IsolationLevel

from cronlock import Cronlock, Run

WRITE = "INSERT INTO effect (job_id, attempt, what) VALUES (%s, %s, %s)"

cron = Cronlock()


@cron.task("work", timeout="60s")
async def work(run: Run, payload: dict[str, Any]) -> dict[str, Any]:
    """Writes, waits for `pause` seconds as `how` says, in the first attempt only if `once`, and writes again."""
    await run.driver.execute(WRITE, (run.id, run.attempt, "begun"))
    pause = 0.0 if payload.get("once") and run.attempt > 1 else float(payload.get("pause", 0))
    if payload.get("how") == "sql":
        await run.driver.execute("SELECT pg_sleep(%s)", (pause,))
    else:
        await asyncio.sleep(pause)
    await run.driver.execute(WRITE, (run.id, run.attempt, "ended"))
    return {"attempt": run.attempt}


@cron.task("work-in-thread", timeout="60s")
def work_in_thread(run: Run, payload: dict[str, Any]) -> None:
    """As `work`, as a plain function."""
    run.driver.execute(WRITE, (run.id, run.attempt, "begun"))
    pause = 0.0 if payload.get("once") and run.attempt > 1 else float(payload.get("pause", 0))
    if payload.get("how") == "sql":
        run.driver.execute("SELECT pg_sleep(%s)", (pause,))
    else:
        time.sleep(pause)
    run.driver.execute(WRITE, (run.id, run.attempt, "ended"))


@cron.task("guarded", mode="guard")
async def guarded(run: Run, payload: dict[str, Any]) -> str:
    """Says at once that it began, waits, asks whether the job is still its own, and says that it ended."""
    say(run, "begun")
    pause = 0.0 if payload.get("once") and run.attempt > 1 else float(payload.get("pause", 0))
    await asyncio.sleep(pause)
    run.check()
    say(run, "ended")
    return "ended"


@cron.task("killer", mode="guard")
async def killer(run: Run) -> None:
    """Ends every worker that takes it."""
    say(run, "begun")
    os._exit(137)


@cron.task("brief", mode="guard")
async def brief(run: Run) -> None:
    """Takes a moment, and has no transaction."""
    await asyncio.sleep(0.05)


@cron.task("bump", mode="guard", max_attempts=100, retry_delay="10ms", retry_cap="200ms")
async def bump(run: Run) -> None:
    """Adds one to each of the same three rows, in a serializable transaction of its own."""
    async with await psycopg.AsyncConnection.connect(cron.settings.database_url) as connection:
        await connection.set_isolation_level(IsolationLevel.SERIALIZABLE)
        for row in (1, 2, 3):
            cursor = await connection.execute("SELECT n FROM counter WHERE id = %s", (row,))
            (seen,) = await cursor.fetchone() or (0,)
            await asyncio.sleep(0.005)
            await connection.execute("UPDATE counter SET n = %s WHERE id = %s", (seen + 1, row))


def say(run: Run, what: str) -> None:
    """Write an effect for good, on a connection of its own."""
    with psycopg.connect(cron.settings.database_url, autocommit=True) as connection:
        connection.execute(WRITE, (run.id, run.attempt, what))
