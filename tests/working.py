"""Workers in this process and in processes of their own, and what became of jobs."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from cronlock import Cronlock
from cronlock.working import Crew
from tests import Db, until
from tests.commands import Running, environment

APP = "tests.crashes.tasks:cron"
numbers = count(1)

EFFECTS = "CREATE TABLE effect (job_id bigint, attempt int, what text, at timestamptz DEFAULT clock_timestamp())"


@asynccontextmanager
async def working(
    cron: Cronlock, *, queues: Sequence[str] = ("default",), concurrency: int = 10, drain: float = 0.0
) -> AsyncIterator[Crew]:
    """A worker in this event loop, drained within `drain` seconds at the end."""
    crew = Crew(cron, list(queues), concurrency)
    async with cron:
        await crew.start()
        try:
            yield crew
        finally:
            crew.drain(drain)
            await crew.work()


class Workers:
    """Starts `cronlock worker` processes; all are killed at the end that still live."""

    def __init__(self, database_url: str, directory: Path) -> None:
        self._database_url = database_url
        self._directory = directory
        self._stack = ExitStack()
        self.all: list[Running] = []

    def start(self, *arguments: str, app: str = APP, waits: bool = True, **settings: str) -> Running:
        """One more; settings are names of the environment. `waits` until it says that it works."""
        directory = self._directory / f"worker-{next(numbers)}"
        directory.mkdir()
        given = {"DATABASE_URL": self._database_url, "CRONLOCK_LOG_FORMAT": "text", **settings}
        command = ("worker", app, *arguments)
        worker = self._stack.enter_context(Running(*command, cwd=directory, env=environment(**given)))
        self.all.append(worker)
        if waits:
            worker.until_says("working for ")
        return worker

    def close(self) -> None:
        """Kill what still lives."""
        self._stack.close()


@contextmanager
def workers(database_url: str, directory: Path) -> Iterator[Workers]:
    """Worker processes for one test."""
    made = Workers(database_url, directory)
    try:
        yield made
    finally:
        made.close()


def status(db: Db, job_id: int) -> tuple[Any, ...] | None:
    """(status, attempts, error_type) of a job."""
    query = "SELECT status, attempts, error_type FROM cronlock.job_status WHERE id = %s"
    return db.execute(query, (job_id,)).fetchone()


def ended(db: Db) -> dict[str, int]:
    """How many jobs have ended, by status."""
    return dict(db.execute("SELECT status, count(*) FROM cronlock.job_history GROUP BY 1").fetchall())


def live(db: Db) -> int:
    """How many jobs have not ended."""
    query = "SELECT (SELECT count(*) FROM cronlock.job) + (SELECT count(*) FROM cronlock.job_waiting)"
    row = db.execute(query).fetchone()
    assert row is not None
    return int(row[0])


def attempts(db: Db, job_id: int) -> list[tuple[Any, ...]]:
    """(attempt, status, error_type) of the attempts of a job that are kept."""
    query = "SELECT attempt, status, error_type FROM cronlock.job_attempt WHERE job_id = %s ORDER BY 1"
    return db.execute(query, (job_id,)).fetchall()


def effects(db: Db, job_id: int) -> list[tuple[int, str]]:
    """(attempt, what) that a job's attempts have written and committed, in order."""
    query = "SELECT attempt, what FROM effect WHERE job_id = %s ORDER BY at"
    return db.execute(query, (job_id,)).fetchall()


async def all_ended(db: Db, seconds: float = 10.0) -> dict[str, int]:
    """Wait until no job is live; how they ended."""
    await until(lambda: live(db) == 0, "every job has ended", seconds)
    return ended(db)


def put(db: Db, task: str, payload: str = "{}", *, jobs: int = 1, most: int = 5) -> list[int]:
    """Write jobs as an application would that no worker here knows of; their ids."""
    query = """INSERT INTO cronlock.job (task, queue, payload, trigger, max_attempts)
        SELECT %s, 'default', %s, 'manual', %s FROM generate_series(1, %s) RETURNING id"""
    return [job_id for (job_id,) in db.execute(query, (task, payload, most, jobs)).fetchall()]
