"""The queue's table, in Markdown."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks import machine
from benchmarks.comparison import Compared, Round
from benchmarks.queue import install
from benchmarks.queue.arms import CALLERS
from benchmarks.queue.systems import CONCURRENCY
from benchmarks.rig import Rig
from benchmarks.table import HEAD, SHORT, figure, line, today, us


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was found out, and how."""

    rig: Rig
    command: str
    seconds: float
    is_short: bool
    rounds: list[Round]
    compared: Sequence[Compared]
    missing: dict[str, str]
    """What was not measured, and why."""

    def __str__(self) -> str:
        parts = [SHORT] if self.is_short else []
        parts += [self._conditions(), "\n".join(self._table())]
        if self.missing:
            parts.append("\n".join(f"- Not measured: {what}: {why}." for what, why in self.missing.items()))
        return "\n\n".join([*parts, _readings(self.rounds), surroundings(self.rig)])

    def _table(self) -> Iterator[str]:
        yield HEAD
        yield from map(line, self.compared)

    def _conditions(self) -> str:
        warm = "" if self.is_short else "after one to warm up; "
        return (
            f"Measured on {today()} with `{self.command}`: {len(self.rounds)} rounds of about {self.seconds:g} s a "
            f"reading, in turn (A B C ... A B C ...) {warm}medians, and ratios taken within a round. {cores(self.rig)} "
            f"Every queue has a database of its own on one server. A worker of cronlock is `cronlock worker "
            f"--concurrency {CONCURRENCY}` with its log in a file; jobs are counted when their end is durable. "
            f"Single jobs are enqueued by {CALLERS} callers in one process."
        )


def cores(rig: Rig) -> str:
    """What runs where."""
    if rig.server_core is None:
        return "Nothing is pinned to a core."
    others = ", ".join(map(str, sorted(rig.other_cores)))
    server = f"PostgreSQL to core {others}" if rig.is_embedded else "PostgreSQL is wherever DATABASE_URL says"
    return f"Workers and what enqueues are pinned to core {rig.server_core}, {server}."


def surroundings(rig: Rig) -> str:
    """The machine, the server, the versions."""
    return (
        f"Machine: {machine.describe()}; load average before the start: {rig.load_before:.1f}.\n"
        f"{rig.postgres()}.\nVersions: {', '.join(machine.versions())}; "
        f"of the peers: {', '.join(install.versions()) or 'none is installed'}."
    )


def _readings(rounds: list[Round]) -> str:
    lines = [
        "| reading | median [min-max] | process CPU us/job | PostgreSQL CPU us/job |",
        "|---|---:|---:|---:|",
    ]
    for name in dict.fromkeys(name for one in rounds for name in one):
        found = [one[name] for one in rounds if name in one]
        values = [reading.value for reading in found]
        unit = found[0].unit
        range_ = f"{figure(median(values), unit)} [{figure(min(values), unit)}-{figure(max(values), unit)}]"
        server, postgres = us([one.server_us for one in found]), us([one.postgres_us for one in found])
        lines.append(f"| {name} | {range_} | {server} | {postgres} |")
    return "\n".join(lines)
