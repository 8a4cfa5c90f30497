"""An app for many processes: each run adds one to a counter by reading, waiting and writing."""

import asyncio
import time

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
