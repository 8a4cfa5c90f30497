"""The driver connections that tasks are handed: they run SQL and refuse to end the transaction.

A task's connection comes from a pool and carries the transaction that holds its lock. While it is lent,
`commit`, `rollback` and `close` raise before they act, and are remembered: the run fails even if the task
catches the error. Raw SQL that ends the transaction cannot be refused; the next statement after it is, and
the closing message finds out the rest (see `locks`).
"""

import asyncio
import os
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import psycopg
from psycopg.adapt import AdaptersMap
from psycopg.errors import Diagnostic
from psycopg.pq import ExecStatus, PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row

from cronlock import wire
from cronlock.errors import LockLost, StatementRefused, TransactionEnded, TransactionRefused
from cronlock.wire import Row

if TYPE_CHECKING:
    from cronlock.invalidation import Said

GONE = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


class Opening(Protocol):
    """A transaction that is begun when it is first needed."""

    def message(self) -> bytes:
        """What begins it; its last statement gives the rows for `opened`."""

    def opened(self, rows: list[Row]) -> None:
        """It is begun; raises for rows with which it is not to be used."""


class Lending:
    """One time a connection is lent to a run, and what its task did that it must not."""

    def __init__(self) -> None:
        self.fault: Exception | None = None
        self.last_error: psycopg.Error | None = None
        self.stopped: str | None = None
        self.is_over = False
        self.in_flight = 0
        self.opening: Opening | None = None
        """What begins the transaction, where it begins with the task's first statement."""
        self.said: Said | None = None
        """What the task said is stale; it is written before the next statement, so that it shares its savepoint."""

    def refuse(self, what: str) -> TransactionRefused:
        """The error for `what`; the run is failed by the first of them."""
        if self.is_over:
            raise StatementRefused("the run has ended; its connection is not the task's any more")
        error = TransactionRefused(
            f"{what} is refused: this transaction holds the lock of the run and is ended by cronlock when the task"
            " returns. Use a savepoint (begin_nested()) for work that may be undone, or raise to undo everything."
        )
        self.fault = self.fault or error
        return error

    def note(self, error: psycopg.Error) -> None:
        """Remember an error of the task's statements; those that only follow from it say nothing new."""
        if error.sqlstate != "25P02":
            self.last_error = error

    def admit(self, status: int) -> None:
        """Let a statement of the task pass, or raise why not."""
        if self.is_over:
            raise StatementRefused("the run has ended; its connection is not the task's any more")
        if self.stopped:
            raise StatementRefused(f"the run is being stopped ({self.stopped}); no further statement is sent")
        if status == TransactionStatus.IDLE:
            self.fault = self.fault or TransactionEnded(
                "the task ended its transaction by SQL (COMMIT, END, ROLLBACK or PREPARE TRANSACTION), and with it"
                " its lock; what it committed itself stays, nothing after it was run"
            )
            raise self.fault


CONTEXT: ContextVar[Lending | None] = ContextVar("cronlock_lending", default=None)
"""Whose code runs here: a task's lending, `OWN` for cronlock itself, None where nobody has said."""

OWN = Lending()

OVER = Lending()
"""What a connection is lent to while no run has it: a thread that kept it has no context, and is refused too."""
OVER.is_over = True


