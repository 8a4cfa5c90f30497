"""The tables task and run, and the views lock_holder and task_health."""

from alembic import context, op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TABLES = """
SET LOCAL lock_timeout = '2s';
SET LOCAL statement_timeout = '60s';
SET LOCAL search_path = pg_catalog;

CREATE TABLE {schema}.task (
    name text CONSTRAINT task_pkey PRIMARY KEY,
    schedule text,
    timezone text,
    mode text NOT NULL DEFAULT 'transaction',
    lock_name text,
    lock_key bigint NOT NULL,
    options jsonb NOT NULL DEFAULT '{{}}',
    paused_at timestamptz,
    paused_by text,
    paused_reason text,
    first_seen_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_seen_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT task_mode_check CHECK (mode IN ('transaction', 'guard', 'queue'))
);

CREATE TABLE {schema}.run (
    id bigint GENERATED ALWAYS AS IDENTITY (CACHE 1) CONSTRAINT run_pkey PRIMARY KEY,
    nonce uuid NOT NULL CONSTRAINT run_nonce_key UNIQUE,
    task text NOT NULL,
    key text,
    status text NOT NULL,
    reason text,
    trigger text NOT NULL,
    caller text,
    occurrence text,
    scheduled_for timestamptz,
    attempt integer NOT NULL DEFAULT 1,
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    stopping_at timestamptz,
    finished_at timestamptz,
    instance uuid NOT NULL,
    host text NOT NULL,
    pid integer NOT NULL,
    release text,
    backend_pid integer,
    lock_name text,
    lock_key bigint NOT NULL,
    lock_classid bigint NOT NULL,
    lock_objid bigint NOT NULL,
    lock_objsubid smallint NOT NULL DEFAULT 1,
    blocked_by bigint,
    holder_pid integer,
    holder_application text,
    result text,
    error_type text,
    error_message text,
    error_traceback text,
    error_sqlstate text,
    progress_done bigint,
    progress_total bigint,
    cancel_requested_at timestamptz,
    cancel_requested_by text,
    CONSTRAINT run_status_check CHECK (
        status IN ('running', 'completed', 'failed', 'timed_out', 'cancelled', 'lost', 'skipped')),
    CONSTRAINT run_reason_check CHECK (
        reason IS NULL OR reason IN ('already_running', 'duplicate', 'too_soon', 'paused', 'queued_already')),
    CONSTRAINT run_skipped_has_reason_check CHECK ((status = 'skipped') = (reason IS NOT NULL)),
    CONSTRAINT run_ended_has_time_check CHECK ((status = 'running') = (finished_at IS NULL)),
    CONSTRAINT run_trigger_check CHECK (trigger IN ('http', 'schedule', 'manual', 'job'))
);

CREATE INDEX run_task_id_idx ON {schema}.run (task, id DESC);
CREATE INDEX run_running_idx ON {schema}.run (lock_classid, lock_objid, backend_pid) WHERE status = 'running';
"""

# Called in the transaction that holds the lock, right before its COMMIT. Being a function its plan is kept with the
# session, also behind a pooler; whatever it raises undoes the run. It says whether the task left something on its
# connection that only goes with it: what it prepared by SQL cannot go without all that psycopg prepared.
COMPLETE_RUN = """
CREATE FUNCTION {schema}.complete_run(run_id bigint, opened_us bigint, run_result text, is_touched boolean)
RETURNS boolean LANGUAGE plpgsql SET search_path = pg_catalog AS $$
BEGIN
    IF (extract(epoch FROM now()) * 1000000)::bigint <> opened_us THEN
        RAISE EXCEPTION 'cronlock: this is not the transaction that took the lock' USING ERRCODE = '25000';
    END IF;
    PERFORM set_config('synchronous_commit', 'on', true);
    UPDATE {schema}.run r SET status = 'completed', finished_at = clock_timestamp(), result = run_result
     WHERE r.id = run_id AND r.status IN ('running', 'lost');
    IF NOT FOUND THEN
        RAISE EXCEPTION 'cronlock: no open run row' USING ERRCODE = '25000';
    END IF;
    IF NOT is_touched THEN
        RETURN false;
    END IF;
    PERFORM pg_advisory_unlock_all();
    RETURN EXISTS (SELECT FROM pg_prepared_statements p WHERE p.from_sql);
END $$;
"""

