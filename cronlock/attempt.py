"""One attempt at a job while it is under way in a worker, and how it ends."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from cronlock import retry
from cronlock.context import Run
from cronlock.errors import Cancel, LockLost
from cronlock.execution import Returned, Stop
from cronlock.jsontext import dump_result
from cronlock.lending import Lending
from cronlock.lines import Lines
from cronlock.outcome import Failure, failure
from cronlock.seats import Seat
from cronlock.tasks import Task

if TYPE_CHECKING:
    from cronlock.transaction import Transaction


@dataclass(slots=True, eq=False)
class Attempt:
    """What a worker knows of a job whose lease it has; to its `Run` it is what an `Execution` is to a run's."""

    is_job: ClassVar[bool] = True

    run_id: int
    """The job's id."""
    token: str
    task: Task
    payload: Any
    attempt: int
    max_attempts: int
    trigger: str
    occurrence: str | None
    priority: int
    instance: str
    lease: "Lease"
    seat: Seat | None = None
    transaction: "Transaction | None" = None
    run: Run | None = None
    code: "asyncio.Future[Returned] | None" = None
    stop: Stop | None = None
    lines: Lines | None = None
    has_logged: bool = False
    is_unicode: bool = True
    """Whether the database holds every text."""
    progress: dict[str, Any] | None = None
    """What the run said last of how far it is, until it is written."""
    key: str | None = None
    age_ms: int = 0
    """How many milliseconds before its claim the job was enqueued."""
    lending: Lending = field(default_factory=Lending)
    started: float = field(default_factory=time.monotonic)

    @property
    def call(self) -> "Attempt":
        """What its `Run` asks for task, payload and occurrence."""
        return self

    @property
    def guard(self) -> "Lease":
        """What `run.check()` asks."""
        return self.lease

    @property
    def effects_of(self) -> tuple[str, str]:
        """What its effect keys are for: the job, whichever attempt it is."""
        return "job", str(self.run_id)

    @property
    def application_name(self) -> str:
        """By which its transaction is known in pg_stat_activity."""
        return f"cronlock:job {self.run_id}"

    @property
    def said(self) -> list[dict[str, Any]]:
        """What it said is stale and no transaction of its own has written, as `Outbox.of_jobs` takes it."""
        return [] if self.lending.said is None else self.lending.said.rows(self.token)

    def log(self) -> str | None:
        """What the task has logged, as the database can hold it."""
        text = None if self.lines is None else self.lines.text()
        if text is None or self.is_unicode:
            return text
        return text.encode("ascii", "backslashreplace").decode()

    def has_returned(self, returned: Returned) -> bool:
        """Whether its code ran to its end and nothing was wrong."""
        return self.code is not None and returned.error is None and self.lending.fault is None

    def elapsed_ms(self) -> int:
        """Milliseconds since it was claimed."""
        return round((time.monotonic() - self.started) * 1000)


class Lease:
    """How long the leases of one claim are surely held, in monotonic seconds; any thread may ask."""

    __slots__ = ("until",)

    def __init__(self, until: float) -> None:
        self.until = until

    def check(self) -> None:
        """Raise `LockLost` if the lease may have run out."""
        if (late := time.monotonic() - self.until) >= 0:
            raise LockLost(f"the lease of the job has not been renewed; it ran out {late:.1f} s ago")


@dataclass(frozen=True, slots=True)
class End:
    """How an attempt ended: what becomes of its job, after how many seconds if that is `queued`, and why."""

    status: str
    result: str | None = None
    delay: float | None = None
    attempt_status: str | None = None
    failure: Failure | None = None

    def row(self, attempt: Attempt) -> dict[str, Any]:
        """As `jobs.END` takes it."""
        why = self.failure
        row = {
            "id": attempt.run_id,
            "token": attempt.token,
            "status": self.status,
            "delay": self.delay,
            "result": self.result,
            "attempt_status": self.attempt_status,
            "log": attempt.log(),
        }
        if why is not None:
            row |= {
                "error_type": why.type,
                "error_message": why.message,
                "error_traceback": why.traceback,
                "error_sqlstate": why.sqlstate,
            }
        return row


def end_of(attempt: Attempt, returned: Returned, scrub: Callable[[str], str]) -> End:
    """What an attempt came to, by what its code returned or raised and by why it was stopped."""
    stop, error, task = attempt.stop, returned.error, attempt.task
    if stop is not None:
        if stop.status == "cancelled":
            return End("cancelled", attempt_status="cancelled", failure=stop.failure())
        wait = retry.delay(attempt.attempt, task.retry_delay.total_seconds(), task.retry_cap.total_seconds())
        return after_failure(attempt, stop.status, stop.failure(), wait, is_transient=True)
    error = error or attempt.lending.fault
    if error is None:
        return End("completed", result=dump_result(returned.value))
    if isinstance(error, Cancel):
        return End("cancelled", attempt_status="cancelled", failure=failure(error, scrub))
    wait = retry.after(error, attempt.attempt, task.retry_delay.total_seconds(), task.retry_cap.total_seconds())
    is_transient = retry.is_transient(error, task.retry_on)
    return after_failure(attempt, "failed", failure(error, scrub), wait, is_transient=is_transient)


def after_failure(attempt: Attempt, status: str, why: Failure, wait: float, *, is_transient: bool) -> End:
    """Another attempt, if the error is worth one and one is left."""
    if is_transient and attempt.attempt < attempt.max_attempts:
        return End("queued", delay=wait, attempt_status=status, failure=why)
    return End("failed", attempt_status=status, failure=why)
