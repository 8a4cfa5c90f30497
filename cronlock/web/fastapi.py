"""A FastAPI router over the same endpoints.

FastAPI applies `dependencies=` only to its own routes, not to Starlette's, and runs a router's lifespan but
never that of a mounted application; so the endpoints are offered as routes of its own, with the lifespan.
"""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cronlock.web.admin import endpoints
from cronlock.web.cron import CronEndpoint
from cronlock.web.jobs import JobsEndpoint

if TYPE_CHECKING:
    from cronlock.app import Cronlock

METHODS = ["GET", "POST", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"]


class Passed(Response):
    """A response that is made by an ASGI application."""

    def __init__(self, endpoint: ASGIApp) -> None:
        super().__init__()
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._endpoint(scope, receive, send)


def router(cron: "Cronlock") -> APIRouter:
    """The router of a `Cronlock`, for `include_router`."""
    made = APIRouter(lifespan=cron.lifespan)
    jobs = JobsEndpoint(cron)
    routes: list[tuple[str, ASGIApp]] = [
        ("/cron/{task:path}", CronEndpoint(cron)),
        ("/jobs/{name}", jobs),
        ("/jobs/{name}/", jobs),
        *endpoints(cron),
    ]
    for path, endpoint in routes:
        made.add_api_route(path, passing(endpoint), methods=METHODS, include_in_schema=False)
    return made


def passing(endpoint: ASGIApp) -> Callable[[Request], Awaitable[Response]]:
    """A function of a route that leaves everything to an ASGI application."""

    async def call(_: Request) -> Response:
        return Passed(endpoint)

    return call
