"""A server process for a `Cronlock`: it owns its signals and ends in order.

On SIGTERM or SIGINT new calls are answered 503 while the listener stays open, so that no caller meets a closed
port. What runs has the drain timeout to finish, then it is cancelled and recorded; then open connections have
a few seconds, and `run` returns. A second signal cancels what runs at once, a third waits for nothing.

(uvicorn alone closes the listener first, and dies by the signal it was sent.)
"""

import asyncio
import gc
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from types import FrameType

import uvicorn

from cronlock import logs
from cronlock.app import Cronlock
from cronlock.errors import CronlockError
from cronlock.loading import load
from cronlock.working import Crew

CONNECTIONS_TIMEOUT = 5
"""Seconds that open connections have after the drain."""

log = logging.getLogger("cronlock.serving")


class CannotListen(CronlockError):
    """The address and port are not to be had; the message says why."""


def serve(app: str, host: str = "127.0.0.1", port: int = 8000, *, ended: Callable[[], None] = lambda: None) -> None:
    """Serve the `Cronlock` that `app` ("module:attribute") names, until a signal; log lines go to stderr.

    `ended`: see `run`.
    Raises `ConfigError` for an app or a setting that is wrong, `CannotListen` if the port cannot be had, and
    `RegistrationError` if the locks of two tasks have one key.
    """
    cron = load(app)
    logs.configure(cron.settings.log_format, cron.settings.scrub)
    cron.settings.require_secrets()
    listener = listen(host, port)

    def started() -> None:
        log.info("serving %s on %s", app, url(listener), extra={"event": "server.started"})

    run(cron, listener, started, ended)
    log.info("stopped", extra={"event": "server.stopped"})


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises `CannotListen`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise CannotListen(f"cannot listen on {host} port {port}: {reason}; choose another --port") from None


def url(listener: socket.socket) -> str:
    """Where a listening socket is reached from this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - read, not bound
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(
    cron: Cronlock,
    listener: socket.socket,
    started: Callable[[], None] = lambda: None,
    ended: Callable[[], None] = lambda: None,
    *,
    crew: Crew | None = None,
) -> None:
    """Serve on `listener` until a signal; with a `crew`, run jobs in this process too.

    `started` is called in the event loop once calls are answered, `ended` when every run has ended and is
    recorded; what follows waits some seconds for code that does not return. Raises `ConfigError` without a usable
    CRON_SECRET, and what `Cronlock.lifespan` raises.
    """
    server = Server(cron, started, ended, crew)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(server.live(listener))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where there is one."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


@asynccontextmanager
async def unbound_threads() -> AsyncIterator[None]:
    """Let the event loop end although `asyncio.to_thread` runs something that never returns.

    It would wait for its executor without a limit, so in the end it is handed one that has nothing to do.
    """
    try:
        yield
    finally:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))


def end_process(code: int = 0, within: float = 2.0) -> None:
    """Make sure that this process ends `within` seconds from now, although the code of a task never returns.

    For commands; the interpreter itself would wait for such a thread for ever.
    """

    def end() -> None:
        time.sleep(within)
        log.warning("the code of a task has not returned; ending without it", extra={"event": "server.code_left"})
        os._exit(code)

    threading.Thread(target=end, name="cronlock-end", daemon=True).start()


class Server(uvicorn.Server):
    """uvicorn's server with the end that is described above."""

    def __init__(
        self, cron: Cronlock, started: Callable[[], None], ended: Callable[[], None], crew: Crew | None = None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                cron.app(),
                lifespan="off",  # held by `live`, so that its end is bounded
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=CONNECTIONS_TIMEOUT,
            )
        )
        self._cron = cron
        self._crew = crew
        self._started = started
        self._ended = ended
        self._loop: asyncio.AbstractEventLoop | None = None
        self._life: asyncio.Task[None] | None = None
        self._endings: list[asyncio.Task[None]] = []

    async def live(self, listener: socket.socket) -> None:
        """Open the Cronlock, serve, drain, close; a signal before it serves ends it there."""
        self._loop, self._life = asyncio.get_running_loop(), asyncio.current_task()
        try:
            with self.capture_signals():  # all the while; as process 1 of a container it has no default for them
                async with unbound_threads(), self._cron.lifespan():
                    if self._crew is not None:
                        await self._crew.start()
                    await self.serve(sockets=[listener])
                    self._ended()
                    await self._cron.close(0)
        except asyncio.CancelledError:
            await self._cron.close(0)
            if self.started:
                raise

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        gc.collect()
        # What is loaded now stays, and a call leaves little: to look through both so often is a fifth of its price.
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)
        self._started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig == signal.SIGINT and multiprocessing.parent_process() is not None:
            return  # Ctrl-C reaches the whole process group; the reloader passes on what it means by SIGTERM
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._end, signal.Signals(sig).name)

    def _end(self, sig: str) -> None:
        if not self.started:
            assert self._life is not None
            self._life.cancel()
            return
        log.info("%s: draining", sig, extra={"event": "server.draining", "signal": sig})
        if len(self._endings) >= 2:
            self.should_exit = self.force_exit = True
            return
        seconds = 0.0 if self._endings else None
        self._endings.append(asyncio.get_running_loop().create_task(self._drain(seconds)))

    async def _drain(self, seconds: float | None) -> None:
        try:
            if self._crew is not None:
                self._crew.drain(seconds)
                await asyncio.gather(self._cron.drain(seconds), self._crew.work())
            else:
                await self._cron.drain(seconds)
        finally:
            self.should_exit = True
