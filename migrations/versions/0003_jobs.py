"""Jobs: the live ones, those that wait for their time, those that ended; their keys, their workers."""

from alembic import context, op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

# A job is a row of exactly one of these three: moved by one statement that deletes it here and inserts it there.
# `job` has only what is due or under way, so that a claim never walks past anything else; its rows have room beside
# them, so that a claim changes no index (fillfactor), and are vacuumed soon. `cron_key` is set for what a call of a
# cron URL made, to the key of that call (blank for a task without one): the next call finds it while it is live.
TABLES = """
SET LOCAL lock_timeout = '2s';
SET LOCAL statement_timeout = '60s';
SET LOCAL search_path = pg_catalog;

CREATE SEQUENCE {schema}.job_id AS bigint;

CREATE TABLE {schema}.job (
    id bigint CONSTRAINT job_pkey PRIMARY KEY DEFAULT nextval('{schema}.job_id'),
    task text NOT NULL,
    queue text NOT NULL,
    priority smallint NOT NULL DEFAULT 0,
    payload jsonb NOT NULL,
    trigger text NOT NULL,
    occurrence text,
    idempotency_key text,
    cron_key text,
    max_attempts smallint NOT NULL,
    attempts smallint NOT NULL DEFAULT 0,
    losses smallint NOT NULL DEFAULT 0,
    enqueued_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    run_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    cancel_requested_at timestamptz,
    cancel_requested_by text,
    started_at timestamptz,
    worker uuid,
    lease_token uuid,
    lease_until timestamptz,
    backend_pid integer,
    progress_done bigint,
    progress_total bigint,
    CONSTRAINT job_trigger_check CHECK (trigger IN ('http', 'schedule', 'manual', 'job')),
    CONSTRAINT job_lease_check CHECK ((lease_token IS NULL) = (lease_until IS NULL))
) WITH (
    fillfactor = 45, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_cost_delay = 0
);

CREATE INDEX job_due_idx ON {schema}.job (queue, priority DESC, id);
CREATE INDEX job_cron_idx ON {schema}.job (task, cron_key) WHERE cron_key IS NOT NULL;
CREATE INDEX job_suspect_idx ON {schema}.job (queue, id) WHERE losses > 1;

CREATE TABLE {schema}.job_waiting (
    id bigint CONSTRAINT job_waiting_pkey PRIMARY KEY,
    task text NOT NULL,
    queue text NOT NULL,
    priority smallint NOT NULL DEFAULT 0,
    payload jsonb NOT NULL,
    trigger text NOT NULL,
    occurrence text,
    idempotency_key text,
    cron_key text,
    max_attempts smallint NOT NULL,
    attempts smallint NOT NULL DEFAULT 0,
    losses smallint NOT NULL DEFAULT 0,
    enqueued_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    run_at timestamptz NOT NULL,
    CONSTRAINT job_waiting_trigger_check CHECK (trigger IN ('http', 'schedule', 'manual', 'job'))
);

CREATE INDEX job_waiting_run_at_idx ON {schema}.job_waiting (queue, run_at);
CREATE INDEX job_waiting_cron_idx ON {schema}.job_waiting (task, cron_key) WHERE cron_key IS NOT NULL;

CREATE TABLE {schema}.job_history (
    id bigint CONSTRAINT job_history_pkey PRIMARY KEY,
    task text NOT NULL,
    queue text NOT NULL,
    priority smallint NOT NULL,
    payload jsonb NOT NULL,
    trigger text NOT NULL,
    occurrence text,
    idempotency_key text,
    cron_key text,
    max_attempts smallint NOT NULL,
    attempts smallint NOT NULL,
    losses smallint NOT NULL,
    enqueued_at timestamptz NOT NULL,
    run_at timestamptz NOT NULL,
    started_at timestamptz,
    finished_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    worker uuid,
    status text NOT NULL,
    result text,
    error_type text,
    error_message text,
    log text,
    CONSTRAINT job_history_status_check CHECK (status IN ('completed', 'failed', 'cancelled'))
);

CREATE INDEX job_history_failed_idx ON {schema}.job_history (id) WHERE status = 'failed';
CREATE INDEX job_history_cron_idx ON {schema}.job_history (task, cron_key, finished_at DESC)
    WHERE cron_key IS NOT NULL AND status = 'completed';

CREATE TABLE {schema}.job_attempt (
    job_id bigint NOT NULL,
    attempt smallint NOT NULL,
    status text NOT NULL,
    started_at timestamptz,
    finished_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    worker uuid,
    error_type text,
    error_message text,
    error_traceback text,
    error_sqlstate text,
    log text,
    CONSTRAINT job_attempt_pkey PRIMARY KEY (job_id, attempt),
    CONSTRAINT job_attempt_status_check CHECK (status IN ('failed', 'timed_out', 'cancelled', 'lost'))
);

CREATE TABLE {schema}.idempotency_key (
    task text NOT NULL,
    key text NOT NULL,
    fingerprint text NOT NULL,
    job_id bigint NOT NULL,
    expires_at timestamptz NOT NULL,
    CONSTRAINT idempotency_key_pkey PRIMARY KEY (task, key)
);

CREATE INDEX idempotency_key_expires_at_idx ON {schema}.idempotency_key (expires_at);

CREATE TABLE {schema}.worker (
    id uuid CONSTRAINT worker_pkey PRIMARY KEY,
    host text NOT NULL,
    pid integer NOT NULL,
    release text,
    queues text[] NOT NULL,
    tasks text[] NOT NULL,
    concurrency integer NOT NULL,
    presence_key bigint NOT NULL,
    has_presence boolean NOT NULL DEFAULT false,
    is_idle boolean NOT NULL DEFAULT false,
    is_draining boolean NOT NULL DEFAULT false,
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    seen_until timestamptz NOT NULL
) WITH (fillfactor = 50);
"""

