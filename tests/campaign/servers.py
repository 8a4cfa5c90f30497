"""One `cronlock serve` process of the campaign: begun, killed, frozen, begun again at the same address."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from tests.commands import PROJECT, environment

STARTS_WITHIN = 60.0
ENDS_WITHIN = 45.0
"""Seconds; a drain has 25, code that does not stop and open connections a few more."""

ESTABLISHED = "01"


@dataclass(eq=False)
class Server:
    """A server and how it is reached; `settings` are environment variables."""

    name: str
    directory: Path
    settings: dict[str, str]
    port: int = 0
    process: "subprocess.Popen[bytes] | None" = None
    is_ready: bool = False
    is_frozen: bool = False
    timeline: int = 1
    starts: list[float] = field(default_factory=list)
    """When it was begun, by the monotonic clock; the last one is the process that lives."""

    @property
    def role(self) -> str:
        """The database role that is this server's alone."""
        return f"campaign_{self.name}"

    @property
    def url(self) -> str:
        """Where it is called."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The process id of the one that was begun last."""
        assert self.process is not None
        return self.process.pid

    def begin(self) -> None:
        """Begin the process; it is ready some time later."""
        self.port = self.port or free_port()
        command = [sys.executable, "-m", "cronlock", "serve", "tests.campaign.tasks:cron", "--port", str(self.port)]
        # It is begun often: what is compiled may be kept.
        own = {"CAMPAIGN_PARENT": str(os.getpid()), "PYTHONDONTWRITEBYTECODE": ""}
        given = environment(**self.settings, **own)
        with (self.directory / f"{self.name}.log").open("ab") as output:
            self.process = subprocess.Popen(
                command, cwd=PROJECT, env=given, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        self.starts.append(time.monotonic())

    async def until_ready(self, client: httpx2.AsyncClient) -> None:
        """Wait until it answers that it is ready."""
        limit = time.monotonic() + STARTS_WITHIN
        while True:
            assert self.process is not None
            assert self.process.poll() is None, f"server {self.name} ended by itself:\n{self.said()}"
            assert time.monotonic() < limit, f"server {self.name} did not get ready:\n{self.said()}"
            try:
                if (await client.get(f"{self.url}/readyz", timeout=5)).status_code == 200:
                    break
            except httpx2.HTTPError:
                pass
            await asyncio.sleep(0.05)
        self.is_ready = True

    def kill(self) -> None:
        """SIGKILL, and wait for the end of the process."""
        self.is_ready = self.is_frozen = False
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)

    def freeze(self) -> None:
        """SIGSTOP."""
        self.is_frozen = True
        self._send(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._send(signal.SIGCONT)
        self.is_frozen = False

    def terminate(self) -> None:
        """SIGTERM: drain and end."""
        self.is_ready = False
        self._send(signal.SIGTERM)

    def _send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def said(self) -> str:
        """The last lines it has written."""
        text = (self.directory / f"{self.name}.log").read_bytes()[-4000:].decode(errors="replace")
        return "\n".join(text.splitlines()[-15:])

    def resident(self) -> int | None:
        """Its resident memory in KiB (VmRSS, proc_pid_status(5)); nothing if it does not live."""
        for line in read(Path(f"/proc/{self.pid}/status")).splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1])
        return None

    def connections(self, ports: set[int]) -> int:
        """How many established connections it has to these loopback ports (proc_pid_net(5))."""
        sockets = set()
        for file in Path(f"/proc/{self.pid}/fd").glob("*"):
            try:
                sockets.add(os.readlink(file))
            except OSError:
                continue
        count = 0
        for line in read(Path("/proc/net/tcp")).splitlines()[1:]:
            words = line.split()
            port = int(words[2].rpartition(":")[2], 16)
            if port in ports and words[3] == ESTABLISHED and f"socket:[{words[9]}]" in sockets:
                count += 1
        return count


def read(file: Path) -> str:
    """What the kernel says in a file; nothing if the process is gone."""
    try:
        return file.read_text()
    except OSError:
        return ""


def free_port() -> int:
    """A port on the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
