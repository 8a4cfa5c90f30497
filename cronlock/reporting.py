"""One structured log line for every run that starts, ends or is skipped."""

import logging
from json import dumps
from typing import Any

from cronlock.outcome import Outcome

log = logging.getLogger("cronlock.run")


class Line(logging.LogRecord):
    """A record of a call or a run: its facts are attributes, as `extra` makes them, and together in `facts`.

    Made without a walk up the stack for the place that logs, which is always this file.
    """

    __slots__ = ("facts",)

    def __init__(self, level: int, event: str, facts: dict[str, Any]) -> None:
        super().__init__(log.name, level, "", 0, "%s %s", (facts["task"], event), None)
        self.facts = facts
        self.__dict__.update(facts)

    def json(self) -> str:
        """The facts as the inside of a JSON object; all but the error are safe there as they are."""
        facts = self.facts
        reason = f'"{facts["reason"]}"' if facts["reason"] else "null"
        error = dumps(facts["error"], ensure_ascii=False) if facts["error"] else "null"
        return (
            f'"event":"{facts["event"]}","task":"{facts["task"]}","runId":{facts["runId"]},'
            f'"status":"{facts["status"]}","reason":{reason},"durationMs":{facts["durationMs"]},'
            f'"lockKey":{facts["lockKey"]},"instance":"{facts["instance"]}","error":{error}'
        )


class Report:
    """Writes the lines of one process, which `instance` names."""

    def __init__(self, instance: str) -> None:
        self._instance = instance

    def line(self, level: int, event: str, outcome: Outcome, lock_key: int) -> None:
        """One event of a call or a run."""
        if log.isEnabledFor(level):
            log.handle(Line(level, event, {"event": f"run.{event}", **self.facts(outcome, lock_key)}))

    def lost(self, task: str, run_id: int, lock_key: int) -> None:
        """A run of some process was found lost by the one that has its lock now."""
        outcome = Outcome(status="lost", task=task, run_id=run_id, duration_ms=0)
        self.line(logging.ERROR, "lost", outcome, lock_key)

    def facts(self, outcome: Outcome, lock_key: int) -> dict[str, Any]:
        """What every line says, by the names of the HTTP answer."""
        return {
            "task": outcome.task,
            "runId": outcome.run_id,
            "status": outcome.status,
            "reason": outcome.reason,
            "durationMs": outcome.duration_ms,
            "lockKey": lock_key,
            "instance": self._instance,
            "error": f"{outcome.failure.type}: {outcome.failure.message}" if outcome.failure else None,
        }
