"""Close: the last step of a run, which decides how it ended, writes it and frees the lock.

One message commits the work and `completed` together (`locks.Closing`). A failure is recorded on the other
connection first and then everything is rolled back, so that whoever gets the lock next finds the outcome
written. When the answer to a closing message is lost, the row is read until it says which way it went; nothing
is answered from hope.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus

from cronlock import locks, runs
from cronlock.background import Background
from cronlock.context import Run, close, settle
from cronlock.database import Database, ask, within
from cronlock.errors import Cancel, Retry, TransactionEnded, Unavailable
from cronlock.execution import Execution, Returned
from cronlock.jsontext import dump_result
from cronlock.lending import Lending, cut, is_gone, lost
from cronlock.outcome import Failure, Outcome, failure, sqlstate
from cronlock.recording import Recorder
from cronlock.seats import Reply, Seat, discard

OUTCOME_WAIT = 10.0
CLOSE_WAIT = 35.0
"""When the caller is told that a commit has no answer yet; its statements have 30 s."""
CLOSE_MARGIN = 60.0
"""How much longer than the task's timeout a commit may be without an answer before its connection is cut."""
RECORD_WAIT = 5.0
SLOT_WAIT = 0.5

log = logging.getLogger("cronlock.run")


class Closer:
    """Closes the runs of one process."""

    def __init__(
        self,
        database: Database,
        recorder: Recorder,
        statements: runs.Statements,
        background: Background,
        scrub: Callable[[str], str],
    ) -> None:
        self._database = database
        self._recorder = recorder
        self._statements = statements
        self._background = background
        self._scrub = scrub
        self._closing = locks.Closing(database.settings.schema_name)
        shares_slots = database.settings.pooler == "transaction" and not database.settings.direct_url
        self._record_wait = SLOT_WAIT if shares_slots else RECORD_WAIT

    async def close(self, execution: Execution, run: Run, returned: Returned) -> Outcome:
        error = returned.error
        if execution.stop.done():
            stop = execution.stop.result()
            return await self.fail(execution, stop.status, stop.failure())
        if is_gone(execution.seat.connection) or execution.seat.connection.closed:
            return await self.fail(execution, "lost", failure(error or lost(execution.task.is_guarded), self._scrub))
        if isinstance(error, Cancel):
            return await self.fail(execution, "cancelled", failure(error, self._scrub))
        if isinstance(error, Retry):
            seconds = max(1, round(error.after))
            return await self.fail(execution, "failed", failure(error, self._scrub), retry_after=seconds)
        if (error := error or execution.lending.fault) is not None:
            return await self.fail(execution, "failed", failure(error, self._scrub))
        if is_busy(execution.seat):
            return await self.fail(execution, "failed", failure(left_open(), self._scrub))
        if execution.seat.connection.pgconn.transaction_status == TransactionStatus.IDLE:
            # Whatever the session flushed now would be committed by itself.
            return await self.fail(execution, "failed", failure(ended(), self._scrub))
        result = dump_result(returned.value)
        try:
            if run.is_touched:
                await settle(run)
        except BaseException as flushing:
            return await self.fail(execution, "failed", failure(self._cause(execution, flushing), self._scrub))
        return await self._commit(execution, result, run.is_touched)

    async def _commit(self, execution: Execution, result: str | None, is_touched: bool) -> Outcome:
        """Send the closing message. It is never cancelled, and after any error the row has the last word."""
        said = execution.lending.said
        also = b"" if said is None else said.take()
        message = self._closing.message(
            execution.run_id, execution.opened_us, result, is_touched, execution.log(), also
        )
        seat = execution.seat
        rows_at = locks.LEFT_AT[True] if is_touched else None
        timeout = execution.task.timeout
        limit = CLOSE_MARGIN if timeout is None else timeout.total_seconds() + CLOSE_MARGIN
        timer = asyncio.get_running_loop().call_later(CLOSE_WAIT, self._reply_unknown, execution)
        try:
            reply = await within(limit, seat.connection, seat.send(message, rows_at))
        except psycopg.Error as error:
            if seat.connection.closed or is_gone(seat.connection):
                return await self._settle(execution, result)
            return await self.fail(execution, "failed", failure(self._cause(execution, error), self._scrub))
        finally:
            timer.cancel()
        if reply.tag != "COMMIT":
            return await self.fail(
                execution, "failed", Failure("TransactionEnded", "the commit was answered by a rollback")
            )
        if said is not None:
            said.committed()
        await self._give_back(seat, reply)
        return execution.outcome("completed", result=result)

    async def _give_back(self, seat: Seat, reply: Reply) -> None:
        """Return a connection to its pool, unless its task left something that only goes with it."""
        if reply.rows and reply.rows[0][-1]:
            await discard(seat)
            return
        if reply.rows:
            seat.renew()
        await seat.give_back()

    def _cause(self, execution: Execution, error: BaseException) -> BaseException:
        """The error that explains a failed close better than its own text does."""
        if locks.NO_ROW in str(error):
            return lost(execution.task.is_guarded, "the run's row is not open any more")
        if sqlstate(error) == "23505" and locks.OCCURRENCE_KEY in str(error):
            return lost(execution.task.is_guarded, "another run of this occurrence has completed")
        return cause(execution.lending, error)

    async def _settle(self, execution: Execution, result: str | None) -> Outcome:
        """The closing message was sent and its answer is lost: read the row until it is decided."""
        seat = execution.seat
        self._background.spawn(discard(seat))
        started = time.monotonic()
        message = b"; ".join(
            (
                b"BEGIN ISOLATION LEVEL READ COMMITTED",
                b"SET LOCAL synchronous_commit = on; SET LOCAL search_path = pg_catalog",
                self._statements.fill(runs.SETTLE, id=execution.run_id),
                self._statements.fill("SELECT status FROM {run} WHERE id = {id}", id=execution.run_id),
                b"COMMIT",
            )
        )
        while True:
            status = None
            try:
                async with self._database.recording() as connection:
                    replies = await within(RECORD_WAIT, connection, ask(connection, message))
                status = replies[-1][0][0] if replies[-1] else "lost"
            except (psycopg.Error, Unavailable):
                pass
            if status not in (None, "running"):
                if status == "completed":
                    if execution.lending.said is not None:
                        execution.lending.said.committed()
                    return execution.outcome("completed", result=result)
                why = failure(lost(execution.task.is_guarded), self._scrub)
                # The row is to say what is answered, whoever wrote `lost` first.
                await asyncio.wait((self.end_row(execution.call.nonce, "lost", why),), timeout=RECORD_WAIT)
                return execution.outcome("lost", failure=why)
            if time.monotonic() - started > OUTCOME_WAIT:
                self._reply_unknown(execution)
            await asyncio.sleep(0.05 if time.monotonic() - started < 2 else 0.5)

    def _reply_unknown(self, execution: Execution) -> None:
        if execution.answer.done():
            return
        message = f"run {execution.run_id}: its commit was sent, no answer came yet; its row will say how it ended"
        execution.answer.set_exception(Unavailable("outcome_unknown", message, run_id=execution.run_id))
        execution.answer.exception()  # its caller may have gone

    async def fail(self, execution: Execution, status: str, why: Failure, *, retry_after: int | None = None) -> Outcome:
        """Record how the run ended, then undo what it wrote, then free the lock.

        Where no recording connection is to be had (at a pooler, all slots may be kept by runs that wait
        for one), both go in one message on the run's own connection, right after each other.
        """
        row = self._ending(execution.call.nonce, status, why, execution.log())
        written = self._put_ending(row)
        seat = execution.seat
        run = execution.run
        # With the connection the lock has gone, and there is nothing that the record must come before.
        await asyncio.wait((written,), timeout=SLOT_WAIT if is_gone(seat.connection) else self._record_wait)
        execution.lending.is_over = True
        if is_busy(seat):  # no message of ours would get through; the server rolls back when it sees the end
            cut(seat.connection)
        try:
            if run is not None:
                await close(run)
        except Exception:
            log.debug("what the task was handed did not close cleanly", exc_info=True)
        is_touched = run is not None and run.is_touched
        record = b"" if written.done() else self._recorder.message(runs.END, row)
        try:
            message = locks.giving_up(is_touched, record)
            rows_at = locks.LEFT_AT[False] if is_touched else None
            reply = await within(RECORD_WAIT, seat.connection, seat.send(message, rows_at))
        except psycopg.Error:
            await discard(seat)
        else:
            written.cancel()
            await self._give_back(seat, reply)
        return execution.outcome(status, failure=why, retry_after=retry_after, is_retry=retry_after is not None)

    def end_row(self, nonce: str, status: str, why: Failure, log: str | None = None) -> "asyncio.Future[Any]":
        """Record the end of a run of which nothing else is left to be done."""
        return self._put_ending(self._ending(nonce, status, why, log))

    def _ending(self, nonce: str, status: str, why: Failure, log: str | None) -> dict[str, Any]:
        return {
            "nonce": nonce,
            "status": status,
            "log": log,
            "error_type": why.type,
            "error_message": why.message,
            "error_traceback": why.traceback,
            "error_sqlstate": why.sqlstate,
        }

    def _put_ending(self, row: dict[str, Any]) -> "asyncio.Future[Any]":
        future = self._recorder.put(runs.END, row)
        future.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        return future


