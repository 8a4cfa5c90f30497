"""A queue's tables as a busy year leaves them: made by one INSERT each, without a worker."""

import psycopg
from psycopg import sql

ENDED = """
INSERT INTO cronlock.job_history (id, task, queue, priority, payload, trigger, max_attempts, attempts, losses,
    enqueued_at, run_at, started_at, finished_at, worker, status)
SELECT nextval('cronlock.job_id'), 'noop', 'default', 0, jsonb_build_object('n', n), 'http', 5, 1, 0, at, at,
       at + interval '1 second', at + interval '2 seconds', md5((n / 50000)::text)::uuid, 'completed'
  FROM (SELECT n, clock_timestamp() - interval '6 days' * (1 - n::float8 / {rows}) AS at
          FROM generate_series(1, {rows}) AS n) AS made
"""
WAITING = """
INSERT INTO cronlock.job_waiting (id, task, queue, payload, trigger, max_attempts, run_at)
SELECT nextval('cronlock.job_id'), 'noop', 'default', jsonb_build_object('n', n), 'http', 5,
       clock_timestamp() + interval '1 day' + interval '1 second' * n
  FROM generate_series(1, {rows}) AS n
"""


def fill(url: str, *, ended: int = 0, waiting: int = 0) -> None:
    """Write so many jobs that have ended, and so many whose time is not before tomorrow."""
    with psycopg.connect(url, autocommit=True) as connection:
        for statement, rows in ((ENDED, ended), (WAITING, waiting)):
            if rows:
                connection.execute(sql.SQL(statement).format(rows=sql.Literal(rows)))
