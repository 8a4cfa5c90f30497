"""Writing records: what waits at one moment shares a message and a commit, a few of many the next one.

A record must survive the rollback of its run, so it is written on connections of its own. A caller puts a
row and waits for the commit that made it durable. While one message is under way the next rows gather; the
more callers, the fewer commits each of them costs.

A row carries a nonce, so that sending it again after a broken connection doubles nothing. A group that fails
for the fault of one row is sent again row by row. The end of a run is sent again until it is written; the
beginning of one, and a skip, fail with `Unavailable` after a second try, since nothing has happened yet.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any
from weakref import WeakSet

import psycopg

from cronlock import runs, wire
from cronlock.database import Database, ask, unavailable, within
from cronlock.errors import Unavailable
from cronlock.outcome import sqlstate
from cronlock.wire import Row

log = logging.getLogger("cronlock.recording")

HEAD = (
    b"BEGIN ISOLATION LEVEL READ COMMITTED NOT DEFERRABLE;"
    b" SELECT pg_catalog.set_config('synchronous_commit', 'on', true),"
    # A migration waits for a table 2 s at a time, and keeps all others waiting meanwhile; a record outlasts that.
    b" pg_catalog.set_config('statement_timeout', '10s', true), pg_catalog.set_config('lock_timeout', '3s', true),"
    b" pg_catalog.set_config('search_path', 'pg_catalog', true),"
    # A plan is kept for as long as its connection, and may have been made when the tables were empty.
    b" pg_catalog.set_config('enable_seqscan', 'off', true), pg_catalog.set_config('enable_hashjoin', 'off', true),"
    b" pg_catalog.set_config('enable_mergejoin', 'off', true); "
)
PATIENT = (runs.STOPPING, runs.END)
INSERTS = (runs.BEGIN, runs.BEGIN_CHECKED, runs.SKIP, runs.SKIP_SEEN, runs.SKIP_CHECKED)
ASKED_AGAIN = 3
GROUP = 500
SHARE = 20
"""How many rows a message takes at least, if so many wait, and how many more than these it leaves for the next."""
BACKOFF = (0.1, 5.0)
UNRECORDABLE = "Unrecordable"
SLOW = 0.03
"""Seconds after which rows no longer wait for the message under way: larger groups are cheaper than more of them."""

SWEEP = 0.05


@dataclass(slots=True, eq=False)
class Entry:
    """A row that waits to be written, and the future of what the server said about it."""

    kind: str
    row: dict[str, Any]
    written: "asyncio.Future[Row | None]" = field(repr=False)
    tries: int = 0


class Recorder:
    """The queue of records of one process."""

    def __init__(self, database: Database, statements: runs.Statements) -> None:
        self._database = database
        self._statements = statements
        self._waiting: list[Entry] = []
        self._writers: set[asyncio.Task[None]] = set()
        self._spare: asyncio.TimerHandle | None = None
        self._watched: list[tuple[float, asyncio.Future[Row | None]]] = []
        self._sweeping: asyncio.TimerHandle | None = None
        self._writer_limit = database.settings.record_pool_size
        self._limit = database.settings.record_queue_size
        self._backoff = BACKOFF[0]
        self._prepared: WeakSet[psycopg.AsyncConnection[Any]] = WeakSet()
        self.messages = 0

    def put(self, kind: str, row: dict[str, Any], until: float = inf) -> "asyncio.Future[Row | None]":
        """Queue one row; the future gives the server's row for it (None where it gave none) once it is durable.

        It fails with `Unavailable` when `until` (monotonic seconds) has come. Raises `Unavailable` when the queue is
        full; an ending is always taken.
        """
        if len(self._waiting) >= self._limit and kind not in PATIENT:
            raise Unavailable("recording_queue_full", "too many records wait to be written")
        entry = Entry(kind, row, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        self._wake()
        if until < inf:
            self._watched.append((until, entry.written))
            if self._sweeping is None:
                self._sweeping = asyncio.get_running_loop().call_later(SWEEP, self._sweep)
        return entry.written

    def _sweep(self) -> None:
        """Fail what has waited too long: one timer for all, which in a storm are thousands a second."""
        now = time.monotonic()
        self._watched = [(until, written) for until, written in self._watched if not written.done()]
        for until, written in self._watched:
            if now > until:
                expire(written)
        self._sweeping = asyncio.get_running_loop().call_later(SWEEP, self._sweep) if self._watched else None

    async def drain(self, timeout: float) -> None:
        """Wait until everything queued is written, `timeout` seconds at most."""
        until = asyncio.get_running_loop().time() + timeout
        while self._writers and (left := until - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait(self._writers, timeout=left)
        if self._waiting:
            log.error("records could not be written before the process ended", extra={"records": len(self._waiting)})

    def _wake(self) -> None:
        if not self._writers:
            self._start_writer()
        elif self._spare is None and len(self._writers) < self._writer_limit:
            self._spare = asyncio.get_running_loop().call_later(SLOW, self._start_spare)

    def _start_writer(self) -> None:
        self._writers.add(asyncio.get_running_loop().create_task(self._write()))

    def _start_spare(self) -> None:
        """The message under way is slow: what waits behind it goes on another connection."""
        self._spare = None
        if self._waiting and len(self._writers) < self._writer_limit:
            self._start_writer()

    async def _write(self) -> None:
        try:
            # Everything that became ready in this turn of the loop joins the group.
            await asyncio.sleep(0)
            while self._waiting:
                # Some of many are left: while these are written, the callers before are answered, and others join.
                size = min(max(SHARE, len(self._waiting) - SHARE), GROUP)
                group, self._waiting = self._waiting[:size], self._waiting[size:]
                await self._write_group([entry for entry in group if not entry.written.done()])
        finally:
            self._writers.discard(asyncio.current_task())

    async def _write_group(self, group: list[Entry]) -> None:
        if not group:
            return
        try:
            await self._send(group)
        except psycopg.Error as error:
            state = error.sqlstate or ""
            if state[:2] in ("0A", "22", "23", "54", "40") or state == "55P03":
                await self._one_by_one(group, error)
            else:
                await self._again(group, unavailable(error))
        except Unavailable as error:
            await self._again(group, error)
        except Exception as error:  # a row that JSON cannot hold, or a fault of ours: nobody may wait for ever
            await self._one_by_one(group, error)
        else:
            self._backoff = BACKOFF[0]

    def message(self, kind: str, row: dict[str, Any]) -> bytes:
        """One row as a message that any connection can send, for a run that must record on its own."""
        return HEAD + self._statements.rows(kind, [row]) + b"; COMMIT"

    async def _send(self, group: list[Entry]) -> None:
        by_kind: dict[str, list[Entry]] = {}
        for entry in group:
            by_kind.setdefault(entry.kind, []).append(entry)
        kinds = [kind for kind in runs.RECORDS if kind in by_kind]
        lists = [(kind, [entry.row for entry in by_kind[kind]]) for kind in kinds]
        async with self._database.recording() as connection:
            self.messages += 1
            try:
                write = await self._writer(connection)
                message = HEAD + b";".join([write(kind, rows) for kind, rows in lists]) + b";COMMIT"
                results = await within(self._seconds, connection, wire.send(connection, message))
            except psycopg.Error:
                if not connection.closed and not connection.broken:
                    await within(self._seconds, connection, ask(connection, b"ROLLBACK"))
                raise
        # Between HEAD's BEGIN and SELECT, and the COMMIT.
        for kind, result in zip(kinds, results[2:-1], strict=True):
            answers = {row[0]: row for row in wire.rows(result)}
            for entry in by_kind[kind]:
                self._answer(entry, answers.get(entry.row["nonce"]))

    def _answer(self, entry: Entry, row: Row | None) -> None:
        """Say what the server gave for a row; one that was sent twice and gave nothing is sent once more.

        The first message may have been committed only while the second one waited for it, and then the
        second one cannot see the row that is there.
        """
        if row is None and entry.kind in INSERTS and 0 < entry.tries < ASKED_AGAIN:
            entry.tries = ASKED_AGAIN
            self._waiting.append(entry)
        elif not entry.written.done():
            entry.written.set_result(row)

    async def _writer(
        self, connection: "psycopg.AsyncConnection[Any]"
    ) -> Callable[[str, Sequence[dict[str, Any]]], bytes]:
        """How rows become a statement on this connection: prepared once, unless a pooler shares it out."""
        if not self._database.keeps_records_apart:
            return self._statements.rows
        if connection not in self._prepared:
            await within(self._seconds, connection, ask(connection, self._statements.prepare()))
            self._prepared.add(connection)
        return self._statements.execute

    @property
    def _seconds(self) -> float:
        return self._database.settings.acquire_timeout.total_seconds()

    async def _one_by_one(self, group: list[Entry], error: Exception) -> None:
        if len(group) > 1:
            for entry in group:
                await self._write_group([entry])
            return
        (entry,) = group
        log.error("a record was refused", extra={"sqlstate": sqlstate(error), "error": type(error).__name__})
        if entry.kind is runs.END and entry.row.get("error_type") != UNRECORDABLE:
            entry.row = {"nonce": entry.row["nonce"], "status": entry.row["status"], "error_type": UNRECORDABLE}
            await self._write_group(group)
        elif not entry.written.done():
            refusal = Unavailable("record_refused", f"the call cannot be recorded ({type(error).__name__})")
            if isinstance(error, psycopg.Error):
                refusal = unavailable(error)
                refusal.__cause__ = error
            entry.written.set_exception(refusal)

    async def _again(self, group: list[Entry], error: Unavailable) -> None:
        again = []
        for entry in group:
            entry.tries += 1
            entry.row["is_resent"] = True
            if entry.kind in PATIENT or entry.tries < 2:
                again.append(entry)
            elif not entry.written.done():
                entry.written.set_exception(error)
        self._waiting = again + self._waiting
        if any(entry.tries > 1 for entry in again):
            await asyncio.sleep(self._backoff)
            self._backoff = min(self._backoff * 2, BACKOFF[1])


def expire(future: "asyncio.Future[Any]") -> None:
    """Nobody may wait for this any longer."""
    if not future.done():
        future.set_exception(Unavailable("database_unavailable", "the database did not answer in time"))