class Refusing:
    """What both kinds of driver connection do while they are lent."""

    lending: Lending | None = None
    closing = False
    own_adapters: AdaptersMap | None = None
    handlers: tuple[Callable[[], None], ...] = ()

    @property
    def adapters(self) -> AdaptersMap:
        """psycopg's, of this connection; a task's own ones go with its run."""
        if self.own_adapters is None:
            self.own_adapters = AdaptersMap(psycopg.adapters)
        return self.own_adapters

    def add_notice_handler(self, callback: Callable[[Diagnostic], None]) -> None:
        super().add_notice_handler(callback)  # type: ignore[misc]  # psycopg's, beside us
        self.handlers += (partial(self.remove_notice_handler, callback),)  # type: ignore[attr-defined]  # as above

    def add_notify_handler(self, callback: Callable[[psycopg.Notify], None]) -> None:
        super().add_notify_handler(callback)  # type: ignore[misc]  # psycopg's, beside us
        self.handlers += (partial(self.remove_notify_handler, callback),)  # type: ignore[attr-defined]  # as above

    def renew(self, prepare_threshold: int | None) -> None:
        """Forget what a task set on the object, as the closing message makes the server forget."""
        self.own_adapters = None
        self.prepare_threshold = prepare_threshold
        handlers, self.handlers = self.handlers, ()
        for remove in handlers:
            with suppress(ValueError):  # the task removed it itself
                remove()

    def lent(self) -> Lending | None:
        """The lending whose rules hold for the calling code; None for cronlock itself and for the pools.

        Code that kept a connection beyond its own run stays bound by that run, which is over.
        """
        mine = CONTEXT.get()
        if mine is OWN:
            return None
        if mine is not None and mine is not self.lending:
            return mine if mine.is_over else self.lending
        return self.lending

    def admit(self) -> Lending | None:
        """Let a statement pass, or raise why not; gives the lending it belongs to."""
        lending = self.lent()
        if lending is not None:
            lending.admit(self.pgconn.transaction_status)  # type: ignore[attr-defined]  # psycopg's, beside us
        return lending

    def unwritten(self, lending: Lending, said: "Said") -> bytes:
        """What the task said and is to be written before its next statement, if that can be now.

        In an aborted transaction it was said within what is about to be rolled back to a savepoint. In the middle of a
        COPY, a stream or a pipeline nothing can be sent; it is written after that.
        """
        pgconn = self.pgconn  # type: ignore[attr-defined]  # psycopg's, beside us
        if not said.is_waiting or lending.is_over or lending.stopped:
            return b""
        if pgconn.transaction_status == TransactionStatus.INERROR:
            said.drop()
        if pgconn.transaction_status != TransactionStatus.INTRANS or pgconn.pipeline_status != PipelineStatus.OFF:
            return b""
        return said.take()


class AsyncTaskConnection(Refusing, psycopg.AsyncConnection[Any]):
    """psycopg's `AsyncConnection`, lent to `async def` tasks."""

    def renew(self, prepare_threshold: int | None) -> None:
        super().renew(prepare_threshold)
        self.row_factory = tuple_row
        self.cursor_factory = psycopg.AsyncCursor
        self.server_cursor_factory = psycopg.AsyncServerCursor

    async def wait(self, *args: Any, **kwargs: Any) -> Any:
        if (lending := self.lent()) is not None:
            if lending.opening is not None:
                await self._begin(lending, lending.opening)
            if lending.said is not None and (message := self.unwritten(lending, lending.said)):
                await self._write(lending, message)
        if (lending := self.admit()) is None:
            return await super().wait(*args, **kwargs)
        lending.in_flight += 1
        try:
            return await super().wait(*args, **kwargs)
        except psycopg.Error as error:
            lending.note(error)
            raise
        finally:
            lending.in_flight -= 1

    async def _begin(self, lending: Lending, opening: Opening) -> None:
        lending.admit(TransactionStatus.INTRANS)
        lending.opening = None
        lending.in_flight += 1
        beginning = asyncio.ensure_future(wire.send(self, opening.message()))
        try:
            try:
                await asyncio.shield(beginning)
            finally:  # also where the task was cancelled, and goes on all the same
                await asyncio.wait((beginning,))
                opening.opened(wire.rows(beginning.result()[-1]))
        except Exception as error:  # without it nothing of the task can be committed, whatever the task makes of that
            lending.fault = lending.fault or error
            raise
        finally:
            lending.in_flight -= 1

    async def _write(self, lending: Lending, message: bytes) -> None:
        lending.in_flight += 1
        writing = asyncio.ensure_future(wire.send(self, message))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait((writing,))  # nothing may be sent in the middle of a message
            raise
        except psycopg.Error as error:
            lending.note(error)
            raise
        finally:
            lending.in_flight -= 1

    async def commit(self) -> None:
        if self.closing:
            return
        if lending := self.lent():
            raise lending.refuse("commit()")
        await super().commit()

    async def rollback(self) -> None:
        if self.closing:
            return
        if lending := self.lent():
            raise lending.refuse("rollback()")
        await super().rollback()

    async def close(self) -> None:
        if self.closing:
            return
        if self.closed:  # by the server: SQLAlchemy closes what a statement found broken
            return
        if (lending := self.lent()) and lending is not OVER:  # the pools' own threads close what is idle
            raise lending.refuse("close()")
        await super().close()


