"""What an operator changes from outside: pause, resume, cancel, terminate, recover, prune. Each is one statement."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from cronlock import runs
from cronlock.runs import HERE
from cronlock.stats import Connection, Row, read

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


def change(connection: Connection, text: str, schema: str, **values: Any) -> Row | None:
    """The row that a statement changed, if it did."""
    return next(iter(read(connection, text, schema, **values)), None)
