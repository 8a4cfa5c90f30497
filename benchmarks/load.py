"""The load: `wrk`, and one keep-alive connection for an idle server."""

import json
import os
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import names

IDLE_CALLS = 300
SCRIPT = Path(__file__).with_name("load.lua")


@dataclass(frozen=True, slots=True)
class Load:
    """What one burst of `wrk` saw."""

    requests: int
    seconds: float
    bytes: int
    p50_ms: float
    p99_ms: float
    refused: int
    broken: int
    cpu: float
    """The share of one core that wrk itself used."""

    @property
    def per_second(self) -> float:
        return self.requests / self.seconds


def burst(
    port: int,
    route: str,
    tasks: list[str],
    seconds: int,
    *,
    is_own: bool = False,
    key: str = "none",
    body: str = "none",
) -> Load:
    """Send requests for `seconds`: over 32 connections through all paths in turn, or over one for each path.

    `key` is the idempotency key of every request, or "none"; with a star at its end it is another in each. `body` is
    the JSON that is posted, or "none" for a GET.
    """
    threads, connections = (len(tasks), len(tasks)) if is_own else (1, names.CONNECTIONS)
    command = ["wrk", f"-t{threads}", f"-c{connections}", f"-d{seconds}s", "--timeout", "10s", "-s", str(SCRIPT)]
    command += [f"http://127.0.0.1:{port}", "--", names.SECRET, "own" if is_own else "all", key, body]
    command += [f"/{route}/{task}" for task in tasks]
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    elapsed = time.monotonic() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"wrk ended with {process.returncode}: {said}")
    told = json.loads(said.strip().splitlines()[-1])
    return Load(
        requests=told["requests"],
        seconds=told["microseconds"] / 1e6,
        bytes=told["bytes"],
        p50_ms=told["p50"] / 1000,
        p99_ms=told["p99"] / 1000,
        refused=told["status"],
        broken=told["socket"],
        cpu=(usage.ru_utime + usage.ru_stime) / elapsed,
    )


class Client:
    """One keep-alive connection; what it costs itself is the same for every route."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def get(self, path: str, key: str | None = None) -> tuple[bytes, bytes]:
        """The head and the body of the answer; raises `RuntimeError` for one that is no success.

        `key` is the idempotency key to send.
        """
        more = "" if key is None else f"Idempotency-Key: {key}\r\n"
        self._socket.sendall(
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {names.SECRET}\r\n{more}"
            "User-Agent: wrk\r\n\r\n".encode()
        )
        received = b""
        while b"\r\n\r\n" not in received:
            received += self._receive()
        head, _, body = received.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        length = int(fields.get(b"content-length", b"0"))
        while len(body) < length:
            body += self._receive()
        if not head.startswith(b"HTTP/1.1 2"):
            raise RuntimeError(f"{path} was answered {head.splitlines()[0]!r} {body!r}")
        return head, body

    def _receive(self) -> bytes:
        received = self._socket.recv(65536)
        if not received:
            raise RuntimeError("the server closed the connection")
        return received


def idle(port: int, path: str, seconds: float) -> list[float]:
    """The milliseconds of each call, one after another over one connection, until `seconds` are over."""
    taken: list[float] = []
    with Client(port) as client:
        client.get(path)
        until = time.monotonic() + seconds
        while len(taken) < IDLE_CALLS and time.monotonic() < until:
            started = time.perf_counter()
            client.get(path)
            taken.append((time.perf_counter() - started) * 1000)
    return taken
