"""A table of runs as a busy year leaves it: made by one INSERT, without a server."""

import psycopg
from psycopg import sql

from benchmarks import names

# Nine of ten are skips, of tasks that a server here calls and of others; a hundredth of the runs failed. All of them
# are younger than the retention of skips, or the server would prune them while it is measured. A nonce is what
# cronlock makes it: drawn for a process, counted within it; here a process wrote 50,000 rows.
INSERT = """
INSERT INTO cronlock.run (nonce, task, status, reason, trigger, caller, started_at, finished_at, instance, host, pid,
    backend_pid, lock_name, lock_key, lock_classid, lock_objid, blocked_by, result, error_type, error_message,
    error_traceback)
SELECT (substr(md5(made.process::text), 1, 20) || lpad(to_hex(made.n), 12, '0'))::uuid, made.task, made.status,
       CASE WHEN made.status = 'skipped' THEN 'already_running' END, 'http', 'vercel-cron/1.0', made.started_at,
       made.started_at + CASE WHEN made.status = 'skipped' THEN interval '0' ELSE interval '8 seconds' END,
       md5(made.process::text)::uuid, 'host-' || made.process % 20, 1000 + made.process % 30000,
       CASE WHEN made.status <> 'skipped' THEN 2000 + made.n % 30000 END, made.task, made.key,
       (made.key >> 32) & 4294967295, made.key & 4294967295,
       CASE WHEN made.status = 'skipped' THEN {first} + made.n - made.n % 10 END,
       CASE WHEN made.status = 'completed' THEN '{{"rows":4211}}' END,
       CASE WHEN made.status = 'failed' THEN 'OperationalError' END,
       CASE WHEN made.status = 'failed' THEN 'the server closed the connection' END,
       CASE WHEN made.status = 'failed' THEN repeat('  File "tasks.py", line 12, in sync', 20) END
  FROM (SELECT n, n / 50000 AS process, tasks.names[1 + (n / 10) % cardinality(tasks.names)] AS task,
               hashtext(tasks.names[1 + (n / 10) % cardinality(tasks.names)])::bigint AS key,
               CASE WHEN n % 10 > 0 THEN 'skipped' WHEN n % 1000 = 0 THEN 'failed' ELSE 'completed' END AS status,
               clock_timestamp() - interval '6 days' * (1 - n::float8 / {rows}) AS started_at
          FROM generate_series(0, {rows} - 1) AS n
         CROSS JOIN (SELECT {tasks}::text[] AS names) AS tasks) AS made
"""


def fill(url: str, rows: int) -> None:
    """Write so many rows into the table of runs, and let what PostgreSQL would do about them be done before."""
    tasks = [*names.HELD, *names.EMPTY, *(f"other-{number:05}" for number in range(16))]
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            sql.SQL(INSERT).format(first=names.FIRST_RUN_ID, rows=rows, tasks=tasks).as_string(connection)
        )
        connection.execute("VACUUM (ANALYZE) cronlock.run")
        connection.execute("CHECKPOINT")
