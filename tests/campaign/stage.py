"""What a scenario plays on: PostgreSQL, a role for each server, proxies, PgBouncer, servers, an observer, callers.

Server `one` reaches PostgreSQL directly, `two` and `three` each through a proxy of their own, and `four` through
PgBouncer in transaction mode, with a proxy between that and PostgreSQL; its records go past PgBouncer, through the
same proxy.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from cronlock.embedded import Embedded
from cronlock.migrate import migrate
from tests.campaign import checks
from tests.campaign.callers import Callers
from tests.campaign.observer import OUTSIDE, Death, Observer
from tests.campaign.servers import ENDS_WITHIN, Server
from tests.campaign.tables import GRANTS, ROLE, SCHEMA
from tests.campaign.tasks import LOCKS
from tests.commands import PROJECT, environment, is_alive
from tests.pooler.bouncer import Bouncer
from tests.proxy import Proxy

POSTGRES = {
    "max_connections": "200",
    "track_commit_timestamp": "on",
    "max_wal_senders": "8",
    "shared_buffers": "64MB",
    "autovacuum_naptime": "5s",
}
NAMES = ("one", "two", "three", "four")
POOL_SIZE = 4
RECORD_POOL_SIZE = 2
MOST_CONNECTIONS = 2 * POOL_SIZE + RECORD_POOL_SIZE
"""A process opens so many for `async def` tasks, as many for plain functions, and those for records."""
SETTINGS = {
    "CRONLOCK_POOL_SIZE": str(POOL_SIZE),
    "CRONLOCK_RECORD_POOL_SIZE": str(RECORD_POOL_SIZE),
    "CRONLOCK_RECOVER_INTERVAL": "1s",
    "CRONLOCK_ACQUIRE_TIMEOUT": "2s",
    "CRONLOCK_GUARD_PING": "1s",
}
"""Lost runs are looked for far more often than by default: a run that is called lost wrongly shall have its chance."""
QUIET_WITHIN = 30.0
STOPS_WITHIN = 20.0
HOLDS_WITHIN = 30.0
PASSWORD_BYTES = 12


class Unfit(Exception):
    """A scenario could not be played as it should; it shows nothing about the promise."""


@dataclass
class Stage:
    """One scenario's world; made by `staged`."""

    directory: Path
    postgres: Embedded
    servers: list[Server]
    proxies: dict[str, Proxy]
    outside: dict[str, Proxy]
    """By server, the way of what its tasks in guard mode do outside; never harmed."""
    bouncer: Bouncer
    client: httpx2.AsyncClient
    callers: Callers
    observer: Observer
    faults: list[str] = field(default_factory=list)
    """What else was wrong, such as a server that ended by itself."""

    @property
    def url(self) -> str:
        """The database, for an administrator."""
        return self.postgres.url

    async def start(self, server: Server) -> None:
        """Begin a server and wait until it is ready."""
        server.begin()
        await server.until_ready(self.client)

    async def kill(self, server: Server) -> Death:
        """SIGKILL a server; its locks are watched from then on."""
        death = self.observer.died(await self.observer.clock(), role=server.role)
        server.kill()
        return death

    async def play(self, seconds: float) -> None:
        """Let the load go on for a while; raises what is wrong with it."""
        limit = time.monotonic() + seconds
        while (left := limit - time.monotonic()) > 0:
            await asyncio.sleep(min(left, 1.0))
            self.look()

    def look(self) -> None:
        """Raise what ended a caller, forget what proxies heard, and note servers that ended by themselves."""
        self.callers.check()
        for proxy in (*self.proxies.values(), *self.outside.values()):
            proxy.heard.clear()
        for server in self.servers:
            if server.is_ready and server.process is not None and (code := server.process.poll()) is not None:
                server.is_ready = False
                self.faults.append(f"server {server.name} ended by itself with {code}:\n{server.said()}")

    async def until_holding(self, server: Server) -> None:
        """Wait until a server holds a lock; raises `Unfit` if it takes none."""
        query = """SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid)
            WHERE l.locktype = 'advisory' AND l.granted AND a.usename = %s"""
        limit = time.monotonic() + HOLDS_WITHIN
        async with await psycopg.AsyncConnection.connect(self.url, autocommit=True, connect_timeout=5) as db:
            while not ((row := await (await db.execute(query, (server.role,))).fetchone()) and row[0]):
                if time.monotonic() > limit:
                    raise Unfit(f"server {server.name} has taken no lock for {HOLDS_WITHIN:g} s")
                await asyncio.sleep(0.002)

    def stop_at_once(self) -> None:
        """Immediate shutdown: PostgreSQL ends without a checkpoint, and recovers when it starts."""
        pid = self.postgres.pid
        os.kill(pid, signal.SIGQUIT)
        limit = time.monotonic() + STOPS_WITHIN
        while is_alive(pid) and time.monotonic() < limit:
            time.sleep(0.005)

    async def end(self) -> None:
        """After the last fault: end the load, then the servers in order, wait for the locks, close what is lost."""
        await self.callers.stop()
        self.look()
        await self._end_servers()
        await self.until_quiet(self.url)
        await recover(self.url)

    async def _end_servers(self) -> None:
        for server in self.servers:
            server.terminate()
        for server in self.servers:
            assert server.process is not None
            try:
                code = await asyncio.to_thread(server.process.wait, ENDS_WITHIN)
            except subprocess.TimeoutExpired:
                self.faults.append(f"server {server.name} did not end within {ENDS_WITHIN:g} s of SIGTERM")
                server.kill()
            else:
                if code != 0:
                    self.faults.append(f"server {server.name} ended with {code} after SIGTERM:\n{server.said()}")

    async def until_quiet(self, url: str) -> None:
        """Wait until none of our locks is held."""
        query = "SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE l.locktype = 'advisory'"
        limit = time.monotonic() + QUIET_WITHIN
        async with await psycopg.AsyncConnection.connect(url, autocommit=True, connect_timeout=5) as connection:
            while (row := await (await connection.execute(query)).fetchone()) and row[0]:
                if time.monotonic() > limit:
                    self.faults.append(f"{row[0]} locks are still held {QUIET_WITHIN:g} s after the servers ended")
                    return
                await asyncio.sleep(0.1)


