"""What is done to the servers: one coroutine a scenario, which gives what came of it."""

import asyncio
import random
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.campaign import checks, timelines
from tests.campaign.callers import Callers
from tests.campaign.checks import Broken, Counts
from tests.campaign.observer import Observer
from tests.campaign.servers import Server
from tests.campaign.stage import (
    MOST_CONNECTIONS,
    POOL_SIZE,
    POSTGRES,
    Stage,
    Unfit,
    going_on,
    judge,
    recover,
    refused_steps,
    staged,
)
from tests.campaign.standby import Standby
from tests.campaign.tasks import TIMEOUT
from tests.proxy import Proxy, end

FREES_WITHIN = 1.0
"""Seconds after which no lock of a killed process is held (docs/lock.md)."""
IDLE_MARGIN = 10.0
"""What the server gives an idle transaction beyond the task's timeout (docs/lock.md)."""
LOOK = 0.5
"""What the observer itself may be late, on a busy machine."""
GROWTH = 0.05
SURE_OF_GROWTH = 600.0
"""Seconds of load that a statement about memory needs; in less, caches are still filling."""
FAKETIME = {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "FAKETIME_FORCE_MONOTONIC_FIX": "0"}
"""Nothing but the time of day is changed. With its "fix", threads that wait for another run in circles."""
WARM_UP = 600.0
SKEWS = {"one": 5, "two": -3, "three": 26, "four": 0}
"""Hours."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much of a scenario: `events`, or `seconds`."""

    events: int = 0
    seconds: float = 0.0


def duration(seconds: float) -> str:
    """As people say it."""
    minutes, rest = divmod(round(seconds), 60)
    return " ".join([f"{minutes} min"] * (minutes > 0) + [f"{rest} s"] * (rest > 0)) or "0 s"


@dataclass
class Result:
    """What came of a scenario."""

    name: str
    what: str
    """Its size in words."""
    counts: Counts = field(default_factory=Counts)
    calls: int = 0
    broken_calls: int = 0
    unavailable: int = 0
    broken: list[Broken] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    held: float | None = None
    held_limit: float | None = None
    growth: float | None = None
    is_growth_sure: bool = False
    connections: int = 0
    connections_limit: int = MOST_CONNECTIONS
    seconds: float = 0.0

    def number(self, promise: str) -> int:
        """How many offences against a promise there are."""
        return sum(broken.promise == promise for broken in self.broken)

    @property
    def is_kept(self) -> bool:
        """Whether everything was as promised."""
        return not self.broken and not self.faults

    def take(self, callers: Callers, observer: Observer) -> None:
        """Take over what was seen, and hold it against the limits."""
        self.calls, self.broken_calls, self.unavailable = callers.calls, callers.broken, callers.unavailable
        self.held = observer.longest_held
        self.connections = max(observer.most_connections.values(), default=0)
        if self.held is not None and self.held_limit is not None and self.held > self.held_limit + LOOK:
            self.faults.append(f"a lock was held for {self.held:.2f} s after its holder's death")
        if self.connections > self.connections_limit:
            self.faults.append(f"a server had {self.connections} connections; {self.connections_limit} are allowed")
        if self.is_growth_sure and self.growth is not None and self.growth > GROWTH:
            self.faults.append(f"a server's memory grew by {self.growth:.1%}")
        if not self.counts.completed:
            self.faults.append("nothing was completed: this shows nothing")


Tell = Callable[[str], None]
Scenario = Callable[[Path, str, Size, Tell], Awaitable[Result]]


