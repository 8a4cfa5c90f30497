"""A row of a table: an arm beside others in the same rounds, and the ratio that is to be reached."""

from dataclasses import dataclass
from statistics import median

from benchmarks.arms import Reading

Round = dict[str, Reading]


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: the ratio of an arm to others, in the same round."""

    group: str
    what: str
    arm: str
    against: str
    others: tuple[str, ...]
    target: float | None = None
    unit: str = "/s"

    @property
    def is_less_better(self) -> bool:
        """Whether the figure is a price."""
        return self.unit != "/s"


@dataclass(frozen=True, slots=True)
class Compared:
    """A row with its figures."""

    row: Row
    mine: float
    theirs: float
    ratios: list[float]

    @property
    def against(self) -> str:
        """What it is compared with."""
        return self.row.against

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
