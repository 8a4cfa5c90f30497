"""What is measured, each thing by itself: an arm takes one reading in every round, in turn with the others."""

import json
import time
from dataclasses import dataclass
from itertools import count
from statistics import median

from benchmarks import machine, names
from benchmarks.load import Load, burst, idle
from benchmarks.rig import Rig
from benchmarks.server import Server

LIMIT_OF_WRK = 0.8
"""Above this share of a core the load generator may be what is measured."""
MAIN = "main"
"""The server that has the tasks of all arms."""
NEW, SAME = "new", "same"
TRIES = 3
"""How often a burst is sent if nothing was answered before its end: in the short form nothing is warm yet."""
keys = count()


class Wrong(Exception):
    """A reading that would be worth nothing: an answer of the wrong kind, or a row too few."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What an arm read in one round: answers a second, the milliseconds of one call, or MiB."""

    value: float
    unit: str
    load: Load | None = None
    server_us: float | None = None
    """CPU time of the server for each answer."""
    postgres_us: float | None = None
    """The same of an embedded PostgreSQL."""
    rows: int = 0
    answers: int = 0
    """Answers each of which must have left a row."""


class Spent:
    """The CPU time that a server and an embedded PostgreSQL spend from now on."""

    def __init__(self, rig: Rig, server: Server) -> None:
        self._rig = rig
        self._server = server
        self._before = server.cpu_seconds(), rig.postgres_cpu_seconds()

    def us(self, answers: int) -> tuple[float, float | None]:
        """The microseconds of both for each of so many answers; None for a PostgreSQL that is not ours."""
        server, postgres = self._before
        now = self._rig.postgres_cpu_seconds()
        known = None if now is None or postgres is None else (now - postgres) / answers * 1e6
        return (self._server.cpu_seconds() - server) / answers * 1e6, known


@dataclass(frozen=True, slots=True)
class Storm:
    """Connections send as much as is answered; rows are counted afterwards."""

    route: str
    tasks: list[str]
    row: str | None = None
    """The status of the row that every answer must have left, of a skip its reason; None for peers."""
    is_own: bool = False
    """Each task has one connection that calls only this one, so that no two calls of one task meet; else there are
    32, which go through all tasks."""
    is_logging: bool = True
    key: str | None = None
    """NEW: an idempotency key in every request, each time another; SAME: one that has completed before."""
    server: str = MAIN
    is_warmed: bool = False
    """The server was started a moment ago: a burst that is not counted comes first."""
    is_emptied: bool = False
    """The table of runs is emptied first."""

    def read(self, rig: Rig, seconds: float) -> Reading:
        """One burst; raises `Wrong`."""
        server = rig.servers[self.server]
        if self.is_emptied:
            server.connection.execute("TRUNCATE cronlock.run")
        if self.is_warmed:
            self._burst(rig, 1)
        if not self.is_logging:
            server.get("/-/logging/ERROR")
        try:
            for _ in range(TRIES):
                reading = self._burst(rig, round(seconds))
                if reading.value:
                    return reading
            raise Wrong(f"/{self.route}: no answer in {seconds:g} s, {TRIES} times")
        finally:
            if not self.is_logging:
                server.get("/-/logging/INFO")

    def _burst(self, rig: Rig, seconds: int) -> Reading:
        server = rig.servers[self.server]
        key = "none" if self.key is None else f"bench-{time.time_ns()}-{next(keys)}"
        if self.key == SAME:
            for task in self.tasks:
                server.get(f"/{self.route}/{task}", key)
        answered, newest = server.answers(), server.newest_run()
        spent = Spent(rig, server)
        load = burst(
            server.port, self.route, self.tasks, seconds, is_own=self.is_own, key=key + "*" * (self.key == NEW)
        )
        answers = server.answers() - answered
        server_us, postgres_us = spent.us(answers)
        written = server.written_since(newest)
        self._check(load, answers, written)
        return Reading(
            load.per_second,
            "/s",
            load,
            server_us,
            postgres_us,
            rows=sum(written.values()),
            answers=answers if self.row else 0,
        )

    def _check(self, load: Load, answers: int, written: dict[str, int]) -> None:
        if load.refused or load.broken or not answers:
            raise Wrong(f"/{self.route}: {load.refused} answers were no success, {load.broken} connections broke")
        expected = {self.row: answers} if self.row else {}
        if written != expected:
            raise Wrong(f"/{self.route}: {answers} answers, but these rows: {written}")
        if not answers - names.CONNECTIONS <= load.requests <= answers:
            raise Wrong(f"/{self.route}: the server gave {answers} answers, wrk counted {load.requests}")
        if load.cpu > LIMIT_OF_WRK:
            raise Wrong(f"wrk used {load.cpu:.0%} of a core: it may be what was measured")


