"""The runner of one process: it starts what has the lock, calls the task, and ends everything in order.

Every run has four steps. *Guard* and *open* are in `attempts`, *do* is here and is the only place that calls a
task, *close* is in `closing`; `stopping` brings code to its end that does not return by itself. A run belongs to
the process, not to the request: its caller may go, it goes on.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from cronlock import runs
from cronlock.attempts import Attempts
from cronlock.background import Background
from cronlock.closing import Closer
from cronlock.context import Run
from cronlock.database import Database
from cronlock.enqueuer import Producer
from cronlock.errors import Unavailable
from cronlock.execution import Execution, Returned, Stop, do, heeded
from cronlock.gate import Call, Gate
from cronlock.guard import Guard
from cronlock.invalidation import Outbox
from cronlock.metrics import Metrics
from cronlock.outcome import Outcome, failure
from cronlock.recording import Recorder
from cronlock.reporting import Report
from cronlock.seats import AsyncSeat
from cronlock.stopping import Stopper

STOP_WAIT = 3.0
LOG_EVERY = 1.0
LOG_RATE = 4000
"""How many characters a second of a run's log are written again and again while it grows."""
SHUTDOWN = Stop("cancelled", "the server was shutting down", "ShuttingDown")

log = logging.getLogger("cronlock.run")


