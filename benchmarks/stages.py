"""What is measured, in its order: stages, each with its servers and its arms."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from benchmarks import history, names, sameness
from benchmarks.arms import MAIN, NEW, SAME, Arm, Disk, Grown, Idle, Inside, Locked, Resident, Started, Storm
from benchmarks.rig import Rig

DISK = "8 KiB made durable on the disk"
FEW, MANY = "10 tasks", "1,000 tasks"
EMPTY_TABLE, FULL_TABLE = "empty table", "full table"


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is made before something is measured."""

    warm_up: int
    """Skips before the memory of a server is read first."""
    skips: int
    """Skips between that and the second time."""
    burst: int
    """Seconds of each burst of these."""
    rows: int
    """Rows of the table of runs that is full."""


FULL = Scale(warm_up=50_000, skips=1_000_000, burst=10, rows=5_000_000)
SHORT = Scale(warm_up=2_000, skips=10_000, burst=1, rows=200_000)


@dataclass(frozen=True, slots=True)
class Stage:
    """Some arms, taken in turn while the same servers are there."""

    arms: dict[str, Arm]
    setting: Callable[[Rig, Scale], AbstractContextManager[None]]
    is_once: bool = False
    """One reading of each arm and no warm-up: they are what is warmed up."""


@contextmanager
def one_server(rig: Rig, scale: Scale) -> Iterator[None]:
    """One server that has the tasks of all arms, and the routes of its peers, which must answer as it does."""
    with rig.database(MAIN) as url, rig.server(MAIN, url) as server:
        server.start()
        sameness.check(rig, server)
        yield


@contextmanager
def few_and_many(rig: Rig, scale: Scale) -> Iterator[None]:
    """Two servers, each on a database of its own, which differ in how many tasks they have; `Started` starts them."""
    with (
        rig.database("few") as few,
        rig.database("many") as many,
        rig.server(FEW, few, **{names.TASKS: "10"}),
        rig.server(MANY, many, **{names.TASKS: "1000"}),
    ):
        yield


@contextmanager
def empty_and_full(rig: Rig, scale: Scale) -> Iterator[None]:
    """Two servers, each on a database of its own: one with no runs in its table, one with millions."""
    with rig.database("empty") as empty, rig.database("filled") as filled:
        history.fill(filled, scale.rows)
        with rig.server(EMPTY_TABLE, empty) as one, rig.server(FULL_TABLE, filled) as other:
            one.start()
            other.start()
            yield


@contextmanager
def fresh_server(rig: Rig, scale: Scale) -> Iterator[None]:
    """A server that has answered nothing yet."""
    with rig.database("fresh") as url, rig.server(MAIN, url) as server:
        server.start()
        yield


ONE = names.HELD[:1]


def stages(scale: Scale) -> list[Stage]:
    """All of them."""
    return [
        Stage(
            {
                DISK: Disk(),
                "nothing, 1 lock": Storm("auth", ONE),
                "skip, 1 lock": Storm("cron", ONE, "already_running"),
                "skip, 1 lock, no log": Storm("cron", ONE, "already_running", is_logging=False),
                "redis, 1 lock": Storm("redis", ONE),
                "redis shared, 1 lock": Storm("redis-shared", ONE),
                "nothing, 32 locks": Storm("auth", names.HELD),
                "skip, 32 locks": Storm("cron", names.HELD, "already_running"),
                "duplicate, 32 tasks": Storm("cron", names.EMPTY, "duplicate", key=SAME),
                "redis, 32 locks": Storm("redis", names.HELD),
                "redis shared, 32 locks": Storm("redis-shared", names.HELD),
                "idle nothing": Idle("auth"),
                "idle skip": Idle("cron"),
                "bare lock": Inside("bare/lock"),
                "bare insert": Inside("bare/insert"),
                "lock only": Locked("opening"),
                "dlock xact": Locked("dlock-xact"),
                "dlock": Locked("dlock"),
                "run from code": Locked("run", "completed"),
                "article": Storm("article", names.EMPTY, is_own=True),
                "run": Storm("cron", names.EMPTY, "completed", is_own=True),
                "run, new key": Storm("cron", names.EMPTY, "completed", is_own=True, key=NEW),
                "guard": Storm("cron", names.GUARDED, "completed", is_own=True),
                "article, 1 statement": Storm("article-one", names.ONE_STATEMENT, is_own=True),
                "run, 1 statement": Storm("cron", names.ONE_STATEMENT, "completed", is_own=True),
                "guard, 1 statement": Storm("cron", names.GUARDED_STATEMENT, "completed", is_own=True),
            },
            one_server,
        ),
        Stage(
            {
                f"{what}, {server}": arm
                for what, make in TASKS.items()
                for server, arm in ((server, make(server)) for server in (FEW, MANY))
            },
            few_and_many,
        ),
        Stage(
            {
                f"{what}, {server}": Storm(
                    "cron", tasks, row, is_own=is_own, server=server, is_emptied=server == EMPTY_TABLE
                )
                for what, tasks, row, is_own in (
                    ("skip, 1 lock", ONE, "already_running", False),
                    ("skip, 32 locks", names.HELD, "already_running", False),
                    ("run", names.EMPTY, "completed", True),
                )
                for server in (EMPTY_TABLE, FULL_TABLE)
            },
            empty_and_full,
        ),
        Stage(
            {
                "memory before": Grown(scale.warm_up, scale.burst),
                "memory after": Grown(scale.skips, scale.burst),
            },
            fresh_server,
            is_once=True,
        ),
    ]


TASKS: dict[str, Callable[[str], Arm]] = {
    "start": lambda server: Started(server),
    "memory": lambda server: Resident(server),
    "look": lambda server: Inside("looks", server),
    "skip": lambda server: Storm("cron", names.FEW[:2], "already_running", server=server, is_warmed=True),
    "run": lambda server: Storm("cron", names.FEW_EMPTY, "completed", is_own=True, server=server, is_warmed=True),
}
