"""What the commands, the admin routes and the metrics show: reads over tasks, runs, jobs and the views.

The newest rows of a task are asked for as `task >= x AND task <= x ORDER BY task, id DESC`, which only an index by
task and id can give. Asked for as `task = x ORDER BY id DESC`, the planner may walk through the ids of all tasks, past
a million skips of another.

Rows are dictionaries in the order in which their columns are shown; moments are in the session's time zone.
"""

from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from cronlock import jobs
from cronlock.runs import HERE, NOT_HELD

STATEMENT_TIMEOUT = ContextVar("STATEMENT_TIMEOUT", default="30s")
"""How long one statement of `read` may take; the admin routes give less."""

Row = dict[str, Any]
Connection = psycopg.Connection[Any]

REVISIONS = "SELECT version_num FROM {alembic_version}"

DURATION = "(extract(epoch FROM coalesce(r.finished_at, clock_timestamp()) - r.started_at) * 1000)::bigint"

COLUMNS = f"""r.id AS run_id, r.task, r.status, r.reason, r.trigger, r.caller, r.started_at, r.finished_at,
       {DURATION} AS duration_ms, r.host, r.pid, r.blocked_by, r.error_type, r.error_message, r.error_sqlstate"""

RUNS = f"""
SELECT {COLUMNS}
  FROM {{run}} r
 WHERE {{conditions}}
 ORDER BY {{order}}r.id DESC
 LIMIT {{limit}}
"""

# Where most rows are skips, the last completed ones of each task are soon found by its index, and by their ids late.
COMPLETED = f"""
WITH RECURSIVE named AS (
    (SELECT n.task FROM {{run}} n ORDER BY n.task LIMIT 1)
    UNION ALL
    SELECT (SELECT n.task FROM {{run}} n WHERE n.task > named.task ORDER BY n.task LIMIT 1)
      FROM named WHERE named.task IS NOT NULL)
SELECT {COLUMNS}
  FROM named
 CROSS JOIN LATERAL (
        SELECT r.* FROM {{run}} r WHERE r.task >= named.task AND r.task <= named.task AND {{conditions}}
         ORDER BY r.task, r.id DESC LIMIT {{limit}}) r
 ORDER BY r.id DESC
 LIMIT {{limit}}
"""

STREAK_LIMIT = 1000
"""Up to how many skips in a row are counted."""

SAME_HOLDER = """n.status = 'skipped' AND n.reason = 'already_running'
           AND n.blocked_by IS NOT DISTINCT FROM r.blocked_by AND n.holder_pid IS NOT DISTINCT FROM r.holder_pid
           AND n.holder_application IS NOT DISTINCT FROM r.holder_application"""

# A run's id is lower than those of the skips it causes; whatever else held the lock did so since the task's last run.
RUN = f"""
SELECT r.id AS run_id, r.*, {DURATION} AS duration_ms,
       (extract(epoch FROM r.started_at - r.scheduled_for) * 1000)::bigint AS late_ms,
       b.task AS blocker_task, b.status AS blocker_status, b.host AS blocker_host, b.pid AS blocker_pid,
       b.instance AS blocker_instance, b.backend_pid AS blocker_backend_pid, b.started_at AS blocker_started_at,
       b.stopping_at AS blocker_stopping_at, b.finished_at AS blocker_finished_at,
       (extract(epoch FROM r.started_at - b.started_at) * 1000)::bigint AS blocker_elapsed_ms,
       (extract(epoch FROM b.finished_at - r.started_at) * 1000)::bigint AS blocker_left_ms,
       s.skips AS streak_skips, {STREAK_LIMIT} AS streak_limit,
       (extract(epoch FROM r.started_at - s.first_at) * 1000)::bigint AS streak_ms
  FROM {{run}} r
  LEFT JOIN {{run}} b ON b.id = r.blocked_by
  LEFT JOIN LATERAL (
        SELECT coalesce(r.blocked_by, (SELECT n.id FROM {{run}} n
                         WHERE n.task >= r.task AND n.task <= r.task AND n.id < r.id AND n.status <> 'skipped'
                         ORDER BY n.task, n.id DESC LIMIT 1), 0) AS id) since ON r.reason = 'already_running'
  LEFT JOIN LATERAL (
        SELECT n.id, n.started_at FROM {{run}} n
         WHERE n.task >= r.task AND n.task <= r.task AND n.id > since.id AND n.id <= r.id AND {SAME_HOLDER}
         ORDER BY n.task DESC, n.id LIMIT 1) first ON true
  LEFT JOIN LATERAL (
        SELECT count(*) AS skips, first.started_at AS first_at
          FROM (SELECT FROM {{run}} n
                 WHERE n.task = r.task AND n.id >= first.id AND n.id <= r.id AND {SAME_HOLDER}
                 LIMIT {STREAK_LIMIT}) w) s ON first.id IS NOT NULL
 WHERE r.id = {{id}}
"""

