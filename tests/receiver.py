"""A webhook's receiver in the test's own event loop, which can fail in every way that one does."""

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

HOOK_SECRET = "a-webhook-secret-for-tests-0123456789"


@dataclass
class Receiver:
    """What came, and how the next request is answered: a status, or "hang", "trickle", "close"."""

    url: str = ""
    answer: int | str = 204
    pause: float = 0.0
    came: Callable[[dict[str, Any]], None] = lambda body: None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Of the requests that were answered with 2xx."""
    tries: list[float] = field(default_factory=list)
    """When each request came, in monotonic seconds."""
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    forged: int = 0
    open_now: int = 0

    def told(self, what: str = "tags") -> list[str]:
        """All tags (or keys, or paths) in the order in which they came."""
        return [one for body in self.bodies for one in body[what]]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        self.open_now += 1
        try:
            while line := await reader.readline():
                await self._answer(line.decode(), reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open_now -= 1
            writer.close()

    async def _answer(self, line: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        headers = {}
        while (header := (await reader.readline()).decode().strip()) != "":
            name, _, text = header.partition(":")
            headers[name.lower()] = text.strip()
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        self.tries.append(time.monotonic())
        self.headers.append(headers)
        self.paths.append(line.split()[1])
        if not is_signed(headers.get("cronlock-signature", ""), body):
            self.forged += 1
        self.came(json.loads(body))
        await asyncio.sleep(self.pause)
        if self.answer == "hang":
            await asyncio.sleep(3600)
        if self.answer == "close":
            writer.close()
            raise ConnectionError
        if self.answer == "trickle":
            writer.write(b"HTTP/1.1 200 OK\r\n")
            while True:
                writer.write(b"x-more: 1\r\n")
                await writer.drain()
                await asyncio.sleep(0.05)
        if self.answer in range(200, 300):
            self.bodies.append(json.loads(body))
        location = f"location: {self.url}/elsewhere\r\n" if self.answer in range(300, 400) else ""
        writer.write(f"HTTP/1.1 {self.answer} Any\r\n{location}content-length: 0\r\n\r\n".encode())
        await writer.drain()


def is_signed(header: str, body: bytes, secret: str = HOOK_SECRET) -> bool:
    """Whether the header is the signature of the body, made a moment ago; not by cronlock's own code."""
    parts = [part.split("=", 1) for part in header.split(",") if "=" in part]
    at = next((text for name, text in parts if name == "t"), "0")
    expected = hmac.new(secret.encode(), at.encode() + b"." + body, hashlib.sha256).hexdigest()
    return expected in [text for name, text in parts if name == "v1"] and abs(time.time() - int(at)) < 60


@asynccontextmanager
async def receiving(**options: Any) -> AsyncIterator[Receiver]:
    """A receiver on a free port."""
    receiver = Receiver(**options)
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(receiver.serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    receiver.url = f"http://127.0.0.1:{port}"
    try:
        yield receiver
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
