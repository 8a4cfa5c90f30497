"""What is measured, in its order: stages, each with its databases and its arms."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

from benchmarks.queue import history
from benchmarks.queue.arms import Arm, Disk, Enqueue, Held, Latency, Process
from benchmarks.queue.posted import Keyed, Posted, served
from benchmarks.queue.systems import BARE, GUARD, QUIET, TRANSACTION, System
from benchmarks.queue.workers import Place, place
from benchmarks.rig import Rig

DISK = "8 KiB made durable on the disk"
EMPTY, ENDED, QUEUED, WAITING, FULL_TABLES = "empty", "ended", "queued", "waiting", "full"
NOTHING, POSTED, KEYED = "post, no database", "post, with a key", "pgbench, keyed INSERT"
HELD = "a transaction is open"
KEPT = "TRUNCATE cronlock.job"
"""Clears a database whose other tables are to stay full."""
Places = dict[str, Place]


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is there before something is measured, and how long it takes."""

    ended: int
    queued: int
    waiting: int
    held_seconds: float
    is_short: bool = False
    """Not everything is measured of everyone."""


FULL = Scale(ended=1_000_000, queued=200_000, waiting=300_000, held_seconds=180)
SHORT = Scale(ended=20_000, queued=10_000, waiting=5_000, held_seconds=0.1, is_short=True)


@dataclass(frozen=True, slots=True)
class Stage:
    """Some arms, taken in turn while the same databases are there."""

    group: str
    arms: dict[str, Arm]
    setting: Callable[[], AbstractContextManager[Places]]
    is_once: bool = False
    """One reading of each arm, and no warm-up."""


@contextmanager
def each(rig: Rig, systems: Sequence[System]) -> Iterator[Places]:
    """A database for each queue."""
    with ExitStack() as stack:
        places: Places = {}
        for system in systems:
            if system.database not in places:
                places[system.database] = stack.enter_context(place(rig, system))
        yield places


def sizes_of(scale: Scale) -> tuple[str, ...]:
    """The databases of `filled`."""
    return (EMPTY, FULL_TABLES) if scale.is_short else (EMPTY, ENDED, QUEUED, WAITING, FULL_TABLES)


@contextmanager
def filled(rig: Rig, scale: Scale) -> Iterator[Places]:
    """Databases of cronlock's, which differ in what is in their tables."""
    sizes = {
        EMPTY: {},
        QUEUED: {},
        ENDED: {"ended": scale.ended},
        WAITING: {"waiting": scale.waiting},
        FULL_TABLES: {"ended": scale.ended, "waiting": scale.waiting},
    }
    with ExitStack() as stack:
        places = {}
        for name in sizes_of(scale):
            size = sizes[name]
            places[name] = stack.enter_context(place(rig, GUARD, name, KEPT if size else None))
            history.fill(places[name].url, **size)
            places[name].settle()
        yield places


def stages(rig: Rig, scale: Scale, peers: Sequence[System]) -> list[Stage]:
    """All of them, with the peers that are there."""
    systems = (GUARD, TRANSACTION, *peers) if scale.is_short else (GUARD, QUIET, TRANSACTION, *peers)
    waited = (BARE, GUARD, *peers[-1:]) if scale.is_short else (BARE, GUARD, TRANSACTION, *peers)
    return [
        Stage(
            "process",
            {DISK: Disk(rig), **{f"process, {one.name}": Process(one, one.database) for one in systems}},
            lambda: each(rig, systems),
        ),
        Stage(
            "enqueue",
            {
                f"enqueue {how}, {one.name}": Enqueue(one, one.database, how)
                for how in ("many", "one", "inside")
                for one in (GUARD, *peers)
                if one is GUARD or how == "inside" or not scale.is_short
            },
            lambda: each(rig, (GUARD, *peers)),
        ),
        Stage(
            "http",
            {NOTHING: Posted("nothing", has_rows=False), POSTED: Posted("jobs", has_rows=True), KEYED: Keyed()},
            lambda: served(rig),
        ),
        Stage(
            "latency",
            {f"latency, {one.name}": Latency(one, one.database) for one in waited},
            lambda: each(rig, waited),
        ),
        Stage(
            "full",
            {
                f"process, {name}": Process(GUARD, name, scale.queued if name in (QUEUED, FULL_TABLES) else 0)
                for name in sizes_of(scale)
            },
            lambda: filled(rig, scale),
        ),
        Stage(
            "held",
            {f"process, {HELD}": Held(GUARD, GUARD.database, scale.held_seconds)},
            lambda: each(rig, (GUARD,)),
            is_once=True,
        ),
    ]
