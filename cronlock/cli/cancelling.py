"""What the commands that cancel share: they wait for the end of what they cancelled, and say what became of it."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from cronlock.cli import output

if TYPE_CHECKING:
    from cronlock.explain import Why
    from cronlock.stats import Row

CANCEL_WAIT = 5.0
POLL = 0.1


def wait(look: "Callable[[], Row]", seconds: float) -> "Row":
    """What is looked at as it is when it has ended, or after `seconds`."""
    until = time.monotonic() + seconds
    while True:
        row = look()
        if row["finished_at"] is not None or time.monotonic() >= until:
            return row
        time.sleep(POLL)


def tell(what: str, number: int, status: str, found: "Why", *, is_late: bool, is_json: bool) -> None:
    """Print what became of a `run` or a `job`; it was cancelled too late if it had already ended."""
    if is_json:
        facts = {"status": status, "code": found.code, "explanation": found.sentence}
        output.document({f"{what}_id": number, **facts})
    else:
        late = " had already ended" if is_late else ""
        print(f"{what} {number}{late}: {output.cell(found.sentence, is_short=False)}")
