"""Open, guard, do, close: the four steps of every run, and the only place that calls a task.

- *Guard*: one attempt takes the lock in a transaction of its own (`locks.opening`), for all callers that
  wait for this lock in this process (`gate`).
- *Open*: once the lock is held, `running` is recorded on another connection, so that the run can be seen
  from outside and its id grows in the order of the locks.
- *Do*: the task runs inside the lock's transaction; it is handed that connection and nothing that ends it.
- *Close*: one message commits the work and `completed` together (`locks.closing`), or the failure is recorded
  on the other connection and then everything is rolled back, in this order, so that whoever gets the lock
  next finds the outcome written.

A run belongs to the process, not to the request: its caller may go, it goes on. When the answer to a closing
message is lost, the row is read until it says which way it went; nothing is answered from hope.
"""

import asyncio
import contextvars
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import psycopg
from psycopg.pq import TransactionStatus

from cronlock import locks, runs
from cronlock.context import Run, close, settle
from cronlock.database import Database, Reply, Seat, ask, discard, unavailable, within
from cronlock.errors import Cancel, LockLost, Retry, TransactionEnded, Unavailable
from cronlock.execution import Execution, Returned, Stop, contain, in_thread
from cronlock.gate import Call, Gate
from cronlock.jsontext import dump_result
from cronlock.lending import CONTEXT, OWN, is_gone, lost
from cronlock.outcome import Failure, Holder, Outcome, failure, sqlstate
from cronlock.recording import Recorder
from cronlock.tasks import Task

ASKS = 40
"""How often a call asks again when the lock was held but no run could be seen behind it."""
ASK_PAUSE = 0.025
DECISION_MARGIN = 0.5
WATCH = 0.4
STATEMENT_GRACE = 0.4
CODE_GRACE = 0.4
ANSWER_WITHIN = 0.9
OUTCOME_WAIT = 10.0
ENDED_BY_SERVER = (None, "57P01", "57P02", "57P05", "25P03")
CLOSE_WAIT = 35.0
"""When the caller is told that a commit has no answer yet; its statements have 30 s."""
CLOSE_MARGIN = 60.0
"""How much longer than the task's timeout a commit may be without an answer before its connection is cut."""
PING = 3.0
RECORD_WAIT = 5.0
SLOT_WAIT = 0.5

log = logging.getLogger("cronlock.run")
T = TypeVar("T")


