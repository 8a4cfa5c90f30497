"""One process under test, and the database that it works on."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg

from benchmarks import machine, names
from benchmarks.load import Client

ROOT = Path(__file__).parent.parent
START_SECONDS = 60.0


class Server:
    """A `cronlock serve` process with the routes of `app`; it can be started and stopped again and again."""

    def __init__(self, url: str, environment: dict[str, str], log: Path, module: str = "benchmarks.app") -> None:
        self.port = free_port()
        self.connection = psycopg.connect(url, autocommit=True)
        self._environment = environment
        self._log = log
        self._module = module
        self._questions = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self.connection.close()

    @property
    def pid(self) -> int:
        """The id of the process; it must have been started."""
        assert self._process is not None, "start() comes first"
        return self._process.pid

    def start(self) -> float:
        """Start the process; the seconds until it says that it is ready. Raises `RuntimeError` if it never does."""
        self._questions = 0
        started = time.perf_counter()
        with self._log.open("wb") as log:
            self._process = launch([sys.executable, "-m", self._module, str(self.port)], self._environment, log)
        while True:
            try:
                self.get("/readyz")
                return time.perf_counter() - started
            except (OSError, RuntimeError) as error:
                if self._process.poll() is not None or time.perf_counter() - started > START_SECONDS:
                    said = self._log.read_text()[-4000:]
                    raise RuntimeError(f"the server did not start ({error}):\n{said}") from None
            time.sleep(0.005)

    def stop(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            end(self._process)
            self._process = None

    def get(self, path: str, key: str | None = None) -> tuple[bytes, bytes]:
        """One answer, over a connection of its own: its head and its body."""
        with Client(self.port) as client:
            return client.get(path, key)

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
        """How many runs there are above an id, by status; skips by their reason."""
        rows = self.connection.execute(
            "SELECT coalesce(reason, status), count(*) FROM cronlock.run WHERE id > %s GROUP BY 1", (run_id,)
        ).fetchall()
        return {str(what): int(number) for what, number in rows}

    def cpu_seconds(self) -> float:
        """The CPU time that the process has used so far."""
        return machine.cpu_seconds(self.pid)


def launch(command: list[str], environment: dict[str, str], log: Any = None) -> "subprocess.Popen[bytes]":
    """A child with pipes for its input and output."""
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
    )


def end(child: "subprocess.Popen[bytes]") -> None:
    """End a child, politely at first."""
    child.terminate()
    try:
        child.communicate(timeout=15)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()


@contextmanager
def process(command: list[str], environment: dict[str, str], log: Any = None) -> Iterator["subprocess.Popen[bytes]"]:
    """A child that is ended at the end."""
    child = launch(command, environment, log)
    try:
        yield child
    finally:
        end(child)


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def environment(url: str, core: int | None) -> dict[str, str]:
    """What a server is told: nothing of cronlock's own settings but those that all of them have."""
    kept = ("CRONLOCK_PG_BIN",)
    told = {name: value for name, value in os.environ.items() if not name.startswith("CRONLOCK_") or name in kept}
    told |= {
        "DATABASE_URL": url,
        "CRON_SECRET": names.SECRET,
        "CRONLOCK_POOL_SIZE": str(names.CONNECTIONS),
    }
    if core is not None:
        told[names.SERVER_CORE] = str(core)
    return told
