"""A small application under plain uvicorn, in a process of its own that tests kill, freeze and stop.

    python -m tests.crashes.served <fd of a listening socket> <uvicorn's graceful shutdown, in seconds>

Settings come from the environment. `/cron/work?how=..` and `/cron/work-in-thread?how=..` write, do what `how`
says for `pause` seconds, and write again.
"""

import asyncio
import socket
import sys
import time
from typing import Any

import uvicorn

from cronlock import Cronlock, Run

WRITE = "INSERT INTO effect VALUES (%s)"
SLEEP = "SELECT pg_sleep(%s)"


def give_tasks(cron: Cronlock) -> None:
    """Register the tasks; tests use them in their own process too."""

    @cron.task("work")
    async def work(run: Run, payload: dict[str, Any]) -> None:
        pause = float(payload.get("pause", 0))
        await run.driver.execute(WRITE, (run.id,))
        if payload.get("how") == "sql":
            await run.driver.execute(SLEEP, (pause,))
        else:
            await asyncio.sleep(pause)
        await run.driver.execute(WRITE, (run.id,))

    @cron.task("work-in-thread")
    def work_in_thread(run: Run, payload: dict[str, Any]) -> None:
        pause = float(payload.get("pause", 0))
        run.driver.execute(WRITE, (run.id,))
        if payload.get("how") == "sql":
            run.driver.execute(SLEEP, (pause,))
        else:
            time.sleep(pause)
        run.driver.execute(WRITE, (run.id,))

    @cron.task("brief", timeout="1s", lock="work")
    async def brief(run: Run) -> None:
        await run.driver.execute(WRITE, (run.id,))
        await asyncio.sleep(0.8)
        await run.driver.execute(WRITE, (run.id,))


def main() -> None:
    """Serve until a signal."""
    cron = Cronlock()
    give_tasks(cron)
    listener = socket.socket(fileno=int(sys.argv[1]))
    config = uvicorn.Config(cron.app(), log_level="warning", timeout_graceful_shutdown=int(sys.argv[2]))
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