class Runner:
    """Runs the tasks of one process."""

    def __init__(
        self,
        database: Database,
        recorder: Recorder,
        statements: runs.Statements,
        instance: runs.Instance,
        scrub: Callable[[str], str],
        metrics: Metrics,
        producer: Producer,
        outbox: Outbox,
    ) -> None:
        self._outbox = outbox
        self.metrics = metrics
        self.recorder = recorder
        self.statements = statements
        self.instance_id = str(instance.id)
        self._scrub = scrub
        self._producer = producer
        self._guard_ping = database.settings.guard_ping.total_seconds()
        self._background = Background()
        self._report = Report(self.instance_id, metrics)
        self._closer = Closer(database, recorder, statements, self._background, scrub)
        self._stopper = Stopper(database, recorder, statements, self._background, self._report)
        self.attempts = Attempts(
            database, recorder, self._closer, self._background, self._report, self.instance_id, self._start
        )
        self._is_ending = False
        self._is_drained = False

    @property
    def active(self) -> set[Execution]:
        """The runs of this process."""
        return self._stopper.active

    @property
    def is_draining(self) -> bool:
        """Whether new calls are refused because the process is ending."""
        return self.attempts.is_draining

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Start a task of the process, which no request's end can cancel."""
        return self._background.spawn(coroutine)

    def call(self, call: Call) -> Coroutine[Any, Any, Outcome]:
        """Run the task of `call`, or skip it; raises `Unavailable` if neither can be decided in time."""
        return self.attempts.call(call)

    def _start(self, gate: Gate, execution: Execution) -> None:
        gate.running.append(execution)
        self._stopper.watch(execution)
        if self._is_ending:  # its attempt was under way when the others were stopped
            execution.ask_to_stop(SHUTDOWN)
        self._report.started(execution.outcome("running"), execution.lock_key, execution.call.elapsed_ms())
        self.spawn(self._execute(gate, execution))

    async def _execute(self, gate: Gate, execution: Execution) -> None:
        try:
            outcome = await self._do(execution)
        except asyncio.CancelledError:
            raise  # only the end of the event loop cancels this task
        except BaseException as error:
            log.exception("a run broke off", extra={"runId": execution.run_id})
            outcome = await self._closer.fail(execution, "failed", failure(error, self._scrub))
        finally:
            gate.running.remove(execution)
            self.active.discard(execution)
        self._report.ended(outcome, execution.lock_key)
        execution.reply(outcome)
        execution.run = None  # which refers to it: nothing is left for the garbage collector

    async def _do(self, execution: Execution) -> Outcome:
        task, seat, lending = execution.task, execution.seat, execution.lending
        run = execution.run = Run(
            execution, self._scrub, lambda said: self._say(execution, said), self._producer, self._outbox
        )
        watching = self._guard(execution) if task.is_guarded else None
        loop = asyncio.get_running_loop()
        seat.connection.lending = lending
        timer = None
        if task.timeout is not None:
            limit = task.timeout.total_seconds()
            stop = Stop("timed_out", f"the task ran over its timeout of {limit:g} s")
            timer = loop.call_later(limit, execution.ask_to_stop, stop)
        execution.is_doing = True
        code = do(execution, run, execution.call.context)
        try:
            code.add_done_callback(execution.turn)
            await execution.turned
            if execution.stop.done():
                await self._stopper.stop(execution, execution.stop.result(), code)
                await asyncio.wait((code,))
            returned = Returned(error=asyncio.CancelledError()) if code.cancelled() else code.result()
        finally:
            if timer is not None:
                timer.cancel()
            if watching is not None:
                await watching()
            execution.is_doing = False
            lending.is_over = True
        return await self._closer.close(execution, run, heeded(run, returned))

    def _guard(self, execution: Execution) -> Callable[[], Coroutine[Any, Any, None]]:
        """Ping the run's connection from now on, until what this gives is awaited."""
        assert isinstance(execution.seat, AsyncSeat), "a guard is pinged from the loop"
        guard = execution.guard = Guard(
            execution.seat, self._guard_ping, execution.opened, lambda why: execution.ask_to_stop(Stop("lost", why))
        )
        watching = self.spawn(guard.watch())

        async def end() -> None:
            guard.end()
            await watching

        return end

    def _say(self, execution: Execution, progress: dict[str, Any] | None) -> None:
        """Take what the run says of itself, its progress or (None) that it has logged, from any thread."""
        try:
            execution.answer.get_loop().call_soon_threadsafe(self._note, execution, progress)
        except RuntimeError:
            pass  # the loop is closed

    def _note(self, execution: Execution, progress: dict[str, Any] | None) -> None:
        if progress is None:
            if not execution.is_writing_log:
                execution.is_writing_log = True
                self.spawn(self._write_log(execution))
            return
        execution.progress = progress
        if not execution.is_writing_progress:
            execution.is_writing_progress = True
            self.spawn(self._write_progress(execution))

    async def _write_progress(self, execution: Execution) -> None:
        """Write the latest word only, and one after the other, so that an older one never comes last."""
        try:
            while execution.progress is not None:
                progress, execution.progress = execution.progress, None
                await self.recorder.put(runs.PROGRESS, {"nonce": execution.call.nonce, **progress})
        except Unavailable:
            pass
        finally:
            execution.is_writing_progress = False

    async def _write_log(self, execution: Execution) -> None:
        """Write the log while it grows, each time after a while: most runs end before, and their log with them."""
        try:
            while execution.has_logged:
                await asyncio.sleep(max(LOG_EVERY, len(execution.log() or "") / LOG_RATE))
                if not execution.is_doing:
                    return
                execution.has_logged = False
                await self.recorder.put(runs.PROGRESS, {"nonce": execution.call.nonce, "log": execution.log()})
        except Unavailable:
            pass
        finally:
            execution.is_writing_log = False

    async def drain(self, timeout: float) -> None:
        """Take no new calls, wait `timeout` seconds for what runs, then cancel and record it; once."""
        self.attempts.is_draining = True
        if self._is_drained:
            return
        await self._until_empty(timeout)
        self._is_ending = True
        for execution in self.active:
            execution.ask_to_stop(SHUTDOWN)
        await self._until_empty(STOP_WAIT)
        for execution in self.active:
            # A thread that does not return: the process is about to end, and with it the connection.
            stop = execution.stop.result()
            self._closer.end_row(execution.call.nonce, stop.status, stop.failure(), execution.log())
        self._is_drained = True

    async def _until_empty(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        while (self.active or any(gate.attempts for gate in self.attempts.gates.values())) and time.monotonic() < until:
            await asyncio.sleep(0.02)
