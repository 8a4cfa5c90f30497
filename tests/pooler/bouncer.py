"""A real PgBouncer in transaction mode, in front of a server."""

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict

from cronlock.binaries import server_account

POOL_SIZE = 3


class Bouncer:
    """Listens on a free loopback port between `start` and `stop`; each database has `pool_size` slots."""

    def __init__(self, directory: Path, server_url: str, pool_size: int = POOL_SIZE) -> None:
        self.directory = directory
        self._pool_size = pool_size
        self.port = 0
        self._server = conninfo_to_dict(server_url)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; returns when it answers. Fails, naming the package, if PgBouncer is not installed."""
        program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
        assert program, "pgbouncer is not installed; on Debian and Ubuntu: apt install pgbouncer"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        file = self.directory / "pgbouncer.ini"
        file.touch(0o600)
        file.write_text(self._settings())
        # It refuses to run as root; the settings are read before it becomes another user.
        become = ["-u", server_account().name] if os.geteuid() == 0 else []
        with (self.directory / "pgbouncer.log").open("wb") as log:
            self._process = subprocess.Popen([program, *become, str(file)], stdout=log, stderr=log)
        deadline = time.monotonic() + 10
        while True:
            try:
                psycopg.connect(self.url("postgres"), connect_timeout=2).close()
                return
            except psycopg.OperationalError:
                assert time.monotonic() < deadline, (self.directory / "pgbouncer.log").read_text()
                time.sleep(0.02)

    def stop(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(10)

    def url(self, database: str) -> str:
        """A database of the server, through here."""
        return f"postgresql://anyone@127.0.0.1:{self.port}/{database}"

    def _settings(self) -> str:
        server = " ".join(
            f"{name}={self._server[name]}" for name in ("host", "port", "user", "password") if self._server.get(name)
        )
        return "\n".join(
            (
                "[databases]",
                f"* = {server}",
                "[pgbouncer]",
                "listen_addr = 127.0.0.1",
                f"listen_port = {self.port}",
                "unix_socket_dir =",
                "auth_type = any",
                "pool_mode = transaction",
                f"default_pool_size = {self._pool_size}",
                "server_login_retry = 1",
                "max_client_conn = 500",
                "log_connections = 0",
                "log_disconnections = 0",
                "",
            )
        )
