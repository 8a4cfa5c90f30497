"""What runs need for keys, intervals, occurrences and logs; and indexes past a million skips."""

from alembic import context, op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

# Whatever broke off half way is begun again, so every statement here may come twice.
COLUMNS = """
ALTER TABLE {schema}.run ADD COLUMN IF NOT EXISTS log text, ADD COLUMN IF NOT EXISTS min_interval interval,
    ADD COLUMN IF NOT EXISTS mode text;
-- squawk-ignore ban-drop-not-null
ALTER TABLE {schema}.task ALTER COLUMN lock_key DROP NOT NULL;
"""

# Beside the one of four arguments, which the code of revision 0001 goes on calling, with whatever grants it has.
COMPLETE_RUN = """
CREATE OR REPLACE FUNCTION {schema}.complete_run(run_id bigint, opened_us bigint, run_result text, is_touched boolean,
    run_log text)
RETURNS boolean LANGUAGE plpgsql SET search_path = pg_catalog AS $$
BEGIN
    IF (extract(epoch FROM now()) * 1000000)::bigint <> opened_us THEN
        RAISE EXCEPTION 'cronlock: this is not the transaction that took the lock' USING ERRCODE = '25000';
    END IF;
    PERFORM set_config('synchronous_commit', 'on', true);
    UPDATE {schema}.run r SET status = 'completed', finished_at = clock_timestamp(), result = run_result,
           log = coalesce(run_log, r.log)
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

# `task >= x AND task <= x ORDER BY task, id DESC` is what only an index by task and id can give: asked for as
# `task = x ORDER BY id DESC`, the planner may walk past a million skips of other tasks.
TASK_HEALTH = """
CREATE OR REPLACE VIEW {schema}.task_health AS
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
         WHERE r.task >= t.name AND r.task <= t.name AND r.status <> 'skipped'
         ORDER BY r.task, r.id DESC LIMIT 1) last ON true
  LEFT JOIN LATERAL (
        SELECT r.id, r.finished_at FROM {schema}.run r
         WHERE r.task >= t.name AND r.task <= t.name AND r.status = 'completed'
         ORDER BY r.task, r.id DESC LIMIT 1) good ON true
  CROSS JOIN LATERAL (
        SELECT count(*) AS calls,
               count(*) FILTER (WHERE w.status = 'skipped') AS skipped
          FROM (SELECT r.status FROM {schema}.run r
                 WHERE r.task >= t.name AND r.task <= t.name AND r.status <> 'running'
                 ORDER BY r.task, r.id DESC LIMIT 100) w) calls
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
                 WHERE r.task >= t.name AND r.task <= t.name AND r.status NOT IN ('running', 'skipped')
                 ORDER BY r.task, r.id DESC LIMIT 100) w) runs;

COMMENT ON VIEW {schema}.task_health IS
'Each task''s last run and last success; skips of its last 100 calls; success and durations of its last 100 runs.';
"""

# The first is the last word on occurrences: whatever decides about them, none completes twice.
INDEXES = {
    "run_occurrence_key": "UNIQUE INDEX {how} {name} ON {schema}.run (task, occurrence)"
    " WHERE status = 'completed' AND occurrence IS NOT NULL",
    "run_occurrence_idx": "INDEX {how} {name} ON {schema}.run (task, occurrence)"
    " WHERE status <> 'skipped' AND occurrence IS NOT NULL",
    "run_completed_idx": "INDEX {how} {name} ON {schema}.run (task, coalesce(key, ''), finished_at DESC)"
    " WHERE status = 'completed'",
    "run_failed_idx": "INDEX {how} {name} ON {schema}.run (id DESC)"
    " WHERE status IN ('failed', 'timed_out', 'cancelled', 'lost')",
    "run_task_run_idx": "INDEX {how} {name} ON {schema}.run (task, id DESC) WHERE status <> 'skipped'",
}


def quoted() -> str:
    name: str = context.config.attributes["schema"]
    return '"' + name.replace('"', '""') + '"'


def execute(statement: str) -> None:
    op.execute(statement.strip().format(schema=quoted()).replace(":", "\\:"))


def run(script: str) -> None:
    for statement in script.strip().removesuffix(";").split(";\n"):
        execute(statement)


def upgrade() -> None:
    execute("SET LOCAL lock_timeout = '2s'")
    execute("SET LOCAL statement_timeout = '60s'")
    execute("SET LOCAL search_path = pg_catalog")
    run(COLUMNS)
    execute(COMPLETE_RUN)
    with op.get_context().autocommit_block():
        execute("SET search_path = pg_catalog")
        # It waits for transactions that are older than the index, and keeps nobody waiting meanwhile.
        execute("SET lock_timeout = '5s'")
        for name, index in INDEXES.items():
            execute("DROP INDEX CONCURRENTLY IF EXISTS {schema}." + name)
            execute("CREATE " + index.format(how="CONCURRENTLY", name=name, schema="{schema}"))
        execute("RESET lock_timeout")
        execute("RESET search_path")
    run(TASK_HEALTH)


def health_before() -> str:
    text = TASK_HEALTH.replace("r.task >= t.name AND r.task <= t.name", "r.task = t.name")
    return text.replace("r.task, r.id", "r.id").replace("LIMIT 100)", "LIMIT 1000)").replace("last 100 ", "last 1,000 ")


def downgrade() -> None:
    run(health_before())
    for name in INDEXES:
        execute("DROP INDEX {schema}." + name)
    execute("DROP FUNCTION {schema}.complete_run(bigint, bigint, text, boolean, text)")
    # A task with a key has no lock of its own, and its row no place before; it is registered again.
    execute("DELETE FROM {schema}.task WHERE lock_key IS NULL")
    execute("ALTER TABLE {schema}.task ALTER COLUMN lock_key SET NOT NULL")
    execute("ALTER TABLE {schema}.run DROP COLUMN log, DROP COLUMN min_interval, DROP COLUMN mode")
