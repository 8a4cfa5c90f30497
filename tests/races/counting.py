"""An app for many processes: each run adds one to a counter by reading, waiting and writing."""

import asyncio
import time

import psycopg

from cronlock import Cronlock, Run

cron = Cronlock()


@cron.task("awaiting", lock="counter")
async def awaiting(run: Run) -> int:
    cursor = await run.driver.execute("SELECT n FROM counter")
    (n,) = await cursor.fetchone()
    await asyncio.sleep(0.01)
    await run.driver.execute("UPDATE counter SET n = %s", (n + 1,))
    return int(n) + 1


@cron.task("plain", lock="counter")
def plain(run: Run) -> int:
    (n,) = run.driver.execute("SELECT n FROM counter").fetchone()
    time.sleep(0.01)
    run.driver.execute("UPDATE counter SET n = %s", (n + 1,))
    return int(n) + 1


@cron.task("slots", max_concurrent=3)
async def slots(run: Run) -> int:
    return await crowded(run)


@cron.task("slots-of-tenant", lock="slots-of", key="{tenant}", max_concurrent=2)
async def slots_of_tenant(run: Run) -> int:
    return await crowded(run)


async def crowded(run: Run) -> int:
    """Sign in where others can see it, count who is in, and sign out."""
    async with await psycopg.AsyncConnection.connect(cron.settings.database_url, autocommit=True) as connection:
        await connection.execute("INSERT INTO inside VALUES (%s, %s, %s)", (run.id, run.task, run.key or ""))
        await asyncio.sleep(0.02)
        cursor = await connection.execute(
            "SELECT count(*) FROM inside WHERE task = %s AND key = %s", (run.task, run.key or "")
        )
        row = await cursor.fetchone()
        assert row is not None
        await connection.execute("DELETE FROM inside WHERE id = %s", (run.id,))
    return int(row[0])