def cause(lending: Lending, error: BaseException) -> BaseException:
    """The error that explains why a transaction could not be closed, better than its own text does."""
    state = sqlstate(error)
    if state == "25P02":
        first = lending.last_error
        told = f": {str(first).strip().splitlines()[0]}" if first and str(first).strip() else ""
        return TransactionEnded(
            "the transaction was already aborted by a statement whose error the task caught"
            f"{told}. Put such a statement into a savepoint (begin_nested())."
        )
    if state in ("3B001", "25P01") or any(text in str(error) for text in locks.ENDED):
        return ended()
    return error


def is_busy(seat: Seat) -> bool:
    """Whether the code left a COPY, a stream or a pipeline open on its connection."""
    connection = seat.connection
    is_piped = connection.pgconn.pipeline_status != PipelineStatus.OFF
    return is_piped or connection.pgconn.transaction_status == TransactionStatus.ACTIVE


def left_open() -> TransactionEnded:
    """The error of a run whose task returned in the middle of something on its connection."""
    return TransactionEnded(
        "the task returned with a COPY, a stream or a pipeline left open on run.driver, so that nothing could be"
        " committed; leave them with their context managers"
    )


def ended() -> TransactionEnded:
    """The error of a run whose task ended the transaction that held the lock."""
    return TransactionEnded(
        "the task ended its transaction by SQL (COMMIT, END, ROLLBACK or PREPARE TRANSACTION), and with it"
        " its lock; what it committed itself stays, the rest was rolled back"
    )
