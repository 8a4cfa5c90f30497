"""What a queue of Python is told to do, one module for each; `drive` is the program that does it.

These modules run in the virtual environment of the peers, which has no cronlock, but for `cronlock` and `bare`.
"""

import asyncio
import os
import socket
import time
from abc import ABC, abstractmethod

PLACED = "INSERT INTO placed (n) VALUES ({})"
"""The user's own statement in a transaction that enqueues; `{}` is its value in the driver's notation."""


class Driver(ABC):
    """One queue. `callers` is how many connections are wanted, `task` what is enqueued."""

    def __init__(self, url: str, callers: int, task: str) -> None:
        self.url = url
        self.callers = callers
        self.task = task

    async def schema(self) -> None:  # noqa: B027 - cronlock's is there already
        """Install what the queue needs in its database."""

    @abstractmethod
    async def open(self) -> None:
        """Connect, to enqueue."""

    @abstractmethod
    async def close(self) -> None:
        """The opposite."""

    @abstractmethod
    async def one(self, n: int) -> None:
        """Enqueue one job; it is durable when this returns."""

    @abstractmethod
    async def many(self, ns: range) -> None:
        """Enqueue a batch."""

    @abstractmethod
    async def inside(self, n: int) -> None:
        """A transaction of the caller's: `PLACED` and one job."""

    @abstractmethod
    async def work(self) -> None:
        """Be a worker until the process is ended."""


class Stamper:
    """Says at what time a job started, by a datagram to whoever enqueued it."""

    def __init__(self) -> None:
        self._to = ("127.0.0.1", int(os.environ.get("BENCHMARK_STAMPS", "9")))
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    def __call__(self, n: int) -> None:
        now = time.monotonic_ns()
        self._socket.sendto(b"%d %d" % (n, now), self._to)


class Stamps(asyncio.DatagramProtocol):
    """Receives what `Stamper` says."""

    def __init__(self) -> None:
        self.expected = -1
        self.arrived: asyncio.Future[int] | None = None

    def datagram_received(self, data: bytes, _: object) -> None:
        n, started = map(int, data.split())
        if n == self.expected and self.arrived is not None and not self.arrived.done():
            self.arrived.set_result(started)