class ThreadTaskConnection(Refusing, psycopg.Connection[Any]):
    """psycopg's `Connection`, lent to plain functions, which run in a thread."""

    ours: psycopg.ClientCursor[Any] | None = None

    def cursor_of_ours(self) -> psycopg.ClientCursor[Any]:
        """The cursor of cronlock's own messages, which is kept: making one costs as much as a short message."""
        if self.ours is None:
            self.ours = psycopg.ClientCursor(self, row_factory=tuple_row)
        return self.ours

    def renew(self, prepare_threshold: int | None) -> None:
        super().renew(prepare_threshold)
        self.row_factory = tuple_row
        self.cursor_factory = psycopg.Cursor
        self.server_cursor_factory = psycopg.ServerCursor

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        if (lending := self.lent()) is not None:
            if lending.opening is not None:
                self._begin(lending, lending.opening)
            if lending.said is not None and (message := self.unwritten(lending, lending.said)):
                self._write(lending, message)
        if (lending := self.admit()) is None:
            return super().wait(*args, **kwargs)
        lending.in_flight += 1
        try:
            return super().wait(*args, **kwargs)
        except psycopg.Error as error:
            lending.note(error)
            raise
        finally:
            lending.in_flight -= 1

    def _begin(self, lending: Lending, opening: Opening) -> None:
        lending.admit(TransactionStatus.INTRANS)
        lending.opening = None
        lending.in_flight += 1
        try:
            result = self.pgconn.exec_(opening.message())  # its cursor would want the lock that is held around us
            if result.status == ExecStatus.FATAL_ERROR:
                raise wire.refusal(result)
            opening.opened(wire.rows(result))
        except Exception as error:  # as above
            lending.fault = lending.fault or error
            raise
        finally:
            lending.in_flight -= 1

    def _write(self, lending: Lending, message: bytes) -> None:
        lending.in_flight += 1
        try:
            result = self.pgconn.exec_(message)
            if result.status == ExecStatus.FATAL_ERROR:
                error = wire.refusal(result)
                lending.note(error)
                raise error
        finally:
            lending.in_flight -= 1

    def commit(self) -> None:
        if self.closing:
            return
        if lending := self.lent():
            raise lending.refuse("commit()")
        super().commit()

    def rollback(self) -> None:
        if self.closing:
            return
        if lending := self.lent():
            raise lending.refuse("rollback()")
        super().rollback()

    def close(self) -> None:
        if self.closing:
            return
        if self.closed:  # by the server: SQLAlchemy closes what a statement found broken
            return
        if (lending := self.lent()) and lending is not OVER:  # the pools' own threads close what is idle
            raise lending.refuse("close()")
        super().close()


TaskConnection = AsyncTaskConnection | ThreadTaskConnection


def is_gone(connection: "psycopg.BaseConnection[Any]") -> bool:
    """Whether the server has closed its side; asks the kernel, sends nothing, safe from any thread."""
    try:
        poller = select.poll()
        poller.register(connection.fileno(), GONE)
        return bool(poller.poll(0))
    except (OSError, ValueError, psycopg.Error):
        return True


def cut(connection: "psycopg.BaseConnection[Any]") -> None:
    """Shut the connection's socket down, so that whatever waits on it returns at once.

    A cancellation through psycopg may wait for a stalled link far longer than a run can.
    """
    try:
        with socket.socket(fileno=os.dup(connection.fileno())) as twin:
            twin.shutdown(socket.SHUT_RDWR)
    except (OSError, psycopg.Error):
        pass


def lost(is_guarded: bool, what: str = "the connection that held the lock is gone") -> LockLost:
    """The error of a run whose lock is not its own any more."""
    left = "what the run had committed by then stays" if is_guarded else "what the run wrote is rolled back"
    return LockLost(f"{what}; {left}")
