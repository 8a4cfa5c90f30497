"""The HTTP side: `/cron/{task}`, the admin routes, and two probes that are open and say nothing."""

from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cronlock.errors import CronlockError, Unavailable
from cronlock.web.admin import endpoints
from cronlock.web.cron import CronEndpoint

if TYPE_CHECKING:
    from cronlock.app import Cronlock

NO_STORE = {"cache-control": "no-store"}


def application(cron: "Cronlock") -> Starlette:
    """The ASGI application of a `Cronlock`; never redirects, answers everything in JSON."""

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

    app = Starlette(
        routes=[
            Route("/cron/{task:path}", CronEndpoint(cron)),
            *(Route(path, endpoint) for path, endpoint in endpoints(cron)),
            Route("/healthz", healthz),
            Route("/readyz", readyz),
        ],
        lifespan=cron.lifespan,
        exception_handlers={404: not_found},
    )
    app.router.redirect_slashes = False
    return app