# One row for every target and every word of a task, in the order of their ids, written in the task's own transaction.
# Who delivers to a target has its row of `invalidation_target` for a few seconds at a time.
INVALIDATION = """
CREATE TABLE {schema}.invalidation (
    id bigint GENERATED ALWAYS AS IDENTITY (CACHE 1) CONSTRAINT invalidation_pkey PRIMARY KEY,
    target text NOT NULL,
    keys text[] NOT NULL,
    tags text[] NOT NULL,
    paths text[] NOT NULL,
    task text NOT NULL,
    run_id bigint,
    job_id bigint,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    delivered_at timestamptz,
    attempts integer NOT NULL DEFAULT 0,
    last_error text
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);

CREATE INDEX invalidation_waiting_idx ON {schema}.invalidation (target, id) WHERE delivered_at IS NULL;

CREATE TABLE {schema}.invalidation_target (
    name text CONSTRAINT invalidation_target_pkey PRIMARY KEY,
    kind text NOT NULL,
    lease_token uuid,
    lease_until timestamptz,
    attempts integer NOT NULL DEFAULT 0,
    retry_at timestamptz,
    failed_at timestamptz,
    last_error text,
    delivered_at timestamptz,
    seen_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT invalidation_target_lease_check CHECK ((lease_token IS NULL) = (lease_until IS NULL))
) WITH (fillfactor = 50);

CREATE TABLE {schema}.cache_version (
    key text CONSTRAINT cache_version_pkey PRIMARY KEY,
    version bigint NOT NULL,
    changed_at timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 90);
"""

# As complete_run: called right before the COMMIT of a job's own transaction. The job's row is gone for everybody else
# only when that commits, and a token that is not the job's any more undoes everything.
COMPLETE_JOB = """
CREATE FUNCTION {schema}.complete_job(done_id bigint, token uuid, opened_us bigint, job_result text,
    job_log text)
RETURNS boolean LANGUAGE plpgsql SET search_path = pg_catalog AS $$
BEGIN
    IF (extract(epoch FROM now()) * 1000000)::bigint <> opened_us THEN
        RAISE EXCEPTION 'cronlock: this is not the transaction of the job' USING ERRCODE = '25000';
    END IF;
    PERFORM set_config('synchronous_commit', 'on', true);
    WITH done AS (
        DELETE FROM {schema}.job j WHERE j.id = done_id AND j.lease_token = token RETURNING j.*)
    INSERT INTO {schema}.job_history (id, task, queue, priority, payload, trigger, occurrence, idempotency_key,
           cron_key, max_attempts, attempts, losses, enqueued_at, run_at, started_at, worker, status, result, log)
    SELECT d.id, d.task, d.queue, d.priority, d.payload, d.trigger, d.occurrence, d.idempotency_key,
           d.cron_key, d.max_attempts, d.attempts, d.losses, d.enqueued_at, d.run_at, d.started_at, d.worker,
           'completed', job_result, job_log
      FROM done d;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'cronlock: lease lost' USING ERRCODE = '25000';
    END IF;
    PERFORM pg_advisory_unlock_all();
    RETURN EXISTS (SELECT FROM pg_prepared_statements p WHERE p.from_sql);
END $$;
"""

