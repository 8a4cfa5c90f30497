"""Looks at a scenario from outside, all the time: at pg_locks with the database's clock, and at processes in /proc."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import psycopg

from tests.campaign.servers import Server

LOOKS_EVERY = 0.02
MEASURES_EVERY = 0.5
LOCKS = """
SELECT extract(epoch FROM clock_timestamp())::float8, a.usename, a.pid, extract(epoch FROM a.xact_start)::float8
  FROM (SELECT 1) AS always LEFT JOIN
       (pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid AND l.locktype = 'advisory' AND l.granted
         AND starts_with(a.usename, 'campaign_')) ON true
"""
"""Every lock of our servers, with the time; one row with only the time if there is none."""

OUTSIDE = "outside"
"""The application name of what tasks in guard mode do outside, which is not cronlock's."""

SESSIONS = f"""SELECT usename, count(*)::integer FROM pg_stat_activity
    WHERE starts_with(usename, 'campaign_') AND application_name <> '{OUTSIDE}' GROUP BY 1"""


@dataclass(eq=False)
class Death:
    """A holder that died, or was frozen: the locks of its transactions are watched until they are gone."""

    at: float
    """By the database's clock, taken just before."""
    role: str | None = None
    pid: int | None = None
    before: float = float("inf")
    """By the database's clock: what began later is the next process's."""
    held: float = 0.0
    """Seconds after its death in which a lock of it was seen."""
    is_over: bool = False

    def owns(self, role: str, pid: int, began: float) -> bool:
        """Whether a transaction is of the one that died."""
        return (role == self.role or pid == self.pid) and began < self.before


@dataclass
class Observer:
    """Watches while `watch` and `measure` run."""

    url: str
    servers: Sequence[Server]
    ports: set[int]
    deaths: list[Death] = field(default_factory=list)
    most_connections: dict[str, int] = field(default_factory=dict)
    resident: dict[tuple[str, int], list[tuple[float, int]]] = field(default_factory=dict)
    """By server and process: when, and how many KiB."""

    async def clock(self) -> float:
        """The database's clock, in seconds."""
        async with await psycopg.AsyncConnection.connect(self.url, autocommit=True, connect_timeout=5) as connection:
            cursor = await connection.execute("SELECT extract(epoch FROM clock_timestamp())::float8")
            row = await cursor.fetchone()
        assert row is not None
        return float(row[0])

    def died(self, at: float, *, role: str | None = None, pid: int | None = None) -> Death:
        """Watch the locks that a server's role, or a backend, held at this time."""
        death = Death(at, role, pid)
        self.deaths.append(death)
        return death

    @property
    def longest_held(self) -> float | None:
        """The longest that a lock was seen after its holder's death; None if nobody died."""
        return max((death.held for death in self.deaths), default=None)

    async def watch(self) -> None:
        """Look at the locks, again and again; connects anew when the database was away."""
        while True:
            try:
                async with await psycopg.AsyncConnection.connect(
                    self.url, autocommit=True, connect_timeout=5, application_name="observer"
                ) as connection:
                    while True:
                        await self._look(connection)
                        await asyncio.sleep(LOOKS_EVERY)
            except psycopg.Error:
                await asyncio.sleep(LOOKS_EVERY)

    async def _look(self, connection: "psycopg.AsyncConnection[Any]") -> None:
        watched = [death for death in self.deaths if not death.is_over]
        if not watched:
            return
        rows = await (await connection.execute(LOCKS)).fetchall()
        now = rows[0][0]
        for death in watched:
            if any(
                role is not None and began is not None and death.owns(role, pid, began) for _, role, pid, began in rows
            ):
                death.held = max(death.held, now - death.at)
            elif now > death.at and death.before != float("inf"):
                death.is_over = True

    async def measure(self) -> None:
        """Look at the processes."""
        while True:
            try:
                async with await psycopg.AsyncConnection.connect(
                    self.url, autocommit=True, connect_timeout=5, application_name="observer"
                ) as connection:
                    sessions: dict[str, int] = dict(await (await connection.execute(SESSIONS)).fetchall())
            except psycopg.Error:
                sessions = {}
            self._measure(sessions)
            await asyncio.sleep(MEASURES_EVERY)

    def _measure(self, sessions: dict[str, int]) -> None:
        for server in self.servers:
            if not server.is_ready:
                continue
            # A request to cancel has a socket for a moment and no session; a broken session has no socket.
            seen = min(server.connections(self.ports), sessions.get(server.role, 0))
            self.most_connections[server.name] = max(seen, self.most_connections.get(server.name, 0))
            if (kib := server.resident()) is not None:
                self.resident.setdefault((server.name, server.pid), []).append((time.monotonic(), kib))

    def residents(self) -> str:
        """What the living servers have now, for a line of progress."""
        living = {(server.name, server.pid) for server in self.servers if server.is_ready}
        return ", ".join(str(samples[-1][1]) for key, samples in self.resident.items() if key in living)

    def growth(self, warm_up: float) -> float | None:
        """How much the memory of a process that lived long enough grew, as a part of what it was; the largest.

        Compared are the medians of the first and the last tenth of what follows `warm_up` seconds of its life.
        """
        grown = []
        for samples in self.resident.values():
            warm = [kib for at, kib in samples if at >= samples[0][0] + warm_up]
            if len(warm) * MEASURES_EVERY < warm_up:
                continue
            tenth = max(len(warm) // 10, 1)
            grown.append(median(warm[-tenth:]) / median(warm[:tenth]) - 1)
        return max(grown, default=None)
