"""What is measured of a queue, each thing by itself: an arm takes one reading in every round, in turn with others."""

import math
import socket
import time
from dataclasses import dataclass, replace
from statistics import median

import psycopg

from benchmarks import machine
from benchmarks.arms import Reading, Wrong
from benchmarks.queue.posted import Keyed, Posted
from benchmarks.queue.systems import System
from benchmarks.queue.workers import Place, Work, Worker, work
from benchmarks.rig import Rig

CALLERS = 16
NEAR = 5000
"""No worker is so many jobs ahead of the oldest one that it has not ended."""
STAMPS = 200
"""Jobs of one reading of a latency at most."""
Found = dict[str, Reading]


def worked(one: Work) -> Reading:
    """A worker's throughput, and the CPU time of each job."""
    return Reading(one.rate, "/s", None, one.worker_us, one.postgres_us)


def middle(found: list[Work]) -> Work:
    """The median by throughput."""
    return sorted(found, key=lambda one: one.rate)[len(found) // 2]


@dataclass(frozen=True, slots=True)
class Process:
    """Jobs that do nothing, worked on by one process until the last one's end is durable."""

    system: System
    place: str
    queued: int = 0
    """How many jobs stand in the queue, where those that are measured are only the first of them."""

    def read(self, places: dict[str, Place], seconds: float) -> Found:
        """A worker is started for it; raises `Wrong`."""
        place = places[self.place]
        place.clear()
        return {"": worked(work(place, self.system, seconds, self.queued))}


@dataclass(frozen=True, slots=True)
class Held:
    """The same beside a transaction that stays open for `seconds`: the readings of its last third."""

    system: System
    place: str
    seconds: float

    def read(self, places: dict[str, Place], seconds: float) -> Found:
        """Three readings before it, then one after another while it is open; raises `Wrong`."""
        place = places[self.place]
        place.clear()
        before = [self._work(place, seconds) for _ in range(4 if seconds >= 1 else 1)][-3:]
        with psycopg.connect(place.url) as other:
            other.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            other.execute("SELECT txid_current()")
            since = time.monotonic()
            found: list[tuple[float, Work]] = []
            while not found or found[-1][0] < self.seconds:
                one = self._work(place, seconds)
                found.append((time.monotonic() - since, one))
        last = [one for at, one in found if at > self.seconds * 2 / 3]
        shown = found[:: max(1, math.ceil(len(found) / 6))]
        series = {f", {at:.0f} s after its beginning": worked(one) for at, one in shown}
        return {", before it": worked(middle(before)), **series, "": worked(middle(last))}

    def _work(self, place: Place, seconds: float) -> Work:
        """A reading whose looks pass over the jobs that have ended, which cannot be removed: they are done in order.

        All that have completed are counted once, at its end.
        """
        last = place.count("SELECT coalesce(pg_sequence_last_value('cronlock.job_id'), 0)")
        ended = f"(SELECT coalesce(max(id), {last}) FROM cronlock.job_history)"
        left = f"{self.system.left} WHERE id > greatest({ended} - {NEAR}, {last})"
        completed = f"{self.system.completed} AND id > {last}"
        return work(place, replace(self.system, left=left, completed=completed), seconds)


@dataclass(frozen=True, slots=True)
class Enqueue:
    """`many`: batches of 1,000; `one`: one by one from 16 callers; `inside`: the same in the callers' transactions."""

    system: System
    place: str
    how: str

    def read(self, places: dict[str, Place], seconds: float) -> Found:
        """One process; the rows are counted afterwards. Raises `Wrong`."""
        place = places[self.place]
        place.clear()
        words = ("many", str(seconds), "100000000") if self.how == "many" else (self.how, str(CALLERS), str(seconds))
        told = place.tell(*words, core=place.core, system=self.system)
        made, rows = told["jobs"] + told["before"], place.count(self.system.left)
        if rows != made:
            raise Wrong(f"{self.system.name}: {made} jobs were enqueued, but there are {rows}")
        if self.how == "inside" and (placed := place.count("SELECT count(*) FROM placed")) != made:
            raise Wrong(f"{self.system.name}: {made} transactions, but {placed} rows of theirs")
        place.clear()
        return {"": Reading(told["jobs"] / told["seconds"], "/s", rows=rows, answers=made)}


@dataclass(frozen=True, slots=True)
class Latency:
    """From the beginning of an enqueue to the start of the job, in a worker that has nothing else to do."""

    system: System
    place: str

    def read(self, places: dict[str, Place], seconds: float) -> Found:
        """A worker is started for it; raises `Wrong`."""
        place = places[self.place]
        place.clear()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
            found.bind(("127.0.0.1", 0))
            more = {"BENCHMARK_STAMPS": str(found.getsockname()[1]), "BENCHMARK_TASK": self.system.stamp}
        with Worker(place, self.system, **more):
            taken = place.tell("latency", str(STAMPS), str(seconds), core=None, system=self.system, **more)
        taken.sort()
        p95 = taken[math.ceil(0.95 * len(taken)) - 1]
        return {" p50": Reading(median(taken), "ms"), " p95": Reading(p95, "ms")}


@dataclass(frozen=True, slots=True)
class Disk:
    """How long it takes to make 8 KiB durable beside the database; what every commit waits for."""

    rig: Rig

    def read(self, places: dict[str, Place], seconds: float) -> Found:
        """The median of a few times."""
        return {"": Reading(machine.sync_ms(self.rig.directory), "ms")}


Arm = Process | Held | Enqueue | Latency | Posted | Keyed | Disk
