"""A server process for a `Cronlock`, which owns its signals and ends in order.

On SIGTERM or SIGINT new calls are answered 503 while the listener stays open, so that no caller meets a closed
port; what runs has the drain timeout to finish, then it is cancelled and recorded; then open connections have
a few seconds, and the process ends with 0. A second signal cancels at once. A thread that never returns does
not keep the process from ending.

uvicorn alone closes the listener first, and dies by the signal it was sent.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from cronlock import logs
from cronlock.app import Cronlock
from cronlock.errors import ConfigError, ServingError
from cronlock.loading import load

CONNECTIONS_TIMEOUT = 5
"""Seconds that connections have to close after the drain."""
THREADS_TIMEOUT = 1.0

log = logging.getLogger("cronlock.serving")


def serve(app: str, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Serve the `Cronlock` that `app` ("module:attribute") names, until a signal; log to stderr.

    Raises `ConfigError` for an app or a setting that is wrong, `ServingError` if the port cannot be had, and
    `RegistrationError` if the locks of two tasks have one key.
    """
    cron = load(app)
    logs.configure(cron.settings.log_format, cron.settings.scrub)
    cron.settings.require_secrets()
    listener = listen(host, port)

    def started() -> None:
        log.info("serving %s on %s", app, url(listener), extra={"event": "server.started"})

    run(cron, listener, started)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises `ServingError` that says why there is none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ServingError(f"cannot listen on {host} port {port}: {reason}") from None


def url(listener: socket.socket) -> str:
    """Where a listening socket is reached from this machine."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - read, not bound
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(cron: Cronlock, listener: socket.socket, started: Callable[[], None] = lambda: None) -> None:
    """Serve on `listener` until a signal; `started` is called when calls are answered."""
    config = uvicorn.Config(
        cron.app(),
        http="httptools",
        lifespan="off",  # held here, around the server, so that its end can be bounded
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=CONNECTIONS_TIMEOUT,
    )
    server = Server(config, cron, started)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(server.live(listener))
        leave_if_threads_stay()


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop, where there is one."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def leave_if_threads_stay() -> None:
    """End the process here if a thread does not: the interpreter would wait for it without a limit."""
    asyncio_threads, until = others(), time.monotonic() + THREADS_TIMEOUT
    return None


class Server(uvicorn.Server):
    """uvicorn's server with another end."""

    def __init__(self, config: uvicorn.Config, cron: Cronlock, started: Callable[[], None]) -> None:
        super().__init__(config)
