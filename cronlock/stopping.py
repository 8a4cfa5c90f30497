"""Stopping a run whose code has not returned: at its timeout, by an operator, at a shutdown, or with its lock lost.

The running statement is cancelled first and the coroutine only outside a statement: SQLAlchemy takes a
cancellation inside one for a disconnect and closes the connection, and the lock would be gone while the task's
`finally` still runs. The caller is answered within a second whatever the code does; the connection and the lock
stay until the code has really returned.
"""

import asyncio
import logging
import time

import psycopg
from psycopg.pq import TransactionStatus

from cronlock import locks, runs
from cronlock.background import Background
from cronlock.database import Database, ask, within
from cronlock.errors import TransactionEnded, Unavailable
from cronlock.execution import Execution, Returned, Stop
from cronlock.lending import is_gone, lost
from cronlock.recording import Recorder
from cronlock.reporting import Report
from cronlock.seats import Busy

WATCH = 0.4
STATEMENT_GRACE = 0.4
CODE_GRACE = 0.4
ANSWER_WITHIN = 0.9
PING = 3.0
RECORD_WAIT = 5.0

log = logging.getLogger("cronlock.run")


class Stopper:
    """Watches the runs of one process, and stops them."""

    def __init__(
        self,
        database: Database,
        recorder: Recorder,
        statements: runs.Statements,
        background: Background,
        report: Report,
    ) -> None:
        self._database = database
        self._recorder = recorder
        self._statements = statements
        self._background = background
        self._report = report
        self._watching: asyncio.Task[None] | None = None
        self.active: set[Execution] = set()
        """The runs of this process."""

    def watch(self, execution: Execution) -> None:
        """Keep an eye on a run until it is taken out of `active`."""
        self.active.add(execution)
        if self._watching is None:
            self._watching = self._background.spawn(self._watch_active())

    async def stop(self, execution: Execution, stop: Stop, code: "asyncio.Future[Returned]") -> None:
        """Bring the task's code to its end; the caller is answered within a second, whatever the code does.

        The running statement is cancelled first and the coroutine only outside a statement: SQLAlchemy takes
        a cancellation inside one for a disconnect and closes the connection, and the lock would be gone
        while the task's `finally` still runs.
        """
        seat, lending = execution.seat, execution.lending
        lending.stopped = stop.message
        self._recorder.put(runs.STOPPING, {"nonce": execution.call.nonce})
        early = execution.outcome(stop.status, failure=stop.failure())
        asyncio.get_running_loop().call_later(ANSWER_WITHIN, execution.reply, early)
        if stop.status != "lost" and lending.in_flight:
            await seat.cancel()
            await self._until_idle(execution)
        if execution.task.is_async:
            code.cancel()
        await asyncio.wait((code,), timeout=CODE_GRACE)
        if code.done():
            return
        execution.reply(early)
        log.warning(
            "%s is stopped but its code goes on; it keeps its lock until it returns",
            execution.task.name,
            extra={"event": "run.stopping", **self._report.facts(early, execution.lock_key)},
        )
        await self._hold(execution, code)

    async def _until_idle(self, execution: Execution) -> None:
        until = time.monotonic() + STATEMENT_GRACE
        while execution.lending.in_flight and time.monotonic() < until:
            await asyncio.sleep(0.005)

    async def _hold(self, execution: Execution, code: "asyncio.Future[Returned]") -> None:
        """Keep the lock until the code has returned: the server's own limits are put off by pings."""
        if execution.guard is not None:  # which pings already
            await asyncio.wait((code,))
            return
        seat = execution.seat
        assert self._database.server is not None
        message = locks.stopping(self._database.server)
        while not code.done() and not seat.connection.closed:
            if not execution.lending.in_flight:
                try:
                    await within(RECORD_WAIT, seat.connection, seat.send(message))
                    message = locks.PING
                except Busy:
                    pass
                except psycopg.Error:
                    break
            await asyncio.wait((code,), timeout=PING)
        await asyncio.wait((code,))

    async def _watch_active(self) -> None:
        """Twice a second: has a running task's connection gone, has its transaction, was it cancelled?"""
        ticks = 0
        while self.active:
            await asyncio.sleep(WATCH)
            ticks += 1
            for execution in list(self.active):
                connection = execution.seat.connection
                if not execution.is_doing:
                    continue
                if connection.closed or is_gone(connection):
                    execution.ask_to_stop(Stop("lost", str(lost(execution.task.is_guarded))))
                elif (
                    not execution.lending.in_flight
                    and connection.pgconn.transaction_status == TransactionStatus.IDLE
                    and execution.lending.fault is None
                ):
                    execution.lending.fault = TransactionEnded("the task ended its transaction by SQL, and its lock")
                    execution.ask_to_stop(Stop("failed", str(execution.lending.fault)))
            if ticks % 2 == 0:
                await self._watch_cancelled()
        self._watching = None

    async def _watch_cancelled(self) -> None:
        ids = [execution.run_id for execution in self.active]
        if not ids:
            return
        message = self._statements.fill(runs.CANCEL_ASKED, ids=ids)
        try:
            async with self._database.recording() as connection:
                (rows,) = await within(RECORD_WAIT, connection, ask(connection, message))
        except (psycopg.Error, Unavailable):
            return
        asked: dict[int, str] = dict(rows)
        for execution in list(self.active):
            if execution.run_id in asked:
                by = asked[execution.run_id]
                execution.ask_to_stop(Stop("cancelled", f"cancelled by {by}" if by else "cancelled by an operator"))
