"""A FastAPI router over the same endpoint.

FastAPI applies `dependencies=` only to its own routes, not to Starlette's, and runs a router's lifespan but
never that of a mounted application; so the endpoint is offered as one of its routes, with the lifespan.
"""

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from cronlock.web.cron import CronEndpoint

if TYPE_CHECKING:
    from cronlock.app import Cronlock

METHODS = ["GET", "POST", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"]


class Passed(Response):
    """A response that is made by an ASGI application."""

    def __init__(self, endpoint: CronEndpoint) -> None:
        super().__init__()
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._endpoint(scope, receive, send)


def router(cron: "Cronlock") -> APIRouter:
    """The router of a `Cronlock`, for `include_router`."""
    endpoint = CronEndpoint(cron)

    async def call(_: Request) -> Response:
        return Passed(endpoint)

    made = APIRouter(lifespan=cron.lifespan)
    made.add_api_route("/cron/{task:path}", call, methods=METHODS, include_in_schema=False)
    return made
