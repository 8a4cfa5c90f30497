"""A PostgreSQL of our own, for `cronlock dev` and for tests.

The server is a direct child: we reap it, so it can start again the moment it died. It has a session of
its own, so Ctrl-C reaches us and not it. On Linux the kernel stops it when we die, however that happens.
It listens on 127.0.0.1 with a generated password, and on a socket in a directory that only its user can
enter.

A directory has one owner, the process whose child the server is. A second process that starts the same
directory shares the server (`is_shared`) and loses it when the first one stops; if it calls `start`
again, it becomes the owner, on the same port. A server that nobody owns (left over where the kernel does
not stop it with us) is stopped and started anew, once it is proven to serve this directory.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg

from cronlock.binaries import (
    find_binaries,
    major_version,
    own_directory,
    reachable_binaries,
    server_account,
)
from cronlock.cluster import Cluster
from cronlock.errors import EmbeddedError
from cronlock.postmaster import end, read_status, works_in

__all__ = ["Embedded", "default_directory", "find_binaries"]

_START_SECONDS = 120.0
_RETRY_SECONDS = 10.0


def default_directory() -> Path:
    """Where `cronlock dev` keeps its server: one directory per user and major version.

    `$XDG_DATA_HOME/cronlock/postgres-<major>`, usually `~/.local/share/cronlock/postgres-<major>`; for root,
    whose home the server cannot enter, `/var/lib/cronlock/postgres-<major>` (see `binaries.own_directory`).
    Raises `EmbeddedError` if there is no PostgreSQL, or no place for its data.
    """
    return own_directory(server_account()) / f"postgres-{major_version(find_binaries())}"


class Embedded:
    """A PostgreSQL server whose data stays in `directory` between starts.

    `directory` is made if it is missing, and is for this alone; as root its parents must be open to
    `postgres` or `nobody`. `port`: a free one if not given. `settings`: those of postgresql.conf, except
    where it listens.

        with Embedded(default_directory()) as server:
            psycopg.connect(server.url)

    Start it from the main thread, or it may outlive a killed process. Everything here blocks.
    """

    def __init__(self, directory: Path, *, port: int | None = None, settings: Mapping[str, str] | None = None) -> None:
        self.is_shared = False
        self._cluster = Cluster(directory)
        self._port = port
        self._settings = dict(settings or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._url = ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def directory(self) -> Path:
        """Where everything of this server is (see `cronlock.cluster`)."""
        return self._cluster.directory

    @property
    def socket_directory(self) -> Path:
        """The directory of the Unix socket; no password is asked for there."""
        return self._cluster.sockets

    @property
    def url(self) -> str:
        """The server as a URL with its password. Raises `EmbeddedError` before the first start."""
        if not self._url:
            raise EmbeddedError("the embedded PostgreSQL was not started")
        return self._url

    @property
    def pid(self) -> int:
        """The postmaster's process id. Raises `EmbeddedError` if it does not run."""
        if self._process is not None and self._process.poll() is None:
            return self._process.pid
        if self.is_shared and (status := read_status(self._cluster.data)):
            return status.pid
        raise EmbeddedError("the embedded PostgreSQL does not run")

    def start(self) -> None:
        """Start the server, made first if `directory` is new; return when it accepts connections.

        Does nothing if it runs. Raises `EmbeddedError` with what the server said if it cannot start.
        """
        if self._process is not None and self._process.poll() is None:
            return
        cluster = self._cluster
        cluster.open()
        if not self._take_or_share():
            return
        try:
            binaries = reachable_binaries(cluster.account)
            cluster.check(binaries)
            self._end_leftover()
            if not cluster.data.exists():
                cluster.make(binaries, is_synced=self._settings.get("fsync") != "off")
            self._launch(binaries)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the server, within bounds (see `postmaster.end`); a shared one is left alone."""
        self._end()
        if not self.is_shared:
            self._cluster.remove_sockets()
        self._cluster.release()
        self.is_shared = False

    def restart(self) -> None:
        """Stop and start on the same port; also after `kill()`. Not for a shared server."""
        self._refuse_shared()
        self._end()
        self.start()

    def kill(self) -> None:
        """SIGKILL to the postmaster, as in a crash. Not for a shared server."""
        self._refuse_shared()
        os.kill(self.pid, signal.SIGKILL)
        self._end()

    def _refuse_shared(self) -> None:
        if self.is_shared:
            raise EmbeddedError(f"the server in {self.directory} belongs to another process")

    def _end(self) -> None:
        process = self._process
        if process is not None:
            end(process.pid, lambda: process.poll() is not None)
            self._process = None

    def _take_or_share(self) -> bool:
        """True when the directory is ours, False when another process's server is ready for us too."""
        deadline = time.monotonic() + _START_SECONDS
        while not self._cluster.take():
            self.is_shared = self._is_answering()
            if self.is_shared:
                return False
            if time.monotonic() > deadline:
                raise EmbeddedError(f"a process holds {self.directory}, but its PostgreSQL does not answer")
            time.sleep(0.05)
        self.is_shared = False
        return True

    def _is_answering(self) -> bool:
        """Whether the server named in `postmaster.pid` is ready and says that it serves this directory."""
        status = read_status(self._cluster.data)
        if status is None or not status.is_ready:
            return False
        try:
            url = self._cluster.url(status.port)
            with psycopg.connect(url, connect_timeout=5, autocommit=True) as connection:
                row = connection.execute("show data_directory").fetchone()
            if row is None or not os.path.samefile(row[0], self._cluster.data):
                return False
        except (psycopg.Error, OSError):
            return False
        self._url, self._cluster.sockets = url, Path(status.socket_directory)
        return True

    def _end_leftover(self) -> None:
        """Stop a server that nobody owns, and clear what a dead one left.

        PostgreSQL would take a reused or unreaped process id in `postmaster.pid` for a live server.
        """
        data = self._cluster.data
        status = read_status(data)
        if status is not None:
            end(status.pid, lambda: not works_in(status.pid, data))
        (data / "postmaster.pid").unlink(missing_ok=True)

    def _launch(self, binaries: Path) -> None:
        cluster = self._cluster
        cluster.make_sockets()
        deadline = time.monotonic() + _RETRY_SECONDS
        while True:
            port = self._port or cluster.free_port()
            try:
                self._launch_on(port, binaries)
            except EmbeddedError as error:
                self._end()
                # Backends outlive a killed postmaster for a moment; another may have taken the free port.
                passing = ("still in use",) if self._port else ("still in use", "already in use")
                if not any(text in str(error) for text in passing) or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                self._port, self._url = port, cluster.url(port)
                cluster.remember(port)
                return

    def _launch_on(self, port: int, binaries: Path) -> None:
        quoted = str(self._cluster.sockets).replace('"', '""')
        settings = self._settings | {
            "listen_addresses": "127.0.0.1",
            "port": str(port),
            "unix_socket_directories": f'"{quoted}"',
            "unix_socket_permissions": "0700",
        }
        data = self._cluster.data
        options = [f"--{name}={value}" for name, value in settings.items()]
        self._process = process = self._cluster.begin(binaries / "postgres", "-D", str(data), *options)
        deadline = time.monotonic() + _START_SECONDS
        while not ((status := read_status(data)) and status.pid == process.pid and status.is_ready):
            if process.poll() is not None or time.monotonic() > deadline:
                raise EmbeddedError(f"PostgreSQL did not start in {self.directory}:\n{self._cluster.said()}")
            time.sleep(0.005)
