"""What an operator changes from outside: runs, tasks and jobs. Each change is one statement."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from psycopg import sql

from cronlock import invalidation, jobs, runs
from cronlock.runs import HERE
from cronlock.stats import Connection, Row, job, names_of, read

PAUSE = """
UPDATE {task} SET paused_at = coalesce(paused_at, clock_timestamp()), paused_by = {by}, paused_reason = {reason}
 WHERE name = {name}
 RETURNING name AS task, paused_at, paused_by, paused_reason
"""

RESUME = """
UPDATE {task} t SET paused_at = NULL, paused_by = NULL, paused_reason = NULL
  FROM (SELECT name, paused_at, paused_by FROM {task} WHERE name = {name} FOR NO KEY UPDATE) was
 WHERE t.name = was.name
 RETURNING t.name AS task, was.paused_at AS was_paused_at, was.paused_by AS was_paused_by
"""

CANCEL = """
UPDATE {run} SET cancel_requested_at = coalesce(cancel_requested_at, clock_timestamp()),
       cancel_requested_by = coalesce(cancel_requested_by, {by})
 WHERE id = {id} AND status = 'running'
 RETURNING id
"""

# One statement: a backend that has let the lock go since, or that serves somebody else now, is left alone.
TERMINATE = f"""
SELECT pg_catalog.pg_terminate_backend(held.pid)
  FROM (SELECT DISTINCT l.pid
          FROM {{run}} r
          JOIN pg_catalog.pg_locks l ON l.locktype = 'advisory' AND l.granted AND l.pid = r.backend_pid
           AND l.classid::bigint = r.lock_classid AND l.objid::bigint = r.lock_objid
           AND l.objsubid = r.lock_objsubid AND l.database = {HERE}
          JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid AND a.application_name = 'cronlock:' || r.task
         WHERE r.id = {{id}} AND r.status = 'running') held
"""


def pause(connection: Connection, schema: str, task: str, *, by: str, reason: str | None) -> Row | None:
    """Have calls of the task skipped from now on; None if there is no such task."""
    return change(connection, PAUSE, schema, name=task, by=by, reason=reason)


def resume(connection: Connection, schema: str, task: str) -> Row | None:
    """Let calls of the task run again; None if there is no such task."""
    return change(connection, RESUME, schema, name=task)


def cancel(connection: Connection, schema: str, run_id: int, *, by: str) -> bool:
    """Ask the process of a run to cancel it, which it does within a second; False if it does not run."""
    return change(connection, CANCEL, schema, id=run_id, by=by) is not None


def terminate(connection: Connection, schema: str, run_id: int) -> bool:
    """End the backend of a run if it still holds that run's lock under its name; whether it was told to."""
    row = change(connection, TERMINATE, schema, id=run_id)
    return row is not None and bool(row["pg_terminate_backend"])


def recover(connection: Connection, schema: str) -> list[Row]:
    """Close every run whose process died before it said how it ended; the rows that were closed."""
    return read(connection, runs.RECOVER, schema)


def prune(
    connection: Connection, schema: str, retentions: dict[str, float], *, is_dry: bool
) -> Iterator[tuple[int, Counter[str]]]:
    """Delete what is older than its retention, or count it, a window of ids and a transaction at a time.

    Gives after each window up to which id it came, and how many rows of each status it was about.
    """
    text = runs.PRUNABLE if is_dry else runs.PRUNE
    after: int | None = 0
    while after is not None:
        ((numbers, after),) = (
            row.values() for row in read(connection, text, schema, after=after, window=runs.WINDOW, **retentions)
        )
        yield after or 0, Counter(json.loads(numbers))


CANCEL_TRIES = 10
"""How often a job is looked for that is being moved at every look."""
RETRIED_AT_ONCE = 500