async def finish(result: Result, stage: Stage, *, is_calm: bool = False) -> Result:
    """End the load and the servers, and let the checker read the database.

    `is_calm`: nothing was done that could cost a run its lock.
    """
    await stage.end()
    stage.callers.write(stage.url)
    broken, counts = await asyncio.to_thread(judge, stage.url)
    if refused := await asyncio.to_thread(refused_steps, stage.url):
        result.notes.append(f"{refused} steps of guard runs that had lost their lock were refused by the fence")
    result.broken += broken
    result.counts = result.counts + counts
    if is_calm:
        with psycopg.connect(stage.url, autocommit=True) as db:
            result.faults += [what for (what,) in db.execute(checks.LOST_IN_PEACE).fetchall()]
            result.notes += [what for (what,) in db.execute(checks.LOST_GUARDS).fetchall()]
    result.faults += stage.faults
    result.take(stage.callers, stage.observer)
    return result


async def kills(directory: Path, seed: str, size: Size, tell: Tell) -> Result:
    """SIGKILL to a random server at a random moment; it is begun again."""
    chance = random.Random(f"{seed} kills")
    result = Result("kills", f"{size.events} SIGKILLs", held_limit=FREES_WITHIN)
    async with staged(directory, f"{seed} kills") as stage, asyncio.TaskGroup() as group:

        async def begin_again(server: Server, pause: float) -> None:
            death = await stage.kill(server)
            await asyncio.sleep(pause)
            death.before = await stage.observer.clock()
            await stage.start(server)

        for number in range(size.events):
            await stage.play(chance.uniform(0.1, 1.0))
            pause, pick = chance.uniform(0.0, 1.0), chance.random()
            while not (ready := [server for server in stage.servers if server.is_ready]):
                await stage.play(0.1)
            server = ready[int(pick * len(ready))]
            tell(f"kill {number + 1} of {size.events}: server {server.name}")
            server.is_ready = False
            group.create_task(begin_again(server, pause))
        while not all(server.is_ready for server in stage.servers):
            await stage.play(0.1)
        await stage.play(1.0)
        return await finish(result, stage)


async def terminations(directory: Path, seed: str, size: Size, tell: Tell) -> Result:
    """`pg_terminate_backend` of a random backend of cronlock's, every other time of one that holds a lock."""
    chance = random.Random(f"{seed} terminations")
    result = Result("terminations", f"{size.events} backends", held_limit=FREES_WITHIN)
    any_backend = "SELECT pid FROM pg_stat_activity WHERE starts_with(usename, 'campaign_') ORDER BY pid"
    holder = f"""SELECT pid FROM ({any_backend}) AS ours WHERE pid IN
        (SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted)"""
    async with staged(directory, f"{seed} terminations") as stage:
        async with await psycopg.AsyncConnection.connect(stage.url, autocommit=True) as db:
            for number in range(size.events):
                await stage.play(chance.uniform(0.2, 1.0))
                pick, limit = chance.random(), time.monotonic() + 10
                query = (any_backend, holder)[number % 2]
                while not (found := await (await db.execute(query.encode())).fetchall()):
                    if time.monotonic() > limit:
                        raise Unfit("there is no backend to terminate")
                    await asyncio.sleep(0.01)
                (pid,) = found[int(pick * len(found))]
                tell(f"termination {number + 1} of {size.events}: backend {pid}")
                death = stage.observer.died(await stage.observer.clock(), pid=pid)
                await db.execute("SELECT pg_terminate_backend(%s)", (pid,))
                death.before = await stage.observer.clock()
        await stage.play(2.0)
        return await finish(result, stage)


async def restarts(directory: Path, seed: str, size: Size, tell: Tell) -> Result:
    """PostgreSQL restarts under load: by fast shutdown, by immediate shutdown, and after a SIGKILL, in turn."""
    chance = random.Random(f"{seed} restarts")
    result = Result("restarts", f"{size.events} restarts (fast, immediate, crash)")
    async with staged(directory, f"{seed} restarts") as stage:
        postgres = stage.postgres
        for number in range(size.events):
            await stage.play(chance.uniform(1.5, 4.0))
            how = ("fast", "immediate", "crash")[number % 3]
            tell(f"restart {number + 1} of {size.events}: {how}")
            if how == "crash":
                await asyncio.to_thread(postgres.kill)
            else:
                if how == "immediate":
                    await asyncio.to_thread(stage.stop_at_once)
                await asyncio.to_thread(postgres.stop)
            await asyncio.sleep(chance.uniform(0.0, 1.0))
            postgres.start()
        await stage.play(4.0)
        return await finish(result, stage)


