"""Starts `tests.crashes.served` as a process, and sends it signals."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx2

from tests import AUTH, SECRET

ROOT = Path(__file__).parents[2]


class Served:
    """A served application while its context is entered; killed at the end if it still lives.

    Keyword arguments are settings, by the names of the environment without their prefix.
    """

    def __init__(self, database_url: str, *, graceful: int = 1, **settings: str) -> None:
        self._environment = {
            "DATABASE_URL": database_url,
            "CRON_SECRET": SECRET,
            **{f"CRONLOCK_{name.upper()}": value for name, value in settings.items()},
        }
        self._graceful = graceful
        self.process: subprocess.Popen[bytes]
        self.url = ""

    def __enter__(self) -> Self:
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("CRON", "DATABASE_URL"))}
        command = [sys.executable, "-m", "tests.crashes.served", str(listener.fileno()), str(self._graceful)]
        self.process = subprocess.Popen(
            command, env=kept | self._environment, cwd=ROOT, pass_fds=[listener.fileno()], stderr=subprocess.PIPE
        )
        listener.close()
        deadline = time.monotonic() + 20
        while self._ready() != 200:
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, "it did not get ready"
            time.sleep(0.02)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _ready(self) -> int:
        try:
            return httpx2.get(f"{self.url}/readyz", timeout=10).status_code
        except httpx2.HTTPError:
            return 0

    def client(self) -> httpx2.AsyncClient:
        """A client that calls it."""
        return httpx2.AsyncClient(base_url=self.url, headers=AUTH, timeout=30)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.process.kill()
        self.process.wait(10)

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def said(self) -> str:
        """What it wrote to stderr, once it has ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()