@asynccontextmanager
async def staged(
    directory: Path,
    seed: str,
    *,
    callers: int = 12,
    pause: float = 0.05,
    all_proxied: bool = False,
    settings: dict[str, dict[str, str]] | None = None,
) -> AsyncIterator[Stage]:
    """A stage whose servers are ready and called; whatever was started has ended when this is left.

    `all_proxied`: server `one`, too, is behind a proxy. `settings`: environment variables of single servers.
    """
    directory.chmod(0o755)  # root's PostgreSQL runs as another user, who must get through
    async with AsyncExitStack() as stack:
        postgres = stack.enter_context(Embedded(directory / "postgres", settings=POSTGRES))
        await asyncio.to_thread(migrate, postgres.url, "cronlock")
        password = secrets.token_hex(PASSWORD_BYTES)
        prepare(postgres.url, password)
        place = conninfo_to_dict(postgres.url)
        host, port = str(place["host"]), int(str(place["port"]))
        behind = NAMES if all_proxied else NAMES[1:]
        proxies = {name: await stack.enter_async_context(Proxy(host, port)) for name in behind}

        outside = {name: await stack.enter_async_context(Proxy(host, port)) for name in NAMES}

        def through(name: str) -> str:
            return by(name, proxies[name].listening if name in proxies else port)

        def by(name: str, nearest: int) -> str:
            return f"postgresql://campaign_{name}:{password}@127.0.0.1:{nearest}/postgres"

        bouncer = Bouncer(directory, through("four"), pool_size=2 * POOL_SIZE)
        stack.callback(bouncer.stop)
        await asyncio.to_thread(bouncer.start)
        servers = []
        for name in NAMES:
            given = {"DATABASE_URL": through(name), "CRONLOCK_RELEASE": name, **SETTINGS}
            given["CAMPAIGN_OUTSIDE_URL"] = f"{by(name, outside[name].listening)}?application_name={OUTSIDE}"
            if name == "four":
                given |= {
                    "DATABASE_URL": bouncer.url("postgres"),
                    "CRONLOCK_DIRECT_URL": through(name),
                    "CRONLOCK_POOLER": "transaction",
                }
            servers.append(Server(name, directory, given | (settings or {}).get(name, {})))
            stack.callback(servers[-1].kill)
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=4 * callers)
        client = await stack.enter_async_context(httpx2.AsyncClient(limits=limits))
        ports = {port, bouncer.port, *(proxy.listening for proxy in proxies.values())}
        observer = Observer(postgres.url, servers, ports)
        load = Callers(servers, seed, callers, pause)
        stage = Stage(directory, postgres, servers, proxies, outside, bouncer, client, load, observer)
        await asyncio.gather(*(stage.start(server) for server in servers))
        stack.push_async_callback(load.abandon)
        for looking in (observer.watch(), observer.measure()):
            await stack.enter_async_context(going_on(looking))
        load.begin(client)
        yield stage


@asynccontextmanager
async def going_on(what: "Coroutine[Any, Any, None]") -> AsyncIterator["asyncio.Task[None]"]:
    """A coroutine that runs until the block is left; what ended it before is raised then."""
    task = asyncio.create_task(what)
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def prepare(url: str, password: str, names: Iterable[str] = NAMES) -> None:
    """Make the campaign's tables, and a role that may use them and cronlock's for each of these servers."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(SCHEMA.encode())
        for table in ("counter", "fence"):
            connection.execute(f"INSERT INTO campaign.{table} SELECT unnest(%s::text[])".encode(), (list(LOCKS),))
        for name in names:
            role = sql.Identifier(f"campaign_{name}")
            connection.execute(sql.SQL(ROLE).format(role=role, password=sql.Literal(password)))
            connection.execute(sql.SQL(GRANTS).format(role=role))


async def recover(url: str) -> None:
    """`cronlock recover`, as an operator runs it."""
    command = [sys.executable, "-m", "cronlock", "recover"]
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=PROJECT,
        env=environment(DATABASE_URL=url, PYTHONDONTWRITEBYTECODE=""),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(60):
            said, _ = await process.communicate()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        raise
    if process.returncode != 0:
        raise Unfit(f"cronlock recover ended with {process.returncode}: {said.decode()}")


def judge(url: str, timeline: int = 1) -> tuple[list[checks.Broken], checks.Counts]:
    """What the checker says of a database."""
    with psycopg.connect(url, autocommit=True) as db:
        return checks.find_broken(db, timeline), checks.count_runs(db)


def refused_steps(url: str) -> int:
    """See `checks.count_refused`."""
    with psycopg.connect(url, autocommit=True) as db:
        return checks.count_refused(db)