JOB_STATUS = """
CREATE VIEW {schema}.job_status AS
SELECT j.id, j.task, j.queue, j.priority, j.payload, j.trigger, j.occurrence, j.idempotency_key, j.cron_key,
       j.max_attempts, j.attempts, j.losses,
       CASE WHEN j.lease_token IS NULL THEN 'queued' ELSE 'processing' END AS status,
       j.enqueued_at, j.run_at, j.started_at, NULL::timestamptz AS finished_at, j.worker, j.lease_until,
       j.cancel_requested_at, j.cancel_requested_by, j.progress_done, j.progress_total, NULL::text AS result,
       NULL::text AS error_type, NULL::text AS error_message, NULL::text AS log
  FROM {schema}.job j
 UNION ALL
SELECT w.id, w.task, w.queue, w.priority, w.payload, w.trigger, w.occurrence, w.idempotency_key, w.cron_key,
       w.max_attempts, w.attempts, w.losses, 'queued', w.enqueued_at, w.run_at, NULL, NULL, NULL, NULL, NULL, NULL,
       NULL, NULL, NULL, NULL, NULL, NULL
  FROM {schema}.job_waiting w
 UNION ALL
SELECT h.id, h.task, h.queue, h.priority, h.payload, h.trigger, h.occurrence, h.idempotency_key, h.cron_key,
       h.max_attempts, h.attempts, h.losses, h.status, h.enqueued_at, h.run_at, h.started_at, h.finished_at, h.worker,
       NULL, NULL, NULL, NULL, NULL, h.result, h.error_type, h.error_message, h.log
  FROM {schema}.job_history h;

COMMENT ON VIEW {schema}.job_status IS
'Every job there is, whether it waits, is under way or has ended. Ask for one id, or for few: history may be long.';
"""

# The revision before has no place for jobs and for what is said to be stale: nobody's work is dropped by the way.
REFUSE_TO_DROP = """
DO $$
DECLARE
    live bigint; ended bigint; stale bigint;
BEGIN
    LOCK TABLE {schema}.job, {schema}.job_waiting, {schema}.job_history, {schema}.invalidation IN ACCESS EXCLUSIVE MODE;
    SELECT (SELECT count(*) FROM {schema}.job) + (SELECT count(*) FROM {schema}.job_waiting) INTO live;
    SELECT count(*) FROM {schema}.job_history INTO ended;
    SELECT count(*) FROM {schema}.invalidation i WHERE i.delivered_at IS NULL INTO stale;
    IF live + ended + stale > 0 THEN
        RAISE EXCEPTION USING MESSAGE = format('cronlock: revision 0002 cannot keep jobs, and there are %s live ones'
            ' and %s that have ended, and %s invalidations to deliver', live, ended, stale),
            HINT = 'Stay at 0003, whose tables the code before does not touch; or copy what is needed, and delete the'
            ' rows of job, job_waiting, job_history and invalidation.', ERRCODE = '55006';
    END IF;
END $$
"""


def quoted() -> str:
    name: str = context.config.attributes["schema"]
    return '"' + name.replace('"', '""') + '"'


def run(script: str) -> None:
    for statement in script.strip().removesuffix(";").split(";\n"):
        op.execute(statement.strip().format(schema=quoted()).replace(":", "\\:"))


def execute(statement: str) -> None:
    op.execute(statement.strip().format(schema=quoted()).replace(":", "\\:"))


def upgrade() -> None:
    run(TABLES)
    execute(COMPLETE_JOB)
    run(JOB_STATUS)
    run(INVALIDATION)


def downgrade() -> None:
    execute(REFUSE_TO_DROP)
    run("""
DROP TABLE {schema}.cache_version, {schema}.invalidation_target, {schema}.invalidation;
DROP VIEW {schema}.job_status;
DROP FUNCTION {schema}.complete_job(bigint, uuid, bigint, text, text);
DROP TABLE {schema}.worker, {schema}.idempotency_key, {schema}.job_attempt, {schema}.job_history,
    {schema}.job_waiting, {schema}.job;
DROP SEQUENCE {schema}.job_id;
""")
