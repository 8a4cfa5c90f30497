"""Dead rows and the size of the tables while jobs come and go for a long time."""

import subprocess
import time
from dataclasses import dataclass
from statistics import median

from benchmarks.arms import Wrong
from benchmarks.queue.systems import GUARD
from benchmarks.queue.table import cores, surroundings
from benchmarks.queue.workers import Place, Worker, pinned, place
from benchmarks.rig import Rig
from benchmarks.server import ROOT, end
from benchmarks.table import SHORT, today

PER_SECOND = 200
SAMPLES, SAMPLES_SHORT = 30, 6
START_WITHIN = 60.0
FLAT = 1.25
"""The last third of the samples is at most so many times the second one, or this is growth."""
SAMPLE = """
SELECT pg_table_size('cronlock.job'), pg_indexes_size('cronlock.job'), stats.n_dead_tup,
       (SELECT count(*) FROM cronlock.job), (SELECT count(*) FROM cronlock.job_history),
       pg_total_relation_size('cronlock.job_history')
  FROM pg_stat_user_tables AS stats WHERE stats.relid = 'cronlock.job'::regclass
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """The table of live jobs, and that of those that have ended, at one moment."""

    at: float
    table: int
    indexes: int
    dead: int
    live: int
    ended: int
    history: int


def report(minutes: float, command: str, *, is_short: bool) -> str:
    """Work for so long, and print the series; raises `Wrong` if the jobs are not worked off."""
    seconds = minutes * 60
    with Rig(has_redis=False) as rig, place(rig, GUARD) as found, Worker(found, GUARD), feed(found, seconds) as feeding:
        samples = _sample(found, feeding, seconds, SAMPLES_SHORT if is_short else SAMPLES)
        text = _text(samples, rig, minutes, command)
    return (f"{SHORT}\n\n" if is_short else "") + text


class feed:
    """The process that enqueues at a steady rate."""

    def __init__(self, place: Place, seconds: float) -> None:
        self._place = place
        self._seconds = seconds

    def __enter__(self) -> "subprocess.Popen[bytes]":
        place = self._place
        with pinned(place.core):
            self._child = subprocess.Popen(
                GUARD.command("steadily", str(PER_SECOND), str(self._seconds)),
                cwd=ROOT,
                env=place.environment(GUARD),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        return self._child

    def __exit__(self, *_: object) -> None:
        end(self._child)


def _sample(place: Place, feeding: "subprocess.Popen[bytes]", seconds: float, times: int) -> list[Sample]:
    began = time.monotonic()
    while not place.count("SELECT count(*) FROM cronlock.job_history"):
        if time.monotonic() - began > START_WITHIN:
            raise Wrong(f"no job had ended after {START_WITHIN:g} s: {place.log.read_text()[-3000:]}")
        time.sleep(0.05)
    began = time.monotonic()
    samples = []
    for number in range(1, times + 1):
        time.sleep(max(0.0, began + number * seconds / times - time.monotonic()))
        row = place.connection.execute(SAMPLE).fetchone()
        assert row is not None
        samples.append(Sample(time.monotonic() - began, *map(int, row)))
    feeding.wait(30)
    until = time.monotonic() + 30
    while left := place.count(GUARD.left):
        if time.monotonic() > until:
            raise Wrong(f"{left} jobs were left at the end: {place.log.read_text()[-3000:]}")
        time.sleep(0.1)
    ended = place.count("SELECT count(*) FROM cronlock.job_history WHERE status = 'completed'")
    if ended < 0.9 * PER_SECOND * seconds:
        raise Wrong(f"{ended} jobs were worked on in {seconds:g} s, which is not {PER_SECOND} a second")
    return samples


def _text(samples: list[Sample], rig: Rig, minutes: float, command: str) -> str:
    third = len(samples) // 3
    second, last = samples[third : 2 * third], samples[-third:]
    lines = [
        f"Made on {today()} with `{command}`: {PER_SECOND} jobs a second for {minutes:g} minutes, each enqueued by "
        f"itself, one worker. {cores(rig)}",
        "",
        "| the table of live jobs | second third, median | last third, median | ratio | to reach | reached |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for what, pick, unit in (
        ("dead rows", lambda one: one.dead, 1),
        ("size, KiB", lambda one: one.table, 1024),
        ("size of its indexes, KiB", lambda one: one.indexes, 1024),
    ):
        before, after = median(map(pick, second)) / unit, median(map(pick, last)) / unit
        ratio = after / before if before else 1.0
        reached = "yes" if ratio <= FLAT else "**no**"
        lines.append(f"| {what} | {before:,.0f} | {after:,.0f} | {ratio:.2f} | at most {FLAT:g} | {reached} |")
    lines += [
        "",
        "| minute | dead rows | live rows | table KiB | indexes KiB | ended jobs | their table MiB |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {one.at / 60:.1f} | {one.dead:,} | {one.live:,} | {one.table / 1024:,.0f} | {one.indexes / 1024:,.0f} "
        f"| {one.ended:,} | {one.history / 2**20:.1f} |"
        for one in samples
    ]
    return "\n".join([*lines, "", surroundings(rig)])
