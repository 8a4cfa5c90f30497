"""Delivery: what committed runs and jobs said is stale is told to the targets, at least once, in order per key.

Every process with targets does it. One of them at a time has a target: its lease, for a few seconds, renewed while
something is being sent. It sends the oldest rows that wait, many as one, and only when they were taken the next ones.
So what is said of a key is never overtaken by what was said before it.

- Right after a commit in this process `wake` is called; every process looks each second for what others have left.
- After a failure the target has a pause, which doubles up to a minute and holds for every process.
- A target that hangs has its own coroutine and its own timeout. The database is asked on a connection of its own, in
  messages of milliseconds; nothing is open while something is sent.
"""

import asyncio
import json
import logging
import random
import time
from uuid import uuid4

import psycopg
from psycopg.pq.abc import PGresult

from cronlock import invalidation, wire
from cronlock.database import Database
from cronlock.errors import Unavailable
from cronlock.jsontext import clip
from cronlock.link import Link
from cronlock.metrics import Metrics
from cronlock.sending import NotDelivered, Sender
from cronlock.targets import Invalidation, Notify, Target, Targets, VersionTable, merged, payloads

POLL = 1.0
"""Seconds after which a process looks, with jitter, although nobody woke it."""
LEASE = 4.0
RENEW = 1.0
BACKOFF = (1.0, 60.0)
REGISTER_EVERY = 60.0
SEND_WITHIN = 10.0
AWAY = (0.2, 5.0)
REST = 5.0
"""Seconds that a target rests of which nothing can be written down; what it took will be sent to it once more."""
CLOSE_WITHIN = 2.0
MESSAGE_LIMIT = 500

HEAD = (
    b"BEGIN ISOLATION LEVEL READ COMMITTED; SELECT pg_catalog.set_config('search_path', 'pg_catalog', true),"
    b" pg_catalog.set_config('synchronous_commit', %b, true), pg_catalog.set_config('statement_timeout', '5s', true),"
    b" pg_catalog.set_config('lock_timeout', '2s', true), pg_catalog.set_config('enable_seqscan', 'off', true); "
)

log = logging.getLogger("cronlock.invalidation")


class LeaseLost(Exception):
    """Another process has the target now."""