TASKS = """
SELECT h.task, h.schedule, h.timezone, t.mode, t.lock_name, t.lock_key, h.paused_at, h.paused_by, h.paused_reason,
       h.last_run_id, h.last_status, h.last_started_at, h.last_finished_at, h.last_completed_at, h.calls,
       (extract(epoch FROM h.p50_duration) * 1000)::bigint AS p50_ms,
       (extract(epoch FROM h.p95_duration) * 1000)::bigint AS p95_ms,
       h.success_rate::float8, h.skip_rate::float8, t.first_seen_at, t.last_seen_at,
       round((t.options ->> 'timeoutSeconds')::float8 * 1000)::bigint AS timeout_ms, t.options ->> 'queue' AS queue,
       (t.options ->> 'maxAttempts')::integer AS max_attempts, t.options ->> 'key' AS key,
       coalesce((t.options ->> 'maxConcurrent')::integer, 1) AS max_concurrent,
       round((t.options ->> 'minIntervalSeconds')::float8 * 1000)::bigint AS min_interval_ms
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
 LIMIT {{limit}}
"""

# What keeps a task from running now: the task's last row is a skip by a holder that still holds the lock.
BLOCKED = f"""
SELECT r.task, r.blocked_by, r.holder_pid, r.holder_application, first.id AS first_skip,
       (extract(epoch FROM r.started_at - first.started_at) * 1000)::bigint AS skipped_ms
  FROM {{task}} t
 CROSS JOIN LATERAL (
        SELECT n.* FROM {{run}} n WHERE n.task >= t.name AND n.task <= t.name ORDER BY n.task, n.id DESC LIMIT 1) r
 CROSS JOIN LATERAL (
        SELECT coalesce(r.blocked_by, (SELECT n.id FROM {{run}} n
                         WHERE n.task >= r.task AND n.task <= r.task AND n.id < r.id AND n.status <> 'skipped'
                         ORDER BY n.task, n.id DESC LIMIT 1), 0) AS id) since
 CROSS JOIN LATERAL (
        SELECT n.id, n.started_at FROM {{run}} n
         WHERE n.task >= r.task AND n.task <= r.task AND n.id > since.id AND n.id <= r.id AND {SAME_HOLDER}
         ORDER BY n.task DESC, n.id LIMIT 1) first
 WHERE r.status = 'skipped' AND r.reason = 'already_running'
   AND CASE WHEN r.blocked_by IS NOT NULL
            THEN EXISTS (SELECT FROM {{run}} b WHERE b.id = r.blocked_by AND b.status = 'running')
            ELSE EXISTS (SELECT FROM pg_catalog.pg_locks l
                          WHERE l.locktype = 'advisory' AND l.granted AND l.pid IS NOT DISTINCT FROM r.holder_pid
                            AND l.database = {HERE} AND l.classid::bigint = r.lock_classid
                            AND l.objid::bigint = r.lock_objid AND l.objsubid = r.lock_objsubid) END
"""

# Whether a worker that is there serves a job's queue and has its task.
HAS_WORKER = """EXISTS (SELECT FROM {worker} k
        WHERE k.seen_until > clock_timestamp() AND j.queue = ANY (k.queues) AND j.task = ANY (k.tasks))"""

