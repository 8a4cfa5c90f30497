"""The table, in Markdown, and its place in a page."""

from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from benchmarks import machine, names
from benchmarks.arms import ARMS, DISK, Storm
from benchmarks.rig import Rig
from benchmarks.rows import Compared, Round, Row
from benchmarks.trips import Count

BEGIN = "<!-- benchmarks: what follows is written by `./run bench --write` -->"
END = "<!-- benchmarks: end -->"
SHORT = "**Short form: not a measurement.**"

LABELS = {DISK: "8 KiB made durable on the disk"}

HEAD = (
    "| what | cronlock | against | its figure | ratio, median [min-max] | to reach | reached |\n"
    "|---|---:|---|---:|---:|---:|---|"
)


def render(
    rig: Rig,
    rounds: list[Round],
    compared: list[Compared],
    missing: dict[Row, str],
    counts: list[Count] | str,
    *,
    command: str,
    seconds: int,
    is_short: bool,
) -> str:
    """The whole report."""
    parts = [SHORT] if is_short else []
    parts.append(_conditions(rig, len(rounds), seconds, command) if rounds else f"Counted with `{command}`.")
    if compared or missing or counts:
        lines = [
            HEAD,
            *map(_row, compared),
            *(_missing(row, why) for row, why in missing.items()),
            *(_count(found) for found in counts),
        ]
        parts.append("\n".join(lines))
    if rounds:
        parts += [_proof(rounds), _readings(rounds)]
    parts.append(_machine(rig))
    return "\n\n".join(parts)


def write(path: Path, report: str) -> None:
    """Put the report between the two marks in a page, or at its end; what stands around it is kept."""
    text = path.read_text() if path.exists() else "# Performance\n"
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before.rstrip()}\n\n{BEGIN}\n\n{report}\n\n{END}\n{after.lstrip(chr(10)) and after}")


def _figure(value: float, unit: str) -> str:
    return f"{value:.2f} ms" if unit == "ms" else f"{value:,.0f}/s"


def _row(found: Compared) -> str:
    row = found.row
    ratio = f"{found.ratio:.2f} [{min(found.ratios):.2f}-{max(found.ratios):.2f}]"
    target = "-" if row.target is None else f"{'at most' if row.is_time else 'at least'} {row.target:g}"
    reached = {None: "-", True: "yes", False: "**no**"}[found.is_reached]
    mine, theirs = _figure(found.mine, row.unit), _figure(found.theirs, row.unit)
    return f"| {row.what} | {mine} | {row.against} | {theirs} | {ratio} | {target} | {reached} |"


def _missing(row: Row, why: str) -> str:
    return f"| {row.what} | | {row.against} | not measured: {why} | | {row.target or '-'} | - |"


def _uncounted(why: str) -> str:
    return f"| round trips and commits that wrote | | | not measured: {why} | | - | - |"


def _count(found: Count) -> str:
    most = f"{found.most_trips} and {found.most_commits}"
    reached = "yes" if found.is_reached else "**no**"
    return (
        f"| round trips and commits that wrote, of {found.what} | {found.trips:g} and {found.commits:g} | "
        f"counted on the wire and in the WAL | | at most {most} | "
        f"at most {found.trips_limit} and {found.commits_limit} | {reached} |"
    )


def _conditions(rig: Rig, rounds: int, seconds: int, command: str) -> str:
    if rig.server_core is None:
        cores = "nothing is pinned to a core"
    else:
        others = ", ".join(map(str, sorted(rig.other_cores)))
        rest = "PostgreSQL, Redis and wrk" if rig.is_embedded else "Redis and wrk"
        cores = f"the server is pinned to core {rig.server_core}, {rest} to core {others}"
    return (
        f"Measured on {datetime.now(UTC):%Y-%m-%d} with `{command}`: {rounds} rounds of {seconds} s for each reading "
        "in turn (A B C ... A B C ...) after one to warm up; medians, and ratios taken within a round. "
        f"{names.CONNECTIONS} connections over HTTP on loopback; {cores}. One `cronlock serve` process has all routes; "
        f"its log lines (JSON, one a call; peers write none) go to a file. Pools: {names.CONNECTIONS} connections for "
        f"cronlock's runs and two for its records, {names.CONNECTIONS} for the article's pattern, up to "
        f"{2 * names.CONNECTIONS} for Redis."
    )


def _proof(rounds: list[Round]) -> str:
    readings = [(ARMS[name], reading) for found in rounds for name, reading in found.items()]
    storms = [(arm, reading) for arm, reading in readings if isinstance(arm, Storm)]
    rows = sum(reading.rows for _, reading in storms)
    answers = sum(reading.answers for arm, reading in storms if arm.status)
    seen = sum(reading.load.requests for arm, reading in storms if arm.status and reading.load)
    busiest = max((reading.load.cpu for _, reading in storms if reading.load), default=0.0)
    return (
        f"Rows counted after every burst: {rows:,} rows for {answers:,} answers that the server gave to these calls; "
        f"wrk saw {seen:,} of them (it ends a burst without the last answers, {names.CONNECTIONS} at most, whose rows "
        f"are there). wrk used {busiest:.0%} of a core at most."
    )


def _readings(rounds: list[Round]) -> str:
    lines = [
        "| reading | median | p50 ms | p99 ms | server CPU us/answer | bytes/answer |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in rounds[0]:
        found = [one[name] for one in rounds]
        unit = "/s" if isinstance(ARMS[name], Storm) else "ms"
        cells = [LABELS.get(name, name), _figure(median(reading.value for reading in found), unit)]
        loads = [reading.load for reading in found if reading.load is not None]
        if loads:
            cells += [
                f"{median(load.p50_ms for load in loads):.2f}",
                f"{median(load.p99_ms for load in loads):.1f}",
                f"{median(reading.cpu_us for reading in found):.0f}",
                f"{median(load.bytes / load.requests for load in loads):.0f}",
            ]
        else:
            cells += ["", "", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _machine(rig: Rig) -> str:
    return (
        f"Machine: {machine.describe()}; load average before the start: {rig.load_before:.1f}.\n"
        f"{rig.postgres()}.\nVersions: {', '.join(machine.versions())}."
    )
