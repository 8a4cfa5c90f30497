"""A TCP proxy between a client and PostgreSQL that can be a bad network.

It passes, stalls (both directions, the sockets stay open), forgets connections for good, refuses, and cuts by FIN
or RST; or it cuts when a frontend message that contains given bytes has come, before or after handing it on.

Frontend messages are a type byte and a length, the first ones of a connection a length alone. (PostgreSQL
manual, "Frontend/Backend Protocol", 55.2.1 Start-up and 55.7 Message Formats.)
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

PROTOCOL_3 = 0x00030000
CANCEL_REQUEST = 80877102
PROXY = "proxy"
"""The name of every asyncio task of a proxy."""
LINGER_RST = struct.pack("ii", 1, 0)


@dataclass(eq=False)
class Link:
    """One client's connection and the connection that was made to the server for it."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    flowing: asyncio.Event = field(default_factory=asyncio.Event)
    is_started: bool = False
    is_cut: bool = False
    pending: bytes = b""

    def messages(self, chunk: bytes) -> list[bytes]:
        """The frontend messages that are complete with `chunk`."""
        self.pending += chunk
        found = []
        while message := self._first():
            self.pending = self.pending[len(message) :]
            found.append(message)
        return found

    def _first(self) -> bytes:
        head = 1 if self.is_started else 0
        if len(self.pending) < (5 if self.is_started else 8):
            return b""
        (length,) = struct.unpack_from("!i", self.pending, head)
        if len(self.pending) < head + length:
            return b""
        if not self.is_started:
            (code,) = struct.unpack_from("!i", self.pending, 4)
            self.is_started = code in (PROTOCOL_3, CANCEL_REQUEST)
        return self.pending[: head + length]


@dataclass
class Proxy:
    """Listens on a free loopback port while its context is entered."""

    host: str
    port: int
    listening: int = 0
    delay: float = 0.0
    """Seconds that everything is held back, in each direction."""
    links: list[Link] = field(default_factory=list)
    passed: int = 0
    heard: list[bytes] = field(default_factory=list)
    """The frontend messages that came, in order."""
    _flowing: asyncio.Event = field(default_factory=asyncio.Event)
    _refusing: bool = False
    _needle: bytes | None = None
    _is_forwarded: bool = False
    _on_cut: Callable[[], None] | None = None
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)
    _server: asyncio.Server | None = None

    async def __aenter__(self) -> "Proxy":
        self._flowing.set()
        await self._listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close_listener()
        self.cut("rst")
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.listening)
        self.listening = self._server.sockets[0].getsockname()[1]

    async def _close_listener(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    # -- what it can do ------------------------------------------------------------------------------------

    def stall(self) -> None:
        """Hold every byte back, in both directions; new connections are taken and held too."""
        self._flowing.clear()

    def flow(self) -> None:
        """Let everything pass, what was held back first."""
        self._flowing.set()

    async def refuse(self) -> None:
        """Close the port: whoever connects is refused at once."""
        await self._close_listener()

    async def accept(self) -> None:
        """Open the port again, the same one."""
        if self._server is None:
            await self._listen()

    def cut(self, how: str) -> int:
        """End the connections there are, on both sides, by "fin" or "rst"; how many."""
        cut, self.links = self.links, []
        for link in cut:
            end(link.client, how)
            end(link.server, how)
            link.is_cut = True
        return len(cut)

    def cut_at(self, needle: bytes, *, is_forwarded: bool) -> "asyncio.Future[None]":
        """Cut the connection on which the next message with `needle` comes; the future tells when it did.

        With `is_forwarded` the server gets the message, and its side stays open until it has answered;
        without, it never hears of it.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._needle, self._is_forwarded = needle, is_forwarded
        self._on_cut = lambda: done.set_result(None)
        return done

    def forget(self) -> None:
        """Never pass anything again on the connections there are, as a network does that lost track of them."""
        for link in self.links:
            link.flowing.clear()

    # -- the two directions ----------------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.set_name(PROXY)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await self._flowing.wait()
            server_reader, server = await asyncio.open_connection(self.host, self.port)
        except (OSError, asyncio.CancelledError):
            end(writer, "fin")
            return
        link = Link(writer, server)
        link.flowing.set()
        self.links.append(link)
        try:
            both = (self._up(reader, link), self._down(server_reader, link))
            await asyncio.gather(*(asyncio.create_task(way, name=PROXY) for way in both))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            end(writer, "fin")
            end(server, "fin")
            with contextlib.suppress(ValueError):
                self.links.remove(link)

    async def _up(self, reader: asyncio.StreamReader, link: Link) -> None:
        async for chunk in chunks(reader):
            await self._may_pass(link)
            if link.is_cut:
                return
            for message in link.messages(chunk):
                self.heard.append(message)
                if self._needle is not None and self._needle in message:
                    self._needle = None
                    if self._is_forwarded:
                        link.server.write(message)
                    else:
                        end(link.server, "rst")
                    end(link.client, "rst")
                    link.is_cut = True
                    assert self._on_cut is not None
                    self._on_cut()
                    return
                link.server.write(message)
                self.passed += 1
            await link.server.drain()
        await self._may_pass(link)
        end(link.server, "fin")

    async def _down(self, reader: asyncio.StreamReader, link: Link) -> None:
        async for chunk in chunks(reader):
            await self._may_pass(link)
            if link.is_cut:
                return  # it has answered, to nobody
            link.client.write(chunk)
            await link.client.drain()
        await self._may_pass(link)
        end(link.client, "fin")

    async def _may_pass(self, link: Link) -> None:
        if self.delay:
            await asyncio.sleep(self.delay)
        await self._flowing.wait()
        await link.flowing.wait()


async def chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """What arrives, until the end of the stream."""
    while chunk := await reader.read(65536):
        yield chunk


def end(writer: asyncio.StreamWriter, how: str) -> None:
    """Close one side: "fin" says goodbye, "rst" does not."""
    if how == "rst":
        found = writer.get_extra_info("socket")
        if found is not None and found.fileno() >= 0:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_RST)
        writer.transport.abort()
    elif not writer.is_closing():
        writer.close()