JOB_COLUMNS = """j.id AS job_id, j.task, j.status, j.queue, j.priority, j.attempts, j.max_attempts, j.enqueued_at,
       j.run_at, j.started_at, j.finished_at, j.error_type, j.error_message"""

# Its attempts that did not complete, and what a queued job waits for: who is there, and who is before it.
JOB = f"""
SELECT {JOB_COLUMNS}, j.payload, j.trigger, j.occurrence, j.idempotency_key, j.losses, j.worker, j.lease_until,
       j.cancel_requested_at, j.cancel_requested_by, j.progress_done, j.progress_total, j.result,
       {HAS_WORKER} AS has_worker,
       j.run_at > clock_timestamp() AS is_early, j.lease_until < clock_timestamp() AS is_overdue,
       (extract(epoch FROM j.run_at - clock_timestamp()) * 1000)::bigint AS due_in_ms,
       (extract(epoch FROM coalesce(j.finished_at, clock_timestamp()) - j.started_at) * 1000)::bigint AS duration_ms,
       EXISTS (SELECT FROM {{worker}} k WHERE k.seen_until > clock_timestamp() AND j.queue = ANY (k.queues))
           AS is_served,
       EXISTS (SELECT FROM {{task}} t WHERE t.name = j.task AND t.paused_at IS NOT NULL) AS is_paused,
       w.host AS worker_host, w.pid AS worker_pid, j.log,
       (SELECT json_agg(json_build_object('attempt', a.attempt, 'status', a.status, 'started_at', a.started_at,
               'finished_at', a.finished_at, 'worker', a.worker, 'error_type', a.error_type,
               'error_message', a.error_message, 'error_traceback', a.error_traceback,
               'error_sqlstate', a.error_sqlstate, 'log', a.log) ORDER BY a.attempt)
          FROM (SELECT a.* FROM {{job_attempt}} a WHERE a.job_id = {{id}} ORDER BY a.attempt DESC LIMIT 100) a
       ) AS attempted
  FROM {{job_status}} j LEFT JOIN {{worker}} w ON w.id = j.worker
 WHERE j.id = {{id}}
"""

HISTORY_LOOK = 100_000
"""How many of the newest ended jobs a list looks at where it wants some of them."""

JOBS_LIVE = f"""
SELECT {JOB_COLUMNS}, j.status = 'queued' AND j.run_at <= clock_timestamp() AND NOT {HAS_WORKER} AS has_no_worker
  FROM (SELECT l.*, CASE WHEN l.lease_token IS NULL THEN 'queued' ELSE 'processing' END AS status,
               NULL::timestamptz AS finished_at, NULL::text AS error_type, NULL::text AS error_message
          FROM (SELECT id, task, queue, priority, attempts, max_attempts, enqueued_at, run_at, started_at, lease_token
                  FROM {{job}}
                 UNION ALL
                SELECT id, task, queue, priority, attempts, max_attempts, enqueued_at, run_at, NULL, NULL
                  FROM {{job_waiting}}) l) j
 WHERE {{conditions}} ORDER BY j.id DESC LIMIT {{limit}}
"""

JOBS_ENDED = f"""
SELECT {JOB_COLUMNS}, false AS has_no_worker
  FROM (SELECT h.* FROM {{job_history}} h WHERE {{which}} ORDER BY h.id DESC LIMIT {{look}}) j
 WHERE {{conditions}} ORDER BY j.id DESC LIMIT {{limit}}
"""

WORKERS = """
SELECT w.id AS worker, w.host, w.pid, w.release, w.queues, w.tasks, w.concurrency, w.is_idle, w.is_draining,
       w.started_at, w.seen_until > clock_timestamp() AS is_there
  FROM {worker} w ORDER BY w.started_at
"""

BLOCKED_COLUMNS = ("task", "blocked_by", "holder_pid", "holder_application", "first_skip", "skipped_ms")

COUNTED = 500_000
"""How many live jobs, and how many that wait, are counted at most."""

