"""Round trips and commits of one call, counted on the wire by a proxy in front of PostgreSQL."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from statistics import median

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from benchmarks import names
from benchmarks.app import add_tasks
from cronlock import Cronlock

CALLS = 10
QUIET = 0.05
"""Seconds without a message after which a call has said all it had to say."""
READY_FOR_QUERY = b"Z"


@dataclass(frozen=True, slots=True)
class Count:
    """What one call cost: the median of several, and the most that was seen."""

    what: str
    trips: float
    most_trips: int
    commits: float
    most_commits: int
    trips_limit: int
    commits_limit: int

    @property
    def is_reached(self) -> bool:
        """Whether even the most that was seen is within the limits."""
        return self.most_trips <= self.trips_limit and self.most_commits <= self.commits_limit


class Proxy:
    """Passes everything on, and counts every ReadyForQuery that the server says: one for each round trip.

    (PostgreSQL manual: "Message Formats", 54.7. TLS must be off.)
    """

    def __init__(self, url: str) -> None:
        given = conninfo_to_dict(url)
        self._target = (str(given.get("host") or "127.0.0.1"), int(str(given.get("port") or 5432)))
        self._given = url
        self._pipes: set[asyncio.Task[None]] = set()
        self.round_trips = 0
        self.url = ""

    @asynccontextmanager
    async def listen(self) -> AsyncIterator["Proxy"]:
        """Accept connections; `url` then leads through here."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        self.url = make_conninfo(self._given, host="127.0.0.1", port=port, sslmode="disable", gssencmode="disable")
        try:
            yield self
        finally:
            server.close()
            for pipe in self._pipes:
                pipe.cancel()
            await asyncio.gather(*self._pipes, return_exceptions=True)

    async def quiet(self) -> None:
        """Return when nothing has been said for a moment."""
        seen = -1
        while seen != self.round_trips:
            seen = self.round_trips
            await asyncio.sleep(QUIET)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self._target
        if host.startswith("/"):
            server_reader, server_writer = await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
        else:
            server_reader, server_writer = await asyncio.open_connection(host, port)
        for pipe in (self._forth(reader, server_writer), self._back(server_reader, writer)):
            task = asyncio.create_task(pipe)
            self._pipes.add(task)
            task.add_done_callback(self._pipes.discard)

    async def _forth(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readexactly(5)
                kind, length = struct.unpack("!cI", head)
                rest = await reader.readexactly(length - 4)
                if kind == READY_FOR_QUERY:
                    self.round_trips += 1
                writer.write(head + rest)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


async def count(url: str) -> list[Count]:
    """Calls of a task whose lock is held elsewhere, of an empty one, and of one with a statement of its own.

    Commits are the commit records in the WAL; a transaction that wrote nothing leaves none. Raises
    `psycopg.Error` where the extension pg_walinspect, which reads them, cannot be had.
    """
    async with Proxy(url).listen() as proxy:
        cron = add_tasks(Cronlock(database_url=proxy.url, secrets=names.SECRET, recover_interval="1h"))
        with psycopg.connect(url, autocommit=True) as observer:
            observer.execute("CREATE EXTENSION IF NOT EXISTS pg_walinspect")
            async with cron:
                return [
                    await _count(proxy, observer, cron, names.HELD[0], "a skip", 3, 1),
                    await _count(proxy, observer, cron, names.EMPTY[0], "a run", 5, 2),
                    await _count(proxy, observer, cron, names.ONE_STATEMENT[0], "a run with one statement", 6, 2),
                ]


async def _count(
    proxy: Proxy,
    observer: "psycopg.Connection[tuple[object, ...]]",
    cron: Cronlock,
    task: str,
    what: str,
    trips_limit: int,
    commits_limit: int,
) -> Count:
    await cron.run(task)
    trips, commits = [], []
    for _ in range(CALLS):
        await proxy.quiet()
        before, wal = proxy.round_trips, wal_end(observer)
        await cron.run(task)
        await proxy.quiet()
        trips.append(proxy.round_trips - before)
        commits.append(commits_since(observer, wal))
    return Count(what, median(trips), max(trips), median(commits), max(commits), trips_limit, commits_limit)


def wal_end(observer: "psycopg.Connection[tuple[object, ...]]") -> str:
    """Where the WAL ends that is durable now."""
    row = observer.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
    assert row is not None
    return str(row[0])


def commits_since(observer: "psycopg.Connection[tuple[object, ...]]", before: str) -> int:
    """The commit records in the WAL after a place in it."""
    now = wal_end(observer)
    if now == before:
        return 0
    row = observer.execute(
        "SELECT count(*) FROM pg_get_wal_records_info(%s::pg_lsn, %s::pg_lsn)"
        " WHERE resource_manager = 'Transaction' AND record_type LIKE 'COMMIT%%'",
        (before, now),
    ).fetchone()
    assert row is not None
    return int(str(row[0]))
