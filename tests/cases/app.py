"""The tasks of the cases, for servers in processes of their own: `cron`, and the same below middleware, `layered`."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount

from cronlock import Cronlock, Run

WRITE = "INSERT INTO effect VALUES (%s)"

cron = Cronlock()


@cron.task("nightly")
async def nightly(run: Run, payload: dict[str, Any]) -> dict[str, Any]:
    """Writes once."""
    await run.driver.execute(WRITE, (run.id,))
    return payload


@cron.task("slow")
async def slow(run: Run, payload: dict[str, Any]) -> None:
    """Writes, waits for `pause` seconds and writes again."""
    await run.driver.execute(WRITE, (run.id,))
    await asyncio.sleep(float(payload.get("pause", 0)))
    await run.driver.execute(WRITE, (run.id,))


class Odd(BaseException):
    """No Exception."""


class Unspeakable(Exception):
    """One that cannot be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


RAISED: dict[str, Callable[[], BaseException]] = {
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "CancelledError": asyncio.CancelledError,
    "GeneratorExit": GeneratorExit,
    "Odd": lambda: Odd("odd"),
    "ExceptionGroup": lambda: ExceptionGroup("several", [ValueError("one"), KeyError("two")]),
    "Unspeakable": Unspeakable,
}


async def raising(run: Run, payload: dict[str, str]) -> None:
    """Writes, and raises what `what` names."""
    await run.driver.execute(WRITE, (run.id,))
    raise RAISED[payload["what"]]()


def raising_in_a_thread(run: Run, payload: dict[str, str]) -> None:
    """As `raising`, as a plain function."""
    run.driver.execute(WRITE, (run.id,))
    raise RAISED[payload["what"]]()


cron.task("raising")(raising)
cron.task("raising-in-a-thread")(raising_in_a_thread)


@cron.task("leaking")
async def leaking(run: Run) -> None:
    """Raises an error that is full of secrets; the local variable is one, too."""
    local_only = "a-local-variable-with-a-password"
    assert local_only
    raise ConnectionError(
        "the supplier refused: Authorization: Bearer sk_test_x51Hx, https://anna:hunter22@shop.example/?token=abc123,"
        f" host=db user=app password=hunter33 dbname=shop, {cron.settings.require_secrets()[0]}"
    )


class Layer(BaseHTTPMiddleware):
    """Starlette's own way to write middleware: the application runs in a task of its own below it."""

    async def dispatch(self, request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        """Hand the call on and mark the answer."""
        answer = await call_next(request)
        answer.headers["x-layer"] = "passed"
        return answer


def layered() -> Starlette:
    """The routes inside an application with middleware of its own: uvicorn --factory tests.cases.app:layered."""
    middleware = [Middleware(Layer), Middleware(GZipMiddleware), Middleware(Layer)]
    return Starlette(routes=[Mount("/internal", cron.app())], middleware=middleware, lifespan=cron.lifespan)
