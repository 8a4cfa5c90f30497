"""The rows of the table: which arms are compared, and what ratio is to be reached."""

from dataclasses import dataclass
from statistics import median

from benchmarks.arms import Reading

Round = dict[str, Reading]


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: the ratio of an arm to the sum of others, in the same round."""

    group: str
    what: str
    arm: str
    against: str
    others: tuple[str, ...]
    target: float | None
    unit: str = "/s"
    needs_redis: bool = False

    @property
    def arms(self) -> tuple[str, ...]:
        """Every arm that the row needs."""
        return (self.arm, *self.others)

    @property
    def is_time(self) -> bool:
        """Whether less is better."""
        return self.unit == "ms"

    def compare(self, rounds: list[Round]) -> "Compared":
        """Medians over the rounds, and the ratio taken in each of them."""
        mine = [found[self.arm].value for found in rounds]
        theirs = [sum(found[name].value for name in self.others) for found in rounds]
        return Compared(self, median(mine), median(theirs), [a / b for a, b in zip(mine, theirs, strict=True)])


@dataclass(frozen=True, slots=True)
class Compared:
    """A row with its figures."""

    row: Row
    mine: float
    theirs: float
    ratios: list[float]

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios."""
        return median(self.ratios)

    @property
    def is_reached(self) -> bool | None:
        """Whether the target is reached; None where there is none."""
        if self.row.target is None:
            return None
        return self.ratio <= self.row.target if self.row.is_time else self.ratio >= self.row.target


NO_DATABASE = "the same app's route that authenticates and touches no database"
REDIS = "the same route on Redis `SET NX PX`, no record kept"
SHARED = "Redis with the same sharing of answers, no record kept"
ARTICLE = "the article's pattern, SQLAlchemy asyncio, no records"
PARTS = "an empty route + a bare lock transaction + a one-row INSERT committed, measured apart and added"

ROWS = (
    Row("skip", "skip storm, one lock", "skip, 1 lock", NO_DATABASE, ("nothing, 1 lock",), 0.7),
    Row("skip", "skip storm, 32 locks", "skip, 32 locks", NO_DATABASE, ("nothing, 32 locks",), None),
    Row("skip", "skip storm, one lock, log lines off", "skip, 1 lock, no log", NO_DATABASE, ("nothing, 1 lock",), None),
    Row("redis", "skip storm, one lock", "skip, 1 lock", REDIS, ("redis, 1 lock",), 2.0, needs_redis=True),
    Row("redis", "skip storm, one lock", "skip, 1 lock", SHARED, ("redis shared, 1 lock",), 1.0, needs_redis=True),
    Row("redis", "skip storm, 32 locks", "skip, 32 locks", REDIS, ("redis, 32 locks",), 2.0, needs_redis=True),
    Row("redis", "skip storm, 32 locks", "skip, 32 locks", SHARED, ("redis shared, 32 locks",), 1.0, needs_redis=True),
    Row(
        "idle",
        "one skip on an idle server, p50",
        "idle skip",
        PARTS,
        ("idle nothing", "bare lock", "bare insert"),
        1.2,
        unit="ms",
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
)
TRIPS = "trips"
GROUPS = (*dict.fromkeys(row.group for row in ROWS), TRIPS)