class Runner:
    """Runs the tasks of one process."""

    def __init__(
        self,
        database: Database,
        recorder: Recorder,
        statements: runs.Statements,
        instance: runs.Instance,
        scrub: Callable[[str], str],
    ) -> None:
        self.database = database
        self.recorder = recorder
        self.statements = statements
        self.instance = instance
        self.instance_id = str(instance.id)
        self.scrub = scrub
        self.gates: defaultdict[str, Gate] = defaultdict(Gate)
        self.active: set[Execution] = set()
        self.paused: set[str] = set()
        self.usual_seconds: dict[str, float] = {}
        self.lock_keys: dict[str, int] = {}
        self.is_draining = False
        self._is_drained = False
        shares_slots = database.settings.pooler == "transaction" and not database.settings.direct_url
        self._record_wait = SLOT_WAIT if shares_slots else RECORD_WAIT
        self._openings: dict[str, bytes] = {}
        self._closing = locks.Closing(database.settings.schema_name)
        self._background: set[asyncio.Task[Any]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._own = contextvars.copy_context()
        self._own.run(CONTEXT.set, OWN)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Start a task of the process, which no request's end can cancel."""
        task = asyncio.get_running_loop().create_task(coroutine, context=self._own.copy())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    # -- guard ---------------------------------------------------------------------------------------------

    async def call(self, call: Call) -> Outcome:
        """Run the task of `call`, or skip it; raises `Unavailable` if neither can be decided in time."""
        gate = self.gates[str(call.task.lock)]
        limit = call.task.acquire_timeout.total_seconds()
        until = time.monotonic() + limit + DECISION_MARGIN
        for _ in range(ASKS):
            if self.is_draining:
                raise Unavailable("shutting_down", "the server is shutting down")
            call.renew()
            if gate.running is not None:
                return await self._skip_running(call, gate.running, until)
            if gate.is_contended or call.task.name in self.paused:
                outcome = await self._skip_seen_one(call, gate.lock_key or self.lock_keys[call.task.name], until)
                if outcome is not None:
                    return outcome
            gate.join(call)
            if gate.attempts is None:
                gate.attempts = self.spawn(self._attempts(gate))
            decision = await in_time(call.decided, until)
            if isinstance(decision, Execution):
                return await asyncio.shield(decision.answer)
            if decision is not None:
                return decision
            await asyncio.sleep(ASK_PAUSE)
        raise Unavailable("undecided", "the lock is held, but by no run that can be seen yet", retry_after=1)

    async def _skip_running(self, call: Call, execution: Execution, until: float) -> Outcome:
        """Skip a call from memory: this process runs its lock's task itself."""
        holder = execution.holder()
        facts = {"reason": "already_running", "blocked_by": holder.run_id}
        row = await in_time(self.recorder.put(runs.SKIP, call.row(execution.lock_key, facts)), until)
        assert row is not None, "the statement gives a row for every nonce"
        return self._skipped(call, execution.lock_key, row[1], holder)

    async def _skip_seen_one(self, call: Call, lock_key: int, until: float) -> Outcome | None:
        """Skip a call if its lock is seen to be held, or its task to be paused; None if neither."""
        row = await in_time(self.recorder.put(runs.SKIP_CHECKED, call.row(lock_key)), until)
        return self._skipped_seen(call, lock_key, row)

    async def _attempts(self, gate: Gate) -> None:
        """Make attempts for a lock until nobody waits for it."""
        try:
            while group := gate.take_group():
                if gate.running is not None:
                    await self._skip(group, gate.running.lock_key, gate.running.holder())
                else:
                    await self._attempt(gate, group)
        except BaseException as error:
            log.exception("an attempt broke off")
            for call in [*group, *gate.waiting]:
                call.fail(Unavailable("internal", f"an attempt broke off ({type(error).__name__})"))
            gate.waiting.clear()
            raise
        finally:
            gate.attempts = None

    async def _attempt(self, gate: Gate, group: list[Call]) -> None:
        task = group[0].task
        try:
            seat, row = await self._open(task)
        except Unavailable as error:
            for call in group:
                call.fail(error)
            return
        acquired, backend_pid, opened_us, lock_key = row
        if not acquired:
            await self._refused(gate, group, seat, lock_key)
            return
        await self._begin(gate, group, seat, backend_pid, opened_us, lock_key)

    async def _open(self, task: Task) -> tuple[Seat, tuple[Any, ...]]:
        """Open a transaction and try the lock in it; a connection that proves dead is replaced."""
        limit = task.acquire_timeout.total_seconds()
        until = time.monotonic() + limit
        while True:
            seat = await self.database.acquire(task.is_async, limit)
            try:
                reply = await within(limit, seat.connection, seat.send(self._opening(task), locks.LOCK_AT))
            except psycopg.Error as error:
                is_dead = seat.connection.closed or is_gone(seat.connection)
                await self._throw_away(seat)
                if is_dead and error.sqlstate in ENDED_BY_SERVER and time.monotonic() < until:
                    continue
                raise unavailable(error) from error
            (row,) = reply.rows
            if row[0] is None:
                await self._throw_away(seat)
                raise Unavailable("read_only", "the server is read-only or a standby; no lock was taken")
            return seat, row

    def _opening(self, task: Task) -> bytes:
        if (message := self._openings.get(task.name)) is None:
            assert self.database.server is not None, "prepare() comes before the first call"
            message = self._openings[task.name] = locks.opening(task, self.database.server)
        return message

    async def _let_go(self, seat: Seat) -> None:
        """End a transaction that did nothing."""
        try:
            await within(RECORD_WAIT, seat.connection, seat.send(locks.REFUSED))
        except psycopg.Error:
            await discard(seat)
        else:
            await seat.give_back()

    async def _throw_away(self, seat: Seat) -> None:
        """Close a connection whose state is not known."""
        await discard(seat)

    async def _refused(self, gate: Gate, group: list[Call], seat: Seat, lock_key: int) -> None:
        """Somebody else holds the lock: end the attempt, see who, and skip; or ask again if nobody can be seen."""
        self.spawn(self._let_go(seat))
        async for call, row in self._record(runs.SKIP_CHECKED, group, lock_key):
            outcome = self._skipped_seen(call, lock_key, row)
            if outcome is not None:
                gate.refused(lock_key)
            call.decide(outcome)

    async def _record(
        self, kind: str, group: list[Call], lock_key: int, facts: dict[str, Any] | None = None
    ) -> AsyncIterator[tuple[Call, Any]]:
        """Write the records of a group of skips together; a call whose record fails is told so."""
        writing: list[tuple[Call, asyncio.Future[Any]]] = []
        for call in group:
            try:
                writing.append((call, self.recorder.put(kind, call.row(lock_key, facts))))
            except Unavailable as error:
                call.fail(error)
        for call, written in writing:
            try:
                yield call, await written
            except Unavailable as error:
                call.fail(error)

    def _skipped_seen(self, call: Call, lock_key: int, row: Any) -> Outcome | None:
        """The outcome of a record that `runs.SKIP_CHECKED` made; None if it made none."""
        if row is None:
            self.paused.discard(call.task.name)
            return None
        _, skip_id, is_paused, run_id, started_at, instance, elapsed_ms, pid, application = row
        if is_paused:
            self.paused.add(call.task.name)
            return self._skipped(call, lock_key, skip_id, None)
        if run_id is None:
            return self._skipped(call, lock_key, skip_id, Holder(pid=pid, application_name=application))
        holder = Holder(run_id, started_at, elapsed_ms, instance)
        return self._skipped(call, lock_key, skip_id, holder)

    async def _skip(self, group: list[Call], lock_key: int, holder: Holder) -> None:
        """Record that these calls met a run of this process, which `holder` is, and answer them."""
        facts = {"reason": "already_running", "blocked_by": holder.run_id}
        async for call, row in self._record(runs.SKIP, group, lock_key, facts):
            call.decide(self._skipped(call, lock_key, row[1], holder))

    def _skipped(self, call: Call, lock_key: int, run_id: int, holder: Holder | None) -> Outcome:
        """A skip by `holder`, or by a pause where there is none."""
        outcome = Outcome(
            status="skipped",
            task=call.task.name,
            run_id=run_id,
            duration_ms=call.elapsed_ms(),
            reason="paused" if holder is None else "already_running",
            holder=holder,
            retry_after=self._retry_after(call.task, holder),
        )
        self._log(logging.INFO, "skipped", outcome, lock_key)
        return outcome

    def _retry_after(self, task: Task, holder: Holder | None) -> int:
        """Whole seconds after which the lock is probably free, from the task's usual duration."""
        usual = self.usual_seconds.get(task.name, min(task.timeout.total_seconds(), 30.0))
        elapsed = (holder.elapsed_ms or 0) / 1000 if holder else 0.0
        return max(1, round(usual - elapsed) if elapsed < usual else round(usual / 2))

    # -- open ----------------------------------------------------------------------------------------------

    async def _begin(
        self, gate: Gate, group: list[Call], seat: Seat, backend_pid: int, opened_us: int, lock_key: int
    ) -> None:
        """With the lock held: record `running`, start the first caller's task, skip the others."""
        leader = next((call for call in group if call.is_waiting), None)
        if leader is None:
            await self._let_go(seat)
            return
        row = {
            "nonce": leader.nonce,
            "task": leader.task.name,
            "lock_name": leader.task.lock.name,
            "lock_key": lock_key,
            "backend_pid": backend_pid,
            "trigger": leader.trigger,
            "caller": leader.caller,
        }
        try:
            written = await self.recorder.put(runs.BEGIN, row)
            assert written is not None, "the statement gives a row for every nonce"
        except Unavailable as error:
            await self._let_go(seat)
            # The row may have been written all the same, if only the answer was lost.
            self._end_row(leader.nonce, "cancelled", Failure("Unavailable", "it was not started: no answer in time"))
            for call in group:
                call.fail(error)
            return
        _, run_id, status, started_at, freed = written
        if freed:
            log.warning("runs were lost", extra={"event": "run.lost", "runs": freed, "lockKey": lock_key})
        if status != "running":
            await self._let_go(seat)
            self.paused.add(leader.task.name)
            leader.decide(self._skipped(leader, lock_key, run_id, None))
            for call in group:
                call.decide(None)
            return
        if not leader.is_waiting:
            await self._let_go(seat)
            self._end_row(leader.nonce, "cancelled", Failure("Unavailable", "it was not started: its caller had gone"))
            for call in group:
                call.decide(None)
            return
        execution = Execution(
            leader,
            seat,
            run_id=run_id,
            started_at=started_at,
            opened_us=opened_us,
            lock_key=lock_key,
            instance=self.instance_id,
        )
        gate.running = execution
        self.active.add(execution)
        self._log_started(execution)
        leader.decide(execution)
        self.spawn(self._execute(gate, execution))
        if self._watch is None:
            self._watch = self.spawn(self._watch_active())
        if joined := [call for call in group if call.is_waiting]:
            await self._skip(joined, lock_key, execution.holder())

    # -- do ------------------------------------------------------------------------------------------------

    async def _execute(self, gate: Gate, execution: Execution) -> None:
        try:
            outcome = await self._do(execution)
        except asyncio.CancelledError:
            raise  # only the end of the event loop cancels this task
        except BaseException as error:
            log.exception("a run broke off", extra={"runId": execution.run_id})
            outcome = await self._fail(execution, "failed", failure(error, self.scrub))
        finally:
            gate.running = None
            self.active.discard(execution)
        self._log_ended(execution, outcome)
        execution.reply(outcome)

    async def _do(self, execution: Execution) -> Outcome:
        task, seat, lending = execution.task, execution.seat, execution.lending
        run = execution.run = Run(
            seat,
            id=execution.run_id,
            task=task.name,
            payload=execution.call.payload,
            instance=self.instance_id,
            report=lambda done, total: self._progress(execution, done, total),
        )
        loop = asyncio.get_running_loop()
        context = execution.call.context
        context.run(CONTEXT.set, lending)
        seat.connection.lending = lending
        limit = task.timeout.total_seconds()
        timer = loop.call_later(
            limit, execution.ask_to_stop, Stop("timed_out", f"the task ran over its timeout of {limit:g} s")
        )
        execution.is_doing = True
        code: asyncio.Future[Returned]
        if task.is_async:
            code = loop.create_task(contain(task, run), context=context)
        else:
            code = in_thread(task, run, context.run)
        try:
            code.add_done_callback(execution.turn)
            await execution.turned
            if execution.stop.done():
                await self._stop(execution, execution.stop.result(), code)
                await asyncio.wait((code,))
            returned = Returned(error=asyncio.CancelledError()) if code.cancelled() else code.result()
        finally:
            timer.cancel()
            execution.is_doing = False
            lending.is_over = True
        return await self._close(execution, run, returned)

    async def _stop(self, execution: Execution, stop: Stop, code: "asyncio.Future[Returned]") -> None:
        """Bring the task's code to its end; the caller is answered within a second, whatever the code does.

        The running statement is cancelled first and the coroutine only outside a statement: SQLAlchemy takes
        a cancellation inside one for a disconnect and closes the connection, and the lock would be gone
        while the task's `finally` still runs.
        """
        seat, lending = execution.seat, execution.lending
        lending.stopped = stop.message
        self.recorder.put(runs.STOPPING, {"nonce": execution.call.nonce})
        early = self._outcome(execution, stop.status, failure=Failure(kind(stop), stop.message))
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
            extra={"event": "run.stopping", **self._facts(early, execution.lock_key)},
        )
        await self._hold(execution, code)

    async def _until_idle(self, execution: Execution) -> None:
        until = time.monotonic() + STATEMENT_GRACE
        while execution.lending.in_flight and time.monotonic() < until:
            await asyncio.sleep(0.005)

    async def _hold(self, execution: Execution, code: "asyncio.Future[Returned]") -> None:
        """Keep the lock until the code has returned: the server's own limits are put off by pings."""
        seat = execution.seat
        assert self.database.server is not None
        message = locks.stopping(self.database.server)
        while not code.done() and not seat.connection.closed:
            if not execution.lending.in_flight:
                try:
                    await within(RECORD_WAIT, seat.connection, seat.send(message))
                    message = locks.PING
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
                    execution.ask_to_stop(Stop("lost", str(lost())))
                elif (
                    not execution.lending.in_flight
                    and connection.info.transaction_status is TransactionStatus.IDLE
                    and execution.lending.fault is None
                ):
                    execution.lending.fault = TransactionEnded("the task ended its transaction by SQL, and its lock")
                    execution.ask_to_stop(Stop("failed", str(execution.lending.fault)))
            if ticks % 2 == 0:
                await self._watch_cancelled()
        self._watch = None

    async def _watch_cancelled(self) -> None:
        ids = [execution.run_id for execution in self.active]
        if not ids:
            return
        message = self.statements.fill(runs.CANCEL_ASKED, ids=ids)
        try:
            async with self.database.recording() as connection:
                (rows,) = await within(RECORD_WAIT, connection, ask(connection, message))
        except (psycopg.Error, Unavailable):
            return
        asked: dict[int, str] = dict(rows)
        for execution in list(self.active):
            if execution.run_id in asked:
                by = asked[execution.run_id]
                execution.ask_to_stop(Stop("cancelled", f"cancelled by {by}" if by else "cancelled by an operator"))

    def _progress(self, execution: Execution, done: int, total: int | None) -> None:
        loop = execution.answer.get_loop()
        try:
            loop.call_soon_threadsafe(self._note_progress, execution, (done, total))
        except RuntimeError:
            pass  # the loop is closed

    def _note_progress(self, execution: Execution, progress: tuple[int, int | None]) -> None:
        execution.progress = progress
        if execution.is_progress_written:
            execution.is_progress_written = False
            self.spawn(self._write_progress(execution))

    async def _write_progress(self, execution: Execution) -> None:
        """Write the latest word only, and one after the other, so that an older one never comes last."""
        try:
            while execution.progress is not None:
                (done, total), execution.progress = execution.progress, None
                await self.recorder.put(runs.PROGRESS, {"nonce": execution.call.nonce, "done": done, "total": total})
        except Unavailable:
            pass
        finally:
            execution.is_progress_written = True

    # -- close ---------------------------------------------------------------------------------------------

    async def _close(self, execution: Execution, run: Run, returned: Returned) -> Outcome:
        error = returned.error
        if execution.stop.done():
            stop = execution.stop.result()
            return await self._fail(execution, stop.status, Failure(kind(stop), stop.message))
        if is_gone(execution.seat.connection) or execution.seat.connection.closed:
            return await self._fail(execution, "lost", failure(error or lost(), self.scrub))
        if isinstance(error, Cancel):
            return await self._fail(execution, "cancelled", failure(error, self.scrub))
        if isinstance(error, Retry):
            seconds = max(1, round(error.after))
            return await self._fail(execution, "failed", failure(error, self.scrub), retry_after=seconds)
        if (error := error or execution.lending.fault) is not None:
            return await self._fail(execution, "failed", failure(error, self.scrub))
        result = dump_result(returned.value)
        try:
            await settle(run)
        except BaseException as flushing:
            return await self._fail(execution, "failed", failure(self._cause(execution, flushing), self.scrub))
        return await self._commit(execution, result, run.is_touched)

    async def _commit(self, execution: Execution, result: str | None, is_touched: bool) -> Outcome:
        """Send the closing message. It is never cancelled, and after any error the row has the last word."""
        message = self._closing.message(execution.run_id, execution.opened_us, result, is_touched)
        seat = execution.seat
        rows_at = locks.LEFTOVERS_AT[True] if is_touched else None
        limit = execution.task.timeout.total_seconds() + CLOSE_MARGIN
        timer = asyncio.get_running_loop().call_later(CLOSE_WAIT, self._reply_unknown, execution)
        try:
            reply = await within(limit, seat.connection, seat.send(message, rows_at))
        except psycopg.Error as error:
            if seat.connection.closed or is_gone(seat.connection):
                return await self._settle(execution, result)
            return await self._fail(execution, "failed", failure(self._cause(execution, error), self.scrub))
        finally:
            timer.cancel()
        if reply.tag != "COMMIT":
            return await self._fail(
                execution, "failed", Failure("TransactionEnded", "the commit was answered by a rollback")
            )
        await self._give_back(seat, reply)
        return self._outcome(execution, "completed", result=result)

    async def _give_back(self, seat: Seat, reply: Reply) -> None:
        """Return a connection to its pool, unless its task left something that only goes with it."""
        if reply.rows and reply.rows[0][1]:
            await discard(seat)
            return
        if reply.rows:
            seat.renew()
        await seat.give_back()

    def _cause(self, execution: Execution, error: BaseException) -> BaseException:
        """The error that explains a failed close better than its own text does."""
        state = sqlstate(error)
        if state == "25P02":
            first = execution.lending.last_error
            told = f": {str(first).strip().splitlines()[0]}" if first and str(first).strip() else ""
            return TransactionEnded(
                "the transaction was already aborted by a statement whose error the task caught"
                f"{told}. Put such a statement into a savepoint (begin_nested())."
            )
        if state in ("3B001", "25P01") or locks.ENDED in str(error):
            return TransactionEnded(
                "the task ended its transaction by SQL (COMMIT, END, ROLLBACK or PREPARE TRANSACTION), and with it"
                " its lock; what it committed itself stays, the rest was rolled back"
            )
        if locks.NO_ROW in str(error):
            return LockLost("the run's row is not open any more; what the run wrote was rolled back")
        return error

    async def _settle(self, execution: Execution, result: str | None) -> Outcome:
        """The closing message was sent and its answer is lost: read the row until it is decided."""
        seat = execution.seat
        self.spawn(discard(seat))
        started = time.monotonic()
        message = b"; ".join(
            (
                b"BEGIN ISOLATION LEVEL READ COMMITTED",
                b"SET LOCAL synchronous_commit = on; SET LOCAL search_path = pg_catalog",
                self.statements.fill(runs.SETTLE, id=execution.run_id),
                self.statements.fill("SELECT status FROM {run} WHERE id = {id}", id=execution.run_id),
                b"COMMIT",
            )
        )
        while True:
            status = None
            try:
                async with self.database.recording() as connection:
                    replies = await within(RECORD_WAIT, connection, ask(connection, message))
                status = replies[-1][0][0] if replies[-1] else "lost"
            except (psycopg.Error, Unavailable):
                pass
            if status not in (None, "running"):
                if status == "completed":
                    return self._outcome(execution, "completed", result=result)
                return self._outcome(execution, "lost", failure=failure(lost(), self.scrub))
            if time.monotonic() - started > OUTCOME_WAIT:
                self._reply_unknown(execution)
            await asyncio.sleep(0.05 if time.monotonic() - started < 2 else 0.5)

    def _reply_unknown(self, execution: Execution) -> None:
        if execution.answer.done():
            return
        message = f"run {execution.run_id}: its commit was sent, no answer came yet; its row will say how it ended"
        execution.answer.set_exception(Unavailable("outcome_unknown", message))
        execution.answer.exception()  # its caller may have gone

    async def _fail(
        self, execution: Execution, status: str, why: Failure, *, retry_after: int | None = None
    ) -> Outcome:
        """Record how the run ended, then undo what it wrote, then free the lock.

        Where no recording connection is to be had (at a pooler, all slots may be kept by runs that wait
        for one), both go in one message on the run's own connection, right after each other.
        """
        row = self._ending(execution.call.nonce, status, why)
        written = self._put_ending(row)
        seat = execution.seat
        run = execution.run
        # With the connection the lock has gone, and there is nothing that the record must come before.
        await asyncio.wait((written,), timeout=SLOT_WAIT if is_gone(seat.connection) else self._record_wait)
        execution.lending.is_over = True
        try:
            if run is not None:
                await close(run)
        except Exception:
            log.debug("what the task was handed did not close cleanly", exc_info=True)
        is_touched = run is not None and run.is_touched
        record = b"" if written.done() else self.recorder.message(runs.END, row)
        try:
            message = locks.giving_up(is_touched, record)
            rows_at = locks.LEFTOVERS_AT[False] if is_touched else None
            reply = await within(RECORD_WAIT, seat.connection, seat.send(message, rows_at))
        except psycopg.Error:
            await discard(seat)
        else:
            written.cancel()
            await self._give_back(seat, reply)
        return self._outcome(execution, status, failure=why, retry_after=retry_after, is_retry=retry_after is not None)

    def _end_row(self, nonce: str, status: str, why: Failure) -> "asyncio.Future[Any]":
        return self._put_ending(self._ending(nonce, status, why))

    def _ending(self, nonce: str, status: str, why: Failure) -> dict[str, Any]:
        return {
            "nonce": nonce,
            "status": status,
            "error_type": why.type,
            "error_message": why.message,
            "error_traceback": why.traceback,
            "error_sqlstate": why.sqlstate,
        }

    def _put_ending(self, row: dict[str, Any]) -> "asyncio.Future[Any]":
        future = self.recorder.put(runs.END, row)
        future.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        return future

    def _outcome(self, execution: Execution, status: str, **facts: Any) -> Outcome:
        return Outcome(
            status=status,
            task=execution.task.name,
            run_id=execution.run_id,
            duration_ms=execution.elapsed_ms(),
            **facts,
        )

    # -- the end of the process ------------------------------------------------------------------------------

    async def drain(self, timeout: float) -> None:
        """Take no new calls, wait `timeout` seconds for what runs, then cancel and record it; once."""
        self.is_draining = True
        if self._is_drained:
            return
        await self._until_empty(timeout)
        for execution in self.active:
            execution.ask_to_stop(Stop("cancelled", "the server was shutting down"))
        await self._until_empty(3.0)
        for execution in self.active:
            # A thread that does not return: the process is about to end, and with it the connection.
            stop = execution.stop.result()
            self._end_row(execution.call.nonce, stop.status, Failure(kind(stop), stop.message))
        self._is_drained = True

    async def _until_empty(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        while (self.active or any(gate.attempts for gate in self.gates.values())) and time.monotonic() < until:
            await asyncio.sleep(0.02)

    # -- log -----------------------------------------------------------------------------------------------

    def _facts(self, outcome: Outcome, lock_key: int) -> dict[str, Any]:
        return {
            "task": outcome.task,
            "runId": outcome.run_id,
            "status": outcome.status,
            "reason": outcome.reason,
            "durationMs": outcome.duration_ms,
            "lockKey": lock_key,
            "instance": self.instance_id,
            "error": f"{outcome.failure.type}: {outcome.failure.message}" if outcome.failure else None,
        }

    def _log(self, level: int, event: str, outcome: Outcome, lock_key: int) -> None:
        if log.isEnabledFor(level):
            facts = {"event": f"run.{event}", **self._facts(outcome, lock_key)}
            # As log.log does, without walking the stack for the place in this file.
            log.handle(log.makeRecord(log.name, level, "", 0, "%s %s", (outcome.task, event), None, extra=facts))

    def _log_started(self, execution: Execution) -> None:
        if log.isEnabledFor(logging.INFO):
            self._log(logging.INFO, "started", self._outcome(execution, "running"), execution.lock_key)

    def _log_ended(self, execution: Execution, outcome: Outcome) -> None:
        level = logging.INFO if outcome.status == "completed" else logging.ERROR
        self._log(level, outcome.status, outcome, execution.lock_key)


async def in_time(future: "asyncio.Future[T]", until: float) -> T:
    """Await what the database is to say; raises `Unavailable` when `until` (monotonic seconds) has come."""
    timer = asyncio.get_running_loop().call_later(until - time.monotonic(), expire, future)
    try:
        return await future
    finally:
        timer.cancel()


def expire(future: "asyncio.Future[Any]") -> None:
    """Nobody may wait for this any longer."""
    if not future.done():
        future.set_exception(Unavailable("database_unavailable", "the database did not answer in time"))


def kind(stop: Stop) -> str:
    """The error type that a stop is recorded under."""
    return {"timed_out": "TimeoutError", "cancelled": "Cancel", "lost": "LockLost"}.get(stop.status, "TransactionEnded")
