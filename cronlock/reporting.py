"""One structured log line for every run that starts, ends or is skipped."""

import logging
from collections.abc import Callable
from json import dumps
from typing import Any

from cronlock.explain import code
from cronlock.outcome import Failure, Outcome

log = logging.getLogger("cronlock.run")

GONE = Failure("ProcessGone", "the process or its connection was gone before it said how the run ended")

straight: Callable[[int, str, str], bool] | None = None
"""Writes a line (its level, message and facts as the inside of a JSON object) where no other handler wants a record of
it, else False. Set by `logs`: in a storm of skips a record of `logging` costs several times what its line does."""


class Report:
    """Writes the lines of one process, which `instance` names."""

    def __init__(self, instance: str) -> None:
        self._instance = instance

    def line(self, level: int, event: str, outcome: Outcome, lock_key: int) -> None:
        """One event of a call or a run."""
        if not log.isEnabledFor(level):
            return
        if straight and straight(level, f"{outcome.task} {event}", self._json(event, outcome, lock_key)):
            return
        facts = {"event": f"run.{event}", **self.facts(outcome, lock_key)}
        # As log.log does, without walking the stack for the place in this file.
        log.handle(log.makeRecord(log.name, level, "", 0, "%s %s", (outcome.task, event), None, extra=facts))

    def lost(self, task: str, run_id: int, lock_key: int) -> None:
        """A run of some process was found lost by the one that has its lock now."""
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


def explained(outcome: Outcome) -> str | None:
    """The error of a run that failed, on one line."""
    return f"{outcome.failure.type}: {outcome.failure.message}" if outcome.failure else None
