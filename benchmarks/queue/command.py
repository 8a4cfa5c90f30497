"""`./run bench queue`: measure jobs beside other queues on PostgreSQL, and print one table."""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.arms import Reading, Wrong
from benchmarks.comparison import Round
from benchmarks.queue import churn, faults
from benchmarks.queue.rows import rows
from benchmarks.queue.stages import FULL, SHORT, Stage, stages
from benchmarks.queue.systems import GRAPHILE, PEERS, PGQUEUER, System
from benchmarks.queue.table import Report
from benchmarks.queue.workers import Place
from benchmarks.rig import Rig
from benchmarks.table import surroundings, write

LEAST_ROUNDS = 5
GROUPS = ("process", "enqueue", "http", "latency", "full", "held")
"""What the table has."""
WITH_PEERS = ("process", "enqueue", "latency")
TABLE, CHURN, FAULTS = "table", "churn", "faults"
"""What has a report of its own."""
BEGIN = "<!-- queue benchmarks: {}: what follows is written by `./run bench queue --write` -->"
END = "<!-- queue benchmarks: {}: end -->"
INSTALL_WITHIN = 600.0
INSTALL_WITHIN_SHORT = 25.0
SHORT_PEERS = (PGQUEUER, GRAPHILE)
MINUTES = 30.0
MINUTES_SHORT = 0.05


def main(words: Sequence[str]) -> int:
    """Returns the exit code: 1 for a reading that is worth nothing; a target that is not reached is no error."""
    given = arguments(words)
    command = shlex.join(["./run", "bench", "queue", *words])
    made: dict[str, Callable[[], str]] = {
        TABLE: lambda: table(given, command),
        CHURN: lambda: churn.report(given.minutes, command, is_short=given.short),
        FAULTS: lambda: faults.report(command, is_short=given.short),
    }
    try:
        for what in wanted(given):
            report = made[what]()
            print(report, end="\n\n", flush=True)
            if given.write:
                write(given.write, report, BEGIN.format(what), END.format(what))
    except Wrong as error:
        print(f"this is no measurement: {error}", file=sys.stderr)
        return 1
    return 0


def wanted(given: argparse.Namespace) -> list[str]:
    """The reports that were asked for; the one that takes half an hour only by its name, or in its short form."""
    if given.only is None:
        return [TABLE, CHURN, FAULTS] if given.short else [TABLE, FAULTS]
    return [TABLE if given.only in GROUPS else given.only]


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line; ends the process with 2 if it makes no sense."""
    parser = argparse.ArgumentParser(prog="./run bench queue", description=__doc__)
    parser.add_argument("--rounds", type=int, help=f"rounds, {LEAST_ROUNDS} at least (default: {LEAST_ROUNDS})")
    parser.add_argument("--seconds", type=float, help="seconds of each reading, about (default: 3)")
    parser.add_argument("--only", choices=(*GROUPS, CHURN, FAULTS), help="only these rows, or only that report")
    parser.add_argument("--peers", metavar="NAMES", help="only these peers, with semicolons between; all by default")
    parser.add_argument("--minutes", type=float, help=f"how long `--only {CHURN}` works (default: {MINUTES:g})")
    parser.add_argument("--short", action="store_true", help="a little of everything, to see that it works")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put what is printed into this page too")
    given = parser.parse_args(words)
    if given.short and given.write:
        parser.error("--write is for measurements, and the short form is none")
    if given.write and (given.only in GROUPS or given.peers):
        parser.error(f"--write is for the whole table, or for --only {CHURN} and --only {FAULTS}")
    if given.write:
        try:
            for what in (TABLE, CHURN, FAULTS):
                surroundings(given.write, BEGIN.format(what), END.format(what))
        except (OSError, ValueError) as error:
            parser.error(str(error))
    names = {one.name: one for one in PEERS}
    given.peers = (
        list(SHORT_PEERS if given.short else PEERS)
        if given.peers is None
        else [
            names[name] if name in names else parser.error(f"--peers: there is no {name!r}, only {'; '.join(names)}")
            for name in filter(None, map(str.strip, given.peers.split(";")))
        ]
    )
    if given.rounds is None:
        given.rounds = 1 if given.short else LEAST_ROUNDS
    if given.seconds is None:
        given.seconds = 0.2 if given.short else 3.0
    if given.minutes is None:
        given.minutes = MINUTES_SHORT if given.short else MINUTES
    if given.seconds <= 0 or given.minutes <= 0 or given.rounds < 1:
        parser.error("there is no time")
    if given.rounds < LEAST_ROUNDS and given.write:
        parser.error(f"at least {LEAST_ROUNDS} rounds, to be written down")
    return given


def table(given: argparse.Namespace, command: str) -> str:
    """Install the peers, measure, and put the table together."""
    scale = SHORT if given.short else FULL
    missing: dict[str, str] = {}
    wanted_peers = given.peers if given.only in (None, *WITH_PEERS) else []
    peers = installed(wanted_peers, INSTALL_WITHIN_SHORT if given.short else INSTALL_WITHIN, missing)
    with Rig(has_redis=False) as rig:
        chosen = [one for one in stages(rig, scale, peers) if given.only in (None, one.group)]
        rounds = measure(chosen, given.rounds, given.seconds, is_short=given.short, missing=missing)
        compared = [
            found
            for row in rows(scale, peers)
            if given.only in (None, row.group) and (found := row.compare(rounds)) is not None
        ]
        return str(Report(rig, command, given.seconds, given.short, rounds, compared, missing))


def installed(peers: Sequence[System], within: float, missing: dict[str, str]) -> list[System]:
    """Those of the peers that are there, after an attempt to install them."""
    why: dict[object, str | None] = {}
    for peer in peers:
        if peer.installer is not None and peer.installer not in why:
            show(f"installing {peer.name} and its like")
            why[peer.installer] = peer.installer(within)
        if (reason := why.get(peer.installer)) is not None:
            missing[peer.name] = reason
    return [peer for peer in peers if peer.name not in missing]


def measure(
    chosen: Sequence[Stage], times: int, seconds: float, *, is_short: bool, missing: dict[str, str]
) -> list[Round]:
    """Every reading: `times` rounds of each stage, after one to warm up but in the short form.

    A peer that breaks off is left out from then on, and named; cronlock's own arms raise `Wrong`.
    """
    rounds: list[Round] = [{} for _ in range(times)]
    for stage in chosen:
        show(f"preparing for: {'; '.join(stage.arms)}")
        with stage.setting() as places:
            if not stage.is_once and not is_short:
                take(stage, places, min(seconds, 1.0), "warming up", missing)
            for number in range(1 if stage.is_once else times):
                rounds[number] |= take(stage, places, seconds, f"round {number + 1} of {times}", missing)
    return rounds


def take(stage: Stage, places: dict[str, Place], seconds: float, what: str, missing: dict[str, str]) -> Round:
    """One round."""
    found: dict[str, Reading] = {}
    for name, arm in stage.arms.items():
        if name in missing:
            continue
        show(f"{what}: {name}")
        try:
            found |= {name + part: reading for part, reading in arm.read(places, seconds).items()}
        except Wrong as error:
            if not any(peer.name in name for peer in PEERS):
                raise
            missing[name] = " ".join(str(error).split())[:300]
            show(f"{name} broke off: {error}")
    return found


def show(text: str) -> None:
    """One line on stderr about what is done now."""
    print(text, file=sys.stderr, flush=True)
