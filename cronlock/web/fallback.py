"""Another ASGI application behind cronlock's routes, and its lifespan.

The lifespan protocol is that of https://asgi.readthedocs.io/en/latest/specs/lifespan.html: an application that
raises when it is called for a lifespan has none, and is served all the same.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from cronlock.errors import ConfigError, CronlockError

log = logging.getLogger("cronlock.web")


def require_asgi(app: object) -> None:
    """Raise `ConfigError` for what cannot be called with `(scope, receive, send)`."""
    try:
        inspect.signature(app).bind(None, None, None)  # type: ignore[arg-type]  # what is no callable raises TypeError
    except TypeError:
        kind = getattr(app, "__name__", type(app).__name__)
        raise ConfigError(
            f"fallback={kind} is no ASGI application, which is called with (scope, receive, send);"
            " give one, such as Django's get_asgi_application()"
        ) from None
    except ValueError:
        pass  # its signature cannot be read


@asynccontextmanager
async def lifespan_of(app: ASGIApp) -> AsyncIterator[dict[str, Any]]:
    """Run the lifespan of `app`, if it has one, around the block; gives the state that it made for requests.

    Raises `CronlockError` with the application's message if its startup or its shutdown failed.
    """
    state: dict[str, Any] = {}
    life = Life(app, state)
    try:
        await life.tell("startup")
        try:
            yield state
        finally:
            await life.tell("shutdown")
    finally:
        await life.end()


class Life:
    """One application's lifespan, lived in a task of its own, as under a server."""

    def __init__(self, app: ASGIApp, state: dict[str, Any]) -> None:
        self._told: asyncio.Queue[Message] = asyncio.Queue()
        self._said: asyncio.Queue[Message] = asyncio.Queue()
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": state}
        self._task = asyncio.ensure_future(self._live(app, scope))
        self._has_started = False

    async def _live(self, app: ASGIApp, scope: Scope) -> None:
        try:
            await app(scope, self._told.get, self._say)
        except Exception as error:
            if self._has_started:
                log.exception("the lifespan of the fallback broke off")
            else:
                log.debug("the fallback has no lifespan: %r", error)

    async def _say(self, message: Message) -> None:
        self._has_started |= message["type"] == "lifespan.startup.complete"
        self._said.put_nowait(message)

    async def tell(self, event: str) -> None:
        """Send `startup` or `shutdown` and wait for the answer, or for the end of an application that gives none."""
        self._told.put_nowait({"type": f"lifespan.{event}"})
        answer = asyncio.ensure_future(self._said.get())
        try:
            await asyncio.wait((answer, self._task), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                return
            said = answer.result()
        finally:
            answer.cancel()
        if said["type"] == f"lifespan.{event}.failed":
            raise CronlockError(f"the {event} of the fallback failed: {said.get('message', '')}".rstrip(": \n"))

    async def end(self) -> None:
        """Let it return; one that has answered and goes on, or whose start was broken off, is cancelled."""
        await asyncio.wait((self._task,), timeout=0 if not self._has_started else 1)
        self._task.cancel()
        await asyncio.wait((self._task,), timeout=1)
