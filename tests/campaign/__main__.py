"""`python -m tests.campaign`, or `./run campaign`: break everything around cronlock, and see whether its promise holds.

Exit code: 0 if it held, 1 if it did not (the rows are named), 2 if a scenario could not be played.
"""

import argparse
import asyncio
import secrets
import shlex
import signal
import sys
import time
from pathlib import Path

from cronlock.errors import EmbeddedError
from tests.campaign.report import offending, report, table, write
from tests.campaign.scenarios import LONG, SCENARIOS, SHORT, Result, Size, play
from tests.campaign.stage import Unfit


def main() -> int:
    """Play the scenarios; returns the exit code."""
    given = arguments()
    sizes = dict(SHORT if given.short else LONG)
    if given.soak_minutes is not None:
        sizes["soak"] = Size(seconds=given.soak_minutes * 60)
    names = given.only or list(SCENARIOS)
    say(f"seed {given.seed}")
    results: list[Result] = []
    unfit: list[str] = []
    try:
        asyncio.run(campaign({name: sizes[name] for name in names}, given.seed, results, unfit))
    except (KeyboardInterrupt, asyncio.CancelledError):
        say("interrupted; everything that was started has ended")
        unfit.append("interrupted")
    if results:
        command = shlex.join(["./run", "campaign", *sys.argv[1:]])
        text = report(results, command=command, seed=given.seed, is_short=given.short)
        print(text)
        if given.report and not unfit:
            write(given.report, text)
    for why in unfit:
        say(f"not played: {why}")
    if not all(result.is_kept for result in results):
        return 1
    return 2 if unfit else 0


def arguments() -> argparse.Namespace:
    """The command line; ends the process with 2 if it makes no sense."""
    parser = argparse.ArgumentParser(prog="./run campaign", description=__doc__)
    parser.add_argument("--short", action="store_true", help="every scenario in a few seconds")
    parser.add_argument("--only", action="append", choices=list(SCENARIOS), help="only this scenario; may be repeated")
    parser.add_argument("--soak-minutes", type=float, metavar="N", help="how long the soak is (default: 60)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the report into this file or page too")
    parser.add_argument("--seed", default=secrets.token_hex(4), help="what every random choice comes from")
    given = parser.parse_args()
    if given.soak_minutes is not None and given.soak_minutes <= 0:
        parser.error("--soak-minutes must be more than 0")
    return given


async def campaign(sizes: dict[str, Size], seed: str, results: list[Result], unfit: list[str]) -> None:
    """One scenario after the other; SIGTERM ends it as Ctrl-C does, which a shell may have it ignore."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    for name, size in sizes.items():
        started = time.monotonic()

        def tell(text: str, name: str = name, started: float = started) -> None:
            say(f"{name} ({time.monotonic() - started:.0f} s): {text}")

        tell("begins")
        try:
            result = await play(name, seed, size, tell)
        except (Unfit, EmbeddedError, AssertionError) as error:
            unfit.append(f"{name}: {error}")
            tell(f"could not be played: {error}")
            continue
        results.append(result)
        say(table([result]))
        for line in offending(result):
            say(line)
        tell("as promised" if result.is_kept else "NOT as promised")


def say(text: str) -> None:
    """One line of progress."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
