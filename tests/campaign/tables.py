"""What the tasks write and the callers were told, in a schema of the campaign's. No constraint hides a violation."""

SCHEMA = """
CREATE SCHEMA campaign;
CREATE TABLE campaign.counter (lock_name text PRIMARY KEY, value bigint NOT NULL DEFAULT 0);
CREATE TABLE campaign.effect (
    run_id bigint NOT NULL,
    call bigint NOT NULL,
    task text NOT NULL,
    lock_name text NOT NULL,
    value_read bigint NOT NULL,
    began_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at timestamptz,
    process_clock timestamptz
);
CREATE TABLE campaign.fence (lock_name text PRIMARY KEY, run_id bigint NOT NULL DEFAULT 0);
CREATE TABLE campaign.step (
    run_id bigint NOT NULL,
    call bigint NOT NULL,
    number integer NOT NULL,
    is_accepted boolean NOT NULL,
    at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE TABLE campaign.answer (
    call bigint NOT NULL,
    server text NOT NULL,
    code integer,
    status text,
    run_id bigint,
    timeline integer
);
COMMENT ON COLUMN campaign.answer.code IS 'null: the connection broke';
COMMENT ON COLUMN campaign.answer.timeline IS 'null: the call was open while its server changed from one to the other';
"""

ROLE = "CREATE ROLE {role} LOGIN PASSWORD {password}"

GRANTS = """
GRANT USAGE ON SCHEMA cronlock, campaign TO {role};
GRANT SELECT ON ALL TABLES IN SCHEMA cronlock, campaign TO {role};
GRANT INSERT, UPDATE ON cronlock.task TO {role};
GRANT INSERT, UPDATE, DELETE ON cronlock.run TO {role};
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA cronlock TO {role};
GRANT UPDATE ON campaign.counter, campaign.fence TO {role};
GRANT INSERT, UPDATE ON campaign.effect, campaign.step TO {role};
"""
"""Those of docs/roles.md, and what the tasks need."""

STEPS = 4
"""What a run in guard mode does outside, one after the other."""

CALLER = "campaign/"
"""What a call's User-Agent begins with; its number follows."""
