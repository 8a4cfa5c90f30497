"""The rows of the queue's table: which arms are compared, and what ratio is to be reached."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.arms import Reading
from benchmarks.queue.stages import EMPTY, ENDED, FULL_TABLES, HELD, KEYED, NOTHING, POSTED, QUEUED, WAITING, Scale
from benchmarks.queue.systems import BARE, GRAPHILE, GUARD, PYTHON_PEERS, QUIET, TRANSACTION, System

Round = dict[str, Reading]


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: the ratio of an arm to the best of others, in the same round."""

    group: str
    what: str
    arm: str
    others: tuple[str, ...]
    against: str = "the fastest peer: {}"
    """`{}` is the name of the best one of `others`."""
    target: float | None = None
    unit: str = "/s"

    @property
    def is_less_better(self) -> bool:
        """Whether the figure is a price."""
        return self.unit != "/s"

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
        return Compared(self, best, median(found[self.arm].value for found in taken), medians[best], ratios)


@dataclass(frozen=True, slots=True)
class Compared:
    """A row with its figures."""

    row: Row
    best: str
    mine: float
    theirs: float
    ratios: list[float]

    @property
    def against(self) -> str:
        """What it is compared with."""
        return self.row.against.format(self.best.partition(", ")[2].removesuffix(" p50").removesuffix(" p95"))

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios."""
        return median(self.ratios)

    @property
    def is_reached(self) -> bool | None:
        """Whether the target is reached; None where there is none."""
        if self.row.target is None:
            return None
        return self.ratio <= self.row.target if self.row.is_less_better else self.ratio >= self.row.target


FASTEST_PYTHON = "the fastest Python peer: {}"
ON_EMPTY = "the same on empty tables"


def rows(scale: Scale, peers: Sequence[System]) -> list[Row]:
    """All of them, as they stand in the table."""
    python = tuple(f"process, {one.name}" for one in peers if one in PYTHON_PEERS)
    graphile = (f"process, {GRAPHILE.name}",)
    mine = f"process, {GUARD.name}"
    work = "jobs that do nothing, one worker process"
    found = [
        Row("process", f"{work}, guard mode", mine, python, FASTEST_PYTHON, 2.5),
        Row("process", f"{work}, guard mode", mine, graphile, "{}", 1.0),
        Row("process", f"{work}, guard mode, no log line a job", f"process, {QUIET.name}", graphile, "{}"),
        Row("process", f"{work}, default mode", f"process, {TRANSACTION.name}", python, FASTEST_PYTHON),
        Row("process", f"{work}, default mode", f"process, {TRANSACTION.name}", graphile, "{}"),
    ]
    for how, what, target in (
        ("many", "enqueue in batches of 1,000", 2.0),
        ("one", "enqueue one by one, no key, 16 concurrent callers in one process", 8.0),
        ("inside", "enqueue in the caller's own transaction, with one INSERT of the user's, 16 callers", 1.0),
    ):
        others = tuple(f"enqueue {how}, {one.name}" for one in peers)
        found.append(Row("enqueue", what, f"enqueue {how}, {GUARD.name}", others, target=target))
    posted = "enqueue one by one over HTTP with an `Idempotency-Key`, 32 connections"
    found += [
        Row("http", posted, POSTED, (NOTHING,), "the same app's route that touches no database"),
        Row("http", posted, POSTED, (KEYED,), "a bare keyed INSERT by pgbench, 32 clients", 0.5),
    ]
    for system, mode in ((GUARD, "guard mode"), (TRANSACTION, "default mode")):
        is_bound = system is GUARD
        for part in ("p50", "p95"):
            what, arm = f"enqueue to start, idle worker, {part}, {mode}", f"latency, {system.name} {part}"
            others = tuple(f"latency, {one.name} {part}" for one in peers)
            bare = (f"latency, {BARE.name} {part}",)
            found.append(Row("latency", what, arm, others, target=1.0 if is_bound else None, unit="ms"))
            found.append(Row("latency", what, arm, bare, "{}", 1.5 if is_bound else None, unit="ms"))
    for name, what in (
        (ENDED, f"with {scale.ended:,} jobs that have ended"),
        (QUEUED, f"with {scale.queued:,} queued"),
        (WAITING, f"with {scale.waiting:,} whose time is tomorrow"),
        (FULL_TABLES, "with all three"),
    ):
        found.append(Row("full", f"{work}, {what}", f"process, {name}", (f"process, {EMPTY}",), ON_EMPTY, 0.8))
    found.append(
        Row(
            "held",
            f"{work}, beside a transaction that is open for {scale.held_seconds:g} s, in its last third",
            f"process, {HELD}",
            (f"process, {HELD}, before it",),
            "the same worker before it",
            0.8,
        )
    )
    return found