async def network(directory: Path, seed: str, size: Size, tell: Tell) -> Result:
    """Cuts, stalls, delays, refusals and forgotten connections, at random, on three of four ways to the database."""
    result = Result("network", f"{duration(size.seconds)} of random faults")
    # On a way that stalls, a request to cancel and an attempt to connect that was given up are there for seconds.
    result.connections_limit += 2 * POOL_SIZE
    async with staged(directory, f"{seed} network") as stage:
        faults: list[str] = []
        async with AsyncExitStack() as stack:
            troubles = [
                await stack.enter_async_context(
                    going_on(trouble(proxy, random.Random(f"{seed} network {name}"), faults.append))
                )
                for name, proxy in stage.proxies.items()
            ]
            until = time.monotonic() + size.seconds
            while (left := until - time.monotonic()) > 0:
                await stage.play(min(left, 5.0))
                for task in troubles:
                    if task.done():
                        task.result()
                tell(
                    f"{size.seconds - max(until - time.monotonic(), 0):.0f} of {size.seconds:g} s, {len(faults)} faults"
                )
        for proxy in stage.proxies.values():
            proxy.delay = 0.0
            proxy.flow()
            await proxy.accept()
            proxy.cut("rst")  # those that were forgotten, as a keepalive would end them
        result.notes.append(", ".join(f"{faults.count(kind)} {kind}" for kind in sorted(set(faults))))
        await stage.play(3.0)
        return await finish(result, stage)


async def trouble(proxy: Proxy, chance: random.Random, note: Callable[[str], None]) -> None:
    """One proxy is a bad network, for ever."""
    while True:
        await asyncio.sleep(chance.uniform(0.2, 3.0))
        kind = chance.choices(
            ("cuts (FIN)", "cuts (RST)", "stalls", "long stalls", "delays", "forgotten", "refusals"),
            (20, 20, 25, 3, 20, 6, 6),
        )[0]
        seconds, milliseconds = chance.uniform(0.05, 3.0), chance.uniform(1, 200)
        note(kind)
        match kind:
            case "cuts (FIN)":
                proxy.cut("fin")
            case "cuts (RST)":
                proxy.cut("rst")
            case "stalls" | "long stalls":
                proxy.stall()
                await asyncio.sleep(seconds if kind == "stalls" else TIMEOUT + IDLE_MARGIN + seconds)
                proxy.flow()
            case "delays":
                proxy.delay = milliseconds / 1000
                await asyncio.sleep(seconds)
                proxy.delay = 0.0
            case "forgotten":
                links = list(proxy.links)
                proxy.forget()
                await asyncio.sleep(TIMEOUT + IDLE_MARGIN + seconds)
                for link in links:
                    end(link.client, "rst")
                    end(link.server, "rst")
            case "refusals":
                await proxy.refuse()
                proxy.cut("rst")
                await asyncio.sleep(seconds)
                await proxy.accept()


async def freezes(directory: Path, seed: str, size: Size, tell: Tell) -> Result:
    """SIGSTOP to a random server for longer than the server waits for an idle transaction, then SIGCONT."""
    chance = random.Random(f"{seed} freezes")
    limit = TIMEOUT + IDLE_MARGIN
    result = Result("freezes", f"{size.events} freezes of {limit + 1:g} s and more", held_limit=limit)
    async with staged(directory, f"{seed} freezes") as stage:
        for number in range(size.events):
            await stage.play(chance.uniform(0.5, 2.0))
            server = chance.choice(stage.servers)
            await stage.until_holding(server)
            tell(f"freeze {number + 1} of {size.events}: server {server.name}")
            death = stage.observer.died(await stage.observer.clock(), role=server.role)
            server.freeze()
            death.before = await stage.observer.clock()
            await stage.play(limit + chance.uniform(1.0, 3.0))
            server.thaw()
        await stage.play(3.0)
        return await finish(result, stage)