LOCK_HOLDER = """
CREATE VIEW {schema}.lock_holder AS
SELECT (l.classid::bigint << 32) | l.objid::bigint AS lock_key,
       coalesce(r.lock_name, t.lock_name) AS lock_name,
       coalesce(r.task, t.name) AS task,
       r.id AS run_id,
       r.started_at,
       clock_timestamp() - r.started_at AS held_for,
       r.stopping_at,
       r.instance,
       r.host,
       r.pid AS process_pid,
       l.pid AS backend_pid,
       a.application_name,
       a.usename AS role,
       a.client_addr,
       a.state,
       a.xact_start,
       a.state_change,
       a.query
  FROM pg_locks l
  LEFT JOIN pg_stat_activity a ON a.pid = l.pid
  LEFT JOIN {schema}.run r
         ON r.status = 'running' AND r.backend_pid = l.pid AND r.lock_classid = l.classid::bigint
        AND r.lock_objid = l.objid::bigint AND r.lock_objsubid = l.objsubid
  LEFT JOIN LATERAL (
        SELECT k.name, k.lock_name FROM {schema}.task k
         WHERE k.lock_key = ((l.classid::bigint << 32) | l.objid::bigint)
         ORDER BY k.last_seen_at DESC, k.name LIMIT 1) t ON r.id IS NULL
 WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
   AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database());

COMMENT ON VIEW {schema}.lock_holder IS
'Who holds an advisory lock of this database now: every holder, cronlock''s and foreign ones. Keys as signed bigint.';
"""

TASK_HEALTH = """
CREATE VIEW {schema}.task_health AS
SELECT t.name AS task,
       t.schedule,
       t.timezone,
       t.paused_at,
       t.paused_by,
       t.paused_reason,
       last.id AS last_run_id,
       last.status AS last_status,
       last.started_at AS last_started_at,
       last.finished_at AS last_finished_at,
       good.id AS last_completed_id,
       good.finished_at AS last_completed_at,
       calls.calls,
       runs.completed,
       runs.failed,
       calls.skipped,
       runs.lost,
       round(runs.completed::numeric / nullif(runs.runs, 0), 4) AS success_rate,
       round(calls.skipped::numeric / nullif(calls.calls, 0), 4) AS skip_rate,
       runs.p50_duration,
       runs.p95_duration
  FROM {schema}.task t
  LEFT JOIN LATERAL (
        SELECT r.id, r.status, r.started_at, r.finished_at FROM {schema}.run r
         WHERE r.task = t.name AND r.status <> 'skipped' ORDER BY r.id DESC LIMIT 1) last ON true
  LEFT JOIN LATERAL (
        SELECT r.id, r.finished_at FROM {schema}.run r
         WHERE r.task = t.name AND r.status = 'completed' ORDER BY r.id DESC LIMIT 1) good ON true
  CROSS JOIN LATERAL (
        SELECT count(*) AS calls,
               count(*) FILTER (WHERE w.status = 'skipped') AS skipped
          FROM (SELECT r.status FROM {schema}.run r
                 WHERE r.task = t.name AND r.status <> 'running'
                 ORDER BY r.id DESC LIMIT 1000) w) calls
  CROSS JOIN LATERAL (
        SELECT count(*) AS runs,
               count(*) FILTER (WHERE w.status = 'completed') AS completed,
               count(*) FILTER (WHERE w.status IN ('failed', 'timed_out', 'cancelled')) AS failed,
               count(*) FILTER (WHERE w.status = 'lost') AS lost,
               percentile_disc(0.5) WITHIN GROUP (ORDER BY w.finished_at - w.started_at)
                   FILTER (WHERE w.status = 'completed') AS p50_duration,
               percentile_disc(0.95) WITHIN GROUP (ORDER BY w.finished_at - w.started_at)
                   FILTER (WHERE w.status = 'completed') AS p95_duration
          FROM (SELECT r.status, r.started_at, r.finished_at FROM {schema}.run r
                 WHERE r.task = t.name AND r.status NOT IN ('running', 'skipped')
                 ORDER BY r.id DESC LIMIT 1000) w) runs;

COMMENT ON VIEW {schema}.task_health IS
'Each task''s last run and last success; skips of its last 1,000 calls; success and durations of its last 1,000 runs.';
"""


def quoted() -> str:
    name: str = context.config.attributes["schema"]
    return '"' + name.replace('"', '""') + '"'


def run(script: str) -> None:
    for statement in script.split(";\n"):
        if statement.strip():
            execute(statement)


def execute(statement: str) -> None:
    op.execute(statement.strip().format(schema=quoted()).replace(":", "\\:"))


def upgrade() -> None:
    run(TABLES)
    execute(COMPLETE_RUN)
    run(LOCK_HOLDER)
    run(TASK_HEALTH)


def downgrade() -> None:
    run("DROP VIEW {schema}.task_health;\nDROP VIEW {schema}.lock_holder;\n")
    execute("DROP FUNCTION {schema}.complete_run")
    run("DROP TABLE {schema}.run;\nDROP TABLE {schema}.task;\n")
