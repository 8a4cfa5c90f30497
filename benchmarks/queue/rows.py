"""The rows of the queue's table: which arms are compared, and what ratio is to be reached."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks import comparison
from benchmarks.comparison import Round
from benchmarks.queue.stages import EMPTY, ENDED, FULL_TABLES, HELD, KEYED, NOTHING, POSTED, QUEUED, WAITING, Scale
from benchmarks.queue.systems import BARE, GRAPHILE, GUARD, PYTHON_PEERS, QUIET, TRANSACTION, System


@dataclass(frozen=True, slots=True)
class Row(comparison.Row):
    """One comparison: the ratio of an arm to the best of others, whose name is the `{}` of `against`."""

    def compare(self, rounds: list[Round]) -> "Compared | None":
        """Medians, and the ratio taken in each round; None where one of the two sides was not measured.

        Which of `others` is the best is decided by their medians.
        """
        medians = {
            name: median(found[name].value for found in rounds if name in found)
            for name in self.others
            if any(name in found for found in rounds)
        }
        taken = [found for found in rounds if self.arm in found]
        if not medians or not taken:
            return None
        best = (min if self.is_less_better else max)(medians, key=medians.__getitem__)
        ratios = [found[self.arm].value / found[best].value for found in taken if best in found]
        return Compared(self, median(found[self.arm].value for found in taken), medians[best], ratios, best)


@dataclass(frozen=True, slots=True)
class Compared(comparison.Compared):
    """A row with its figures."""

    best: str

    @property
    def against(self) -> str:
        """What it is compared with."""
        return self.row.against.format(self.best.partition(", ")[2].removesuffix(" p50").removesuffix(" p95"))


FASTEST = "the fastest peer: {}"
FASTEST_PYTHON = "the fastest Python peer: {}"
ON_EMPTY = "the same on empty tables"


def rows(scale: Scale, peers: Sequence[System]) -> list[Row]:
    """All of them, as they stand in the table."""
    python = tuple(f"process, {one.name}" for one in peers if one in PYTHON_PEERS)
    graphile = (f"process, {GRAPHILE.name}",)
    mine = f"process, {GUARD.name}"
    work = "jobs that do nothing, one worker process"
    found = [
        Row("process", f"{work}, guard mode", mine, FASTEST_PYTHON, python, 2.5),
        Row("process", f"{work}, guard mode", mine, "{}", graphile, 1.0),
        Row("process", f"{work}, guard mode, no log line a job", f"process, {QUIET.name}", "{}", graphile),
        Row("process", f"{work}, default mode", f"process, {TRANSACTION.name}", FASTEST_PYTHON, python),
        Row("process", f"{work}, default mode", f"process, {TRANSACTION.name}", "{}", graphile),
    ]
    for how, what, target in (
        ("many", "enqueue in batches of 1,000", 2.0),
        ("one", "enqueue one by one, no key, 16 concurrent callers in one process", 8.0),
        ("inside", "enqueue in the caller's own transaction, with one INSERT of the user's, 16 callers", 1.0),
    ):
        others = tuple(f"enqueue {how}, {one.name}" for one in peers)
        found.append(Row("enqueue", what, f"enqueue {how}, {GUARD.name}", FASTEST, others, target))
    posted = "enqueue one by one over HTTP with an `Idempotency-Key`, 32 connections"
    found += [
        Row("http", posted, POSTED, "the same app's route that touches no database", (NOTHING,)),
        Row("http", posted, POSTED, "a bare keyed INSERT by pgbench, 32 clients", (KEYED,), 0.5),
    ]
    for system, mode in ((GUARD, "guard mode"), (TRANSACTION, "default mode")):
        is_bound = system is GUARD
        for part in ("p50", "p95"):
            what, arm = f"enqueue to start, idle worker, {part}, {mode}", f"latency, {system.name} {part}"
            others = tuple(f"latency, {one.name} {part}" for one in peers)
            bare = (f"latency, {BARE.name} {part}",)
            found.append(Row("latency", what, arm, FASTEST, others, 1.0 if is_bound else None, "ms"))
            found.append(Row("latency", what, arm, "{}", bare, 1.5 if is_bound else None, "ms"))
    for name, what in (
        (ENDED, f"with {scale.ended:,} jobs that have ended"),
        (QUEUED, f"with {scale.queued:,} queued"),
        (WAITING, f"with {scale.waiting:,} whose time is tomorrow"),
        (FULL_TABLES, "with all three"),
    ):
        found.append(Row("full", f"{work}, {what}", f"process, {name}", ON_EMPTY, (f"process, {EMPTY}",), 0.8))
    found.append(
        Row(
            "held",
            f"{work}, beside a transaction that is open for {scale.held_seconds:g} s, in its last third",
            f"process, {HELD}",
            "the same worker before it",
            (f"process, {HELD}, before it",),
            0.8,
        )
    )
    return found
