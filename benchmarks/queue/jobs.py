"""The tasks that `cronlock worker` works on here."""

import logging
import os

from sqlalchemy import text

from benchmarks.queue.drivers import Stamper
from cronlock import Cronlock, Run

if level := os.environ.get("BENCHMARK_LOG_LEVEL"):
    logging.getLogger("cronlock.worker").setLevel(level)

EFFECT = text("INSERT INTO effect (n) VALUES (:n)")

cron = Cronlock()
stamper = Stamper()


async def noop(run: Run) -> None:
    """Nothing."""


async def stamp(run: Run, payload: dict[str, int]) -> None:
    """Say when it started."""
    stamper(payload["n"])


async def effect(run: Run, payload: dict[str, int]) -> None:
    """Write one row in the job's own transaction."""
    await run.connection.execute(EFFECT, payload)


cron.task("noop", mode="guard")(noop)
cron.task("noop-transaction")(noop)
cron.task("stamp", mode="guard")(stamp)
cron.task("stamp-transaction")(stamp)
cron.task("effect")(effect)
