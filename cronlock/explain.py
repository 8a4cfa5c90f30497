"""Why a run or a job ended as it did, or has not: a code for programs and a sentence with the facts for people.

The code follows from what is in memory when a call is answered and in the row afterwards, so that the answer, the
log line, the commands and the admin routes say the same; docs/http.md lists the codes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from cronlock.documents import Result, result_of
from cronlock.outcome import Outcome

FAILED = {
    "Retry": "retry_asked",
    "TransactionEnded": "transaction_ended",
    "TransactionRefused": "transaction_refused",
    "StatementRefused": "statement_refused",
    "LockLost": "row_changed",
    "Unrecordable": "unrecordable",
}
"""Codes of failed runs, by what cronlock itself raised; no other exception can have these names in a row."""

CANCELLED = {
    "CancelAsked": "cancelled_by_operator",
    "ShuttingDown": "shutting_down",
    "Unavailable": "not_started",
}
LOST = {"ProcessGone": "process_gone"}
REFUSED = {"23": "constraint_violated", "40": "conflict"}
"""Codes of failed runs, by the class of PostgreSQL's SQLSTATE."""

CODES = (
    *("completed", "running", "already_running", "duplicate", "too_soon", "paused", "queued_already"),
    *("task_raised", "statement_failed", "statement_cancelled", *REFUSED.values(), *FAILED.values()),
    *("timed_out", "cancelled_by_task", *CANCELLED.values(), "connection_lost", *LOST.values()),
)
"""Every code there is."""

LATE = 1000
"""Milliseconds after the time it was due from which a run is called late."""

IN_A_ROW = 3
"""How many skips by one holder are more than a chance."""


@dataclass(frozen=True, slots=True)
class Why:
    """A stable code, and a sentence."""

    code: str
    sentence: str


def code_of(status: str, reason: str | None, error_type: str | None, sqlstate: str | None) -> str:
    """The code of a run, from its outcome or from its row."""
    match status:
        case "skipped":
            return reason or "skipped"
        case "failed":
            return FAILED.get(error_type or "") or refused(sqlstate)
        case "cancelled":
            return CANCELLED.get(error_type or "", "cancelled_by_task")
        case "lost":
            return LOST.get(error_type or "", "connection_lost")
    return status


def refused(sqlstate: str | None) -> str:
    """The code of a run that failed with an exception which is not one of cronlock's."""
    if sqlstate is None:
        return "task_raised"
    if sqlstate == "57014":
        return "statement_cancelled"
    return REFUSED.get(sqlstate[:2], "statement_failed")


def code(outcome: Outcome) -> str:
    """The code of an outcome."""
    if outcome.status == "skipped":
        return outcome.reason or "skipped"  # of which there may be thousands a second
    failure = outcome.failure
    if failure is None:
        return code_of(outcome.status, outcome.reason, None, None)
    return code_of(outcome.status, outcome.reason, failure.type, failure.sqlstate)