@dataclass(frozen=True, slots=True)
class Grown:
    """The resident memory of the server after so many skips since the last reading."""

    skips: int
    burst: int
    """How many seconds each of the bursts takes that make them."""
    server: str = MAIN

    def read(self, rig: Rig, seconds: float) -> Reading:
        """As many bursts as are needed; raises `Wrong`."""
        answers = rows = 0
        while answers < self.skips:
            reading = Storm("cron", names.HELD, "already_running", server=self.server).read(rig, self.burst)
            answers += reading.answers
            rows += reading.rows
        return Reading(machine.resident_mib(rig.servers[self.server].pid), "MiB", rows=rows, answers=answers)


@dataclass(frozen=True, slots=True)
class Locked:
    """Lock transactions that 32 callers in the server's own event loop make, each on a key of its own."""

    what: str
    row: str | None = None
    """As of `Storm`."""

    def read(self, rig: Rig, seconds: float) -> Reading:
        """As many as there can be in `seconds`; raises `Wrong`."""
        server = rig.servers[MAIN]
        newest = server.newest_run()
        spent = Spent(rig, server)
        made, elapsed, before = json.loads(server.get(f"/-/locking/{self.what}/{seconds}")[1])
        server_us, postgres_us = spent.us(made + before)
        written = server.written_since(newest)
        if written != ({self.row: made + before} if self.row else {}):
            raise Wrong(f"{self.what}: {made + before} lock transactions, but these rows: {written}")
        return Reading(made / elapsed, "/s", None, server_us, postgres_us)


@dataclass(frozen=True, slots=True)
class Idle:
    """One call after another over one connection; the median."""

    route: str

    def read(self, rig: Rig, seconds: float) -> Reading:
        """A few hundred calls in `seconds` at most."""
        return Reading(median(idle(rig.servers[MAIN].port, f"/{self.route}/{names.HELD[0]}", seconds)), "ms")


@dataclass(frozen=True, slots=True)
class Inside:
    """What the server timed itself, in its own event loop: the median of a few hundred times."""

    what: str
    server: str = MAIN

    def read(self, rig: Rig, seconds: float) -> Reading:
        """A few hundred times in `seconds` at most."""
        return Reading(median(json.loads(rig.servers[self.server].get(f"/-/{self.what}/{seconds}")[1])), "ms")


@dataclass(frozen=True, slots=True)
class Started:
    """How long a server takes from the start of its process until it says that it is ready."""

    server: str

    def read(self, rig: Rig, seconds: float) -> Reading:
        """One start, after the end of the process that was there."""
        rig.servers[self.server].stop()
        return Reading(rig.servers[self.server].start() * 1000, "ms")


@dataclass(frozen=True, slots=True)
class Resident:
    """The resident memory of a server."""

    server: str

    def read(self, rig: Rig, seconds: float) -> Reading:
        """What it has now."""
        return Reading(machine.resident_mib(rig.servers[self.server].pid), "MiB")


@dataclass(frozen=True, slots=True)
class Disk:
    """How long it takes to make 8 KiB durable beside the database; what every commit waits for."""

    def read(self, rig: Rig, seconds: float) -> Reading:
        """The median of a few times."""
        return Reading(machine.sync_ms(rig.directory), "ms")


Arm = Storm | Grown | Locked | Idle | Inside | Started | Resident | Disk
