"""What the tests of several modules need: a client, a foreign holder of a lock, an observer's questions."""

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import psycopg
from starlette.types import ASGIApp

from cronlock import Cronlock, Outcome, Run

SECRET = "a-secret-for-the-tests-0123456789"
AUTH = {"authorization": f"Bearer {SECRET}"}

Make = Callable[..., Cronlock]
Db = psycopg.Connection[tuple[Any, ...]]
Steps = Generator[Any, Any, Any]


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of the application, with its lifespan."""
    async with app.router.lifespan_context(app), client_of(app) as client:
        yield client


def client_of(app: ASGIApp) -> httpx2.AsyncClient:
    """A client that calls the application in this event loop, with the secret."""
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=True)
    return httpx2.AsyncClient(transport=transport, base_url="http://test", headers=AUTH)


def rows(db: Db, task: str) -> list[tuple[Any, ...]]:
    """(status, reason) of a task's runs, oldest first."""
    return db.execute("SELECT status, reason FROM cronlock.run WHERE task = %s ORDER BY id", (task,)).fetchall()


def value(db: Db, query: str, *parameters: Any) -> Any:
    """The one value that a query gives."""
    row = db.execute(query, parameters).fetchone()
    assert row is not None
    return row[0]


def holders(db: Db, name: str) -> list[int]:
    """The pids of the backends that hold the lock of this name."""
    query = """SELECT l.pid FROM pg_locks l, (SELECT hashtext(%s)::bigint AS key) k
        WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
          AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
          AND l.classid::bigint = (k.key >> 32) & 4294967295 AND l.objid::bigint = k.key & 4294967295"""
    return [pid for (pid,) in db.execute(query, (name,)).fetchall()]


def advisory_locks(db: Db) -> int:
    """How many advisory locks there are in the test's database."""
    query = """SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"""
    return int(value(db, query))


def end_holders(db: Db) -> None:
    """End the backends that hold an advisory lock of the test's database, and wait until they are gone."""
    db.execute(
        """SELECT pg_terminate_backend(pid, 5000) FROM pg_locks WHERE locktype = 'advisory' AND pid IS NOT NULL
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"""
    )


@asynccontextmanager
async def held(url: str, name: str, application: str = "psql") -> AsyncIterator[int]:
    """Another program holds the lock; gives its backend's pid."""
    async with await psycopg.AsyncConnection.connect(url, application_name=application) as connection:
        cursor = await connection.execute(
            "SELECT pg_try_advisory_xact_lock(hashtext(%s)::bigint), pg_backend_pid()", (name,)
        )
        row = await cursor.fetchone()
        assert row is not None
        assert row[0] is True
        yield row[1]
        await connection.rollback()


def statements(script: str) -> list[str]:
    """What `cronlock migrate --sql` printed, one by one, as psql sends it."""
    return script.strip().removesuffix(";").split(";\n\n")


async def until(is_so: Callable[[], Any], what: str, seconds: float = 10.0) -> Any:
    """Ask again until the answer is true, and give it; fails after `seconds`."""
    limit = time.monotonic() + seconds
    while not (answer := is_so()):
        assert time.monotonic() < limit, f"{what}: not within {seconds:g} s"
        await asyncio.sleep(0.01)
    return answer


async def run_once(cron: Cronlock, function: Callable[..., Any], **options: Any) -> Outcome:
    """Register `function` as the task "once", run it and close everything again."""
    cron.task("once", **options)(function)
    async with cron:
        return await cron.run("once")


def task_of(steps: Callable[[Run], Steps], is_async: bool) -> Callable[[Run], Any]:
    """One text for both kinds of task: `steps` yields whatever an `async def` task would have to await."""

    async def awaiting(run: Run) -> Any:
        going = steps(run)
        try:
            step = next(going)
            while True:
                try:
                    answer = await step if inspect.isawaitable(step) else step
                except BaseException as error:
                    step = going.throw(error)
                else:
                    step = going.send(answer)
        except StopIteration as done:
            return done.value

    def plain(run: Run) -> Any:
        going = steps(run)
        try:
            step = next(going)
            while True:
                step = going.send(step)
        except StopIteration as done:
            return done.value

    return awaiting if is_async else plain
