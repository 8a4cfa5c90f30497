"""What is measured, each thing by itself: an arm takes one reading in every round, in turn with the others."""

import json
from dataclasses import dataclass
from statistics import median

from benchmarks import names
from benchmarks.load import Load, burst, idle
from benchmarks.machine import sync_ms
from benchmarks.rig import Rig

LIMIT_OF_WRK = 0.8
"""Above this share of a core the load generator may be what is measured."""


class Wrong(Exception):
    """A reading that would be worth nothing: an answer of the wrong kind, or a row too few."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What an arm read in one round: answers a second, or the milliseconds of one call."""

    value: float
    load: Load | None = None
    server_us: float = 0.0
    """CPU time of the server for each answer."""
    postgres_us: float | None = None
    """The same of an embedded PostgreSQL."""
    rows: int = 0
    answers: int = 0


@dataclass(frozen=True, slots=True)
class Storm:
    """32 connections send as much as is answered; rows are counted afterwards."""

    route: str
    tasks: list[str]
    status: str | None = None
    """The status of the row that every answer must have left; None for peers, which leave none."""
    is_own: bool = False
    """Each connection calls a task of its own, so that no two calls of one task meet."""
    is_logging: bool = True

    def read(self, rig: Rig, seconds: float) -> Reading:
        """One burst; raises `Wrong`."""
        if not self.is_logging:
            rig.get("/-/logging/ERROR")
        try:
            answered, newest, (server, postgres) = rig.answers(), rig.newest_run(), rig.cpu_seconds()
            load = burst(rig.port, self.route, self.tasks, round(seconds), is_own=self.is_own)
            answers = rig.answers() - answered
            server_now, postgres_now = rig.cpu_seconds()
            written = rig.written_since(newest)
        finally:
            if not self.is_logging:
                rig.get("/-/logging/INFO")
        self._check(load, answers, written)
        return Reading(
            load.per_second,
            load,
            server_us=(server_now - server) / answers * 1e6,
            postgres_us=(postgres_now - postgres) / answers * 1e6 if rig.is_embedded else None,
            rows=sum(written.values()),
            answers=answers,
        )

    def _check(self, load: Load, answers: int, written: dict[str, int]) -> None:
        if load.refused or load.broken or not answers:
            raise Wrong(f"/{self.route}: {load.refused} answers were no success, {load.broken} connections broke")
        expected = {self.status: answers} if self.status else {}
        if written != expected:
            raise Wrong(f"/{self.route}: {answers} answers, but these rows: {written}")
        if not answers - names.CONNECTIONS <= load.requests <= answers:
            raise Wrong(f"/{self.route}: the server gave {answers} answers, wrk counted {load.requests}")
        if load.cpu > LIMIT_OF_WRK:
            raise Wrong(f"wrk used {load.cpu:.0%} of a core: it may be what was measured")


@dataclass(frozen=True, slots=True)
class Idle:
    """One call after another over one connection; the median."""

    route: str

    def read(self, rig: Rig, seconds: float) -> Reading:
        """A few hundred calls in `seconds` at most."""
        return Reading(median(idle(rig.port, f"/{self.route}/{names.HELD[0]}", seconds)))


@dataclass(frozen=True, slots=True)
class Bare:
    """A part of a skip by itself, taken inside the server's event loop; the median."""

    what: str

    def read(self, rig: Rig, seconds: float) -> Reading:
        """A few hundred times in `seconds` at most."""
        return Reading(median(json.loads(rig.get(f"/-/bare/{self.what}/{seconds}")[1])))


@dataclass(frozen=True, slots=True)
class Disk:
    """How long it takes to make 8 KiB durable beside the database; what every commit waits for."""

    def read(self, rig: Rig, seconds: float) -> Reading:
        """The median of a few times."""
        return Reading(sync_ms(rig.directory))


Arm = Storm | Idle | Bare | Disk

DISK = "disk"
ONE = names.HELD[:1]
ARMS: dict[str, Arm] = {
    DISK: Disk(),
    "nothing, 1 lock": Storm("auth", ONE),
    "skip, 1 lock": Storm("cron", ONE, "skipped"),
    "skip, 1 lock, no log": Storm("cron", ONE, "skipped", is_logging=False),
    "redis, 1 lock": Storm("redis", ONE),
    "redis shared, 1 lock": Storm("redis-shared", ONE),
    "nothing, 32 locks": Storm("auth", names.HELD),
    "skip, 32 locks": Storm("cron", names.HELD, "skipped"),
    "redis, 32 locks": Storm("redis", names.HELD),
    "redis shared, 32 locks": Storm("redis-shared", names.HELD),
    "idle nothing": Idle("auth"),
    "idle skip": Idle("cron"),
    "bare lock": Bare("lock"),
    "bare insert": Bare("insert"),
    "article": Storm("article", names.EMPTY, is_own=True),
    "run": Storm("cron", names.EMPTY, "completed", is_own=True),
    "article, 1 statement": Storm("article-one", names.ONE_STATEMENT, is_own=True),
    "run, 1 statement": Storm("cron", names.ONE_STATEMENT, "completed", is_own=True),
}
