"""What cronlock is measured against, as routes of the same application."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import psycopg
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from benchmarks import names
from benchmarks.load import IDLE_CALLS
from cronlock.config import Settings
from cronlock.outcome import Holder, Outcome
from cronlock.web import answers
from cronlock.web.answers import plain
from cronlock.web.auth import Bearer

LEASE_MS = 120_000
TRY_LOCK = text("select pg_try_advisory_xact_lock(hashtext(:name)::bigint)")
RELEASE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"


class Peer(ABC):
    """A route that authenticates, decides in its own way, and answers as cronlock does."""

    def __init__(self, bearer: Bearer, numbers: Iterator[int], holder_pid: int) -> None:
        self._bearer = bearer
        self._numbers = numbers
        self._holder = Holder(pid=holder_pid, application_name=names.HOLDER)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic()
        if self._bearer.refusal([value for name, value in scope["headers"] if name == b"authorization"]) is not None:
            await plain(401, "unauthorized").send(send)
            return
        task = scope["path_params"]["task"].removesuffix("/")
        is_run = await self.is_run(task)
        elapsed = round((time.monotonic() - started) * 1000)
        if is_run:
            outcome = Outcome(status="completed", task=task, run_id=next(self._numbers), duration_ms=elapsed)
        else:
            outcome = Outcome(
                status="skipped",
                task=task,
                run_id=next(self._numbers),
                duration_ms=elapsed,
                reason="already_running",
                holder=self._holder,
            )
        await answers.of(outcome, 200).send(send)

    @abstractmethod
    async def is_run(self, task: str) -> bool:
        """Run the task under its lock if it is free."""


class Nothing(Peer):
    """Touches no database: every call is skipped."""

    async def is_run(self, task: str) -> bool:
        return False


class Redis(Peer):
    """`SET NX PX`, one for each call, and no record."""

    def __init__(self, bearer: Bearer, numbers: Iterator[int], holder_pid: int, url: str) -> None:
        import redis.asyncio

        super().__init__(bearer, numbers, holder_pid)
        self._redis = redis.asyncio.Redis.from_url(url, max_connections=2 * names.CONNECTIONS)
        self._release = self._redis.register_script(RELEASE)

    async def is_run(self, task: str) -> bool:
        token = uuid4().hex
        if not await self._redis.set(f"lock:{task}", token, nx=True, px=LEASE_MS):
            return False
        await self._release(keys=[f"lock:{task}"], args=[token])
        return True


class SharedRedis(Redis):
    """The callers of one lock that wait at one moment share one `SET NX PX`, as cronlock's share an attempt.

    The first of them runs if the lock is free; the others are skipped.
    """

    def __init__(self, bearer: Bearer, numbers: Iterator[int], holder_pid: int, url: str) -> None:
        super().__init__(bearer, numbers, holder_pid, url)
        self._waiting: dict[str, list[asyncio.Future[bool]]] = {}
        self._attempts: dict[str, asyncio.Task[None]] = {}

    async def is_run(self, task: str) -> bool:
        loop = asyncio.get_running_loop()
        decided: asyncio.Future[bool] = loop.create_future()
        self._waiting.setdefault(task, []).append(decided)
        if task not in self._attempts:
            self._attempts[task] = loop.create_task(self._attempt(task))
        return await decided

    async def _attempt(self, task: str) -> None:
        try:
            while group := self._waiting.pop(task, None):
                is_run = await super().is_run(task)
                for decided in group:
                    if not decided.done():
                        decided.set_result(is_run)
                    is_run = False
        finally:
            del self._attempts[task]


class Article(Peer):
    """The article's pattern: the lock in a SQLAlchemy transaction around the task, and no record."""

    def __init__(
        self,
        bearer: Bearer,
        numbers: Iterator[int],
        holder_pid: int,
        settings: Settings,
        *,
        has_statement: bool = False,
    ) -> None:
        super().__init__(bearer, numbers, holder_pid)
        self._has_statement = has_statement
        self._engine = create_async_engine(
            "postgresql+psycopg://",
            async_creator=lambda: psycopg.AsyncConnection.connect(settings.database_url),
            pool_size=settings.pool_size,
            max_overflow=0,
        )

    async def is_run(self, task: str) -> bool:
        async with self._engine.begin() as connection:
            if not (await connection.execute(TRY_LOCK, {"name": task})).scalar():
                return False
            if self._has_statement:
                await connection.execute(names.STATEMENT)
        return True


class Bare:
    """What a skip consists of, each part by itself: times taken in the server's own event loop.

    `lock`: BEGIN, the try at a lock that is held elsewhere, COMMIT. `insert`: one row of a skipped run,
    committed, into a table shaped like `run`.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._connection: psycopg.AsyncConnection[Any] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._connection is None:
            self._connection = await psycopg.AsyncConnection.connect(self._settings.database_url, autocommit=True)
        once = {"lock": self._lock, "insert": self._insert}[scope["path_params"]["what"]]
        times: list[float] = []
        until = time.monotonic() + scope["path_params"]["seconds"]
        while len(times) < IDLE_CALLS and time.monotonic() < until:
            started = time.perf_counter()
            await once(self._connection)
            times.append((time.perf_counter() - started) * 1000)
        await JSONResponse(times)(scope, receive, send)

    async def _lock(self, connection: "psycopg.AsyncConnection[Any]") -> None:
        await connection.execute("BEGIN")
        cursor = await connection.execute("SELECT pg_try_advisory_xact_lock(hashtext(%s)::bigint)", (names.HELD[0],))
        assert await cursor.fetchone() == (False,)
        await connection.execute("COMMIT")

    async def _insert(self, connection: "psycopg.AsyncConnection[Any]") -> None:
        await connection.execute(INSERT, (uuid4(), names.HELD[0], self._instance, names.HELD[0]))

    _instance = uuid4()


INSERT = """
INSERT INTO bare.run (nonce, task, status, reason, finished_at, trigger, caller, instance, host, pid, lock_name,
    lock_key, lock_classid, lock_objid, holder_pid, holder_application)
VALUES (%s, %s, 'skipped', 'already_running', clock_timestamp(), 'http', 'wrk', %s, 'host', 12345, %s,
    1234567890, 0, 1234567890, 12345, 'holder')
"""
