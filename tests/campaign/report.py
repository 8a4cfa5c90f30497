"""The table, in Markdown, and its place in a page."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from benchmarks import machine
from cronlock.binaries import find_binaries
from tests.campaign.checks import FALSE_COMPLETED, LOST_RECORDS, OVERLAPS, WRONGLY_LOST
from tests.campaign.scenarios import Result, duration

BEGIN = "<!-- campaign: what follows is written by `./run campaign --report` -->"
END = "<!-- campaign: end -->"
SHOWN = 20
"""How many offences of a scenario are named."""

HEAD = (
    "| scenario | what was done | runs started | completed | failed on purpose or late | lost | skipped"
    " | calls answered / unavailable / broken | overlaps of commits | false completed | lost records | wrongly lost"
    " | longest lock after a death | memory growth | connections | took |\n"
    "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
)


def table(results: list[Result]) -> str:
    """One line a scenario."""
    return "\n".join([HEAD, *map(_row, results)])


def _row(result: Result) -> str:
    counts = result.counts
    answered = result.calls - result.unavailable - result.broken_calls
    promises = (_number(result.number(promise)) for promise in (OVERLAPS, FALSE_COMPLETED, LOST_RECORDS, WRONGLY_LOST))
    cells = (
        result.name,
        result.what,
        f"{counts.started:,}",
        f"{counts.completed:,}",
        f"{counts.ended_otherwise:,}",
        f"{counts.lost:,}",
        f"{counts.skipped:,}",
        f"{answered:,} / {result.unavailable:,} / {result.broken_calls:,}",
        *promises,
        "-" if result.held is None else f"{result.held:.2f} s",
        "-" if result.growth is None else f"{result.growth:+.1%}",
        f"{result.connections} of {result.connections_limit}",
        duration(result.seconds),
    )
    return f"| {' | '.join(cells)} |"


def _number(number: int) -> str:
    return f"**{number:,}**" if number else "0"


def report(results: list[Result], *, command: str, seed: str, is_short: bool) -> str:
    """The table with how it came about."""
    parts = [
        f"Played on {datetime.now(UTC):%Y-%m-%d} with `{command}`, seed `{seed}`"
        f"{', in the short form' if is_short else ''}.",
        table(results),
    ]
    if notes := [f"- {result.name}: {note}" for result in results for note in result.notes]:
        parts.append("\n".join(notes))
    if offences := [line for result in results for line in offending(result)]:
        parts.append("\n".join(["**Not as promised:**", "", *offences]))
    parts.append("\n".join(_surroundings()))
    return "\n\n".join(parts)


def offending(result: Result) -> list[str]:
    """The first offences of a scenario, a line each."""
    found = [str(broken) for broken in result.broken] + result.faults
    more = [f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return [f"- {result.name}: {what}" for what in [*found[:SHOWN], *more]]


def _surroundings() -> list[str]:
    names = ("psycopg", "psycopg-pool", "sqlalchemy", "starlette", "uvicorn", "uvloop")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return [
        f"Machine: {machine.describe()}; load average at the end: {os.getloadavg()[0]:.1f}.",
        f"{_said(str(find_binaries() / 'postgres'), '--version')}, fsync and synchronous_commit on;"
        f" {_said('pgbouncer', '--version')}, transaction mode.",
        f"{machine.revision()}, Python {platform.python_version()}, {versions}.",
    ]


def _said(program: str, option: str) -> str:
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
    done = subprocess.run(
        [program, option], capture_output=True, text=True, check=False, env={**os.environ, "PATH": path}
    )
    return done.stdout.splitlines()[0].replace("postgres (PostgreSQL)", "PostgreSQL")


def write(page: Path, text: str) -> None:
    """Put the report between the two marks of a page, or make the file of it."""
    if not page.exists() or BEGIN not in (before := page.read_text()):
        page.write_text(f"{text}\n")
        return
    head, _, rest = before.partition(BEGIN)
    page.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")
