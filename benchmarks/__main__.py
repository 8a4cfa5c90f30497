"""`python -m benchmarks`, or `./run bench`: measure everything and print one table."""

import argparse
import asyncio
import shlex
import sys
from pathlib import Path

import psycopg

from benchmarks import machine, sameness, trips
from benchmarks.arms import ARMS, DISK, Arm, Wrong
from benchmarks.rig import Rig
from benchmarks.rows import GROUPS, ROWS, TRIPS, Round, Row
from benchmarks.table import Report, surroundings, write

LEAST_ROUNDS = 5


def main() -> int:
    """Returns the exit code: 1 for a reading that is worth nothing; a target that is not reached is no error."""
    given = arguments()
    wanted = [row for row in ROWS if given.only in (None, row.group)]
    missing = find_missing(wanted)
    rows = [row for row in wanted if row not in missing]
    try:
        with Rig(has_redis=any(row.needs_redis for row in rows)) as rig:
            sameness.check(rig)
            counts = count(rig) if given.only in (None, TRIPS) else []
            rounds = measure(rig, rows, given.rounds, given.seconds)
            report = str(
                Report(
                    rig,
                    command=shlex.join(["./run", "bench", *sys.argv[1:]]),
                    seconds=given.seconds,
                    is_short=given.short,
                    rounds=rounds,
                    compared=[row.compare(rounds) for row in rows],
                    missing=missing,
                    counts=counts,
                )
            )
    except Wrong as error:
        print(f"this is no measurement: {error}", file=sys.stderr)
        return 1
    print(report)
    if given.write:
        write(given.write, report)
    return 0


def arguments() -> argparse.Namespace:
    """The command line; ends the process with 2 if it makes no sense."""
    parser = argparse.ArgumentParser(prog="./run bench", description=__doc__)
    parser.add_argument("--rounds", type=int, help=f"rounds, {LEAST_ROUNDS} at least (default: {LEAST_ROUNDS})")
    parser.add_argument("--seconds", type=int, help="whole seconds of each reading (default: 2)")
    parser.add_argument("--only", choices=GROUPS, help="only these rows")
    parser.add_argument("--short", action="store_true", help="one round of a second, to see that it works")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table into this page too")
    given = parser.parse_args()
    if given.short and given.write:
        parser.error("--write is for measurements, and the short form is none")
    if given.only and given.write:
        parser.error("--write is for the whole table")
    if given.write:
        try:
            surroundings(given.write)
        except (OSError, ValueError) as error:
            parser.error(str(error))
    if given.rounds is None:
        given.rounds = 1 if given.short else LEAST_ROUNDS
    if given.seconds is None:
        given.seconds = 1 if given.short else 2
    if given.seconds < 1 or given.rounds < 1 or (given.rounds < LEAST_ROUNDS and not given.short):
        parser.error(f"at least {LEAST_ROUNDS} rounds of a second each, or --short")
    return given


def find_missing(rows: list[Row]) -> dict[Row, str]:
    """The rows that cannot be measured here, and why; what they need is installed first where that is possible."""
    found = {}
    without_wrk = without_redis = None
    if any(not row.is_time for row in rows):
        without_wrk = machine.install("wrk")
    if any(row.needs_redis for row in rows):
        without_redis = (
            machine.install("redis-server") or machine.missing_module("redis") or machine.missing_module("hiredis")
        )
    for row in rows:
        if why := (None if row.is_time else without_wrk) or (without_redis if row.needs_redis else None):
            found[row] = why
    return found


def count(rig: Rig) -> list[trips.Count] | str:
    """Round trips and commits, or why they cannot be counted here."""
    show("counting round trips and commits")
    try:
        return asyncio.run(trips.count(rig.url))
    except psycopg.Error as error:
        return f"pg_walinspect cannot be used ({str(error).splitlines()[0]})"


def measure(rig: Rig, rows: list[Row], times: int, seconds: int) -> list[Round]:
    """Warm up, then take every reading that the rows need, `times` rounds of them in turn."""
    if not rows:
        return []
    needed = {DISK, *(name for row in rows for name in row.arms)}
    arms = {name: arm for name, arm in ARMS.items() if name in needed}
    take(rig, arms, 1, "warming up")
    return [take(rig, arms, seconds, f"round {number + 1} of {times}") for number in range(times)]


def take(rig: Rig, arms: dict[str, Arm], seconds: int, what: str) -> Round:
    """One round."""
    found = {}
    for name, arm in arms.items():
        show(f"{what}: {name}")
        found[name] = arm.read(rig, seconds)
    return found


def show(text: str) -> None:
    """One line on stderr about what is done now."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
