"""The tasks that the servers serve: each reads its lock's counter, works, and writes it back, in the run's transaction.

Two are in guard mode: they commit steps on a connection of their own, which goes past all that harms cronlock's.

A call says with `call` who it is, with `lasts` how many milliseconds the work takes, with `where` whether it waits in a
statement or in Python, and with `ends` how it ends.
"""

import asyncio
import ctypes
import os
import signal
import sys
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import psycopg

from cronlock import Cancel, Cronlock, Retry, Run
from tests import Steps, task_of
from tests.campaign.tables import STEPS

READ = "SELECT value FROM campaign.counter WHERE lock_name = %s"
BEGIN = """INSERT INTO campaign.effect (run_id, call, task, lock_name, value_read, process_clock)
    VALUES (%s, %s, %s, %s, %s, %s)"""
MOVE_FENCE = "UPDATE campaign.fence SET run_id = %s WHERE lock_name = %s AND run_id <= %s"
STEP = "INSERT INTO campaign.step (run_id, call, number, is_accepted) VALUES (%s, %s, %s, %s)"
WAIT = "SELECT pg_sleep(%s)"
WRITE = "UPDATE campaign.counter SET value = %s WHERE lock_name = %s"
END = "UPDATE campaign.effect SET ended_at = clock_timestamp() WHERE run_id = %s AND call = %s"

TIMEOUT = 2.0
"""Seconds that most tasks may take; the server frees the lock of a frozen process 10 s later."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A task by what it locks and how it is written."""

    name: str
    lock: str | int
    is_async: bool
    timeout: float = TIMEOUT
    mode: str = "transaction"

    @property
    def lock_name(self) -> str:
        """The lock as the campaign's tables name it."""
        return str(self.lock)


KINDS = (
    Kind("stock", "stock", True),
    Kind("stock-report", "stock", False),
    Kind("prices", "prices", True),
    Kind("prices-check", "prices", False),
    Kind("mail", "mail", True),
    Kind("rates", 8492019482019283, True),
    Kind("rates-archive", 8492019482019283, False),
    Kind("late", "late", True, timeout=1.0),
    Kind("late-in-thread", "late", False, timeout=1.0),
    Kind("guarded", "guarded", True, mode="guard"),
    Kind("guarded-in-thread", "guarded", False, mode="guard"),
)
LOCKS = tuple(dict.fromkeys(kind.lock_name for kind in KINDS))


def work(kind: Kind) -> Any:
    """The function of a task."""

    def steps(run: Run) -> Steps:
        asked: dict[str, Any] = run.payload
        call, seconds, ends = int(asked["call"]), float(asked["lasts"]) / 1000, asked["ends"]
        cursor = yield run.driver.execute(READ, (kind.lock_name,))
        (value,) = yield cursor.fetchone()
        marker = (run.id, call, kind.name, kind.lock_name, value, datetime.now(UTC))
        yield run.driver.execute(BEGIN, marker)
        if asked["where"] == "sql":
            yield run.driver.execute(WAIT, (seconds,))
        elif kind.is_async:
            yield asyncio.sleep(seconds)
        else:
            threading.Event().wait(seconds)  # time.sleep refuses to work under libfaketime
        yield run.connection.exec_driver_sql(WRITE, (value + 1, kind.lock_name))
        yield run.driver.execute(END, (run.id, call))
        if ends == "sql":
            yield run.driver.execute("SELECT 1 / 0")
        end_as(ends)
        return value

    return task_of(steps, kind.is_async)


def guarded_work(kind: Kind) -> Any:
    """The function of a task in guard mode: it commits each step on its own connection, fenced by the run's id."""
    connect = psycopg.AsyncConnection.connect if kind.is_async else psycopg.Connection.connect

    def steps(run: Run) -> Steps:
        asked: dict[str, Any] = run.payload
        call, seconds = int(asked["call"]), float(asked["lasts"]) / 1000 / STEPS
        db = yield connect(os.environ["CAMPAIGN_OUTSIDE_URL"], autocommit=True, connect_timeout=5)
        try:
            for number in range(1, STEPS + 1):
                run.check()
                # The fence's row lock puts the steps that are accepted in an order, by which they have their times.
                yield db.execute("BEGIN")
                moved = yield db.execute(MOVE_FENCE, (run.id, kind.lock_name, run.id))
                yield db.execute(STEP, (run.id, call, number, moved.rowcount == 1))
                yield db.execute("COMMIT")
                if moved.rowcount != 1:
                    raise RuntimeError(f"step {number} was refused: there is a younger run")
                if kind.is_async:
                    yield asyncio.sleep(seconds)
                else:
                    threading.Event().wait(seconds)
        finally:
            yield db.close()
        end_as(asked["ends"])

    return task_of(steps, kind.is_async)


def end_as(ends: str) -> None:
    """End the task as the call asked."""
    match ends:
        case "error":
            raise ValueError("the supplier is down")
        case "retry":
            raise Retry(after=1)
        case "cancel":
            raise Cancel("nothing to do")


cron = Cronlock()
for kind in KINDS:
    if kind.mode == "guard":
        cron.task(kind.name, lock=kind.lock, mode="guard")(guarded_work(kind))
    else:
        cron.task(kind.name, lock=kind.lock, timeout=kind.timeout)(work(kind))

if sys.platform == "linux" and (parent := os.environ.get("CAMPAIGN_PARENT")):
    # No server outlives a campaign that was killed itself: prctl(2), PR_SET_PDEATHSIG is 1.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit("the campaign is gone")
