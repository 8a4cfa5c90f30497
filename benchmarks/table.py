"""The table, in Markdown, and its place in a page."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from benchmarks import comparison, machine, names
from benchmarks.comparison import Compared, Round
from benchmarks.rig import Rig
from benchmarks.rows import Row
from benchmarks.trips import Count

BEGIN = "<!-- benchmarks: what follows is written by `./run bench --write` -->"
END = "<!-- benchmarks: end -->"
SHORT = "**Short form: not a measurement.**"

HEAD = (
    "| what | cronlock | against | its figure | ratio, median [min-max] | to reach | reached |\n"
    "|---|---:|---|---:|---:|---:|---|"
)


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was found out, and how."""

    rig: Rig
    command: str
    seconds: int
    is_short: bool
    rounds: list[Round]
    compared: list[Compared]
    missing: dict[Row, str]
    """Rows that were not measured, and why."""
    counts: list[Count] | str
    """Round trips and commits, or why they were not counted."""

    def __str__(self) -> str:
        parts = [SHORT] if self.is_short else []
        parts += [self._conditions(), "\n".join(self._table())]
        if self.rounds:
            parts += [_proof(self.rounds), _readings(self.rounds)]
        return "\n\n".join([*parts, _machine(self.rig)])

    def _table(self) -> Iterator[str]:
        yield HEAD
        yield from map(line, self.compared)
        for row, why in self.missing.items():
            yield f"| {row.what} | | {row.against} | not measured: {why} | | {_target(row)} | - |"
        if isinstance(self.counts, str):
            yield f"| round trips and commits that wrote | | | not measured: {self.counts} | | - | - |"
        else:
            yield from map(_count, self.counts)

    def _conditions(self) -> str:
        rig = self.rig
        if not self.rounds:
            return f"Counted on {today()} with `{self.command}`."
        warm = "" if self.is_short else "after one to warm up; "
        cores = "nothing is pinned to a core"
        if rig.server_core is not None:
            rest = "PostgreSQL, Redis and wrk" if rig.is_embedded else "Redis and wrk"
            others = ", ".join(map(str, sorted(rig.other_cores)))
            cores = f"the server is pinned to core {rig.server_core}, {rest} to core {others}"
        return (
            f"Measured on {today()} with `{self.command}`: {len(self.rounds)} rounds of {self.seconds} s a reading, "
            f"in turn (A B C ... A B C ...) {warm}medians, and ratios taken within a round. "
            f"{names.CONNECTIONS} connections over HTTP on loopback; {cores}. One `cronlock serve` process has all "
            "routes that are compared, and two take turns where servers are; log lines (JSON, one a call; peers write "
            f"none) go to a file. Pools: {names.CONNECTIONS} connections for cronlock's runs and two for its records, "
            f"{names.CONNECTIONS} for the article's pattern, for sqlalchemy-dlock and for the guarded task, up to "
            f"{2 * names.CONNECTIONS} for Redis."
        )


def write(page: Path, report: str, begin: str = BEGIN, end: str = END) -> None:
    """Put the report between the two marks in a page, or at its end; what stands around it is kept."""
    before, after = surroundings(page, begin, end)
    page.write_text(f"{before.rstrip()}\n\n{begin}\n\n{report}\n\n{end}{after or chr(10)}")


def surroundings(page: Path, begin: str = BEGIN, end: str = END) -> tuple[str, str]:
    """What stands before and after the report in a page; raises `ValueError` if one of the two marks is missing."""
    text = page.read_text() if page.exists() else "# Performance\n"
    if (begin in text) != (end in text):
        raise ValueError(f"{page} has one of these lines without the other: {begin} {end}")
    before, _, rest = text.partition(begin)
    return before, rest.partition(end)[2]


def today() -> str:
    """The date, in UTC."""
    return f"{datetime.now(UTC):%Y-%m-%d}"


def _target(row: comparison.Row) -> str:
    if row.target is None:
        return "-"
    return f"{'at most' if row.is_less_better else 'at least'} {row.target:g}"


def figure(value: float, unit: str) -> str:
    """A reading's value as it stands in a table."""
    if unit == "/s":
        return f"{value:,.0f}/s"
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.2f} {unit}"


def line(found: Compared) -> str:
    """A comparison as a row of the table below `HEAD`."""
    row = found.row
    ratio = f"{found.ratio:.2f} [{min(found.ratios):.2f}-{max(found.ratios):.2f}]"
    reached = {None: "-", True: "yes", False: "**no**"}[found.is_reached]
    mine, theirs = figure(found.mine, row.unit), figure(found.theirs, row.unit)
    return f"| {row.what} | {mine} | {found.against} | {theirs} | {ratio} | {_target(row)} | {reached} |"


def _count(found: Count) -> str:
    most = f"{found.most_trips} and {found.most_commits}"
    reached = "yes" if found.is_reached else "**no**"
    return (
        f"| round trips and commits that wrote, of {found.what} | {found.trips:g} and {found.commits:g} | "
        f"counted on the wire and in the WAL | | at most {most} | "
        f"at most {found.trips_limit} and {found.commits_limit} | {reached} |"
    )


def _proof(rounds: list[Round]) -> str:
    readings = [reading for found in rounds for reading in found.values()]
    rows = sum(reading.rows for reading in readings)
    answers = sum(reading.answers for reading in readings)
    busiest = max((reading.load.cpu for reading in readings if reading.load), default=0.0)
    return (
        f"Rows counted after every burst: {rows:,} rows for {answers:,} answers that the servers gave to these calls; "
        "and one for each run from code. (wrk ends a burst without the last answers, one for each connection at most; "
        f"their rows are there.) wrk used {busiest:.0%} of a core at most."
    )


def _readings(rounds: list[Round]) -> str:
    lines = [
        "| reading | median | p50 ms | p99 ms | server CPU us/answer | PostgreSQL CPU us/answer | bytes/answer |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in dict.fromkeys(name for one in rounds for name in one):
        found = [one[name] for one in rounds if name in one]
        loads = [reading.load for reading in found if reading.load is not None]
        cells = [
            name,
            figure(median(reading.value for reading in found), found[0].unit),
            f"{median(load.p50_ms for load in loads):.2f}" if loads else "",
            f"{median(load.p99_ms for load in loads):.1f}" if loads else "",
            us([reading.server_us for reading in found]),
            us([reading.postgres_us for reading in found]),
            f"{median(load.bytes / load.requests for load in loads):.0f}" if loads else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def us(found: list[float | None]) -> str:
    """The median of what was measured, in microseconds; empty where nothing was."""
    known = [us for us in found if us is not None]
    return f"{median(known):.0f}" if known else ""


def _machine(rig: Rig) -> str:
    return (
        f"Machine: {machine.describe()}; load average before the start: {rig.load_before:.1f}.\n"
        f"{rig.postgres()}.\nVersions: {', '.join(machine.versions())}."
    )