GAUGES = {
    "tasks": """
SELECT t.name AS task, t.paused_at IS NOT NULL AS is_paused,
       extract(epoch FROM last.started_at)::float8 AS last_started,
       extract(epoch FROM good.finished_at)::float8 AS last_completed
  FROM {task} t
  LEFT JOIN LATERAL (
        SELECT n.started_at FROM {run} n
         WHERE n.task >= t.name AND n.task <= t.name AND n.status <> 'skipped'
         ORDER BY n.task, n.id DESC LIMIT 1) last ON true
  LEFT JOIN LATERAL (
        SELECT n.finished_at FROM {run} n
         WHERE n.task >= t.name AND n.task <= t.name AND n.status = 'completed'
         ORDER BY n.task, n.id DESC LIMIT 1) good ON true
 ORDER BY t.name""",
    # A row whose lock is free is not running any more, whether its loss has been noticed or not.
    "running": f"""
SELECT t.name AS task, count(r.id) FILTER (WHERE NOT r.is_gone) AS running,
       count(r.id) FILTER (WHERE r.is_gone) AS gone,
       count(r.id) FILTER (WHERE r.stopping_at IS NOT NULL AND NOT r.is_gone) AS stopping,
       coalesce(max(r.age) FILTER (WHERE NOT r.is_gone), 0) AS longest
  FROM {{task}} t
  LEFT JOIN (
        SELECT r.id, r.task, r.stopping_at, {NOT_HELD} AS is_gone,
               extract(epoch FROM clock_timestamp() - r.started_at)::float8 AS age
          FROM {{run}} r WHERE r.status = 'running') r ON r.task = t.name
 GROUP BY t.name ORDER BY t.name""",
    "blocked": BLOCKED,
    # Of the newest failures only: there may be many, and they are found by their ids.
    "lost": """
SELECT count(*) AS lost
  FROM (SELECT r.status, r.finished_at FROM {run} r
         WHERE r.status IN ('failed', 'timed_out', 'cancelled', 'lost') ORDER BY r.id DESC LIMIT 10000) w
 WHERE w.status = 'lost' AND w.finished_at > clock_timestamp() - interval '1 day'""",
    # The columns that the last ORDER BY names keep to the index of what waits.
    "invalidations": """
SELECT t.name AS target, count(w.id) AS waiting,
       coalesce(extract(epoch FROM clock_timestamp() - min(w.created_at)), 0)::float8 AS oldest
  FROM {invalidation_target} t
  LEFT JOIN LATERAL (
        SELECT i.id, i.created_at FROM {invalidation} i
         WHERE i.target >= t.name AND i.target <= t.name AND i.delivered_at IS NULL
         ORDER BY i.target, i.id LIMIT 10000) w ON true
 GROUP BY t.name ORDER BY t.name""",
    # Of the live jobs only, and of no more than so many: what is counted here is read from one end to the other.
    "jobs": f"""
SELECT j.queue, j.task, {HAS_WORKER} AS has_worker, t.name IS NOT NULL AS is_known, j.queued, j.processing, j.overdue,
       j.oldest
  FROM (SELECT l.queue, l.task, count(*) FILTER (WHERE l.lease_token IS NULL) AS queued,
               count(l.lease_token) AS processing, count(*) FILTER (WHERE l.lease_until < clock_timestamp()) AS overdue,
               extract(epoch FROM clock_timestamp() - min(l.run_at) FILTER (WHERE l.lease_token IS NULL))::float8
                   AS oldest
          FROM (SELECT n.queue, n.task, n.lease_token, n.lease_until, n.run_at FROM {{job}} n
                 LIMIT {COUNTED}) l
         GROUP BY l.queue, l.task) j
  LEFT JOIN {{task}} t ON t.name = j.task""",
    "waiting": f"""
SELECT w.queue, count(*) AS waiting FROM (SELECT n.queue FROM {{job_waiting}} n LIMIT {COUNTED}) w GROUP BY w.queue""",
    "workers": """
SELECT k.queues, k.is_idle, k.is_draining FROM {worker} k WHERE k.seen_until > clock_timestamp()""",
    "dead": """
SELECT count(*) FILTER (WHERE f.finished_at > clock_timestamp() - interval '1 day') AS failed
  FROM (SELECT h.finished_at FROM {job_history} h WHERE h.status = 'failed' ORDER BY h.id DESC LIMIT 10000) f""",
    "ended": """
SELECT greatest(c.reltuples::float8, pg_stat_get_live_tuples(c.oid)::float8, 0) AS rows,
       pg_table_size(c.oid) + pg_indexes_size(c.oid) AS bytes
  FROM pg_class c WHERE c.oid = {history_name}::regclass""",
    "rows": """
SELECT greatest(c.reltuples::float8, pg_stat_get_live_tuples(c.oid)::float8, 0) AS rows,
       pg_table_size(c.oid) + pg_indexes_size(c.oid) AS bytes
  FROM pg_class c WHERE c.oid = {run_name}::regclass""",
    # What keeps VACUUM from removing old rows of this database: snapshots and open writes, by who has them.
    "xmin": """
SELECT CASE WHEN a.application_name LIKE 'cronlock:%' THEN 'run'
            WHEN a.application_name LIKE 'cronlock%' THEN 'cronlock' ELSE 'other' END AS held_by,
       max(greatest(age(a.backend_xmin), age(a.backend_xid)))::float8 AS age
  FROM pg_stat_activity a
 WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
   AND (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL)
 GROUP BY 1
 UNION ALL
SELECT 'prepared', max(age(p.transaction))::float8 FROM pg_prepared_xacts p
 WHERE p.database = current_database() HAVING count(*) > 0""",
}
"""What /metrics reads, all in one message."""