class Deliverer:
    """Delivers for one process."""

    def __init__(
        self, database: Database, statements: invalidation.Statements, targets: Targets, metrics: Metrics
    ) -> None:
        self._statements = statements
        self._targets = targets
        self._metrics = metrics
        self._scrub = database.settings.scrub
        self._link = Link(database, b"SELECT 1")
        self._sender = Sender(database.settings)
        self._wake = asyncio.Event()
        self._busy: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, int] = {}
        self._rest_until: dict[str, float] = {}
        """When a target is tried again whose deliveries could not be written down, in monotonic seconds."""
        self._register_at = 0.0
        self._has_more = False
        self._is_told = False

    def wake(self) -> None:
        """Something was said and is committed; from the event loop of this process."""
        self._has_more = True
        self._wake.set()

    def unheard(self) -> None:
        """Something was said although there is no target; any thread."""
        if not self._is_told:
            self._is_told = True
            log.warning(
                "a task invalidates, but no target is registered: nobody is told. Register one with cron.target(..)",
                extra={"event": "invalidation.no_target"},
            )

    async def run(self) -> None:
        """Until cancelled."""
        pause = AWAY[0]
        while True:
            if not len(self._targets):
                await self._wake.wait()
            self._wake.clear()
            try:
                await self._look()
                pause = AWAY[0]
            except (psycopg.Error, Unavailable) as error:
                log.debug("what waits cannot be looked for now", exc_info=error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, AWAY[1])
                continue
            try:
                async with asyncio.timeout(POLL * random.uniform(0.75, 1.25)):  # noqa: S311 - jitter, not a secret
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _look(self) -> None:
        """Take every target that nobody has and for which something waits."""
        self._has_more = False
        if (now := time.monotonic()) >= self._register_at:
            rows = [{"name": target.name, "kind": target.to.kind} for target in self._targets]
            await self._send(self._statements.fill(invalidation.REGISTER, rows=rows))
            self._register_at = now + REGISTER_EVERY
        names = [name for name in self._targets.names if self._is_free(name, now)]
        if not names:
            return
        token = str(uuid4())
        message = self._statements.fill(invalidation.CLAIM, names=tuple(names), token=token, seconds=LEASE)
        for name, failures in wire.rows((await self._send(message))[-2]):
            self._failures[name] = failures
            self._busy[name] = task = asyncio.get_running_loop().create_task(self._deliver(self._targets[name], token))
            task.add_done_callback(lambda _, name=name: self._freed(name))  # type: ignore[misc]  # the default's type

    def _is_free(self, name: str, now: float) -> bool:
        """Whether a delivery to this target may begin here."""
        is_resting = self._rest_until.get(name, 0.0) > now
        return not is_resting and name not in self._busy and not self._sender.is_left(name)

    def _freed(self, name: str) -> None:
        task = self._busy.pop(name)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._rest_until[name] = time.monotonic() + REST
            log.error(
                "a delivery to the target %s broke off", name, exc_info=error,
                extra={"event": "invalidation.broken", "target": name},
            )  # fmt: skip
        self._wake.set()  # something may have been said while it gave the target back

    async def _deliver(self, target: Target, token: str) -> None:
        """Deliver what waits for a target, until nothing does, it fails, or another process has it."""
        named = {"name": target.name, "token": token}
        try:
            while batch := await self._waiting(target):
                ids, change = batch
                try:
                    await self._sent(target, change, ids, token)
                except LeaseLost:
                    return
                except NotDelivered as error:
                    await self._failed(target, ids, error, token)
                    return
                if not await self._delivered(target, ids, change, token):
                    return
        except (psycopg.Error, Unavailable) as error:
            self._rest_until[target.name] = time.monotonic() + REST
            log.warning(
                "deliveries to the target %s cannot be written down now: %s", target.name, type(error).__name__,
                extra={"event": "invalidation.unwritten", "target": target.name},
            )  # fmt: skip
        finally:
            try:
                await self._send(self._statements.fill(invalidation.RELEASE, **named))
            except (psycopg.Error, Unavailable):
                pass  # the lease runs out

    async def _waiting(self, target: Target) -> tuple[list[int], Invalidation] | None:
        """The oldest rows that wait, as one; None if there are none."""
        rows = wire.rows((await self._send(self._statements.fill(invalidation.WAITING, name=target.name)))[-2])
        ids: list[int] = []
        parts: list[Invalidation] = []
        texts = characters = 0
        for row in rows:
            keys, tags, paths = (tuple(json.loads(text)) for text in row[1:])
            part = Invalidation(keys, tags, paths)
            texts, characters = texts + len(part), characters + sum(map(len, part.texts))
            if ids and (texts > invalidation.TEXTS_AT_ONCE or characters > invalidation.CHARACTERS_AT_ONCE):
                break
            ids.append(row[0])
            parts.append(part)
        return (ids, merged(parts)) if ids else None

    async def _sent(self, target: Target, change: Invalidation, ids: list[int], token: str) -> None:
        """Send to where no statement of ours does it, with the lease renewed meanwhile."""
        if isinstance(target.to, (Notify, VersionTable)):
            return
        sending = asyncio.get_running_loop().create_task(self._sender.send(target, change, ids[-1]))
        held_until = time.monotonic() + LEASE
        try:
            while not (await asyncio.wait((sending,), timeout=RENEW))[0]:
                try:
                    renewing = self._statements.fill(invalidation.RENEW, name=target.name, token=token, seconds=LEASE)
                    sent = time.monotonic()
                    if not wire.rows((await self._send(renewing))[-2]):
                        raise LeaseLost
                    held_until = sent + LEASE
                except (psycopg.Error, Unavailable):
                    if time.monotonic() > held_until:
                        raise LeaseLost from None
        except BaseException:
            sending.cancel()
            await asyncio.wait((sending,), timeout=CLOSE_WITHIN)
            raise
        try:
            await sending
        except (NotDelivered, asyncio.CancelledError):
            raise
        except Exception as error:  # a fault of ours, or of the client's: the target has its pause all the same
            raise NotDelivered(f"{type(error).__name__}: {error}") from error

    async def _delivered(self, target: Target, ids: list[int], change: Invalidation, token: str) -> bool:
        """Write it down, and say it where that is a statement; whether the target is still ours."""
        fill, to = self._statements.fill, target.to
        texts = [fill(invalidation.MINE, name=target.name, token=token)]
        if isinstance(to, Notify):
            texts.append(fill(invalidation.NOTIFY, channel=to.channel, payloads=payloads(change)))
        elif isinstance(to, VersionTable):
            texts.append(fill(invalidation.RAISE, keys=sorted(set(change.texts))))
        texts.append(fill(invalidation.DELIVERED, name=target.name, token=token, ids=tuple(ids)))
        results = await self._send(b"; ".join(texts), is_durable=True)
        if not wire.rows(results[2]):
            return False
        if failures := self._failures.pop(target.name, 0):
            log.info(
                "the target %s takes what it is sent again, after %s failed deliveries", target.name, failures,
                extra={"event": "invalidation.recovered", "target": target.name},
            )  # fmt: skip
        self._metrics.delivered(target.name, len(ids))
        return True

    async def _failed(self, target: Target, ids: list[int], error: NotDelivered, token: str) -> None:
        failures = self._failures.get(target.name, 0) + 1
        longest = min(BACKOFF[1], BACKOFF[0] * 2.0 ** min(failures - 1, 10))
        delay = longest * random.uniform(0.5, 1)  # noqa: S311 - jitter, not a secret
        why = clip(self._scrub(str(error)), MESSAGE_LIMIT)
        log.warning(
            "the target %s was not told of %s rows: %s; again in %.1f s", target.name, len(ids), why, delay,
            extra={
                "event": "invalidation.failed", "target": target.name, "rows": len(ids), "error": why,
                "attempts": failures,
            },
        )  # fmt: skip
        self._metrics.not_delivered(target.name)
        message = self._statements.fill(
            invalidation.FAILED,
            name=target.name,
            token=token,
            ids=tuple(ids),
            error=why,
            delay=delay,
        )
        await self._send(message, is_durable=True)

    async def _send(self, message: bytes, *, is_durable: bool = False) -> list[PGresult]:
        """Send one transaction; the results of its statements, BEGIN and COMMIT included."""
        head = HEAD % (b"'on'" if is_durable else b"'off'")
        return await self._link.send(head + message + b"; COMMIT", SEND_WITHIN)

    async def close(self) -> None:
        """Give what was said last a moment to be told, then let the targets go to whoever else is there."""
        until = time.monotonic() + CLOSE_WITHIN
        if self._has_more:
            try:
                await self._look()
            except (psycopg.Error, Unavailable):
                pass
        while self._busy and (left := until - time.monotonic()) > 0:
            await asyncio.wait(self._busy.values(), timeout=left)
        for task in list(self._busy.values()):
            task.cancel()
        if self._busy:
            await asyncio.wait(list(self._busy.values()), timeout=CLOSE_WITHIN)
        await self._sender.close()
        await self._link.close()
