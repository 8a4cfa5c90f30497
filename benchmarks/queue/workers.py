"""Processes: workers, and what enqueues; each on a core of its own, and ended by its id."""

import json
import os
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
from benchmarks.server import ROOT, Server, end, environment

COMMAND_WITHIN = 180.0
WORK_WITHIN = 180.0
POLL = (0.02, 0.25)
TRIES = 3
LEAST, MOST = 200, 300_000
"""How many jobs are counted in one reading."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a worker did: jobs a second, how many there were, and the CPU time of each."""

    rate: float
    jobs: int
    worker_us: float
    postgres_us: float | None


@dataclass(frozen=True, slots=True)
class Moment:
    """How many jobs were left at a time, and the CPU seconds that the worker and PostgreSQL had used by then."""

    at: float
    left: int
    worker: float
    postgres: float


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
        self.connection: psycopg.Connection[Any] = psycopg.connect(url, autocommit=True, options="-c lock_timeout=30s")
        self._cleared = cleared or system.cleared
        self.server: Server | None = None
        """What is served there, if anything is."""
        self.rates: dict[str, float] = {}
        """Of each system: jobs a second in its last reading."""

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
    """A worker process."""

    def __init__(self, place: Place, system: System, **more: str) -> None:
        self.place = place
        self.system = system
        self._more = more
        self._process: subprocess.Popen[bytes]

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
        end(self._process)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def wait(self, until: int) -> Moment:
        """Until no more than `until` jobs are left; looks seldom at first, and more often towards the end.

        Raises `Wrong` if the worker ends, or does not come to an end.
        """
        began = time.monotonic()
        first: Moment | None = None
        while True:
            left = self.place.count(self.system.left)
            moment = Moment(time.monotonic(), left, *self._cpu_seconds())
            if left <= until:
                return moment
            if self._process.poll() is not None or moment.at - began > WORK_WITHIN:
                said = self.place.log.read_text(errors="replace")[-3000:]
                raise Wrong(f"{self.system.name}: {left} jobs are left after {moment.at - began:.0f} s:\n{said}")
            wait = POLL[1]
            if first is not None and left < first.left:
                wait = 0.4 * (left - until) * (moment.at - first.at) / (first.left - left)
            first = first or moment
            time.sleep(min(max(wait, POLL[0]), POLL[1]))

    def _cpu_seconds(self) -> tuple[float, float]:
        return machine.cpu_seconds(self.pid), self.place.rig.postgres_cpu_seconds() or 0.0


def work(place: Place, system: System, seconds: float, queued: int = 0) -> Work:
    """One worker, started for this, works for about `seconds` on jobs that are all there before it.

    The first ones are not counted, so that nothing is cold. `queued`: so many jobs are there at least; those behind
    the ones that are counted are not waited for. Raises `Wrong`.
    """
    for _ in range(TRIES):
        rate = place.rates.get(system.name, system.guess)
        found, is_seen = _work(place, system, rate, seconds, queued)
        if is_seen or seconds < 1:
            place.rates[system.name] = found.rate
            return found
        place.clear()
        place.rates[system.name] = 2 * rate
    raise Wrong(f"{system.name}: all jobs were over before there was a second look, {TRIES} times")


def _work(place: Place, system: System, rate: float, seconds: float, queued: int) -> tuple[Work, bool]:
    """One reading; whether there was more than one look at what was left."""
    jobs = min(max(round(rate * seconds), LEAST), MOST)
    first = max(jobs // 4, LEAST)
    total = max(first + jobs, queued)
    before = place.count(system.completed) if system.completed else 0
    place.tell("many", "0", str(total), core=place.core, system=system)
    if seconds >= 1:
        place.settle()
    with Worker(place, system) as worker:
        began = time.monotonic()
        start = worker.wait(total - first)
        stop = worker.wait(total - first - jobs)
    is_seen = stop.left < start.left
    if is_seen:
        done, elapsed = start.left - stop.left, stop.at - start.at
    else:
        done, elapsed = total, stop.at - began
    if system.completed and (completed := place.count(system.completed) - before) < total - stop.left:
        raise Wrong(f"{system.name}: {total - stop.left} jobs are gone, but only {completed} have completed")
    postgres_us = (stop.postgres - start.postgres) / done * 1e6 if place.rig.embedded else None
    return Work(done / elapsed, done, (stop.worker - start.worker) / done * 1e6, postgres_us), is_seen
