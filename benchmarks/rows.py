"""The rows of the table: which arms are compared, and what ratio is to be reached."""

from dataclasses import dataclass
from statistics import median

from benchmarks import comparison
from benchmarks.comparison import Compared, Round
from benchmarks.stages import DISK, EMPTY_TABLE, FEW, FULL_TABLE, MANY, Scale


@dataclass(frozen=True, slots=True)
class Row(comparison.Row):
    """One comparison: the ratio of an arm to the sum of others, in the same round."""

    needs: tuple[str, ...] = ("wrk",)
    """Programs, Python packages and files without which it cannot be measured."""

    @property
    def arms(self) -> tuple[str, ...]:
        """Every arm that the row needs."""
        return (self.arm, *self.others)

    def compare(self, rounds: list[Round]) -> Compared:
        """Medians over the rounds that have it, and the ratio taken in each of them."""
        taken = [found for found in rounds if self.arm in found]
        mine = [found[self.arm].value for found in taken]
        theirs = [sum(found[name].value for name in self.others) for found in taken]
        return Compared(self, median(mine), median(theirs), [a / b for a, b in zip(mine, theirs, strict=True)])


NO_DATABASE = "the same app's route that authenticates and touches no database"
REDIS = "the same route on Redis `SET NX PX`, no record kept"
SHARED = "Redis with the same sharing of answers, no record kept"
ARTICLE = "the article's pattern, SQLAlchemy asyncio, no records"
PARTS = "an empty route + a bare lock transaction + a one-row INSERT committed, measured apart and added"
LOCKS = "lock transactions of 32 callers in one process, no HTTP, no records"
RUNS = "the same callers, each time a whole run through `cron.run`, with its records"
XACT = "sqlalchemy-dlock, `xact=True`"
SESSION = "sqlalchemy-dlock as it is by default (session-level lock)"
IN_TRANSACTION = "the same in transaction mode"

TRIPS = "trips"
GROUPS = (
    "skip",
    "redis",
    "idle",
    "run",
    "statement",
    "locks",
    "guard",
    "idempotency",
    "tasks",
    "table",
    "memory",
    TRIPS,
)


def rows(scale: Scale) -> list[Row]:
    """All of them, as they stand in the table."""
    ten, table = "the same server with 10 registered tasks", "the same server on an empty table of runs"
    full = f"with {scale.rows:,} rows in the table of runs"
    wrk_and_proc, redis, dlock = ("wrk", "proc"), ("wrk", "redis"), ("dlock",)
    return [
        Row("skip", "skip storm, one lock", "skip, 1 lock", NO_DATABASE, ("nothing, 1 lock",), 0.7),
        Row("skip", "skip storm, 32 locks", "skip, 32 locks", NO_DATABASE, ("nothing, 32 locks",)),
        Row("skip", "skip storm, one lock, log lines off", "skip, 1 lock, no log", NO_DATABASE, ("nothing, 1 lock",)),
        Row("redis", "skip storm, one lock", "skip, 1 lock", REDIS, ("redis, 1 lock",), 2.0, needs=redis),
        Row("redis", "skip storm, one lock", "skip, 1 lock", SHARED, ("redis shared, 1 lock",), 1.0, needs=redis),
        Row("redis", "skip storm, 32 locks", "skip, 32 locks", REDIS, ("redis, 32 locks",), 2.0, needs=redis),
        Row("redis", "skip storm, 32 locks", "skip, 32 locks", SHARED, ("redis shared, 32 locks",), 1.0, needs=redis),
        Row(
            "idle",
            "one skip on an idle server, p50",
            "idle skip",
            PARTS,
            ("idle nothing", "bare lock", "bare insert"),
            1.2,
            unit="ms",
            needs=(),
        ),
        Row("run", "a completed run of an empty task, 32 tasks", "run", ARTICLE, ("article",), 1.5),
        Row(
            "statement",
            "the same with one statement through `run.connection`",
            "run, 1 statement",
            ARTICLE + ", with the same statement",
            ("article, 1 statement",),
            1.0,
        ),
        Row("locks", LOCKS, "lock only", XACT, ("dlock xact",), 3.0, needs=dlock),
        Row("locks", LOCKS, "lock only", SESSION, ("dlock",), 3.0, needs=dlock),
        Row("locks", RUNS, "run from code", XACT, ("dlock xact",), needs=dlock),
        Row("locks", RUNS, "run from code", SESSION, ("dlock",), needs=dlock),
        Row("guard", "a completed run of an empty task in guard mode, 32 tasks", "guard", IN_TRANSACTION, ("run",)),
        Row(
            "guard",
            "the same with one statement, committed on a connection of the task's own pool",
            "guard, 1 statement",
            IN_TRANSACTION + ", the statement through `run.connection`",
            ("run, 1 statement",),
        ),
        Row(
            "idempotency",
            "a completed run with an `Idempotency-Key`, new in each call, 32 tasks",
            "run, new key",
            "the same without",
            ("run",),
        ),
        Row(
            "idempotency",
            "calls whose `Idempotency-Key` has completed before: skips, `duplicate`, 32 tasks",
            "duplicate, 32 tasks",
            "skip storm, 32 locks",
            ("skip, 32 locks",),
        ),
        _many("start", "start of a server with 1,000 registered tasks, until `/readyz` says yes", ten, unit="ms"),
        _many("look", "its look at the database and its tasks, every 15 s", ten, unit="ms"),
        _many("memory", "its resident memory after the start", ten, unit="MiB", needs=wrk_and_proc),
        _many("skip", "skip storm on it, two locks", ten, 0.9),
        _many("run", "completed runs of an empty task on it, 8 tasks", ten, 0.9),
        _full("skip, 1 lock", f"skip storm, one lock, {full}", table),
        _full("skip, 32 locks", f"skip storm, 32 locks, {full}", table),
        _full("run", f"a completed run of an empty task, 32 tasks, {full}", table),
        Row(
            "memory",
            f"resident memory of a server after {scale.skips:,} skips more",
            "memory after",
            f"its own after its first {scale.warm_up:,}",
            ("memory before",),
            1.1,
            unit="MiB",
            needs=wrk_and_proc,
        ),
    ]


def _many(
    arm: str, what: str, against: str, target: float | None = None, unit: str = "/s", needs: tuple[str, ...] = ("wrk",)
) -> Row:
    return Row("tasks", what, f"{arm}, {MANY}", against, (f"{arm}, {FEW}",), target, unit, needs)


def _full(arm: str, what: str, against: str) -> Row:
    return Row("table", what, f"{arm}, {FULL_TABLE}", against, (f"{arm}, {EMPTY_TABLE}",), 0.9)


ALWAYS = (DISK,)
"""Arms that say something about the machine, whatever is compared."""
