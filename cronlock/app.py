"""`Cronlock`: the object that users hold."""

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from cronlock import enqueue, jobs, subscribing, versions
from cronlock.config import Settings
from cronlock.enqueue import Enqueued, Order
from cronlock.errors import CronlockError, Unavailable
from cronlock.gate import Call
from cronlock.keys import occurrence_fault
from cronlock.metrics import Metrics
from cronlock.outcome import Outcome
from cronlock.process import Process
from cronlock.runner import log
from cronlock.stint import Done
from cronlock.targets import CHANNEL, Invalidation, Notify, Targets, VersionTable, Webhook
from cronlock.tasks import Dedupe, Registry, Task, declare

if TYPE_CHECKING:
    from fastapi import APIRouter
    from starlette.applications import Starlette
    from starlette.types import ASGIApp

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=Callable[[Invalidation], Any])


class Cronlock:
    """A set of tasks, and the database in which their locks and records live.

    Settings come from keyword arguments, else from the environment (`DATABASE_URL`, `CRON_SECRET`,
    `CRONLOCK_*`); docs/settings.md lists them. Nothing is connected until the application starts.

    Raises `ConfigError` for a setting that is missing or wrong.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = Settings.load(**settings)
        self.tasks = Registry()
        self.targets = Targets()
        self.metrics = Metrics(self.tasks, self.targets)
        self._process: Process | None = None
        self._starting: asyncio.Lock | None = None
        self._alone = threading.Lock()
        self._joining = threading.Lock()

    def task(
        self,
        name: str,
        *,
        lock: str | int | None = None,
        mode: str = "transaction",
        key: str | None = None,
        max_concurrent: int = 1,
        min_interval: str | float | timedelta | None = None,
        timeout: str | float | timedelta | None = None,
        acquire_timeout: str | float | timedelta | None = None,
        skip_status: int | None = None,
        schedule: str | None = None,
        timezone: str = "UTC",
        queue: str = "default",
        priority: int = 0,
        max_attempts: int | None = None,
        retry_delay: str | float | timedelta = 1,
        retry_cap: str | float | timedelta = 3600,
        retry_on: "Sequence[type[BaseException]] | type[BaseException] | None" = None,
        dedupe: Dedupe | None = None,
        idempotency_ttl: str | float | timedelta | None = None,
    ) -> Callable[[F], F]:
        """Register the decorated function as the task `name`, called at `/cron/<name>`.

        The function takes `(run)` or `(run, payload)`; it may be `async def`, or plain and run in a thread.

        - `lock`: the lock's name (the task's by default), or an int that is used as the key itself. Tasks
          that name one lock exclude each other.
        - `mode`: "transaction" (the task works in the transaction that holds its lock), "guard" (the lock has a
          transaction of its own, and the task opens its own) or "queue" (a call makes a job, which a worker runs).
        - `key`: such as "{tenant}": each value of these fields of the payload has a lock of its own.
        - `max_concurrent`: how many runs of a lock there may be at once, 1 to 100.
        - `min_interval`: a call is skipped for so long after the last completed run of the same task and key.
        - `timeout`: how long a run may take; "90s", "15m", seconds or a timedelta (CRONLOCK_TIMEOUT; none in guard
          mode).
        - `acquire_timeout`: how long a call may wait for a connection (CRONLOCK_ACQUIRE_TIMEOUT).
        - `skip_status`: the HTTP status of a skip: 200, 409 or 503 (CRONLOCK_SKIP_STATUS).
        - `schedule`, `timezone`: when a scheduler outside is expected to call; five cron fields or `@hourly`.

        For its jobs:

        - `queue`, `priority`: where they wait, and which goes first there: the higher one, then the older one.
        - `max_attempts`: how often a job is tried (CRONLOCK_MAX_ATTEMPTS, 5).
        - `retry_delay`, `retry_cap`: the second attempt begins within the first of these, each further one within
          twice as much, up to the cap.
        - `retry_on`: the exception types after which a job is tried again, in place of those that may pass by
          themselves (see docs/retries.md).
        - `dedupe`: how the idempotency key of a job is found where none is given: "payload", the names of fields of
          the payload, or a callable that takes the payload and returns the key.
        - `idempotency_ttl`: how long a key is remembered (CRONLOCK_IDEMPOTENCY_TTL, 1h).

        Raises `RegistrationError` for a name, lock or option that is not allowed.
        """

        def register(function: F) -> F:
            self.tasks.add(
                declare(
                    function,
                    name,
                    self.settings,
                    lock=lock,
                    mode=mode,
                    key=key,
                    max_concurrent=max_concurrent,
                    min_interval=min_interval,
                    timeout=timeout,
                    acquire_timeout=acquire_timeout,
                    skip_status=skip_status,
                    schedule=schedule,
                    timezone=timezone,
                    queue=queue,
                    priority=priority,
                    max_attempts=max_attempts,
                    retry_delay=retry_delay,
                    retry_cap=retry_cap,
                    retry_on=retry_on,
                    dedupe=dedupe,
                    idempotency_ttl=idempotency_ttl,
                )
            )
            return function

        return register

    async def enqueue(
        self,
        connection: Any,
        name: str,
        payload: Any = None,
        *,
        run_at: datetime | None = None,
        delay: str | float | timedelta | None = None,
        priority: int | None = None,
        queue: str | None = None,
        max_attempts: int | None = None,
        idempotency_key: str | None = None,
    ) -> Enqueued:
        """Write a job of the task `name`, in the caller's transaction.

        - `connection`: whose transaction it is: an `AsyncConnection` or `AsyncSession` of SQLAlchemy, over any driver,
          or psycopg's `AsyncConnection`. The job is there when that commits. None: in a transaction of its own,
          durable when this returns.
        - `payload`: a dict that JSON can hold, or a pydantic model; it must fit the task.
        - `run_at`: a time with its zone; `delay`: "90s", "15m", seconds or a timedelta. At most one of them.
        - `priority`, `queue`, `max_attempts`: in place of the task's.
        - `idempotency_key`: 1 to 255 characters that name this enqueue: a second one with the same key gives the first
          job's id. In place of what the task's `dedupe` says.

        Raises `UnknownTask`, `PayloadError`, `PayloadInvalid`, `IdempotencyKeyReused`, `IdempotencyKeyInUse`, and
        `Unavailable` where the transaction is its own; else what the connection raises.
        """
        keys = None if idempotency_key is None else [idempotency_key]
        (enqueued,) = await self.enqueue_many(
            connection, name, [payload], run_at=run_at, delay=delay, priority=priority, queue=queue,
            max_attempts=max_attempts, idempotency_keys=keys,
        )  # fmt: skip
        return enqueued

    async def enqueue_many(
        self,
        connection: Any,
        name: str,
        payloads: "Sequence[Any]",
        *,
        run_at: datetime | None = None,
        delay: str | float | timedelta | None = None,
        priority: int | None = None,
        queue: str | None = None,
        max_attempts: int | None = None,
        idempotency_keys: "Sequence[str] | None" = None,
    ) -> list[Enqueued]:
        """As `enqueue`, for thousands of payloads in one statement; `idempotency_keys` are in their order."""
        task = self.tasks.get(name)
        wanted = enqueue.order(
            task, payloads, run_at=run_at, delay=delay, priority=priority, queue=queue, max_attempts=max_attempts,
            keys=idempotency_keys,
        )  # fmt: skip
        if not payloads:
            return []
        if connection is None:
            process = self._process or await self._open_late()
            return await process.enqueuer.enqueue(wanted)
        return await enqueue.on_async(connection, jobs.statements(self.settings.schema_name), wanted)

    def enqueue_sync(self, connection: Any, name: str, payload: Any = None, **options: Any) -> Enqueued:
        """`enqueue` for a connection that is not async: SQLAlchemy's `Connection` or `Session`, psycopg's `Connection`.

        Takes the same options and raises the same.
        """
        if "idempotency_key" in options:
            key = options.pop("idempotency_key")
            options["keys"] = None if key is None else [key]
        wanted = enqueue.order(self.tasks.get(name), [payload], **options)
        return enqueue.on_sync(connection, jobs.statements(self.settings.schema_name), wanted)[0]

    @overload
    def target(self, name: str, to: "Webhook | Notify | VersionTable") -> None: ...

    @overload
    def target(self, name: str, to: C, *, timeout: "str | float | timedelta" = "30s") -> C: ...

    @overload
    def target(self, name: str, *, timeout: "str | float | timedelta" = "30s") -> Callable[[C], C]: ...

    def target(self, name: str, to: Any = None, *, timeout: "str | float | timedelta" = "30s") -> Any:
        """Register a target, which is told what tasks invalidate: after their commit, at least once, in order per key.

        - `name`: 1 to 40 of a-z, 0-9, ".", "_" and "-"; deliveries are written down under it, so keep it.
        - `to`: a `Webhook`, a `Notify`, a `VersionTable`, or a callable that takes an `Invalidation`: `async def`, or
          plain and run in a thread. What it raises is a failed delivery, which is tried again. Without `to` this is a
          decorator of such a callable.
        - `timeout`: how long a callable may take; "30s", seconds or a timedelta.

        Every process that runs tasks is to register the same ones. See docs/invalidation.md.

        Raises `RegistrationError` for a name, a target or a timeout that is not allowed.
        """
        if to is not None:
            self.targets.add(name, to, timeout)
            return None if isinstance(to, (Webhook, Notify, VersionTable)) else to

        def register(function: C) -> C:
            self.targets.add(name, function, timeout)
            return function

        return register

    def subscribe(self, channel: str = CHANNEL) -> AsyncIterator[Invalidation]:
        """What a `Notify` target says, for a cache in this process: `async for stale in cron.subscribe():`.

        Goes on for ever, on a direct connection of its own, which is opened again after every outage. `stale.has_gap`
        says that something may have been missed, so that anything may be stale: at first, and after each outage.

        Raises `RegistrationError` for a channel that is none, `ConfigError` if only a pooler is known.
        """
        return subscribing.subscribe(self.settings, channel)

    async def cache_versions(self, connection: Any, *keys: str) -> dict[str, int]:
        """The versions of keys, tags or paths, as a `VersionTable` target raises them; 0 for one never invalidated.

        `connection`: SQLAlchemy's `AsyncConnection` or `AsyncSession`, psycopg's `AsyncConnection`, or None for one of
        cronlock's own. Read the version first, then what is cached under it.

        Raises `PayloadError` for a key that can be none, `Unavailable` where the connection is cronlock's own, and
        TypeError for a connection of another kind; else what the connection raises.
        """
        found = versions.checked(keys)
        if connection is None:
            process = self._process or await self._open_late()
            return await versions.of_ours(process.database, found)
        return await versions.on_async(connection, self.settings.schema_name, found)

    def cache_versions_sync(self, connection: Any, *keys: str) -> dict[str, int]:
        """`cache_versions` for SQLAlchemy's `Connection` or `Session`, or psycopg's `Connection`."""
        return versions.on_sync(connection, self.settings.schema_name, versions.checked(keys))

    async def run(
        self, name: str, payload: dict[str, Any] | None = None, *, idempotency_key: str | None = None
    ) -> Outcome:
        """Run a task from code, under the same lock, records and rules as a call of its URL.

        `idempotency_key`, 1 to 255 characters, names an occurrence: one that has completed is not run again.

        Raises `UnknownTask`, `PayloadInvalid` or `Unavailable`, and ValueError for an idempotency key that is none;
        how the task itself ended is in the outcome.
        """
        task = self.tasks.get(name)
        if idempotency_key is not None and (fault := occurrence_fault(idempotency_key)):
            raise ValueError(f"the idempotency key {fault}")
        return await self.start_call(
            task, task.validate(payload or {}), trigger="manual", caller="code", occurrence=idempotency_key
        )

    def run_sync(
        self, name: str, payload: dict[str, Any] | None = None, *, idempotency_key: str | None = None
    ) -> Outcome:
        """`run` for code that is not async: blocks this thread until the run has ended.

        Where this Cronlock is open, in a server, the run takes place in its event loop, so this may be called from
        any other thread: a plain function's, a synchronous view's. Where it is not, in a script, connections are
        opened for this call and closed after it.

        Raises what `run` raises, and `CronlockError` in an event loop's own thread, which it would block.
        """
        if is_in_loop():
            raise CronlockError(f"run_sync({name!r}) would block the event loop: await cron.run({name!r}) here")
        with self._joining:
            if (process := self._process) is not None:
                process.require_loop()
                process.joined += 1
        if process is not None:
            try:
                running = self.run(name, payload, idempotency_key=idempotency_key)
                return asyncio.run_coroutine_threadsafe(running, process.loop).result()
            finally:
                with self._joining:
                    process.joined -= 1

        async def alone() -> Outcome:
            process = await self.open()
            try:
                return await self.run(name, payload, idempotency_key=idempotency_key)
            finally:
                while not self._leave(process):
                    await asyncio.sleep(0.01)
                await process.close()

        with self._alone:
            return asyncio.run(alone())

    def _leave(self, process: Process) -> bool:
        """Let no thread join this process from now on; False while one still has a call there."""
        with self._joining:
            if is_left := not process.joined:
                self._process = self._starting = None
            return is_left

    async def start_call(
        self,
        task: Task,
        payload: Any,
        *,
        trigger: str,
        caller: str | None,
        occurrence: str | None = None,
        scheduled_for: str | None = None,
    ) -> Outcome:
        """Run `task` with a validated payload; `run()` and the cron route both end here."""
        key = task.key.fill(payload) if task.key is not None else None
        process = await self._ready()
        call = Call(task, payload, trigger, caller, contextvars.copy_context(), key, occurrence, scheduled_for)
        return await process.runner.call(call)

    async def start_queued(
        self,
        task: Task,
        given: dict[str, Any],
        *,
        caller: str | None,
        occurrence: str | None,
        scheduled_for: str | None,
    ) -> Enqueued | Outcome:
        """Make a job of a call of the cron route, or skip it; `given` is the payload as it came."""
        payload = task.validate(given)
        key = task.key.fill(payload) if task.key is not None else None
        process = await self._ready()
        call = Call(task, payload, "http", caller, contextvars.copy_context(), key, occurrence, scheduled_for)
        made = await process.queueing.call(call, given)
        if isinstance(made, Enqueued):
            process.told(task, made, occurrence)
        return made

    async def start_enqueue(self, wanted: Order) -> Enqueued:
        """Enqueue one job in a transaction of its own; the route ends here."""
        process = await self._ready()
        (made,) = await process.enqueuer.enqueue(wanted)
        process.told(wanted.task, made, next(iter(wanted.keys), None))
        return made

    async def _ready(self) -> Process:
        """The process, open and with a database that has the schema; raises `Unavailable`."""
        process = self._process or await self._open_late()
        process.require_loop(asyncio.get_running_loop())
        if process.runner.is_draining:
            raise Unavailable("shutting_down", "the server is shutting down")
        if not process.readiness.is_ready:
            await process.readiness.require()
        return process

    async def start_work(self, most: int, seconds: float, queues: "Sequence[str]") -> Done:
        """Work off what is due in these queues for a while, in this process; see `stint`."""
        process = await self._ready()
        return await process.stints.work(most, seconds, queues)

    async def _open_late(self) -> Process:
        log.warning(
            "opened at the first call: no lifespan has run. An application that mounts cronlock must hand it on, as in"
            " Starlette(lifespan=cron.lifespan) or FastAPI's include_router(cron.router); without it nothing is"
            " drained when the server stops.",
            extra={"event": "lifespan.missing"},
        )
        return await self.open()

    async def open(self) -> Process:
        """Open the connections and start the timer of this process, once; `lifespan` does it for you."""
        self.targets.require_secrets(self.settings)
        if self._starting is None:
            self._starting = asyncio.Lock()
        async with self._starting:
            if self._process is None:
                process = Process(self.settings, self.tasks, self.metrics, self.targets)
                await process.open()
                self._process = process
        return self._process

    async def close(self, drain_timeout: float | None = None) -> None:
        """Drain: refuse new calls, wait for what runs, cancel and record the rest, close the connections."""
        process, self._process, self._starting = self._process, None, None
        if process is not None:
            await process.close(drain_timeout)

    async def drain(self, drain_timeout: float | None = None) -> None:
        """The first half of `close`: afterwards nothing runs, and calls are still answered, with 503."""
        if self._process is not None:
            await self._process.drain(drain_timeout)

    @asynccontextmanager
    async def lifespan(self, _: Any = None) -> AsyncIterator[None]:
        """Open at the start of an application and close at its end; usable as any ASGI app's lifespan."""
        process = await self.open()
        try:
            await process.readiness.require()
        except Unavailable as error:
            log.warning("started without a database: %s", error, extra={"event": "database.unavailable"})
        except BaseException:
            await self.close(0)
            raise
        try:
            yield
        finally:
            await self.close()

    async def __aenter__(self) -> "Cronlock":
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def using(self, database_url: str) -> "Using":
        """Use another database within the block, as for tests; afterwards everything is as before.

        `async with cron.using(url):` opens the connections too, and closes them at the end. `with cron.using(url):` is
        for code that does so itself, such as an application's lifespan or `run_sync`. The database is reached
        directly: `direct_url` and `pooler` do not hold for it, all other settings do.

        Raises `ConfigError` for a URL that is wrong, and `CronlockError` if this Cronlock is open at the beginning, or
        was left open at the end, of the block.
        """
        return Using(self, self.settings.on(database_url))

    def app(self, *, fallback: "ASGIApp | None" = None, probes: bool = True) -> "Starlette":
        """An ASGI application with `/cron/{task}`, `/healthz` and `/readyz`; serve it or mount it.

        - `fallback`: the ASGI application, such as Django's, that gets all other requests and WebSockets as they
          came. Its lifespan, if it has one, is started before cronlock's and ended after it.
        - `probes`: whether `/healthz` and `/readyz` are cronlock's; False if the fallback has its own.

        Raises `ConfigError` if no usable CRON_SECRET is set, or if `fallback` is no ASGI application.
        """
        from cronlock.web import application

        return application(self, fallback, has_probes=probes)

    @property
    def router(self) -> "APIRouter":
        """A FastAPI router with the same routes and the lifespan: `app.include_router(cron.router)`.

        `dependencies=` given to `include_router` hold for these routes too, in addition to the secret.

        Raises `ConfigError` if no usable CRON_SECRET is set, `ImportError` if FastAPI is not installed.
        """
        from cronlock.web.fastapi import router

        return router(self)


def is_in_loop() -> bool:
    """Whether an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Using:
    """A `Cronlock` with other settings for the time of a block; see `Cronlock.using`."""

    def __init__(self, cron: Cronlock, settings: Settings) -> None:
        self._cron = cron
        self._settings = settings
        self._before: Settings | None = None

    def __enter__(self) -> Cronlock:
        if self._cron._process is not None:
            raise CronlockError("this Cronlock is open on its database: using() another one must come before")
        self._before, self._cron.settings = self._cron.settings, self._settings
        return self._cron

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        cron = self._cron
        assert self._before is not None, "only what was entered is left"
        cron.settings = self._before
        if cron._process is not None:
            cron._process = cron._starting = None
            if error is None:
                raise CronlockError(
                    "this Cronlock was opened within using() and not closed: run the application's lifespan"
                    " (`with TestClient(app) as client`), or write `async with cron.using(..)`"
                )

    async def __aenter__(self) -> Cronlock:
        self.__enter__()
        try:
            await self._cron.open()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self._cron

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._cron.close()
        finally:
            self.__exit__(kind, error, trace)
