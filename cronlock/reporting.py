"""One structured log line, and one more in the counters, for every run that starts, ends or is skipped."""

import logging
from collections.abc import Callable
from json import dumps
from typing import Any

from cronlock.explain import code
from cronlock.metrics import Metrics
from cronlock.outcome import Failure, Outcome

log = logging.getLogger("cronlock.run")
job_log = logging.getLogger("cronlock.job")

GONE = Failure("ProcessGone", "the process or its connection was gone before it said how the run ended")

straight: Callable[[logging.Logger, int, str, str], bool] | None = None
"""Writes a line (its logger, level, message and facts as the inside of a JSON object) where no other handler wants a
record of it, else False. Set by `logs`: in a storm of skips a record of `logging` costs several times what its line
does."""


class Report:
    """Writes the lines of one process, which `instance` names, and counts what they say."""

    def __init__(self, instance: str, metrics: Metrics) -> None:
        self._instance = instance
        self._metrics = metrics

    def skipped(self, outcome: Outcome, lock_key: int) -> None:
        """A call was skipped."""
        self._metrics.skipped(outcome.task, outcome.reason or "", outcome.duration_ms)
        self.line(logging.INFO, "skipped", outcome, lock_key)

    def started(self, outcome: Outcome, lock_key: int, decided_ms: int) -> None:
        """A call became a run, `decided_ms` after it came."""
        self._metrics.started(outcome.task, decided_ms)
        self.line(logging.INFO, "started", outcome, lock_key)

    def ended(self, outcome: Outcome, lock_key: int) -> None:
        """A run of this process ended."""
        self._metrics.ended(outcome.task, outcome.status, outcome.duration_ms)
        level = logging.INFO if outcome.status == "completed" else logging.ERROR
        self.line(level, outcome.status, outcome, lock_key)

    def line(self, level: int, event: str, outcome: Outcome, lock_key: int) -> None:
        """One event of a call or a run."""
        if not log.isEnabledFor(level):
            return
        if straight and straight(log, level, f"{outcome.task} {event}", self._json(event, outcome, lock_key)):
            return
        facts = {"event": f"run.{event}", **self.facts(outcome, lock_key)}
        # As log.log does, without walking the stack for the place in this file.
        log.handle(log.makeRecord(log.name, level, "", 0, "%s %s", (outcome.task, event), None, extra=facts))

    def lost(self, task: str, run_id: int, lock_key: int) -> None:
        """A run of some process was found lost by the one that has its lock now."""
        self._metrics.recovered()
        outcome = Outcome(status="lost", task=task, run_id=run_id, duration_ms=0, failure=GONE)
        self.line(logging.ERROR, "lost", outcome, lock_key)

    def facts(self, outcome: Outcome, lock_key: int) -> dict[str, Any]:
        """What every line says, by the names of the HTTP answer."""
        return {
            "task": outcome.task,
            "runId": outcome.run_id,
            "status": outcome.status,
            "code": code(outcome),
            "reason": outcome.reason,
            "durationMs": outcome.duration_ms,
            "lockKey": lock_key,
            "instance": self._instance,
            "error": explained(outcome),
        }

    def _json(self, event: str, outcome: Outcome, lock_key: int) -> str:
        """The event and its facts as JSON; all but the error are safe in it as they are."""
        reason = f'"{outcome.reason}"' if outcome.reason else "null"
        error = dumps(explained(outcome), ensure_ascii=False) if outcome.failure else "null"
        return (
            f'"event":"run.{event}","task":"{outcome.task}","runId":{outcome.run_id},"status":"{outcome.status}",'
            f'"code":"{code(outcome)}","reason":{reason},"durationMs":{outcome.duration_ms},"lockKey":{lock_key},'
            f'"instance":"{self._instance}","error":{error}'
        )


class JobReport:
    """Writes the lines of one worker's jobs."""

    def __init__(self, worker: str) -> None:
        self._worker = worker

    def completed(self, task: str, job_id: int, attempt: int, duration_ms: int) -> None:
        """A job was completed, for good."""
        if not job_log.isEnabledFor(logging.INFO):
            return
        facts = (
            f'"event":"job.completed","task":"{task}","jobId":{job_id},"attempt":{attempt},'
            f'"durationMs":{duration_ms},"workerId":"{self._worker}"'
        )
        if not (straight and straight(job_log, logging.INFO, f"{task} completed", facts)):
            self._line(logging.INFO, "completed", f"{task} completed", task, job_id, attempt, duration_ms)

    def ended(
        self, status: str, attempt_status: str, why: Failure | None, task: str, job_id: int, attempt: int,
        duration_ms: int, delay: float | None,
    ) -> None:  # fmt: skip
        """An attempt did not complete; `status` is what became of its job, `delay` the seconds until the next one."""
        again = f"; again in {delay:.1f} s" if status == "queued" and delay is not None else ""
        level = logging.ERROR if status == "failed" else logging.WARNING
        event = "retried" if status == "queued" else status
        error = f"{why.type}: {why.message}" if why else None
        self._line(
            level, event, f"{task} {attempt_status}{again}", task, job_id, attempt, duration_ms, status=status,
            error=error,
        )  # fmt: skip

    def given_back(self, task: str, job_id: int, attempt: int, duration_ms: int) -> None:
        """The worker ends before the job did; the attempt does not count, though its code may have run."""
        said = f"{task}: job {job_id} was stopped and given back, since its worker ends"
        self._line(logging.WARNING, "given_back", said, task, job_id, attempt, duration_ms)

    def lease_lost(self, task: str, job_id: int, attempt: int, duration_ms: int) -> None:
        """Another worker has the job, and nothing of this attempt is written."""
        said = f"{task}: the lease of job {job_id} was lost, and what this attempt did was not committed"
        self._line(logging.ERROR, "lease_lost", said, task, job_id, attempt, duration_ms)

    def _line(
        self, level: int, event: str, said: str, task: str, job_id: int, attempt: int, duration_ms: int, **more: Any
    ) -> None:
        facts = {"task": task, "jobId": job_id, "attempt": attempt, "durationMs": duration_ms, "workerId": self._worker}
        job_log.log(level, "%s", said, extra={"event": f"job.{event}", **facts, **more})


def explained(outcome: Outcome) -> str | None:
    """The error of a run that failed, on one line."""
    return f"{outcome.failure.type}: {outcome.failure.message}" if outcome.failure else None