def listed(run: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `stats.runs` as programs get it: with its code."""
    return {**run, "code": code_of(run["status"], run["reason"], run["error_type"], run["error_sqlstate"])}


def explain(run: Mapping[str, Any]) -> Why:
    """The code and the sentence for a row of `stats.run`."""
    found = code_of(run["status"], run["reason"], run["error_type"], run["error_sqlstate"])
    return Why(found, told(found, run) + lateness(run))


def document(run: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `stats.run` as programs get it: with its code, its explanation and its holder."""
    why = explain(run)
    holder = {name.removeprefix("blocker_"): value for name, value in run.items() if name.startswith("blocker_")}
    kept = {name: value for name, value in run.items() if name != "id" and not name.startswith(("blocker_", "streak_"))}
    return {
        **kept,
        "holder": holder if holder["task"] else None,
        "skipped_in_a_row": run["streak_skips"] or None,
        "skipped_in_a_row_ms": run["streak_ms"] if run["streak_skips"] else None,
        "code": why.code,
        "explanation": why.sentence,
    }


def told(code: str, run: Mapping[str, Any]) -> str:
    """What happened, without when it was due."""
    match run["status"]:
        case "skipped":
            return f"skipped: {skip(run)}"
        case "running":
            return running(run)
        case "completed":
            kept = "it held its lock to the end" if is_guarded(run) else "what it wrote was committed with it"
            return f"completed in {span(run['duration_ms'])}; {kept}"
        case "lost":
            return lost(code, run)
        case "timed_out":
            return f"timed out: {run['error_message']}; {left(run)}"
    told = f"{run['status']}: {named(run)}"
    return told if code in ("transaction_ended", "unrecordable") else f"{told}; {left(run)}"


def is_guarded(run: Mapping[str, Any]) -> bool:
    """Whether the run worked on connections of its own, beside the transaction that held its lock."""
    return bool(run["mode"] == "guard")


def left(run: Mapping[str, Any]) -> str:
    """What became of the work of a run that did not complete."""
    return "what it had committed itself stays" if is_guarded(run) else "what it wrote was rolled back"


def named(run: Mapping[str, Any]) -> str:
    """The error of a run: its type and its message, where they are known."""
    state = f" (SQLSTATE {run['error_sqlstate']})" if run["error_sqlstate"] else ""
    if run["error_type"] == "Unrecordable":
        return "PostgreSQL refused the record of its end, so that its error is only in the server's log"
    told = ": ".join(part for part in (run["error_type"], run["error_message"]) if part)
    return (told or "its error was not written") + state


def lost(code: str, run: Mapping[str, Any]) -> str:
    """How a run was lost."""
    process = f"its process ({run['pid']} on {run['host']})"
    if code == "process_gone":
        return (
            f"lost: {process} or its connection was gone before it said how the run ended, at latest"
            f" {span(run['duration_ms'])} after it began; {left(run)}"
        )
    seen = f" ({named(run)})" if run["error_type"] not in (None, "LockLost", "CancelledError") else ""
    return (
        f"lost: {process} saw, at latest {span(run['duration_ms'])} after it began, that the connection, and with it"
        f" the lock, was gone{seen}; {left(run)}"
    )


def skip(run: Mapping[str, Any]) -> str:
    """Why nothing was run."""
    match run["reason"]:
        case "paused":
            return "the task was paused"
        case "already_running":
            return held(run) + streak(run)
        case "duplicate":
            occurrence = f" {run['occurrence']}" if run["occurrence"] else ""
            return f"its occurrence{occurrence} already had a run{blocker(run)}"
        case "too_soon":
            interval = run.get("min_interval")
            least = f" (min_interval {span(interval / timedelta(milliseconds=1))})" if interval else ""
            return f"the last completed run was not long enough ago{least}{blocker(run)}"
        case "queued_already":
            return "a job of this task from an earlier call was still waiting or at work"
    return str(run["reason"]).replace("_", " ")


def blocker(run: Mapping[str, Any]) -> str:
    """The earlier run that a duplicate, or one that came too soon, was skipped for."""
    if run["blocked_by"] is None:
        return ""
    if run["blocker_task"] is None:
        return f": run {run['blocked_by']} (its row has been pruned since)"
    told = f": run {run['blocked_by']}, started {span(run['blocker_elapsed_ms'])} before on host {run['blocker_host']}"
    if run["blocker_left_ms"] is None:
        return f"{told}; it is still running"
    if run["blocker_left_ms"] > 0:
        return f"{told}; it ended {run['blocker_status']} {span(run['blocker_left_ms'])} later"
    return f"{told}; it had ended {run['blocker_status']} {span(-run['blocker_left_ms'])} before"


def held(run: Mapping[str, Any]) -> str:
    """Who held the lock."""
    if run["blocked_by"] is None:
        application = f" ({run['holder_application']})" if run["holder_application"] else ""
        if run["holder_pid"] is None:
            return "a prepared transaction held the lock, with no process behind it; cronlock locks names it"
        return f"database backend {run['holder_pid']}{application} held the lock; it is not one of cronlock's runs"
    if run["blocker_task"] is None:
        return f"run {run['blocked_by']} held the lock (its row has been pruned since)"
    told = (
        f"run {run['blocked_by']} of {run['blocker_task']} held the lock, started"
        f" {span(run['blocker_elapsed_ms'])} before, on host {run['blocker_host']} (process {run['blocker_pid']})"
    )
    if run["blocker_left_ms"] is None:
        stopping = ", though it was told to stop" if run["blocker_stopping_at"] else ""
        return f"{told}; it is still running{stopping}"
    return f"{told}; it ended {run['blocker_status']} {span(run['blocker_left_ms'])} later"


def streak(run: Mapping[str, Any]) -> str:
    """How long this holder has been in the way, where that is more than a chance."""
    skips = run["streak_skips"] or 0
    if skips < IN_A_ROW:
        return ""
    more = " or more" if skips >= run["streak_limit"] else ""
    return f"; the task was skipped {skips:,}{more} times in a row by this holder, for {span(run['streak_ms'])}"


def blocked(row: Mapping[str, Any]) -> str:
    """The sentence for a row of `stats.BLOCKED`: one holder keeps a task from running."""
    if row["blocked_by"] is not None:
        who = f"run {row['blocked_by']}"
    elif row["holder_pid"] is not None:
        who = f"database backend {row['holder_pid']} ({row['holder_application'] or 'without a name'})"
    else:
        who = "a prepared transaction"
    return f"{row['task']} has been skipped for {span(row['skipped_ms'])} in a row: {who} still holds its lock"


def running(run: Mapping[str, Any]) -> str:
    """What a run is at."""
    told = f"running for {span(run['duration_ms'])} in process {run['pid']} on {run['host']}"
    if run["progress_done"] is not None:
        told += f", {run['progress_done']} of {run['progress_total'] or 'unknown'} done"
    if run["stopping_at"] is not None:
        return f"{told}; it was told to stop, but its code has not returned and keeps the lock"
    if run["cancel_requested_at"] is not None:
        return f"{told}; {run['cancel_requested_by'] or 'an operator'} asked for its end"
    return told


def lateness(run: Mapping[str, Any]) -> str:
    """How long after the time it was due a run began, where that is known and is long."""
    if (late := run["late_ms"]) is None or late < LATE:
        return ""
    began = "the call came" if run["status"] == "skipped" else "it began"
    return f"; {began} {span(late)} after {run['scheduled_for'].isoformat(timespec='seconds')}, when it was due"


def span(milliseconds: float | None) -> str:
    """A duration for people: 850 ms, 12.3 s, 4 min 5 s, 2 h 3 min, 3 d 4 h."""
    if milliseconds is None:
        return "-"
    seconds = max(0.0, milliseconds / 1000)
    if seconds < 1:
        return f"{max(0.0, milliseconds):.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def job_document(job: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `stats.job` as programs get it: with its code and its explanation; payload and result as they are."""
    why = explain_job(job)
    hidden = ("has_worker", "is_served", "is_early", "is_overdue", "is_paused", "due_in_ms")
    kept = {name: value for name, value in job.items() if name not in hidden}
    return {
        **kept,
        "payload": Result(job["payload"]),
        "result": result_of(job["result"]),
        "attempted": job["attempted"] or [],
        "code": why.code,
        "explanation": why.sentence,
    }


def explain_job(job: Mapping[str, Any]) -> Why:
    """The code and the sentence for a row of `stats.job`: what it waits for, or how it ended."""
    attempt = f"attempt {job['attempts']} of {job['max_attempts']}"
    error = ": ".join(part for part in (job["error_type"], job["error_message"]) if part)
    match job["status"]:
        case "completed":
            return Why("completed", f"completed in {attempt}, {span(job['duration_ms'])} after that began")
        case "failed":
            return Why("failed", f"failed in {attempt}: {error or 'its error was not written'}")
        case "cancelled":
            return Why("cancelled", f"cancelled after {job['attempts']} attempt{'s' * (job['attempts'] != 1)}: {error}")
        case "processing":
            return processing(job, attempt)
    left = f"attempt {job['attempts'] + 1} of {job['max_attempts']}"
    if job["is_early"]:
        return Why("waiting", f"waits for its time, {span(job['due_in_ms'])} from now; then {left}")
    due = f"due for {span(-job['due_in_ms'])}"
    if job["is_paused"]:
        return Why("paused", f"{due}, but its task is paused; cronlock resume {job['task']} lets workers take it")
    if not job["is_served"]:
        return Why("no_worker", f"{due}, but no worker that is there serves the queue {job['queue']!r}")
    if not job["has_worker"]:
        return Why("no_handler", f"{due}, but no worker of its queue that is there has the task {job['task']!r}")
    return Why("due", f"{due}; a worker that is there takes it in its turn, for {left}")


def processing(job: Mapping[str, Any], attempt: str) -> Why:
    """What a job that a worker has is at."""
    where = f" in process {job['worker_pid']} on {job['worker_host']}" if job["worker_host"] else ""
    told = f"{attempt} has been at work for {span(job['duration_ms'])}{where}"
    if job["progress_done"] is not None:
        told += f", {job['progress_done']} of {job['progress_total'] or 'unknown'} done"
    if job["is_overdue"]:
        return Why("overdue", f"{told}; its lease has run out, and any worker takes the job back")
    if job["cancel_requested_at"] is not None:
        told += f"; {job['cancel_requested_by'] or 'an operator'} asked for its end"
    return Why("processing", told)
