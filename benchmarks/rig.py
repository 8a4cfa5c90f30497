"""Everything that runs during a benchmark: PostgreSQL, Redis, the processes that hold the locks, the servers."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg
from psycopg.conninfo import make_conninfo

from benchmarks import machine, names
from benchmarks.server import START_SECONDS, Server, environment, free_port, process
from cronlock.embedded import Embedded
from cronlock.migrate import migrate

POSTGRES = {
    "shared_buffers": "512MB",
    "max_connections": "200",
    "max_wal_size": "4GB",
    "checkpoint_timeout": "30min",
}
SHOWN = ("fsync", "synchronous_commit", "full_page_writes", "wal_level", *POSTGRES, "jit")


class Rig:
    """Starts what a benchmark needs, and ends it again."""

    def __init__(self, *, has_redis: bool) -> None:
        self.has_redis = has_redis
        self.server_core, self.other_cores = machine.split_cores()
        self.is_embedded = not os.environ.get("DATABASE_URL")
        self.servers: dict[str, Server] = {}
        """Those that can be measured now, by the name that their arms know."""
        self.load_before = os.getloadavg()[0]
        self._url = ""
        self.embedded: Embedded | None = None
        """The PostgreSQL, where it is ours."""
        self._redis_url: str | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _start(self, stack: ExitStack) -> None:
        if self.server_core is not None:
            before = os.sched_getaffinity(0)
            os.sched_setaffinity(0, self.other_cores)  # what is started from here on inherits it
            stack.callback(os.sched_setaffinity, 0, before)
        self.directory = directory = Path(tempfile.mkdtemp(prefix="cronlock-benchmarks-"))
        stack.callback(shutil.rmtree, directory)
        directory.chmod(0o755)  # root's PostgreSQL runs as another user, who must get through
        self._url, self.embedded = stack.enter_context(postgres(directory))
        self.connection = stack.enter_context(psycopg.connect(self._url, autocommit=True))
        if self.has_redis:
            self._redis_url = stack.enter_context(redis_server())

    @contextmanager
    def database(self, name: str) -> Iterator[str]:
        """A migrated database of its own; gives its URL."""
        with self.empty_database(name) as url:
            migrate(url, "cronlock")
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute(f"ALTER TABLE cronlock.run ALTER COLUMN id RESTART WITH {names.FIRST_RUN_ID}")
                connection.execute("CREATE SCHEMA bare")
                connection.execute("CREATE TABLE bare.run (LIKE cronlock.run INCLUDING ALL)")
            yield url

    @contextmanager
    def empty_database(self, name: str) -> Iterator[str]:
        """A database of its own with nothing in it; gives its URL."""
        full = f"cronlock_benchmark_{os.getpid()}_{name}"
        self.connection.execute(f"CREATE DATABASE {full}")
        try:
            yield make_conninfo(self._url, dbname=full)
        finally:
            self.connection.execute(f"DROP DATABASE {full} WITH (FORCE)")

    @contextmanager
    def server(self, name: str, url: str, **more: str) -> Iterator[Server]:
        """A server on a database, not yet started, that arms find by `name`; locks in it are held meanwhile.

        `more` is added to its environment.
        """
        told = environment(url, self.server_core)
        if self._redis_url is not None:
            told[names.REDIS_URL] = self._redis_url
        log = self.directory / f"{name.replace(' ', '-')}.log"
        with (
            holder(told) as holder_pid,
            Server(url, {**told, names.HOLDER_PID: holder_pid, **more}, log) as server,
        ):
            self.servers[name] = server
            try:
                yield server
            finally:
                del self.servers[name]

    def postgres_cpu_seconds(self) -> float | None:
        """The CPU time that an embedded PostgreSQL has used so far; None for another."""
        return machine.family_cpu_seconds(self.embedded.pid) if self.embedded is not None else None

    def restart(self) -> None:
        """Restart an embedded PostgreSQL."""
        assert self.embedded is not None, "another one is not ours to restart"
        self.connection.close()
        self.embedded.restart()
        self.connection = self._stack.enter_context(psycopg.connect(self._url, autocommit=True))

    def postgres(self) -> str:
        """The server's version and the settings that matter here."""
        shown = [f"{name}={self._show(name)}" for name in SHOWN]
        where = "embedded" if self.is_embedded else "the one that DATABASE_URL names"
        return f"PostgreSQL {self._show('server_version')} ({where}), {', '.join(shown)}"

    def _show(self, name: str) -> str:
        row = self.connection.execute("SELECT current_setting(%s)", (name,)).fetchone()
        assert row is not None
        return str(row[0])


@contextmanager
def postgres(directory: Path) -> Iterator[tuple[str, Embedded | None]]:
    """A PostgreSQL, and its server where that is ours: the one that is started here.

    Where DATABASE_URL is set it is the one that it names, and databases are made and dropped there.
    """
    if given := os.environ.get("DATABASE_URL"):
        yield given, None
        return
    with Embedded(directory / "postgres", settings=POSTGRES) as server:
        yield server.url, server


@contextmanager
def holder(told: dict[str, str]) -> Iterator[str]:
    """The process that holds the locks of all tasks in `names.HELD`; gives its backend's process id."""
    with process([sys.executable, "-m", "benchmarks.holder", *names.HELD], told) as child:
        assert child.stdout is not None
        pid = child.stdout.readline().decode().strip()
        if not pid:
            raise RuntimeError("the process that holds the locks did not start")
        yield pid


@contextmanager
def redis_server() -> Iterator[str]:
    """A Redis that keeps nothing, with the locks of `names.HELD` taken; gives its URL."""
    import redis

    port = free_port()
    command = [
        "redis-server",
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--appendonly",
        "no",
        "--loglevel",
        "warning",
    ]
    with process(command, dict(os.environ), subprocess.DEVNULL), redis.Redis(port=port) as client:
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
        for name in names.HELD:
            client.set(f"lock:{name}", names.HOLDER, nx=True)
        yield f"redis://127.0.0.1:{port}"
