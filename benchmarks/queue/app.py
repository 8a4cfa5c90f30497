"""The server that jobs are enqueued at, and beside that a route that answers the same and touches no database."""

import itertools
import os
import sys
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from benchmarks import names
from benchmarks.app import Counted, answered
from cronlock import Cronlock, Run, enqueue, serving
from cronlock.enqueue import Enqueued
from cronlock.web import answers
from cronlock.web.answers import plain
from cronlock.web.auth import Bearer, authorization
from cronlock.web.body import read_object
from cronlock.web.cron import idempotency_key


class Nothing:
    """Checks the secret, the payload and the key as `/jobs/{task}` does, and writes nothing."""

    def __init__(self, cron: Cronlock) -> None:
        self._cron = cron
        self._bearer = Bearer(cron.settings.require_secrets())
        self._numbers = itertools.count(names.FIRST_RUN_ID)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._bearer.refusal(authorization(scope)) is not None:
            await plain(401, "unauthorized").send(send)
            return
        task = self._cron.tasks.get(scope["path_params"]["name"])
        payload = await read_object(dict(scope["headers"]), receive, self._cron.settings.max_body)
        key = idempotency_key(scope["headers"])
        enqueue.order(task, [payload], trigger="http", keys=None if key is None else [key])
        await answers.enqueued(Enqueued(next(self._numbers))).send(send)


class Measured(Cronlock):
    """A Cronlock whose application has that route too."""

    def app(self, **options: Any) -> Starlette:
        app = super().app(**options)
        nothing = Route("/nothing/{name}", Nothing(self))
        app.router.routes[:0] = [nothing, Route("/-/answers", answered)]
        app.add_middleware(Counted)
        return app


def make() -> Cronlock:
    """The Cronlock that is served."""
    cron = Measured()

    async def noop(run: Run) -> None:
        pass

    cron.task("noop", mode="guard")(noop)
    return cron


def main() -> None:
    """Serve on the port that the first argument names, on one core if the environment says which."""
    if core := os.environ.get(names.SERVER_CORE):
        os.sched_setaffinity(0, {int(core)})
    serving.serve("benchmarks.queue.app:make", port=int(sys.argv[1]))


if __name__ == "__main__":
    main()