async def clocks(directory: Path, seed: str, size: Size, tell: Tell) -> Result:
    """The servers' clocks are hours ahead and behind (libfaketime); no time in the database may show it."""
    result = Result("clocks", ", ".join(f"{hours:+d} h" for hours in SKEWS.values()) + f" for {duration(size.seconds)}")
    library = find_libfaketime()
    skewed = {
        name: {"LD_PRELOAD": str(library), "FAKETIME": f"{hours:+d}h", **FAKETIME}
        for name, hours in SKEWS.items()
        if hours
    }
    async with staged(directory, f"{seed} clocks", settings=skewed) as stage:
        began = await stage.observer.clock()
        until = time.monotonic() + size.seconds
        while (left := until - time.monotonic()) > 0:
            await stage.play(min(left, 10.0))
            tell(f"{size.seconds - max(until - time.monotonic(), 0):.0f} of {size.seconds:g} s")
        await finish(result, stage, is_calm=True)
        with psycopg.connect(stage.url, autocommit=True) as db:
            seen: dict[str, float] = dict(db.execute(checks.SKEWS).fetchall())
            if {name: round(hours) for name, hours in seen.items()} != SKEWS:
                raise Unfit(f"the clocks of the servers were not skewed as they should: {seen}")
            strays = db.execute(checks.STRAYS.replace("{began}", str(began)).encode()).fetchall()
        result.faults += [f"a time is not the database's: {what}" for (what,) in strays]
        return result


def find_libfaketime() -> Path:
    """The library of Debian's package `libfaketime`, in the form for threads; raises `Unfit` if it is not there."""
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    if not found:
        raise Unfit("libfaketime is not installed; on Debian and Ubuntu: apt install libfaketime")
    return found[0]


async def failover(directory: Path, seed: str, size: Size, tell: Tell) -> Result:
    """An asynchronous replica that lags is promoted while the old primary is up and written to.

    The servers are sent to it one by one, so that for a while there are two primaries.
    """
    result = Result("failover", f"{size.events} promotions")
    for number in range(size.events):
        tell(f"failover {number + 1} of {size.events}")
        place = directory / f"failover-{number + 1}"
        directory.chmod(0o755)  # root's PostgreSQL runs as another user, who must get through
        place.mkdir(0o755)
        once = await fail_over(place, f"{seed} failover {number + 1}", tell)
        result.counts = result.counts + once.counts
        result.calls += once.calls
        result.broken_calls += once.broken_calls
        result.unavailable += once.unavailable
        result.broken += once.broken
        result.faults += once.faults
        result.notes += once.notes
        result.connections = max(result.connections, once.connections)
    return result


