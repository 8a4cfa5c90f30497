"""What the commands show: reads over task, run and the two views, each one statement.

Rows are dictionaries in the order in which their columns are shown; moments are in the session's time zone.
"""

from datetime import timedelta
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from cronlock.runs import HERE

Row = dict[str, Any]
Connection = psycopg.Connection[Any]

REVISIONS = "SELECT version_num FROM {alembic_version}"

DURATION = "(extract(epoch FROM coalesce(r.finished_at, clock_timestamp()) - r.started_at) * 1000)::bigint"

RUNS = f"""
SELECT r.id AS run_id, r.task, r.status, r.reason, r.trigger, r.caller, r.started_at, r.finished_at,
       {DURATION} AS duration_ms, r.host, r.pid, r.blocked_by, r.error_type, r.error_message
  FROM {{run}} r
 WHERE {{conditions}}
 ORDER BY r.id DESC
 LIMIT {{limit}}
"""

RUN = f"""
SELECT r.id AS run_id, r.*, {DURATION} AS duration_ms,
       b.task AS blocker_task, b.status AS blocker_status, b.host AS blocker_host, b.pid AS blocker_pid,
       (extract(epoch FROM r.started_at - b.started_at) * 1000)::bigint AS blocker_elapsed_ms,
       (extract(epoch FROM b.finished_at - r.started_at) * 1000)::bigint AS blocker_left_ms
  FROM {{run}} r LEFT JOIN {{run}} b ON b.id = r.blocked_by
 WHERE r.id = {{id}}
"""

TASKS = """
SELECT h.task, h.schedule, h.timezone, t.mode, t.lock_name, t.lock_key, h.paused_at, h.paused_by, h.paused_reason,
       h.last_run_id, h.last_status, h.last_started_at, h.last_finished_at, h.last_completed_at, h.calls,
       (extract(epoch FROM h.p50_duration) * 1000)::bigint AS p50_ms,
       (extract(epoch FROM h.p95_duration) * 1000)::bigint AS p95_ms,
       h.success_rate::float8, h.skip_rate::float8, t.first_seen_at, t.last_seen_at
  FROM {task_health} h JOIN {task} t ON t.name = h.task
 ORDER BY h.task
"""

LOCKS = f"""
SELECT v.lock_key, v.lock_name, v.task, v.run_id, v.started_at,
       (extract(epoch FROM clock_timestamp() - coalesce(v.started_at, v.xact_start, x.prepared)) * 1000)::bigint
           AS held_ms,
       v.stopping_at, v.host, v.process_pid, v.backend_pid, v.application_name, v.role, v.client_addr::text,
       v.state, x.gid AS prepared_transaction
  FROM {{lock_holder}} v
  LEFT JOIN LATERAL (
        SELECT p.gid, p.prepared
          FROM pg_catalog.pg_locks l
          JOIN pg_catalog.pg_locks t ON t.locktype = 'transactionid' AND t.pid IS NULL
           AND t.virtualtransaction = l.virtualtransaction
          JOIN pg_catalog.pg_prepared_xacts p ON p.transaction = t.transactionid
         WHERE v.backend_pid IS NULL AND l.pid IS NULL
           AND l.locktype = 'advisory' AND l.objsubid = 1 AND l.database = {HERE}
           AND l.classid::bigint = (v.lock_key >> 32) & 4294967295
           AND l.objid::bigint = v.lock_key & 4294967295
         LIMIT 1) x ON true
 ORDER BY held_ms DESC NULLS LAST
"""


def runs(
    connection: Connection,
    schema: str,
    *,
    task: str | None = None,
    status: str | None = None,
    since: timedelta | None = None,
    before: int | None = None,
    limit: int = 50,
) -> list[Row]:
    """Runs, newest first; `before` continues after the run of that id."""
    conditions: list[sql.Composable] = [sql.SQL("true")]
    if task is not None:
        conditions.append(sql.SQL("r.task = {}").format(task))
    if status is not None:
        conditions.append(sql.SQL("r.status = {}").format(status))
    if since is not None:
        conditions.append(sql.SQL("r.started_at >= clock_timestamp() - {}::interval").format(since))
    if before is not None:
        conditions.append(sql.SQL("r.id < {}").format(before))
    return read(connection, RUNS, schema, conditions=sql.SQL(" AND ").join(conditions), limit=limit)


def run(connection: Connection, schema: str, run_id: int) -> Row | None:
    """Everything of a run, and of the run that blocked it; None if there is no such run."""
    return next(iter(read(connection, RUN, schema, id=run_id)), None)


def tasks(connection: Connection, schema: str) -> list[Row]:
    """Every task that the database knows, with how it fared over its last 1,000 calls."""
    return read(connection, TASKS, schema)


def task_names(connection: Connection, schema: str) -> list[str]:
    """The names of the tasks that the database knows."""
    return [row["name"] for row in read(connection, "SELECT name FROM {task} ORDER BY name", schema)]


def locks(connection: Connection, schema: str) -> list[Row]:
    """Who holds an advisory lock of this database, oldest first; prepared transactions have no backend."""
    return read(connection, LOCKS, schema)


def revisions(connection: Connection, schema: str) -> list[str]:
    """The revisions of the schema; raises psycopg's `UndefinedTable` or `InvalidSchemaName` if there is none."""
    return [row["version_num"] for row in read(connection, REVISIONS, schema)]


def read(connection: Connection, text: str, schema: str, **values: Any) -> list[Row]:
    """The rows of a statement over the schema's tables, in a transaction of its own; also of one that writes."""
    tables = ("run", "task", "task_health", "lock_holder", "alembic_version")
    names = {name: sql.Identifier(schema, name) for name in tables}
    with connection.transaction(), connection.cursor(row_factory=dict_row) as cursor:
        cursor.execute(
            "SELECT pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true),"
            " pg_catalog.set_config('statement_timeout', '30s', true),"
            " pg_catalog.set_config('lock_timeout', '5s', true)"
        )
        cursor.execute(sql.SQL(text).format(**names, **values))
        return cursor.fetchall()
