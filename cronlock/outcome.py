"""How a call ended: what is answered, logged and recorded."""

import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cronlock.errors import Cancel, Retry
from cronlock.jsontext import clip

dump = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
MESSAGE_LIMIT = 500
TRACEBACK_LIMIT = 16_000
OWN_TYPES = (
    "Cancel",
    "CancelAsked",
    "LockLost",
    "ProcessGone",
    "Retry",
    "ShuttingDown",
    "StatementRefused",
    "TransactionEnded",
    "TransactionRefused",
    "Unavailable",
    "Unrecordable",
)
"""Error types by which a row says what became of its run (see `explain`); somebody else's get their module's name."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a run did not complete; the texts are scrubbed of secrets and cut."""

    type: str
    message: str
    traceback: str | None = None
    sqlstate: str | None = None


@dataclass(frozen=True)
class Holder:
    """Who held the lock: one of our runs, or a backend that is not ours. Only `run_id`: a run that ended before.

    Only `job_id`: the job that a call in queue mode was skipped for.
    """

    run_id: int | None = None
    started_at: str | None = None
    elapsed_ms: int | None = None
    instance: str | None = None
    pid: int | None = None
    application_name: str | None = None
    job_id: int | None = None

    @cached_property
    def json(self) -> str:
        """As the answer of a skipped call shows it; one holder is that of many skips."""
        if self.job_id is not None:
            return dump({"jobId": self.job_id})
        if self.run_id is None:
            return dump({"pid": self.pid, "applicationName": self.application_name})
        if self.started_at is None:
            return dump({"runId": self.run_id})
        return dump(
            {
                "runId": self.run_id,
                "startedAt": self.started_at,
                "elapsedMs": self.elapsed_ms,
                "instance": self.instance,
            }
        )


@dataclass(slots=True)
class Outcome:
    """One call's end.

    `status` is a run status, `result` JSON text, `retry_after` whole seconds.
    """

    status: str
    task: str
    run_id: int
    duration_ms: int
    reason: str | None = None
    result: str | None = None
    failure: Failure | None = None
    holder: Holder | None = None
    retry_after: int | None = None
    is_retry: bool = False

    @property
    def value(self) -> Any:
        """What the task returned, as JSON gives it back; None if it returned nothing or did not complete."""
        return None if self.result is None else json.loads(self.result)


def failure(error: BaseException, scrub: Callable[[str], str]) -> Failure:
    """What is kept of an exception: never the values of its frames, and never a secret."""
    try:
        message = str(error)
    except BaseException as broken:
        message = f"(its message cannot be read: {type(broken).__name__})"
    try:
        trace: str | None = "".join(traceback.format_exception(error))
    except BaseException:
        trace = None
    # What its frames hold is let go: an unfinished stream of rows would keep the run's connection to itself.
    traceback.clear_frames(error.__traceback__)
    return Failure(
        type=clip(type_name(error), 200),
        message=clip(scrub(message), MESSAGE_LIMIT),
        traceback=clip(scrub(trace), TRACEBACK_LIMIT) if trace else None,
        sqlstate=sqlstate(error),
    )


def type_name(error: BaseException) -> str:
    """The type of an error as it is recorded: a signal's own name, and never one of ours for somebody else's."""
    for signal in (Cancel, Retry):
        if isinstance(error, signal):
            return signal.__name__
    kind = type(error)
    if kind.__name__ in OWN_TYPES and not kind.__module__.startswith("cronlock."):
        return f"{kind.__module__}.{kind.__name__}"
    return kind.__name__


def sqlstate(error: BaseException) -> str | None:
    """PostgreSQL's code in a psycopg error, or in one that SQLAlchemy wrapped."""
    state = getattr(error, "sqlstate", None) or getattr(getattr(error, "orig", None), "sqlstate", None)
    return state if isinstance(state, str) and len(state) == 5 else None
