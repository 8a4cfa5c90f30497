"""The transaction of a job: begun right before its first statement, ended together with the job or undone.

It is READ COMMITTED: at any other level the end of a job whose lease was renewed meanwhile could never be written.
What it holds while the task runs is the task's own; the job's row is touched by the closing message alone, or the
renewal of every lease would wait for it.
"""

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
from psycopg.pq import TransactionStatus

from cronlock import locks
from cronlock.closing import CLOSE_MARGIN, RECORD_WAIT, cause, ended, is_busy, left_open
from cronlock.context import close, is_pending, settle
from cronlock.database import within
from cronlock.errors import LockLost
from cronlock.execution import Returned
from cronlock.jsontext import dump_result
from cronlock.lending import OVER, cut, is_gone
from cronlock.seats import Reply, Seat

if TYPE_CHECKING:
    from cronlock.attempt import Attempt
    from cronlock.jobs import Statements


class Transaction:
    """One attempt's, on its seat."""

    def __init__(self, attempt: "Attempt", seat: Seat, statements: "Statements") -> None:
        self._attempt = attempt
        self._seat = seat
        self._statements = statements
        self.opened_us: int | None = None
        """When it was begun, as the server tells it; None until then."""
        self.is_seat_good = False
        """Whether the seat can have another attempt, once this one is over; else it is to be thrown away."""
        attempt.lending.opening = self
        seat.connection.lending = attempt.lending

    def message(self) -> bytes:
        """What begins it: its backend is on the job's row before, so that whoever takes the job over can end it."""
        server = self._seat.database.server
        assert server is not None, "a worker begins when the server is known"
        attempt = self._attempt
        mark, check = self._statements.mark(attempt.run_id, attempt.token)
        return locks.job_opening(attempt.task, server, attempt.application_name, mark, check)

    def opened(self, rows: list[Any]) -> None:
        """Take what the message gave; raises `LockLost` if the lease is not ours any more."""
        if not rows:
            raise LockLost("the lease of the job is another worker's now")
        ((self.opened_us,),) = rows

    async def _begin(self) -> None:
        """Begin it although the task sent no statement."""
        self._attempt.lending.opening = None
        self.opened((await self._seat.send(self.message(), -1)).rows)

    async def commit(self, returned: Returned) -> "Committed":
        """Complete the job in it, if there is one and the code was good; else what is to be undone and why."""
        attempt, seat, run = self._attempt, self._seat, self._attempt.run
        assert run is not None
        error = returned.error or attempt.lending.fault
        if error is None and run.is_touched and not is_gone(seat.connection):
            try:
                if self.opened_us is None and is_pending(run):
                    await self._begin()  # nothing that cronlock itself sends does
                await settle(run)
            except BaseException as flushing:
                error = cause(attempt.lending, flushing)
        error = error or attempt.lending.fault
        if error is not None or self.opened_us is None:
            return Committed(Returned(returned.value, error), False)
        if is_busy(seat):
            return Committed(Returned(error=left_open()), False)
        if seat.connection.pgconn.transaction_status == TransactionStatus.IDLE:
            return Committed(Returned(error=ended()), False)
        attempt.lending.is_over = True
        result = dump_result(returned.value)
        complete = self._statements.complete(attempt.run_id, attempt.token, self.opened_us, result, attempt.log())
        said = attempt.lending.said
        message = locks.job_closing(complete, b"" if said is None else said.take())
        timeout = attempt.task.timeout
        limit = CLOSE_MARGIN if timeout is None else timeout.total_seconds() + CLOSE_MARGIN
        try:
            reply = await within(limit, seat.connection, seat.send(message, locks.LEFT_AT[True]))
        except psycopg.Error as failed:
            return Committed(Returned(error=cause(attempt.lending, failed)), False)
        if reply.tag != "COMMIT":
            return Committed(Returned(error=ended()), False)
        self._leave(reply)
        return Committed(returned, True)

    async def undo(self) -> None:
        """Roll back what was begun."""
        attempt, seat = self._attempt, self._seat
        attempt.lending.is_over = True
        attempt.lending.opening = None
        if attempt.run is not None:
            await close(attempt.run)
        if is_gone(seat.connection) or seat.connection.closed:
            return
        if is_busy(seat):  # no message of ours would get through; the server rolls back when it sees the end
            cut(seat.connection)
        is_touched = attempt.run is not None and attempt.run.is_touched
        if self.opened_us is None and not is_touched:
            self._vacate()
            return
        with suppress(psycopg.Error):
            giving_up = seat.send(locks.giving_up(is_touched), locks.LEFT_AT[False])
            self._leave(await within(RECORD_WAIT, seat.connection, giving_up))

    def _leave(self, reply: Reply) -> None:
        """The seat is as it was, unless its session has what cannot be taken back."""
        if not (reply.rows and reply.rows[0][-1]):
            self._seat.renew()
            self._vacate()

    def _vacate(self) -> None:
        self._seat.connection.lending = OVER
        self.is_seat_good = True


class Committed(NamedTuple):
    """What came of the try: the code's own end, or the error for which it is to be undone."""

    returned: Returned
    is_committed: bool
