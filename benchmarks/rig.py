"""Everything that runs during a benchmark: PostgreSQL, Redis, the process that holds the locks, the server."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg
from psycopg.conninfo import make_conninfo

from benchmarks import machine, names
from benchmarks.load import Client
from cronlock.embedded import Embedded
from cronlock.migrate import migrate

ROOT = Path(__file__).parent.parent
POSTGRES = {
    "shared_buffers": "512MB",
    "max_connections": "200",
    "max_wal_size": "4GB",
    "checkpoint_timeout": "30min",
}
SHOWN = ("fsync", "synchronous_commit", "full_page_writes", "wal_level", *POSTGRES, "jit")
START_SECONDS = 30.0


class Rig:
    """Starts what a benchmark needs, and ends it again."""

    def __init__(self, *, has_redis: bool) -> None:
        self.has_redis = has_redis
        self.server_core, self.other_cores = machine.split_cores()
        self.is_embedded = not os.environ.get("DATABASE_URL")
        self.url = ""
        self.postgres_pid: int | None = None
        self.port = free_port()
        self.load_before = os.getloadavg()[0]
        self._questions = 0
        self._stack = ExitStack()
        self._server: subprocess.Popen[bytes] | None = None

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
        self.url, self.postgres_pid = stack.enter_context(database(directory))
        migrate(self.url, "cronlock")
        self.connection = stack.enter_context(psycopg.connect(self.url, autocommit=True))
        self._prepare_tables()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CRONLOCK_")}
        environment |= {
            "DATABASE_URL": self.url,
            "CRON_SECRET": names.SECRET,
            "CRONLOCK_POOL_SIZE": str(names.CONNECTIONS),
        }
        if pg_bin := os.environ.get("CRONLOCK_PG_BIN"):
            environment["CRONLOCK_PG_BIN"] = pg_bin
        environment[names.HOLDER_PID] = stack.enter_context(holder(environment))
        if self.has_redis:
            environment[names.REDIS_URL] = stack.enter_context(redis_server())
        if self.server_core is not None:
            environment[names.SERVER_CORE] = str(self.server_core)
        log = stack.enter_context((directory / "server.log").open("wb"))
        self._server = stack.enter_context(
            process([sys.executable, "-m", "benchmarks.app", str(self.port)], environment, log)
        )
        self._wait(directory / "server.log")

    def _prepare_tables(self) -> None:
        self.connection.execute(f"ALTER TABLE cronlock.run ALTER COLUMN id RESTART WITH {names.FIRST_RUN_ID}")
        self.connection.execute("CREATE SCHEMA bare")
        self.connection.execute("CREATE TABLE bare.run (LIKE cronlock.run INCLUDING ALL)")

    def _wait(self, log: Path) -> None:
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                self.get(f"/cron/{names.EMPTY[0]}")
                return
            except (OSError, RuntimeError) as error:
                assert self._server is not None
                if self._server.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"the server did not start ({error}):\n{log.read_text()[-4000:]}") from None
            time.sleep(0.1)

    def get(self, path: str) -> tuple[bytes, bytes]:
        """One answer, over a connection of its own: its head and its body."""
        with Client(self.port) as client:
            return client.get(path)

    def cpu_seconds(self) -> tuple[float, float]:
        """The CPU time that the server under test and an embedded PostgreSQL have used so far."""
        assert self._server is not None
        postgres = machine.family_cpu_seconds(self.postgres_pid) if self.postgres_pid else 0.0
        return machine.cpu_seconds(self._server.pid), postgres

    def answers(self) -> int:
        """How many answers the server has given, once none is due; those to this question are not counted."""
        while True:
            given, due = json.loads(self.get("/-/answers")[1])
            given, self._questions = given - self._questions, self._questions + 1
            if not due:
                return int(given)
            time.sleep(0.02)

    def newest_run(self) -> int:
        """The highest id in the table of runs."""
        row = self.connection.execute("SELECT coalesce(max(id), 0) FROM cronlock.run").fetchone()
        assert row is not None
        return int(row[0])

    def written_since(self, run_id: int) -> dict[str, int]:
        """How many runs there are above an id, by status."""
        rows = self.connection.execute(
            "SELECT status, count(*) FROM cronlock.run WHERE id > %s GROUP BY status", (run_id,)
        ).fetchall()
        return {str(status): int(number) for status, number in rows}

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
def database(directory: Path) -> Iterator[tuple[str, int | None]]:
    """A database of our own, and the process id of its server where that is ours: the one that is started here.

    Where DATABASE_URL is set, the database is made on the server that it names.
    """
    if not (given := os.environ.get("DATABASE_URL")):
        with Embedded(directory / "postgres", settings=POSTGRES) as server:
            yield server.url, server.pid
        return
    name = f"cronlock_benchmark_{os.getpid()}"
    with psycopg.connect(given, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        try:
            yield make_conninfo(given, dbname=name), None
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@contextmanager
def process(command: list[str], environment: dict[str, str], log: Any = None) -> Iterator["subprocess.Popen[bytes]"]:
    """A child that is ended at the end, politely at first."""
    child = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
    )
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()


@contextmanager
def holder(environment: dict[str, str]) -> Iterator[str]:
    """The process that holds the locks of all tasks in `names.HELD`; gives its backend's process id."""
    with process([sys.executable, "-m", "benchmarks.holder", *names.HELD], environment) as child:
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


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