async def fail_over(directory: Path, seed: str, tell: Tell) -> Result:
    """One promotion."""
    chance = random.Random(seed)
    result = Result("failover", "1 promotion")
    async with staged(directory, seed, all_proxied=True) as stage, AsyncExitStack() as stack:
        place = conninfo_to_dict(stage.url)
        wire = await stack.enter_async_context(Proxy(str(place["host"]), int(str(place["port"]))))
        follows = make_conninfo("", **{**place, "port": wire.listening})
        replica = await stack.enter_async_context(Standby(directory / "standby", stage.url, follows, POSTGRES))
        await replica.wait_for("SELECT count(*) = 1 FROM pg_stat_wal_receiver WHERE status = 'streaming'")
        stage.observer.ports.add(replica.port)
        await stage.play(chance.uniform(2.0, 4.0))
        wire.stall()
        await stage.play(chance.uniform(0.3, 1.5))  # what is committed now never reaches the replica
        wire.cut("rst")
        await wire.refuse()
        tell("the replica is promoted")
        await replica.promote()
        await stage.play(0.5)
        order = list(stage.servers)
        chance.shuffle(order)
        for server in order:
            for proxy in (stage.proxies[server.name], stage.outside[server.name]):
                proxy.port = replica.port
                proxy.cut("rst")
            server.timeline = 2
            tell(f"server {server.name} was sent to the new primary")
            await stage.play(chance.uniform(0.2, 1.0))
        stage.observer.url = replica.url
        await stage.play(4.0)
        await stage.end()
        await stage.until_quiet(replica.url)
        await recover(replica.url)
        stage.callers.write(stage.url, replica.url)
        judged = [await asyncio.to_thread(judge, url, number) for number, url in ((1, stage.url), (2, replica.url))]
        for where, (broken, _) in zip(("old", "new"), judged, strict=True):
            result.broken += [Broken(found.promise, f"on the {where} timeline: {found.what}") for found in broken]
        with psycopg.connect(stage.url, autocommit=True) as old, psycopg.connect(replica.url, autocommit=True) as new:
            result.broken += timelines.find_unknown(old, new)
            result.counts = timelines.count_together(old, new)
            result.notes.append(timelines.describe(old, new))
        result.faults += stage.faults
        result.take(stage.callers, stage.observer)
    return result


async def soak(directory: Path, seed: str, size: Size, tell: Tell) -> Result:
    """Nothing but load, mixed and steady: what grows?"""
    result = Result("soak", f"{duration(size.seconds)} of load")
    warm_up = min(WARM_UP, size.seconds / 3)
    result.is_growth_sure = size.seconds >= SURE_OF_GROWTH
    async with staged(directory, f"{seed} soak") as stage:
        until = time.monotonic() + size.seconds
        while (left := until - time.monotonic()) > 0:
            await stage.play(min(left, 30.0))
            stage.callers.write(stage.url)
            tell(
                f"{size.seconds - max(until - time.monotonic(), 0):.0f} of {size.seconds:g} s,"
                f" {stage.callers.calls:,} calls, KiB resident: {stage.observer.residents()}"
            )
        result.growth = stage.observer.growth(warm_up)
        return await finish(result, stage, is_calm=True)


SCENARIOS: dict[str, Scenario] = {
    "kills": kills,
    "terminations": terminations,
    "restarts": restarts,
    "network": network,
    "failover": failover,
    "freezes": freezes,
    "clocks": clocks,
    "soak": soak,
}
LONG = {
    "kills": Size(events=100),
    "terminations": Size(events=50),
    "restarts": Size(events=20),
    "network": Size(seconds=600),
    "failover": Size(events=3),
    "freezes": Size(events=10),
    "clocks": Size(seconds=120),
    "soak": Size(seconds=3600),
}
SHORT = {
    "kills": Size(events=6),
    "terminations": Size(events=8),
    "restarts": Size(events=3),
    "network": Size(seconds=12),
    "failover": Size(events=1),
    "freezes": Size(events=1),
    "clocks": Size(seconds=6),
    "soak": Size(seconds=10),
}


def most_seconds(size: Size) -> float:
    """When a scenario of this size is given up."""
    return 240 + 40 * size.events + 1.5 * size.seconds


async def play(name: str, seed: str, size: Size, tell: Tell) -> Result:
    """Play one scenario in a directory of its own, which is kept if something was not as promised.

    Raises `Unfit` if it could not be played.
    """
    directory = Path(tempfile.mkdtemp(prefix=f"cronlock-campaign-{name}-"))
    started = time.monotonic()
    is_wanted = True
    try:
        async with asyncio.timeout(most_seconds(size)):
            result = await SCENARIOS[name](directory, seed, size, tell)
        is_wanted = not result.is_kept
    except asyncio.CancelledError:
        is_wanted = False
        raise
    except TimeoutError:
        raise Unfit(f"{name} did not end within {most_seconds(size):g} s; see {directory}") from None
    finally:
        if is_wanted:
            tell(f"what the servers said is in {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    result.seconds = time.monotonic() - started
    return result