GAUGES_TIMEOUT = 2000
"""Milliseconds for all of them together."""
LOCKS_AT_ONCE = 1000


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
        conditions.append(sql.SQL("r.task >= {task} AND r.task <= {task}").format(task=task))
    if status is not None:
        conditions.append(sql.SQL("r.status = {}").format(status))
    if since is not None:
        conditions.append(sql.SQL("r.started_at >= clock_timestamp() - {}::interval").format(since))
    if before is not None:
        conditions.append(sql.SQL("r.id < {}").format(before))
    text = COMPLETED if status == "completed" and task is None else RUNS
    order = sql.SQL("r.task, " if task is not None else "")
    return read(connection, text, schema, conditions=sql.SQL(" AND ").join(conditions), order=order, limit=limit)


def run(connection: Connection, schema: str, run_id: int) -> Row | None:
    """Everything of a run, and of the run that blocked it; None if there is no such run."""
    return next(iter(read(connection, RUN, schema, id=run_id)), None)


def job(connection: Connection, schema: str, job_id: int) -> Row | None:
    """Everything of a job, with its attempts that did not complete; None if there is no such job."""
    return next(iter(read(connection, JOB, schema, id=job_id)), None)


def list_jobs(
    connection: Connection,
    schema: str,
    *,
    task: str | None = None,
    queue: str | None = None,
    status: str | None = None,
    before: int | None = None,
    limit: int = 50,
) -> list[Row]:
    """Jobs, newest first; `before` continues after the job of that id.

    Where only some of those that ended are asked for, no more than the newest `HISTORY_LOOK` are looked at; those that
    failed have an index.
    """
    wanted: list[sql.Composable] = [sql.SQL("true")]
    if task is not None:
        wanted.append(sql.SQL("j.task = {}").format(task))
    if queue is not None:
        wanted.append(sql.SQL("j.queue = {}").format(queue))
    if status is not None:
        wanted.append(sql.SQL("j.status = {}").format(status))
    before_it = sql.SQL("true") if before is None else sql.SQL("{} < {}")

    def conditions(*more: sql.Composable) -> sql.Composable:
        return sql.SQL(" AND ").join([*wanted, *more])

    rows: list[Row] = []
    if status in (None, "queued", "processing"):
        older = before_it if before is None else before_it.format(sql.SQL("j.id"), before)
        rows += read(connection, JOBS_LIVE, schema, conditions=conditions(older), limit=limit)
    if status in (None, *jobs.ENDS):
        which = before_it if before is None else before_it.format(sql.SQL("h.id"), before)
        if status == "failed":
            which = sql.SQL("{} AND h.status = 'failed'").format(which)
        look = limit if task is None and queue is None and status in (None, "failed") else HISTORY_LOOK
        rows += read(connection, JOBS_ENDED, schema, which=which, conditions=conditions(), look=look, limit=limit)
    return sorted(rows, key=lambda row: -row["job_id"])[:limit]


