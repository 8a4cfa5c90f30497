"""A worker process for a `Cronlock`: it owns its signals and ends in order.

On SIGTERM or SIGINT nothing more is claimed; what runs has the drain timeout to finish, then it is stopped and given
back as if it had not been taken. Leases are renewed until the last end is written. A second signal gives back at once.
"""

import asyncio
import gc
import logging
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import psycopg
from prometheus_client import CollectorRegistry, start_http_server
from psycopg import sql

from cronlock.database import Database
from cronlock.duties import Duties
from cronlock.errors import ConfigError
from cronlock.leases import Leases
from cronlock.presence import Presence
from cronlock.stint import ended
from cronlock.worker import Worker

if TYPE_CHECKING:
    from cronlock.app import Cronlock

MOST_SEATS = 100
"""How many connections a worker opens at most for jobs that have a transaction."""
LISTEN_PAUSE = 1.0
PRESENCE_WAIT = 2.0

log = logging.getLogger("cronlock.worker")


class Crew:
    """A worker and what it needs around it, in one event loop."""

    def __init__(self, cron: "Cronlock", queues: Sequence[str], concurrency: int) -> None:
        self._cron = cron
        self._queues = queues
        self._concurrency = concurrency
        self._keepers: list[asyncio.Task[None]] = []
        self._drains: list[asyncio.Task[None]] = []
        self.worker: Worker

    async def start(self) -> None:
        """Open everything; raises `Unavailable` without a database that has the schema."""
        cron = self._cron
        if any(not task.is_guarded for task in cron.tasks):
            seats = max(cron.settings.pool_size, min(self._concurrency, MOST_SEATS))
            cron.settings = cron.settings.model_copy(update={"pool_size": seats})
        process = await cron.open()
        await process.readiness.require()
        database = process.database
        statements = process.producer.statements
        self.worker = Worker(
            database,
            process.producer,
            process.instance,
            cron.settings.scrub,
            process.outbox,
            queues=self._queues,
            concurrency=self._concurrency,
            metrics=cron.metrics,
        )
        presence = Presence(database) if database.keeps_records_apart else None
        self._leases = Leases(database, statements, self.worker, process.instance, presence)
        self._duties = Duties(database, statements, self.worker)
        spawn = asyncio.get_running_loop().create_task
        if presence is not None:
            self._keepers.append(spawn(presence.keep()))
            with suppress(TimeoutError):  # what it takes before others can see it, only the lease gives back
                await asyncio.wait_for(presence.changed.wait(), PRESENCE_WAIT)
        await self._leases.begin()
        if presence is not None:
            self._keepers.append(spawn(listen(database, statements.channel, self.worker.wake)))
        self._keepers.append(spawn(self._duties.keep()))
        self._leasing = spawn(self._leases.keep())
        self._working = spawn(self.worker.work())

    async def work(self) -> None:
        """Until drained; then end everything around the worker, the leases last."""
        try:
            await self._working
        finally:
            for keeper in self._keepers:
                await ended(keeper)
            await self._duties.close()
            await ended(self._leasing)
            await self._leases.leave()
            await self.worker.close()

    @property
    def is_draining(self) -> bool:
        """Whether it has begun to end."""
        return bool(self._drains)

    def drain(self, seconds: float | None = None) -> None:
        """Begin to end; once more: at once."""
        limit = self._cron.settings.drain_timeout.total_seconds() if seconds is None else seconds
        if self._drains:
            limit = 0.0
        self._drains.append(asyncio.get_running_loop().create_task(self.worker.drain(limit)))


async def listen(database: Database, channel: str, wake: Callable[[], None]) -> None:
    """Call `wake` for every NOTIFY, and after every beginning, since what came before was not heard."""
    while True:
        try:
            connection = await database.connect(5.0)
            try:
                await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
                wake()
                async for _ in connection.notifies():
                    wake()
            finally:
                with suppress(psycopg.Error):
                    await connection.close()
        except (psycopg.Error, TimeoutError):
            log.debug("the listening connection broke off", exc_info=True)
        await asyncio.sleep(LISTEN_PAUSE)


async def live(cron: "Cronlock", queues: Sequence[str], concurrency: int, started: Callable[[], None]) -> None:
    """Work until a signal."""
    crew = Crew(cron, queues, concurrency)
    loop = asyncio.get_running_loop()
    life = asyncio.current_task()
    assert life is not None
    has_started = False

    def end(name: str) -> None:
        if not has_started:
            life.cancel()
            return
        said = "giving back what runs" if crew.is_draining else "draining"
        log.info("%s: %s", name, said, extra={"event": "worker.draining", "signal": name})
        crew.drain()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number.name)
    try:
        await crew.start()
        gc.collect()
        # What is loaded now stays, and a job leaves little: to look through both so often is a third of its price.
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)
        has_started = True
        started()
        await crew.work()
    finally:
        await cron.close(0)


def answer_prometheus(registry: CollectorRegistry, host: str, port: int) -> None:
    """Answer scrapes from a thread until the process ends; raises `ConfigError` if that place cannot be had.

    There is no secret: who reaches the address reads counters, whose labels are names of tasks.
    """
    try:
        server, _ = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise ConfigError(f"--metrics-port: {host}:{port} cannot be listened on: {error.strerror}") from None
    place = f"http://{host}:{server.server_port}/metrics"
    log.info("metrics are on %s", place, extra={"event": "worker.metrics", "url": place})


def require_queues(text: str) -> list[str]:
    """The queues that a comma-separated text names, each once; raises `ConfigError`."""
    from cronlock.tasks import queue_name

    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ConfigError("--queues: no queue is named; leave it out for default, or name some: urgent,default")
    try:
        return [queue_name(name) for name in names]
    except ValueError as error:
        raise ConfigError(f"--queues: {error}") from None
