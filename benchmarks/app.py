"""The server under test: one cronlock process that also has the routes of its peers.

The routes of the peers that a skip is compared with stand before `/cron/{task}` in the route list, so what the order
costs there, cronlock pays; the article's, whose calls cost ten times as much, stand at the end.
All of them authenticate with the same object and answer through the same code.
"""

import itertools
import json
import logging
import os
import sys
import time
from typing import Any

import psycopg
from sqlalchemy.ext.asyncio import create_async_engine
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from benchmarks import names
from benchmarks.load import IDLE_CALLS
from benchmarks.locking import Locking
from benchmarks.peers import Article, Bare, Nothing, Peer, Redis, SharedRedis
from cronlock import Cronlock, Run, serving
from cronlock.web.auth import Bearer

numbers = itertools.count(names.FIRST_RUN_ID)


class Counted:
    """Counts the calls and the answers of the whole application, whether or not their client still waits."""

    calls = 0
    answers = 0

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        Counted.calls += 1
        await self._app(scope, receive, send)
        Counted.answers += 1


async def answered(_: Request) -> Response:
    """How many answers were given before this one, and how many calls are still without."""
    return JSONResponse([Counted.answers, Counted.calls - Counted.answers - 1])


async def logging_level(request: Request) -> Response:
    """Set the level of cronlock's log."""
    logging.getLogger("cronlock").setLevel(request.path_params["level"])
    return Response(status_code=204)


class Looks:
    """`/-/looks/{seconds}`: the milliseconds of each look at whether the database is ready and the tasks are in it."""

    def __init__(self, cron: Cronlock) -> None:
        self._cron = cron

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        readiness = (await self._cron.open()).readiness
        times: list[float] = []
        until = time.monotonic() + scope["path_params"]["seconds"]
        while len(times) < IDLE_CALLS and time.monotonic() < until:
            started = time.perf_counter()
            await readiness.look()
            times.append((time.perf_counter() - started) * 1000)
        await Response(json.dumps(times))(scope, receive, send)


class Measured(Cronlock):
    """A Cronlock whose application also has the routes of its peers."""

    def app(self, **options: Any) -> Starlette:
        app = super().app(**options)
        bearer = Bearer(self.settings.require_secrets())
        holder_pid = int(os.environ[names.HOLDER_PID])
        peers: dict[str, Peer] = {
            "auth": Nothing(bearer, numbers, holder_pid),
            "article": Article(bearer, numbers, holder_pid, self.settings),
            "article-one": Article(bearer, numbers, holder_pid, self.settings, has_statement=True),
        }
        if url := os.environ.get(names.REDIS_URL):
            peers["redis"] = Redis(bearer, numbers, holder_pid, url)
            peers["redis-shared"] = SharedRedis(bearer, numbers, holder_pid, url)
        bare = Bare(self.settings)
        routes = {name: Route(f"/{name}/{{task:path}}", peer) for name, peer in peers.items()}
        articles = [routes.pop(name) for name in ("article", "article-one")]
        app.router.routes[:0] = routes.values()
        app.router.routes += articles
        app.router.routes += [
            Route("/-/answers", answered),
            Route("/-/logging/{level}", logging_level),
            Route("/-/bare/{what}/{seconds:float}", bare),
            Route("/-/locking/{what}/{seconds:float}", Locking(self)),
            Route("/-/looks/{seconds:float}", Looks(self)),
        ]
        app.add_middleware(Counted)
        return app


def add_tasks(cron: Cronlock) -> Cronlock:
    """Register tasks whose lock is held elsewhere, empty ones, and ones with one statement, in both modes."""
    engine = create_async_engine(
        "postgresql+psycopg://",
        async_creator=lambda: psycopg.AsyncConnection.connect(cron.settings.database_url),
        pool_size=names.CONNECTIONS,
        max_overflow=0,
    )

    async def empty(run: Run) -> None:
        pass

    async def one_statement(run: Run) -> None:
        await run.connection.execute(names.STATEMENT)

    async def guarded_statement(run: Run) -> None:
        async with engine.begin() as connection:
            await connection.execute(names.STATEMENT)

    for name in names.HELD + names.EMPTY:
        cron.task(name)(empty)
    for name in names.ONE_STATEMENT:
        cron.task(name)(one_statement)
    for name in names.GUARDED:
        cron.task(name, mode="guard")(empty)
    for name in names.GUARDED_STATEMENT:
        cron.task(name, mode="guard")(guarded_statement)
    return cron


def add_many(cron: Cronlock, number: int) -> Cronlock:
    """Register `number` tasks: those in `names.FEW`, and others that nobody calls."""

    async def empty(run: Run) -> None:
        pass

    for name in (*names.FEW, *(f"other-{each:05}" for each in range(number - len(names.FEW)))):
        cron.task(name, schedule="*/5 * * * *")(empty)
    return cron


def make() -> Cronlock:
    """The Cronlock that is served; its settings and the number of its tasks come from the environment."""
    if number := os.environ.get(names.TASKS):
        return add_many(Measured(), int(number))
    return add_tasks(Measured())


def main() -> None:
    """Serve on the port that the first argument names, on one core if the environment says which."""
    if core := os.environ.get(names.SERVER_CORE):
        os.sched_setaffinity(0, {int(core)})
    serving.serve("benchmarks.app:make", port=int(sys.argv[1]))


if __name__ == "__main__":
    main()