def cancel_job(connection: Connection, schema: str, job_id: int, *, by: str) -> tuple[str, Row | None]:
    """Cancel a job: what became of that, and the job as it was then; None if there is none.

    - "cancelled": nobody worked on it, and nobody will;
    - "asked": its worker stops it within a second, if it does not complete before;
    - "ended": it had ended before.
    """
    for _ in range(CANCEL_TRIES):
        if (told := change(connection, jobs.CANCEL, schema, id=job_id, by=by)) is not None:
            return "asked" if told["is_asked"] else "cancelled", job(connection, schema, job_id)
        row = job(connection, schema, job_id)
        if row is None or row["finished_at"] is not None:
            break
    return "ended", row


def retry_job(connection: Connection, schema: str, job_id: int, *, max_attempts: int) -> tuple[bool, Row | None]:
    """Have a job that failed or was cancelled tried again, with its id: whether it is, and the job; None if none is.

    `max_attempts` more times, if the database does not know how many its task has. A job that is retried is told as the
    retry made it: no worker sees it before that is committed.
    """
    chosen = sql.SQL(jobs.RETRY_ONE).format(**names_of(schema), id=job_id)
    with connection.transaction():
        is_retried = bool(read(connection, jobs.RETRY, schema, chosen=chosen, max_attempts=max_attempts))
        return is_retried, job(connection, schema, job_id)


def retry_failed(
    connection: Connection,
    schema: str,
    *,
    task: str | None,
    max_attempts: int,
    limit: int,
    after: int = 0,
) -> tuple[list[int], int | None]:
    """Have jobs that failed tried again, a transaction of some hundred: their ids, and where the next one begins."""
    window = min(limit, RETRIED_AT_ONCE)
    chosen = sql.SQL(jobs.RETRY_FAILED).format(**names_of(schema), after=after, task_name=task, limit=window)
    ids = [row["id"] for row in read(connection, jobs.RETRY, schema, chosen=chosen, max_attempts=max_attempts)]
    return ids, max(ids) if len(ids) == window else None


def prune_jobs(
    connection: Connection, schema: str, retentions: dict[str, float], *, is_dry: bool
) -> Iterator[tuple[int, Counter[str]]]:
    """As `prune`, for jobs that have ended."""
    text = jobs.PRUNABLE if is_dry else jobs.PRUNE
    after: int | None = 0
    while after is not None:
        ((numbers, after),) = (
            row.values() for row in read(connection, text, schema, after=after, window=jobs.WINDOW, **retentions)
        )
        yield after or 0, Counter(json.loads(numbers))


def prune_keys(connection: Connection, schema: str, *, is_dry: bool) -> Iterator[int]:
    """Delete the idempotency keys that have expired, so many at a time, or count them; gives their numbers."""
    if is_dry:
        ((number,),) = (row.values() for row in read(connection, jobs.PRUNABLE_KEYS, schema))
        yield number
        return
    number = jobs.WINDOW
    while number == jobs.WINDOW:
        ((number,),) = (row.values() for row in read(connection, jobs.PRUNE_KEYS, schema, window=jobs.WINDOW))
        yield number


def prune_invalidations(
    connection: Connection, schema: str, kept: float, *, is_dry: bool
) -> Iterator[tuple[int, Counter[str]]]:
    """As `prune`, for invalidations that are older than `kept` seconds: how many were delivered, and undelivered."""
    text = invalidation.PRUNABLE if is_dry else invalidation.PRUNE
    after: int | None = 0
    while after is not None:
        ((numbers, after),) = (
            row.values()
            for row in read(connection, text, schema, after=after, window=invalidation.PRUNE_WINDOW, kept=kept)
        )
        found = json.loads(numbers).values()
        undelivered = sum(missed for _, missed in found)
        counts = {"delivered": sum(number for number, _ in found) - undelivered, "undelivered": undelivered}
        yield after or 0, Counter({status: number for status, number in counts.items() if number})


def change(connection: Connection, text: str, schema: str, **values: Any) -> Row | None:
    """The row that a statement changed, if it did."""
    return next(iter(read(connection, text, schema, **values)), None)
