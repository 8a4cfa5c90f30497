"""Why a run ended as it did, or has not ended, in one sentence for people."""

from typing import Any


def explain(run: dict[str, Any]) -> str:
    """The sentence for a row of `stats.run`."""
    match run["status"]:
        case "skipped":
            return f"skipped: {skip(run)}"
        case "running":
            return running(run)
        case "completed":
            return f"completed in {span(run['duration_ms'])}; what it wrote was committed with it"
        case "lost":
            return (
                f"lost: its process ({run['pid']} on {run['host']}) or its connection was gone before it said how"
                " the run ended; what it wrote was rolled back"
            )
        case "timed_out":
            return f"timed out: {run['error_message']}; what it wrote was rolled back"
    told = f"{run['status']}: {run['error_type']}: {run['error_message']}"
    return told if run["error_type"] == "TransactionEnded" else f"{told}; what it wrote was rolled back"


def skip(run: dict[str, Any]) -> str:
    """Why nothing was run."""
    if run["reason"] == "paused":
        return "the task was paused"
    if run["reason"] != "already_running":
        return str(run["reason"]).replace("_", " ")
    if run["blocked_by"] is None:
        application = f" ({run['holder_application']})" if run["holder_application"] else ""
        return f"database backend {run['holder_pid']}{application} held the lock; it is not one of cronlock's runs"
    if run["blocker_task"] is None:
        return f"run {run['blocked_by']} held the lock (its row has been pruned since)"
    told = (
        f"run {run['blocked_by']} of {run['blocker_task']} held the lock, started"
        f" {span(run['blocker_elapsed_ms'])} before, on host {run['blocker_host']} (process {run['blocker_pid']})"
    )
    if run["blocker_left_ms"] is None:
        return f"{told}; it is still running"
    return f"{told}; it ended {run['blocker_status']} {span(run['blocker_left_ms'])} later"


def running(run: dict[str, Any]) -> str:
    """What a run is at."""
    told = f"running for {span(run['duration_ms'])} in process {run['pid']} on {run['host']}"
    if run["progress_done"] is not None:
        told += f", {run['progress_done']} of {run['progress_total'] or 'unknown'} done"
    if run["stopping_at"] is not None:
        return f"{told}; it was told to stop, but its code has not returned and keeps the lock"
    if run["cancel_requested_at"] is not None:
        return f"{told}; {run['cancel_requested_by'] or 'an operator'} asked for its end"
    return told


def span(milliseconds: float | None) -> str:
    """A duration for people: 850 ms, 12.3 s, 4 min 5 s, 2 h 3 min, 3 d 4 h."""
    if milliseconds is None:
        return "-"
    seconds = max(0.0, milliseconds / 1000)
    if seconds < 1:
        return f"{milliseconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