def workers(connection: Connection, schema: str) -> list[Row]:
    """The workers, oldest first; one that is not there any more is shown until its jobs are recovered."""
    return read(connection, WORKERS, schema)


def tasks(connection: Connection, schema: str) -> list[Row]:
    """Every task that the database knows, with how it fared over its last 100 calls and runs."""
    return read(connection, TASKS, schema)


def task_names(connection: Connection, schema: str) -> list[str]:
    """The names of the tasks that the database knows."""
    return [row["name"] for row in read(connection, "SELECT name FROM {task} ORDER BY name", schema)]


def has_task(connection: Connection, schema: str, task: str) -> bool:
    """Whether the database knows a task of this name, or has a job of it."""
    return task in task_names(connection, schema) or bool(list_jobs(connection, schema, task=task, limit=1))


def locks(connection: Connection, schema: str, *, limit: int = LOCKS_AT_ONCE) -> list[Row]:
    """Who holds an advisory lock of this database, oldest first; prepared transactions have no backend."""
    return read(connection, LOCKS, schema, limit=limit)


def gauges(connection: Connection, schema: str) -> dict[str, list[Row]]:
    """What the database says for the metrics, by the names of `GAUGES`: one message, two seconds at most."""
    # PostgreSQL gives the timeout to each statement of a message anew: each gets what is left.
    left = sql.SQL(
        "SELECT pg_catalog.set_config('statement_timeout', greatest(1, {} - (1000 * extract(epoch FROM"
        " clock_timestamp() - now()))::integer)::text, true)"
    ).format(GAUGES_TIMEOUT)
    texts: list[sql.Composable] = [
        sql.SQL("BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY"),
        sql.SQL(
            "SELECT pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true),"
            " pg_catalog.set_config('lock_timeout', '1s', true)"
        ),
    ]
    for text in GAUGES.values():
        texts += (left, sql.SQL(text).format(**names_of(schema)))
    texts.append(sql.SQL("COMMIT"))
    cursor = psycopg.ClientCursor(connection, row_factory=dict_row)
    try:
        cursor.execute(sql.SQL("; ").join(texts))
    except psycopg.Error:
        if not connection.closed:
            connection.rollback()
        raise
    cursor.nextset()
    found: dict[str, list[Row]] = {}
    for name in GAUGES:
        cursor.nextset()
        cursor.nextset()
        found[name] = cursor.fetchall()
    return found


def revisions(connection: Connection, schema: str) -> list[str]:
    """The revisions of the schema; raises psycopg's `UndefinedTable` or `InvalidSchemaName` if there is none."""
    return [row["version_num"] for row in read(connection, REVISIONS, schema)]


def read(connection: Connection, text: str, schema: str, **values: Any) -> list[Row]:
    """The rows of a statement over the schema's tables, in a transaction of its own; also of one that writes."""
    with connection.transaction(), connection.cursor(row_factory=dict_row) as cursor:
        cursor.execute(
            "SELECT pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true),"
            " pg_catalog.set_config('statement_timeout', %s, true),"
            " pg_catalog.set_config('lock_timeout', '5s', true)",
            (STATEMENT_TIMEOUT.get(),),
        )
        cursor.execute(sql.SQL(text).format(**names_of(schema), **values))
        return cursor.fetchall()


def names_of(schema: str) -> dict[str, sql.Composable]:
    """The schema's tables and views, by the names in the statements."""
    tables = ("run", "task", "task_health", "lock_holder", "alembic_version", "invalidation", "invalidation_target")
    named = {
        f"{name}_name": sql.Identifier(schema, table) for name, table in (("run", "run"), ("history", "job_history"))
    }
    return {
        **jobs.names_of(schema),
        **{name: sql.Identifier(schema, name) for name in tables},
        **{name: sql.Literal(table.as_string(None)) for name, table in named.items()},
    }
