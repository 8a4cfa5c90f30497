"""`python -m benchmarks`, or `./run bench`: measure everything and print one table."""

import argparse
import asyncio
import shlex
import sys
from pathlib import Path

import psycopg

from benchmarks import machine, trips
from benchmarks.arms import Arm, Wrong
from benchmarks.comparison import Round
from benchmarks.queue import command as queue
from benchmarks.rig import Rig, holder
from benchmarks.rows import ALWAYS, GROUPS, TRIPS, Row, rows
from benchmarks.server import environment
from benchmarks.stages import FULL, SHORT, Scale, stages
from benchmarks.table import Report, surroundings, write

LEAST_ROUNDS = 5


def main() -> int:
    """Returns the exit code: 1 for a reading that is worth nothing; a target that is not reached is no error."""
    given = arguments()
    scale = SHORT if given.short else FULL
    wanted = [row for row in rows(scale) if given.only in (None, row.group)]
    missing = find_missing(wanted)
    measured = [row for row in wanted if row not in missing]
    try:
        with Rig(has_redis=any("redis" in row.needs for row in measured)) as rig:
            counts = count(rig) if given.only in (None, TRIPS) else []
            rounds = measure(rig, scale, measured, given.rounds, given.seconds)
            report = str(
                Report(
                    rig,
                    command=shlex.join(["./run", "bench", *sys.argv[1:]]),
                    seconds=given.seconds,
                    is_short=given.short,
                    rounds=rounds,
                    compared=[row.compare(rounds) for row in measured],
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
    parser = argparse.ArgumentParser(
        prog="./run bench", description=__doc__, epilog="The queue has a command of its own: ./run bench queue --help"
    )
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


def find_missing(wanted: list[Row]) -> dict[Row, str]:
    """The rows that cannot be measured here, and why; what they need is installed first where that is possible."""
    found = {need: why for need in {need for row in wanted for need in row.needs} if (why := lack(need))}
    return {row: found[need] for row in wanted for need in row.needs if need in found}


def lack(need: str) -> str | None:
    """Why something that a row needs is not to be had, if so."""
    if need == "wrk":
        return machine.install("wrk")
    if need == "redis":
        return machine.install("redis-server") or machine.missing_module("redis") or machine.missing_module("hiredis")
    return machine.missing_module("sqlalchemy-dlock") if need == "dlock" else machine.missing_proc()


def count(rig: Rig) -> list[trips.Count] | str:
    """Round trips and commits, or why they cannot be counted here."""
    show("counting round trips and commits")
    try:
        with rig.database("trips") as url, holder(environment(url, None)):
            return asyncio.run(trips.count(url))
    except psycopg.Error as error:
        return f"pg_walinspect cannot be used ({str(error).splitlines()[0]})"


def measure(rig: Rig, scale: Scale, wanted: list[Row], times: int, seconds: int) -> list[Round]:
    """Every reading that the rows need: `times` rounds of each stage, after one to warm up but in the short form."""
    if not wanted:
        return []
    needed = {*ALWAYS, *(name for row in wanted for name in row.arms)}
    rounds: list[Round] = [{} for _ in range(times)]
    for stage in stages(scale):
        arms = {name: arm for name, arm in stage.arms.items() if name in needed}
        if not arms.keys() - ALWAYS:
            continue
        show(f"preparing for: {'; '.join(arms)}")
        with stage.setting(rig, scale):
            if not stage.is_once and scale is not SHORT:
                take(rig, arms, 1, "warming up")
            for number in range(1 if stage.is_once else times):
                rounds[number] |= take(rig, arms, seconds, f"round {number + 1} of {times}")
    return rounds


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
    sys.exit(queue.main(sys.argv[2:]) if sys.argv[1:2] == ["queue"] else main())
