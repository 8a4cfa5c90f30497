"""The queues that are compared: how each is started, and how its database says what is done."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.queue import install

CONCURRENCY = 1000
"""Of a cronlock worker here."""


@dataclass(frozen=True, slots=True)
class System:
    """One queue, with its settings."""

    name: str
    driver: str
    """The module in `drivers`, or the name that node/drive.mjs knows."""
    left: str
    """How many jobs are not completed, as SQL; one is completed when that is committed."""
    completed: str | None
    """How many are, where it keeps them."""
    cleared: str
    """Removes every job."""
    kind: str = "python"
    task: str = "noop"
    stamp: str = "stamp"
    guess: int = 5000
    """Jobs a second, before it is known."""
    environment: dict[str, str] = field(default_factory=dict)
    installer: Callable[[float], str | None] | None = install.python

    @property
    def database(self) -> str:
        """The name of its database: systems with the same driver share one."""
        return self.driver

    def command(self, *words: str) -> list[str]:
        """The command line of its program."""
        if self.kind == "node":
            return ["node", str(install.NODE / "drive.mjs"), self.driver, *words]
        python = sys.executable if self.installer is None else str(install.PYTHON / "bin" / "python")
        return [python, "-m", "benchmarks.queue.drive", self.driver, *words]

    def work(self) -> list[str]:
        """The command line of a worker."""
        if self.kind != "cronlock":
            return self.command("work")
        app = "benchmarks.queue.jobs:cron"
        return [sys.executable, "-m", "cronlock", "worker", app, "--concurrency", str(CONCURRENCY)]


def _cronlock(name: str, task: str, stamp: str, log_level: str | None = None) -> System:
    return System(
        name,
        "cronlock",
        left="SELECT count(*) FROM cronlock.job",
        completed="SELECT count(*) FROM cronlock.job_history WHERE status = 'completed'",
        cleared="TRUNCATE cronlock.job, cronlock.job_history, cronlock.job_attempt, cronlock.idempotency_key",
        kind="cronlock",
        task=task,
        stamp=stamp,
        environment={} if log_level is None else {"BENCHMARK_LOG_LEVEL": log_level},
        installer=None,
    )


GUARD = _cronlock("cronlock", "noop", "stamp")
"""A job that needs no transaction."""
QUIET = _cronlock("cronlock, no line a job", "noop", "stamp", "WARNING")
TRANSACTION = _cronlock("cronlock, default mode", "noop-transaction", "stamp-transaction")

PROCRASTINATE = System(
    "Procrastinate",
    "procrastinate",
    left="SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')",
    completed="SELECT count(*) FROM procrastinate_jobs WHERE status = 'succeeded'",
    cleared="TRUNCATE procrastinate_jobs, procrastinate_events, procrastinate_periodic_defers",
    guess=250,
)


def _pgqueuer(name: str, driver: str) -> System:
    return System(
        name,
        driver,
        left="SELECT count(*) FROM pgqueuer",
        completed="SELECT count(*) FROM pgqueuer_log WHERE status = 'successful'",
        cleared="TRUNCATE pgqueuer, pgqueuer_log, pgqueuer_statistics",
    )


PGQUEUER = _pgqueuer("PgQueuer, asyncpg", "pgqueuer")
PGQUEUER_PSYCOPG = _pgqueuer("PgQueuer, psycopg", "pgqueuer_psycopg")
CHANCY = System(
    "Chancy",
    "chancy",
    left="SELECT count(*) FROM chancy_jobs WHERE state <> 'succeeded'",
    completed="SELECT count(*) FROM chancy_jobs WHERE state = 'succeeded'",
    cleared="TRUNCATE chancy_jobs",
)
GRAPHILE = System(
    "graphile-worker",
    "graphile",
    left="SELECT count(*) FROM graphile_worker._private_jobs",
    completed=None,
    cleared="TRUNCATE graphile_worker._private_jobs",
    kind="node",
    environment={"NO_LOG_SUCCESS": "1"},
    installer=install.node,
)
PGBOSS = System(
    "pg-boss",
    "pgboss",
    left="SELECT count(*) FROM pgboss.job WHERE state < 'completed'",
    completed="SELECT count(*) FROM pgboss.job WHERE state = 'completed'",
    cleared="TRUNCATE pgboss.job, pgboss.archive",
    kind="node",
    installer=install.node,
)
BARE = System(
    "one NOTIFY and two commits",
    "bare",
    left="SELECT count(*) FROM bare_job WHERE taken IS NULL",
    completed="SELECT count(*) FROM bare_job WHERE taken IS NOT NULL",
    cleared="TRUNCATE bare_job",
    installer=None,
)

PYTHON_PEERS = (PGQUEUER, PGQUEUER_PSYCOPG, CHANCY, PROCRASTINATE)
PEERS = (GRAPHILE, PGBOSS, *PYTHON_PEERS)
