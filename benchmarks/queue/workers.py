"""Processes: workers, and what enqueues; each on a core of its own, and ended by its id."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import psycopg
from psycopg.conninfo import conninfo_to_dict

from benchmarks import machine
from benchmarks.arms import Wrong
from benchmarks.queue.systems import System
from benchmarks.rig import Rig
from benchmarks.server import ROOT, end, environment

COMMAND_WITHIN = 180.0
WORK_WITHIN = 180.0
POLL = (0.02, 0.5)
REST = 0.3
"""Seconds after which a worker that has nothing to do has told everybody so."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a worker did: jobs a second, how many there were, and the CPU time of each."""

    rate: float
    jobs: int
    worker_us: float
    postgres_us: float | None


@contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """What is started within runs on this core alone."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Place:
    """A queue's database, and the core that its processes run on."""

    def __init__(self, rig: Rig, system: System, url: str, name: str, cleared: str | None = None) -> None:
        self.rig = rig
        self.system = system
        self.url = as_url(url)
        self.core = rig.server_core
        self.log = rig.directory / f"worker-{name}.log"
        self.connection = psycopg.connect(url, autocommit=True, options="-c lock_timeout=30s")
        self._cleared = cleared or system.cleared

    def environment(self, system: System, **more: str) -> dict[str, str]:
        """What a process is told."""
        # environment() keeps cronlock's own settings out, but for these that belong to the benchmark.
        told = environment(self.url, None)
        del told["CRONLOCK_POOL_SIZE"]
        return {**told, "PYTHONPATH": str(ROOT), **system.environment, **more}

    def tell(self, *words: str, core: int | None, system: System | None = None, **more: str) -> Any:
        """Run the driver once; what it printed. Raises `Wrong` if it fails or takes too long."""
        system = system or self.system
        told = self.environment(system, **{"BENCHMARK_TASK": system.task, **more})
        with pinned(core):
            child = subprocess.Popen(
                system.command(*words),
                cwd=ROOT,
                env=told,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        try:
            said, complained = child.communicate(timeout=COMMAND_WITHIN)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            raise Wrong(f"{system.name}: {words[0]} took more than {COMMAND_WITHIN:g} s") from None
        if child.returncode:
            raise Wrong(f"{system.name}: {words[0]} failed: {complained.strip()[-2000:]}")
        return json.loads(said) if said.strip() else None

    def count(self, statement: str) -> int:
        """One number from the database."""
        row = self.connection.execute(statement).fetchone()
        assert row is not None
        return int(row[0])

    def clear(self) -> None:
        """Take every job away."""
        self.connection.execute(self._cleared)
        self.connection.execute("TRUNCATE placed, effect")

    def settle(self) -> None:
        """Have done what PostgreSQL would do in the background while something is measured."""
        self.connection.execute("VACUUM (ANALYZE)")
        self.connection.execute("CHECKPOINT")

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


@contextmanager
def place(rig: Rig, system: System, name: str | None = None, cleared: str | None = None) -> Iterator[Place]:
    """A database of its own for a queue, with its schema."""
    name = name or system.database
    make = rig.database if system.kind == "cronlock" else rig.empty_database
    with make(name) as url:
        found = Place(rig, system, url, name, cleared)
        try:
            if system.kind != "cronlock":
                found.tell("schema", core=found.core)
            found.connection.execute("CREATE TABLE placed (n bigint, placed_at timestamptz NOT NULL DEFAULT now())")
            found.connection.execute("CREATE TABLE effect (n bigint, written_at timestamptz NOT NULL DEFAULT now())")
            yield found
        finally:
            found.close()


def as_url(conninfo: str) -> str:
    """A conninfo as the URL that every driver reads."""
    told = {name: quote(str(value), safe="") for name, value in conninfo_to_dict(conninfo).items()}
    head = "postgresql://{user}:{password}@{host}:{port}/{dbname}".format(
        **{name: told.pop(name, "") for name in ("user", "password", "host", "port", "dbname")}
    )
    return head + ("?" + "&".join(f"{name}={value}" for name, value in told.items()) if told else "")


class Worker:
    """A worker process; it can be stopped and let go on, so that jobs can be put before it."""

    def __init__(self, place: Place, system: System, **more: str) -> None:
        self.place = place
        self.system = system
        self._more = more
        self._process: subprocess.Popen[bytes]
        self._is_frozen = False

    def __enter__(self) -> Self:
        with pinned(self.place.core), self.place.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.system.work(),
                cwd=ROOT,
                env=self.place.environment(self.system, **self._more),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.thaw()
        end(self._process)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def freeze(self) -> None:
        """Let it do nothing."""
        self._process.send_signal(signal.SIGSTOP)
        self._is_frozen = True

    def thaw(self) -> None:
        """Let it go on."""
        if self._is_frozen:
            self._process.send_signal(signal.SIGCONT)
            self._is_frozen = False

    def fill(self, jobs: int) -> None:
        """Enqueue so many."""
        self.place.tell("many", "0", str(jobs), core=self.place.core, system=self.system)

    def drain(self, jobs: int, until: int = 0) -> float:
        """Wait until no more than `until` jobs are left of `jobs`; jobs a second from the first end on.

        Raises `Wrong` if the worker ends, or does not come to an end.
        """
        began = time.monotonic()
        first: tuple[float, int] | None = None
        while True:
            left = self.place.count(self.system.left)
            now = time.monotonic()
            if left <= until and first is not None:
                return (first[1] - left) / (now - first[0])
            if left <= until:
                return (jobs - left) / (now - began)
            if first is None and left < jobs:
                first = now, left
            if self._process.poll() is not None or now - began > WORK_WITHIN:
                said = self.place.log.read_text(errors="replace")[-3000:]
                raise Wrong(f"{self.system.name}: {left} of {jobs} jobs are left after {now - began:.0f} s:\n{said}")
            wait = POLL[0]
            if first is not None and left < first[1]:
                wait = 0.3 * (left - until) * (now - first[0]) / (first[1] - left)
            time.sleep(min(max(wait, POLL[0]), POLL[1]))

    def prepare(self, jobs: int | None = None) -> float:
        """Jobs that are not counted, so that nothing is cold; about how many a second there were."""
        jobs = jobs or self.system.warm
        self.fill(jobs)
        rate = self.drain(jobs)
        time.sleep(REST)
        return rate

    def measure(self, jobs: int, queued: int = 0) -> Work:
        """Work on so many jobs, all of which are there at the beginning, with others behind them up to `queued`."""
        queued = max(jobs, queued)
        self.freeze()
        before = self.place.count(self.system.completed) if self.system.completed else 0
        self.fill(queued)
        self.place.settle()
        spent = self._cpu_seconds()
        self.thaw()
        rate = self.drain(queued, until=queued - jobs)
        worker, postgres = (after - was for after, was in zip(self._cpu_seconds(), spent, strict=True))
        if self.system.completed:
            completed = self.place.count(self.system.completed) - before
            if completed < jobs or (completed > jobs and queued == jobs):
                raise Wrong(f"{self.system.name}: {jobs} jobs, but {completed} have completed")
        return Work(rate, jobs, worker / jobs * 1e6, postgres / jobs * 1e6 if postgres else None)

    def _cpu_seconds(self) -> tuple[float, float]:
        return machine.cpu_seconds(self.pid), self.place.rig.postgres_cpu_seconds() or 0.0
