"""The HTTP side: `/cron/{task}`, `/jobs/..`, the admin routes, two open probes, and what another application gets."""

import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cronlock.errors import CronlockError, Unavailable
from cronlock.web.admin import endpoints
from cronlock.web.cron import CronEndpoint
from cronlock.web.fallback import lifespan_of, require_asgi
from cronlock.web.jobs import JobsEndpoint

if TYPE_CHECKING:
    from cronlock.app import Cronlock

NO_STORE = {"cache-control": "no-store"}


class InFront(Starlette):
    """cronlock's routes; all else goes to `fallback` as it came: no middleware, no scope of ours."""

    def __init__(self, fallback: ASGIApp, **options: Any) -> None:
        super().__init__(**options)
        self.fallback = fallback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_ours(scope):
            await super().__call__(scope, receive, send)
        else:
            await self.fallback(scope, receive, send)

    def _is_ours(self, scope: Scope) -> bool:
        return any(route.matches(scope)[0] is not Match.NONE for route in self.routes)


def application(cron: "Cronlock", fallback: ASGIApp | None = None, *, has_probes: bool = True) -> Starlette:
    """The ASGI application of a `Cronlock`; never redirects, answers everything of its own in JSON."""
    if fallback is not None:
        require_asgi(fallback)

    async def healthz(_: Request) -> Response:
        return JSONResponse({"status": "ok"}, headers=NO_STORE)

    async def readyz(_: Request) -> Response:
        try:
            process = await cron.open()
            if process.runner.is_draining:
                raise Unavailable("shutting_down", "the server is shutting down")
            await process.readiness.require()
        except CronlockError:
            return JSONResponse({"status": "unavailable"}, 503, headers={**NO_STORE, "retry-after": "5"})
        return JSONResponse({"status": "ready"}, headers=NO_STORE)

    async def not_found(_: Request, __: Exception) -> Response:
        return JSONResponse({"status": "not_found"}, 404, headers=NO_STORE)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[dict[str, Any] | None]:
        if fallback is None:
            async with cron.lifespan(app):
                yield None
        else:  # its own first, and last: tasks use what it opens
            async with lifespan_of(fallback) as state, cron.lifespan(app):
                yield state or None

    jobs = JobsEndpoint(cron)
    make = Starlette if fallback is None else functools.partial(InFront, fallback)
    app = make(
        routes=[
            Route("/cron/{task:path}", CronEndpoint(cron)),
            *(Route(f"/jobs/{{name}}{slash}", jobs) for slash in ("", "/")),
            *(Route(path, endpoint) for path, endpoint in endpoints(cron)),
            *([Route("/healthz", healthz), Route("/readyz", readyz)] if has_probes else []),
        ],
        lifespan=lifespan,  # type: ignore[arg-type]  # a state may be None, which the server is not told
        exception_handlers={404: not_found},
    )
    app.router.redirect_slashes = False
    return app
