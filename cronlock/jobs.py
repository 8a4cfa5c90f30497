"""Every statement on jobs, their keys and their workers.

A live job is a row of `job`, one that waits for its time a row of `job_waiting`, one that has ended a row of
`job_history`; what moves it deletes it here and inserts it there in one statement. Whoever works on a job has its
lease: a random token and a time. Every write about a job names the token, and a write that matches no row says that
the lease was lost.

A claim takes what no one has, in the order of priority and id, and changes no column that an index has. It begins
behind what it saw last (`low`); now and then, and whenever it finds too little, it begins at the front.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any

from psycopg import sql

from cronlock.locks import quoted, text_of

VALUE = re.compile(r"\[([a-z_]+)\]")
"""Where a statement for any connection has a value; arrays are sent as text, since drivers disagree about them."""

PARAMETER = re.compile(r"\$(\d)")
"""Where a statement that is prepared has a value."""

CARRIED = (
    "id, task, queue, priority, payload, trigger, occurrence, idempotency_key, cron_key, max_attempts, attempts,"
    " losses, enqueued_at"
)
"""What a job keeps wherever it is."""


def of(alias: str) -> str:
    """`CARRIED`, of a table's alias."""
    return ", ".join(f"{alias}.{column}" for column in CARRIED.split(", "))


ENDS = ("completed", "failed", "cancelled")

SUSPECT = 2
"""After so many lost attempts a job is taken alone: it may be what ends its workers."""

CLAIMED = """j.id, j.task, j.payload::text, j.attempts, j.max_attempts, j.trigger, j.occurrence, j.priority,
       (date_part('epoch', j.started_at - j.run_at) * 1000)::bigint,
       (date_part('epoch', j.started_at - j.enqueued_at) * 1000)::bigint"""
"""Its last two columns: for how many milliseconds it was due, and how many ago it was enqueued."""

TAKE = f"""
UPDATE {{job}} j
   SET attempts = j.attempts + 1, lease_token = $1, lease_until = clock_timestamp() + $2, worker = $3,
       started_at = clock_timestamp(), backend_pid = NULL
  FROM due WHERE j.id = due.id
 RETURNING {CLAIMED}
"""

# FOR UPDATE would pass over a job that a foreign key of the user's refers to.
CLAIM_NEXT = f"""
WITH due AS MATERIALIZED (
    SELECT j.id FROM {{job}} j
     WHERE j.queue = $4 AND j.priority = $7 AND j.id > $8 AND j.lease_token IS NULL AND j.losses < {SUSPECT}
       AND j.task = ANY ($5)
     ORDER BY j.id LIMIT $6 FOR NO KEY UPDATE SKIP LOCKED)
{TAKE}"""

CLAIM = f"""
WITH due AS MATERIALIZED (
    SELECT j.id FROM {{job}} j
     WHERE j.queue = $4 AND j.lease_token IS NULL AND j.losses < {SUSPECT} AND j.task = ANY ($5)
     ORDER BY j.priority DESC, j.id LIMIT $6 FOR NO KEY UPDATE SKIP LOCKED)
{TAKE}"""

CLAIM_SUSPECT = f"""
WITH due AS MATERIALIZED (
    SELECT j.id FROM {{job}} j
     WHERE j.queue = ANY ($4) AND j.losses >= {SUSPECT} AND j.lease_token IS NULL AND j.task = ANY ($5)
     ORDER BY j.id LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED)
{TAKE}"""

SUSPECTS = f"""
SELECT EXISTS (SELECT FROM {{job}} j
                WHERE j.queue = ANY ($1) AND j.losses >= {SUSPECT} AND j.lease_token IS NULL AND j.task = ANY ($2))
"""

ENDED_COLUMNS = f"{CARRIED}, run_at, started_at, worker, status, result, error_type, error_message, log"

# The plain end: completed, with no result.
DONE = f"""
WITH done AS (
    DELETE FROM {{job}} j USING unnest($1, $2) AS e(id, token)
     WHERE j.id = e.id AND j.lease_token = e.token
 RETURNING {of("j")}, j.run_at, j.started_at, j.worker),
kept AS (
    INSERT INTO {{job_history}} ({CARRIED}, run_at, started_at, worker, status)
    SELECT {of("d")}, d.run_at, d.started_at, d.worker, 'completed' FROM done d RETURNING id)
SELECT count(*), CASE WHEN count(*) < cardinality($1) THEN array_to_json(array_agg(k.id))::text END FROM kept k
"""

# Any other end of an attempt: `queued` goes back to wait for `delay` seconds. An attempt that failed is kept with its
# error, whatever becomes of the job.
END = f"""
WITH ended AS MATERIALIZED (
    SELECT * FROM json_to_recordset($1) AS e(id bigint, token uuid, status text, delay float8, result text,
        attempt_status text, error_type text, error_message text, error_traceback text, error_sqlstate text, log text)),
gone AS (
    DELETE FROM {{job}} j USING ended e
     WHERE j.id = e.id AND j.id = ANY (ARRAY(SELECT n.id FROM ended n)) AND j.lease_token = e.token
 RETURNING {of("j")}, j.run_at, j.started_at, j.worker,
           CASE WHEN e.status = 'queued' AND j.cancel_requested_at IS NOT NULL THEN 'cancelled' ELSE e.status END
               AS status,
           e.delay, e.result, e.attempt_status, e.error_type, e.error_message, e.error_traceback, e.error_sqlstate,
           e.log),
kept AS (
    INSERT INTO {{job_history}} ({ENDED_COLUMNS})
    SELECT {of("g")}, g.run_at, g.started_at, g.worker, g.status, g.result, g.error_type, g.error_message,
           g.log
      FROM gone g WHERE g.status <> 'queued'),
again AS (
    INSERT INTO {{job_waiting}} ({CARRIED}, run_at)
    SELECT {of("g")}, clock_timestamp() + make_interval(secs => g.delay) FROM gone g WHERE g.status = 'queued'),
attempt AS (
    INSERT INTO {{job_attempt}} (job_id, attempt, status, started_at, worker, error_type, error_message,
           error_traceback, error_sqlstate, log)
    SELECT g.id, g.attempts, g.attempt_status, g.started_at, g.worker, g.error_type, g.error_message,
           g.error_traceback, g.error_sqlstate, g.log
      FROM gone g WHERE g.attempt_status IS NOT NULL
        ON CONFLICT (job_id, attempt) DO UPDATE SET status = excluded.status, started_at = excluded.started_at,
           finished_at = excluded.finished_at, worker = excluded.worker, error_type = excluded.error_type,
           error_message = excluded.error_message, error_traceback = excluded.error_traceback,
           error_sqlstate = excluded.error_sqlstate, log = excluded.log)
SELECT g.id, g.status FROM gone g
"""

# What became of attempts of ours that were not found any more: the message that ended them may have had no answer.
# `queued` stands for one that is to be tried again.
FATES = """
SELECT e.id, coalesce(h.status, 'queued')
  FROM unnest($1, $2) AS e(id, attempt)
  LEFT JOIN {job_history} h ON h.id = e.id AND h.attempts = e.attempt AND h.worker = $3
  LEFT JOIN {job_attempt} a ON a.job_id = e.id AND a.attempt = e.attempt AND a.worker = $3
 WHERE a.status IS DISTINCT FROM 'lost' AND (h.id IS NOT NULL OR a.job_id IS NOT NULL)
"""

# Given back as if it had not been taken; one that is to be cancelled is, and does not run again.
GIVE_BACK = f"""
held AS MATERIALIZED (
    SELECT j.id, j.cancel_requested_at IS NOT NULL AS is_unwanted FROM {{job}} j JOIN mine m ON m.id = j.id
     WHERE j.lease_token = m.token FOR NO KEY UPDATE OF j),
back AS (
    UPDATE {{job}} j
       SET attempts = j.attempts - 1, lease_token = NULL, lease_until = NULL, worker = NULL, started_at = NULL,
           backend_pid = NULL
      FROM held h WHERE j.id = h.id AND NOT h.is_unwanted
 RETURNING j.id),
gone AS (
    DELETE FROM {{job}} j USING held h WHERE j.id = h.id AND h.is_unwanted
 RETURNING {of("j")}, j.run_at, j.started_at, j.worker, j.cancel_requested_by),
kept AS (
    INSERT INTO {{job_history}} ({ENDED_COLUMNS})
    SELECT {of("g")}, g.run_at, g.started_at, g.worker, 'cancelled', NULL, 'CancelAsked',
           concat('cancelled by ', coalesce(nullif(g.cancel_requested_by, ''), 'an operator')), NULL
      FROM gone g)
SELECT b.id FROM back b UNION ALL SELECT g.id FROM gone g
"""

RELEASE = f"WITH mine AS (SELECT * FROM unnest($1, $2) AS e(id, token)),{GIVE_BACK}"

# Whoever has a row locked is mostly ending it: it is not waited for, and neither renewed nor lost. What it tells of are
# the rows that were not renewed, and those that are to be cancelled.
RENEW = """
WITH held AS MATERIALIZED (
    SELECT j.id, j.cancel_requested_at IS NOT NULL AS is_cancelled, coalesce(j.cancel_requested_by, '') AS cancelled_by
      FROM unnest($1, $2) AS e(id, token)
      JOIN {job} j ON j.id = e.id AND j.lease_token = e.token),
free AS (
    SELECT j.id FROM {job} j
     WHERE j.id = ANY (ARRAY(SELECT h.id FROM held h)) FOR NO KEY UPDATE SKIP LOCKED),
renewed AS (
    UPDATE {job} j SET lease_until = clock_timestamp() + $3
      FROM unnest($1, $2) AS e(id, token)
     WHERE j.id = e.id AND j.lease_token = e.token AND j.id = ANY (ARRAY(SELECT f.id FROM free f))
 RETURNING j.id)
SELECT e.id, e.id NOT IN (SELECT h.id FROM held h) AS is_lost, e.id IN (SELECT r.id FROM renewed r) AS is_renewed,
       (SELECT h.cancelled_by FROM held h WHERE h.id = e.id AND h.is_cancelled)
  FROM unnest($1, $2) AS e(id, token)
 WHERE e.id NOT IN (SELECT r.id FROM renewed r) OR e.id IN (SELECT h.id FROM held h WHERE h.is_cancelled)
"""

CANCELLED = """
SELECT j.id, coalesce(j.cancel_requested_by, '') FROM {job} j
 WHERE j.id = ANY ($1) AND j.cancel_requested_at IS NOT NULL
"""

PROGRESS = """
UPDATE {job} j SET progress_done = e.done, progress_total = e.total
  FROM json_to_recordset($1) AS e(id bigint, token uuid, done bigint, total bigint)
 WHERE j.id = e.id AND j.lease_token = e.token
"""

PAUSED = "SELECT t.name FROM {task} t WHERE t.paused_at IS NOT NULL"

# Claims of which no answer came.
DISOWN = f"""
WITH mine AS (
    SELECT j.id, j.lease_token AS token FROM {{job}} j WHERE j.worker = $1 AND j.lease_token = ANY ($2)),{GIVE_BACK}"""

PROMOTE = f"""
WITH due AS MATERIALIZED (
    SELECT w.id FROM {{job_waiting}} w
     WHERE w.queue = $1 AND w.run_at <= clock_timestamp() ORDER BY w.run_at LIMIT $2 FOR UPDATE SKIP LOCKED),
gone AS (
    DELETE FROM {{job_waiting}} w WHERE w.id = ANY (ARRAY(SELECT d.id FROM due d)) RETURNING {of("w")}, w.run_at),
back AS (
    INSERT INTO {{job}} ({CARRIED}, run_at) SELECT {of("g")}, g.run_at FROM gone g ORDER BY g.run_at, g.id RETURNING 1)
SELECT count(*), (SELECT extract(epoch FROM min(w.run_at) - clock_timestamp())::float8 FROM {{job_waiting}} w
                   WHERE w.queue = $1 AND w.id <> ALL (ARRAY(SELECT d.id FROM due d)))
  FROM back
"""

# A worker says how long it is there, and by which lock it can be seen.
SEEN = """
INSERT INTO {worker} AS w (id, host, pid, release, queues, tasks, concurrency, presence_key, has_presence, is_idle,
       is_draining, seen_until)
SELECT s.id, s.host, s.pid, s.release, s.queues, s.tasks, s.concurrency, s.presence_key, s.has_presence, s.is_idle,
       s.is_draining, clock_timestamp() + $2
  FROM json_to_record($1) AS s(id uuid, host text, pid integer, release text, queues text[], tasks text[],
       concurrency integer, presence_key bigint, has_presence boolean, is_idle boolean, is_draining boolean)
    ON CONFLICT (id) DO UPDATE SET seen_until = excluded.seen_until, has_presence = excluded.has_presence,
       is_draining = excluded.is_draining
"""

# The time and the last id there is, before and after a claim from the front: what it took, and where it looked.
CLOCK = "SELECT extract(epoch FROM clock_timestamp())::float8, coalesce(pg_sequence_last_value({job_id}), 0)"

IDLE = "UPDATE {worker} w SET is_idle = $2 WHERE w.id = $1 AND w.is_idle <> $2"

# One that left jobs behind is there to be missed.
LEAVE = """
DELETE FROM {worker} w
 WHERE w.id = $1 AND NOT EXISTS (SELECT FROM {job} j WHERE j.worker = w.id AND j.lease_token IS NOT NULL)
"""

PRESENT = """EXISTS (SELECT FROM pg_catalog.pg_locks l
       WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
         AND l.classid::bigint = (w.presence_key >> 32) & 4294967295
         AND l.objid::bigint = w.presence_key & 4294967295
         AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d
                            WHERE d.datname = pg_catalog.current_database()))"""

# Who has not renewed its leases in time, and whose presence lock is free. After a restart of the server nobody had the
# time to take it.
MISSING = f"""
SELECT s.id, s.is_late, s.is_absent
  FROM (SELECT w.id::text, w.seen_until < clock_timestamp() AS is_late,
               w.has_presence AND NOT {PRESENT} AND pg_postmaster_start_time() + $2 < clock_timestamp() AS is_absent
          FROM {{worker}} w WHERE w.id <> $1) s
 WHERE s.is_late OR s.is_absent
"""

RECOVER_WINDOW = 500

# Jobs whose lease ran out, whatever is known of their worker, or whose worker is gone for sure ($1, which is asked
# again here). One that was lost too often has failed, one that was to be cancelled is; all others may be taken at once.
# The backends that may still have a transaction of theirs open are told, to be ended by `END_BACKEND`.
RECOVER = f"""
WITH lost AS MATERIALIZED (
    SELECT j.id, j.backend_pid,
           CASE WHEN j.cancel_requested_at IS NOT NULL THEN 'cancelled'
                WHEN j.attempts >= j.max_attempts THEN 'failed' ELSE 'queued' END AS status
      FROM {{job}} j LEFT JOIN {{worker}} w ON w.id = j.worker
     WHERE j.lease_token IS NOT NULL
       AND (j.lease_until < clock_timestamp() OR (w.id = ANY ($1) AND w.has_presence AND NOT {PRESENT}))
     ORDER BY j.id LIMIT {RECOVER_WINDOW} FOR NO KEY UPDATE OF j SKIP LOCKED),
back AS (
    UPDATE {{job}} j
       SET lease_token = NULL, lease_until = NULL, losses = j.losses + 1, backend_pid = NULL
      FROM lost o WHERE o.id = j.id AND o.status = 'queued'
 RETURNING {of("j")}, j.started_at, j.worker),
gone AS (
    DELETE FROM {{job}} j USING lost o WHERE o.id = j.id AND o.status <> 'queued'
 RETURNING {of("j")}, j.run_at, j.started_at, j.worker, o.status),
kept AS (
    INSERT INTO {{job_history}} ({ENDED_COLUMNS})
    SELECT {of("g").replace("g.losses", "g.losses + 1")}, g.run_at, g.started_at, g.worker, g.status, NULL,
           CASE g.status WHEN 'failed' THEN 'WorkerLost' ELSE 'CancelAsked' END,
           CASE g.status WHEN 'failed'
                THEN format('its worker was lost in attempt %s of %s', g.attempts, g.max_attempts)
                ELSE 'it was to be cancelled when its worker was lost' END, NULL
      FROM gone g),
attempt AS (
    INSERT INTO {{job_attempt}} (job_id, attempt, status, started_at, worker, error_type, error_message)
    SELECT a.id, a.attempts, 'lost', a.started_at, a.worker, 'WorkerLost', 'the worker was gone before the job ended'
      FROM (SELECT b.id, b.attempts, b.started_at, b.worker FROM back b
             UNION ALL SELECT g.id, g.attempts, g.started_at, g.worker FROM gone g) a
        ON CONFLICT (job_id, attempt) DO NOTHING)
SELECT a.id, a.task, a.attempts, a.max_attempts, a.worker::text, o.status, o.backend_pid
  FROM (SELECT b.id, b.task, b.attempts, b.max_attempts, b.worker FROM back b
         UNION ALL SELECT g.id, g.task, g.attempts, g.max_attempts, g.worker FROM gone g) a
  JOIN lost o ON o.id = a.id
"""

# Only if that backend is still in the transaction of this very job.
END_BACKEND = """
SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity a
 WHERE a.pid = $1 AND a.application_name = $2 AND a.datname = current_database()
"""

# A worker that has nothing any more is forgotten.
FORGET = """
DELETE FROM {worker} w
 WHERE w.id = ANY ($1) AND NOT EXISTS (SELECT FROM {job} j WHERE j.worker = w.id AND j.lease_token IS NOT NULL)
"""

CHANNEL = "cronlock_job"

# Tell workers only where one waits to be told: a NOTIFY makes commits wait for one another.
TOLD = """told AS (
    SELECT pg_notify({channel}, '') FROM made WHERE EXISTS (SELECT FROM {worker} w WHERE w.is_idle) LIMIT 1)"""

# Of one task, thousands at once; `made` gives the ids in the order of the payloads.
ENQUEUE = f"""
WITH made AS (
    INSERT INTO {{job}} (task, queue, priority, payload, trigger, occurrence, max_attempts)
    SELECT CAST([task] AS text), CAST([queue] AS text), CAST([priority] AS smallint), p.payload::jsonb,
           CAST([trigger] AS text), CAST([occurrence] AS text), CAST([max_attempts] AS smallint)
      FROM unnest(CAST(CAST([payloads] AS text) AS text[])) WITH ORDINALITY AS p(payload, place)
     ORDER BY p.place
 RETURNING id),
{TOLD}
SELECT m.id FROM made m LEFT JOIN told ON true
"""

ENQUEUE_LATER = """
INSERT INTO {job_waiting} (id, task, queue, priority, payload, trigger, occurrence, max_attempts, run_at)
SELECT nextval({job_id}), CAST([task] AS text), CAST([queue] AS text), CAST([priority] AS smallint), p.payload::jsonb,
           CAST([trigger] AS text), CAST([occurrence] AS text), CAST([max_attempts] AS smallint),
       coalesce(CAST([run_at] AS timestamptz), clock_timestamp() + CAST([delay] AS interval))
  FROM unnest(CAST(CAST([payloads] AS text) AS text[])) WITH ORDINALITY AS p(payload, place)
 ORDER BY p.place
 RETURNING id
"""

# With keys: `made` is those whose key was free. The others are looked up in a second statement, which sees what the
# first one had to wait for.
KEYED = f"""
WITH new AS (
    SELECT nextval({{job_id}}) AS id, o.key, o.fingerprint, o.payload
      FROM (SELECT * FROM unnest(CAST(CAST([keys] AS text) AS text[]), CAST(CAST([fingerprints] AS text) AS text[]),
                CAST(CAST([payloads] AS text) AS text[])) AS o(key, fingerprint, payload) ORDER BY key) o),
claimed AS (
    INSERT INTO {{idempotency_key}} (task, key, fingerprint, job_id, expires_at)
    SELECT CAST([task] AS text), n.key, n.fingerprint, n.id, clock_timestamp() + CAST([ttl] AS interval) FROM new n
        ON CONFLICT (task, key) DO NOTHING RETURNING job_id),
made AS (
    INSERT INTO {{job}} (id, task, queue, priority, payload, trigger, occurrence, idempotency_key, max_attempts)
    SELECT n.id, CAST([task] AS text), CAST([queue] AS text), CAST([priority] AS smallint), n.payload::jsonb,
           CAST([trigger] AS text), CAST([occurrence] AS text), n.key, CAST([max_attempts] AS smallint)
      FROM new n JOIN claimed c ON c.job_id = n.id ORDER BY n.id
 RETURNING id, idempotency_key),
{TOLD}
SELECT m.id, m.idempotency_key FROM made m LEFT JOIN told ON true
"""

KEYED_LATER = """
WITH new AS (
    SELECT nextval({job_id}) AS id, o.key, o.fingerprint, o.payload
      FROM (SELECT * FROM unnest(CAST(CAST([keys] AS text) AS text[]), CAST(CAST([fingerprints] AS text) AS text[]),
                CAST(CAST([payloads] AS text) AS text[])) AS o(key, fingerprint, payload) ORDER BY key) o),
claimed AS (
    INSERT INTO {idempotency_key} (task, key, fingerprint, job_id, expires_at)
    SELECT CAST([task] AS text), n.key, n.fingerprint, n.id, clock_timestamp() + CAST([ttl] AS interval) FROM new n
        ON CONFLICT (task, key) DO NOTHING RETURNING job_id)
INSERT INTO {job_waiting} (id, task, queue, priority, payload, trigger, occurrence, idempotency_key, max_attempts,
       run_at)
SELECT n.id, CAST([task] AS text), CAST([queue] AS text), CAST([priority] AS smallint), n.payload::jsonb,
           CAST([trigger] AS text), CAST([occurrence] AS text), n.key, CAST([max_attempts] AS smallint),
       coalesce(CAST([run_at] AS timestamptz), clock_timestamp() + CAST([delay] AS interval))
  FROM new n JOIN claimed c ON c.job_id = n.id ORDER BY n.id
 RETURNING id, idempotency_key
"""

FIRST = """
SELECT k.key, k.job_id, k.fingerprint, k.expires_at <= clock_timestamp() AS is_expired
  FROM {idempotency_key} k WHERE k.task = CAST([task] AS text) AND k.key = ANY (CAST(CAST([keys] AS text) AS text[]))
"""

EXPIRE = """
DELETE FROM {idempotency_key} k
 WHERE k.task = CAST([task] AS text) AND k.key = ANY (CAST(CAST([keys] AS text) AS text[]))
   AND k.expires_at <= clock_timestamp()
"""

# What waits at one moment in one process, of any tasks.
ENQUEUE_TOGETHER = f"""
WITH made AS (
    INSERT INTO {{job}} (id, task, queue, priority, payload, trigger, occurrence, max_attempts)
    SELECT nextval({{job_id}}), o.task, o.queue, o.priority, o.payload, o.trigger, o.occurrence, o.max_attempts
      FROM ROWS FROM (json_to_recordset($1) AS (task text, queue text, priority smallint, payload jsonb, trigger text,
           occurrence text, max_attempts smallint)) WITH ORDINALITY
        AS o(task, queue, priority, payload, trigger, occurrence, max_attempts, place)
     ORDER BY o.place
 RETURNING id),
{TOLD}
SELECT m.id FROM made m LEFT JOIN told ON true
"""

# The same with a key each, none of them twice; NULL instead of an id for a key that is somebody's already.
ENQUEUE_KEYED = f"""
WITH new AS MATERIALIZED (
    SELECT nextval({{job_id}}) AS id, o.*
      FROM (SELECT * FROM ROWS FROM (json_to_recordset($1) AS (task text, queue text, priority smallint, payload jsonb,
                trigger text, occurrence text, max_attempts smallint, key text, fingerprint text, ttl float8))
                WITH ORDINALITY
                AS r(task, queue, priority, payload, trigger, occurrence, max_attempts, key, fingerprint, ttl, place)
             ORDER BY r.place) o),
claimed AS (
    INSERT INTO {{idempotency_key}} (task, key, fingerprint, job_id, expires_at)
    SELECT n.task, n.key, n.fingerprint, n.id, clock_timestamp() + make_interval(secs => n.ttl) FROM new n
     ORDER BY n.place
        ON CONFLICT (task, key) DO NOTHING RETURNING job_id),
made AS (
    INSERT INTO {{job}} (id, task, queue, priority, payload, trigger, occurrence, idempotency_key, max_attempts)
    SELECT n.id, n.task, n.queue, n.priority, n.payload, n.trigger, n.occurrence, n.key, n.max_attempts
      FROM new n JOIN claimed c ON c.job_id = n.id ORDER BY n.id
 RETURNING id),
{TOLD}
SELECT m.id FROM new n LEFT JOIN made m ON m.id = n.id LEFT JOIN told ON true ORDER BY n.place
"""

# A call of the cron URL of a task in queue mode: the task's row is locked by the first statement, so that such calls
# are decided one after the other, and never beside a pause; the second one sees what the one before it did.
CALL_LOCK = """
INSERT INTO {task} AS t (name, mode) VALUES (CAST([task] AS text), 'queue')
    ON CONFLICT (name) DO UPDATE SET name = excluded.name WHERE false
"""

# A live job of the cron URL is one of `job` or of `job_waiting`, wherever it is being moved: one snapshot sees both.
# A name of an occurrence is kept among the idempotency keys, behind a character that no key of a caller can have.
CALL = f"""
WITH seen AS MATERIALIZED (
    SELECT CASE WHEN t.paused_at IS NOT NULL THEN 'paused' WHEN k.job_id IS NOT NULL THEN 'duplicate'
                WHEN live.id IS NOT NULL THEN 'queued_already' WHEN recent.id IS NOT NULL THEN 'too_soon'
            END AS reason,
           coalesce(k.job_id, live.id, recent.id) AS job_id,
           ceil(date_part('epoch', recent.finished_at + CAST([min_interval] AS interval) - statement_timestamp()))::int
               AS wait
      FROM {{task}} t
      LEFT JOIN {{idempotency_key}} k ON k.task = t.name AND k.key = chr(31) || CAST([occurrence] AS text)
       AND k.expires_at > clock_timestamp()
      LEFT JOIN LATERAL (
           SELECT min(l.id) AS id
             FROM (SELECT j.id FROM {{job}} j WHERE j.task = t.name AND j.cron_key = CAST([cron_key] AS text)
                    UNION ALL
                   SELECT w.id FROM {{job_waiting}} w
                    WHERE w.task = t.name AND w.cron_key = CAST([cron_key] AS text)) l) live ON true
      LEFT JOIN LATERAL (
           SELECT h.id, h.finished_at FROM {{job_history}} h
            WHERE h.task = t.name AND h.cron_key = CAST([cron_key] AS text) AND h.status = 'completed'
              AND h.finished_at > statement_timestamp() - CAST([min_interval] AS interval)
            ORDER BY h.finished_at DESC LIMIT 1) recent ON true
     WHERE t.name = CAST([task] AS text)),
new AS MATERIALIZED (SELECT nextval({{job_id}}) AS id FROM seen s WHERE s.reason IS NULL),
made AS (
    INSERT INTO {{job}} (id, task, queue, priority, payload, trigger, occurrence, cron_key, max_attempts)
    SELECT n.id, CAST([task] AS text), CAST([queue] AS text), CAST([priority] AS smallint), CAST([payload] AS jsonb),
           'http', CAST([occurrence] AS text), CAST([cron_key] AS text), CAST([max_attempts] AS smallint)
      FROM new n
 RETURNING id),
named AS (
    INSERT INTO {{idempotency_key}} AS k (task, key, fingerprint, job_id, expires_at)
    SELECT CAST([task] AS text), chr(31) || CAST([occurrence] AS text), '', n.id,
           clock_timestamp() + CAST([ttl] AS interval)
      FROM new n WHERE CAST([occurrence] AS text) IS NOT NULL
        ON CONFLICT (task, key) DO UPDATE SET job_id = excluded.job_id, expires_at = excluded.expires_at),
{TOLD}
SELECT s.reason, coalesce(m.id, s.job_id), s.wait, [lock_key]
  FROM seen s LEFT JOIN made m ON true LEFT JOIN told ON true
"""

RETRIED = f"""
    DELETE FROM {{job_history}} h
     WHERE h.id = ANY (ARRAY(SELECT l.id FROM locked l)) AND h.status IN ('failed', 'cancelled') RETURNING {of("h")}"""

# Ended jobs live again, with their ids: as many attempts more as their task has, which is counted on, so that no number
# of an attempt is given twice; what they lost workers by is forgotten.
RETRY = f"""
WITH locked AS MATERIALIZED ({{chosen}}),
gone AS ({RETRIED}),
made AS (
    INSERT INTO {{job}} ({CARRIED}, run_at)
    SELECT {
    of("g")
    .replace(
        "g.max_attempts",
        "least(32767, g.attempts + coalesce(CAST(t.options ->> 'maxAttempts' AS integer), {max_attempts}))",
    )
    .replace("g.losses", "0")
}, clock_timestamp()
      FROM gone g LEFT JOIN {{task}} t ON t.name = g.task
 RETURNING id, task),
{TOLD}
SELECT m.id, m.task FROM made m LEFT JOIN told ON true ORDER BY m.id
"""

RETRY_ONE = "SELECT h.id FROM {job_history} h WHERE h.id = {id} FOR UPDATE"

# The dead letters, the oldest first: by the index of those that failed.
RETRY_FAILED = """
SELECT h.id FROM {job_history} h
 WHERE h.status = 'failed' AND h.id > {after} AND ({task_name}::text IS NULL OR h.task = {task_name})
 ORDER BY h.id LIMIT {limit} FOR UPDATE SKIP LOCKED
"""

# What nobody works on ends at once; of anything else its worker is told. Both are decided under the lock of the row.
CANCEL = f"""
WITH here AS MATERIALIZED (
    SELECT j.id, j.lease_token IS NOT NULL AND j.lease_until > clock_timestamp() AS is_held
      FROM {{job}} j WHERE j.id = {{id}} FOR NO KEY UPDATE),
asked AS (
    UPDATE {{job}} j SET cancel_requested_at = coalesce(j.cancel_requested_at, clock_timestamp()),
           cancel_requested_by = coalesce(j.cancel_requested_by, {{by}}::text)
      FROM here WHERE j.id = here.id AND here.is_held
 RETURNING j.id),
gone AS (
    DELETE FROM {{job}} j USING here WHERE j.id = here.id AND NOT here.is_held
 RETURNING {of("j")}, j.run_at, j.started_at, j.worker),
unwaited AS (
    DELETE FROM {{job_waiting}} w WHERE w.id = {{id}}
 RETURNING {of("w")}, w.run_at, NULL::timestamptz AS started_at, NULL::uuid AS worker),
kept AS (
    INSERT INTO {{job_history}} ({CARRIED}, run_at, started_at, worker, status, error_type, error_message)
    SELECT {of("e")}, e.run_at, e.started_at, e.worker, 'cancelled', 'CancelAsked',
           concat('cancelled by ', {{by}}::text)
      FROM (SELECT * FROM gone UNION ALL SELECT * FROM unwaited) e
 RETURNING id)
SELECT a.id, true AS is_asked FROM asked a UNION ALL SELECT k.id, false FROM kept k
"""

# What those who poll are told, in one statement: a job that is being moved is seen in exactly one place.
POLLED = """
SELECT s.job_id, row_to_json(s)::text
  FROM (SELECT j.id AS job_id, j.task, j.status, j.attempts, j.max_attempts, j.enqueued_at, j.run_at, j.started_at,
               j.finished_at, j.progress_done, j.progress_total
          FROM {job_status} j WHERE j.id = ANY (CAST([ids] AS bigint[]))) s
"""

WINDOW = 5000
"""How many ended jobs a pruner looks at in one transaction."""

# As `runs.OLD`: a window of ended jobs in the order of their ids. Those behind were enqueued later, and so they ended
# later than this window's were enqueued.
OLD = """
WITH seen AS MATERIALIZED (
    SELECT h.id, h.status, h.enqueued_at, h.finished_at FROM {job_history} h
     WHERE h.id > {after} ORDER BY h.id LIMIT {window}),
old AS MATERIALIZED (
    SELECT s.id, s.status FROM seen s
     WHERE s.finished_at < clock_timestamp() - make_interval(secs => CASE s.status
               WHEN 'completed' THEN {completed} ELSE {failed} END))"""

GONE = """
SELECT (SELECT coalesce(json_object_agg(g.status, g.number), '{{}}')::text
          FROM (SELECT gone.status, count(*) AS number FROM gone GROUP BY gone.status) g) AS numbers,
       CASE WHEN count(*) = {window} AND min(s.enqueued_at) < clock_timestamp() - make_interval(secs => {shortest})
            THEN max(s.id) END AS after
  FROM seen s
"""

PRUNE = f"""{OLD},
locked AS MATERIALIZED (
    SELECT h.id FROM {{job_history}} h
     WHERE h.id = ANY (ARRAY(SELECT o.id FROM old o)) FOR UPDATE SKIP LOCKED),
gone AS (
    DELETE FROM {{job_history}} h WHERE h.id = ANY (ARRAY(SELECT l.id FROM locked l)) RETURNING h.id, h.status),
attempts AS (
    DELETE FROM {{job_attempt}} a WHERE a.job_id = ANY (ARRAY(SELECT g.id FROM gone g)))
{GONE}"""

PRUNABLE = f"""{OLD},
gone AS (SELECT o.status FROM old o)
{GONE}"""

# Keys that have expired, by their index; a row locked by somebody else is his.
PRUNE_KEYS = """
WITH old AS MATERIALIZED (
    SELECT k.task, k.key FROM {idempotency_key} k
     WHERE k.expires_at < clock_timestamp() ORDER BY k.expires_at LIMIT {window} FOR UPDATE SKIP LOCKED),
gone AS (
    DELETE FROM {idempotency_key} k USING old o WHERE k.task = o.task AND k.key = o.key RETURNING 1)
SELECT count(*) AS number FROM gone
"""

PRUNABLE_KEYS = "SELECT count(*) AS number FROM {idempotency_key} k WHERE k.expires_at < clock_timestamp()"

PREPARED = {
    "claim_next": (CLAIM_NEXT, "uuid, interval, uuid, text, text[], integer, smallint, bigint"),
    "claim": (CLAIM, "uuid, interval, uuid, text, text[], integer"),
    "claim_suspect": (CLAIM_SUSPECT, "uuid, interval, uuid, text[], text[]"),
    "suspects": (SUSPECTS, "text[], text[]"),
    "done": (DONE, "bigint[], uuid[]"),
    "end": (END, "json"),
    "fates": (FATES, "bigint[], smallint[], uuid"),
    "release": (RELEASE, "bigint[], uuid[]"),
    "renew": (RENEW, "bigint[], uuid[], interval"),
    "cancelled": (CANCELLED, "bigint[]"),
    "progress": (PROGRESS, "json"),
    "disown": (DISOWN, "uuid, uuid[]"),
    "promote": (PROMOTE, "text, integer"),
    "seen": (SEEN, "json, interval"),
    "clock": (CLOCK, ""),
    "idle": (IDLE, "uuid, boolean"),
    "leave": (LEAVE, "uuid"),
    "paused": (PAUSED, ""),
    "missing": (MISSING, "uuid, interval"),
    "recover": (RECOVER, "uuid[]"),
    "end_backend": (END_BACKEND, "integer, text"),
    "forget": (FORGET, "uuid[]"),
    "enqueue": (ENQUEUE_TOGETHER, "json"),
    "enqueue_keyed": (ENQUEUE_KEYED, "json"),
}
"""The statements of workers and of the group writer, with the types of their values."""

NAMED = {
    "keyed": (
        KEYED,
        {
            "task": "text",
            "queue": "text",
            "priority": "smallint",
            "trigger": "text",
            "occurrence": "text",
            "max_attempts": "smallint",
            "keys": "text",
            "fingerprints": "text",
            "payloads": "text",
            "ttl": "interval",
        },
    ),
}
"""Statements that callers' connections are sent too, whose values have names, with their types."""

encode = json.JSONEncoder(separators=(",", ":")).encode


def literal(value: Any) -> bytes:
    """A value as SQL in ASCII: a number, text, a time, a span, a UUID, None, a mapping as JSON, or a list of these.

    Bytes are SQL already.
    """
    match value:
        case None:
            return b"NULL"
        case bytes():
            return value
        case bool():
            return b"true" if value else b"false"
        case int():
            return b"%d" % value
        case float():
            return repr(value).encode()
        case str():
            return text_of(value)
        case dict():
            return quoted(encode(value))
        case timedelta():
            return b"'%r s'" % value.total_seconds()
        case list():
            if value and isinstance(value[0], dict):
                return quoted(encode(value))
            return text_of(array(value))
    return quoted(str(value))


def array(values: Sequence[Any]) -> str:
    """Numbers or texts as the text of an array, which every driver sends as it is."""
    return "{" + ",".join([item(value) for value in values]) + "}"


def item(value: Any) -> str:
    """An element in the text of an array."""
    if isinstance(value, int):
        return str(value)
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


TABLES = ("job", "job_waiting", "job_history", "job_attempt", "idempotency_key", "worker", "job_status", "task")


def names_of(schema: str) -> dict[str, sql.Composable]:
    """What the statements have in braces: tables, the sequence, the channel."""
    sequence = sql.Identifier(schema, "job_id").as_string(None)
    return {
        **{name: sql.Identifier(schema, name) for name in TABLES},
        "job_id": sql.SQL("{}::regclass").format(sql.Literal(sequence)),
        "channel": sql.Literal(f"{CHANNEL}:{schema}"),
    }


class Statements:
    """The statements of one schema, put together once.

    They are executed by their name on a connection that has `prepare`d; or, unless `is_prepared`, sent whole each time,
    for connections that a pooler shares out.
    """

    def __init__(self, schema: str, *, is_prepared: bool = True) -> None:
        self.is_prepared = is_prepared
        self._whole: dict[str, list[str]] = {}
        self._names = names_of(schema)
        self._cut: dict[str, list[tuple[str, bool]]] = {}
        self._complete_job = sql.Identifier(schema, "complete_job")
        self.channel = f"{CHANNEL}:{schema}"

    def prepare(self, names: Sequence[str] = tuple(PREPARED)) -> bytes:
        """A message after which `execute` works on a connection."""
        lines = [b"BEGIN; SET LOCAL search_path = pg_catalog"]
        for name in names:
            text, types = PREPARED[name]
            made = sql.SQL(text).format(**self._names).as_bytes(None)
            kinds = f" ({types})" if types else ""
            lines.append(b"PREPARE cronlock_%s%s AS %s" % (name.encode(), kinds.encode(), made))
        return b"; ".join((*lines, b"COMMIT"))

    def prepare_named(self) -> bytes:
        """A message after which `execute_named` works on a connection."""
        lines = [b"BEGIN; SET LOCAL search_path = pg_catalog"]
        for name, (statement, types) in NAMED.items():
            places = {value: f"${place}" for place, value in enumerate(types, 1)}
            made = "".join(places[piece] if is_value else piece for piece, is_value in self._pieces(statement))
            lines.append(f"PREPARE cronlock_{name} ({', '.join(types.values())}) AS {made}".encode())
        return b"; ".join((*lines, b"COMMIT"))

    def execute_named(self, name: str, values: Mapping[str, Any]) -> bytes:
        """One of these statements with its values."""
        _, types = NAMED[name]
        return b"EXECUTE cronlock_%s(%s)" % (name.encode(), b", ".join(literal(values[value]) for value in types))

    def execute(self, name: str, *values: Any) -> bytes:
        """One of the statements with its values."""
        if self.is_prepared:
            given = b"(%s)" % b", ".join(literal(value) for value in values) if values else b""
            return b"EXECUTE cronlock_%s%s" % (name.encode(), given)
        types = PREPARED[name][1].split(", ") if values else []
        cast = [b"CAST(%s AS %s)" % (literal(value), kind.encode()) for value, kind in zip(values, types, strict=True)]
        if (pieces := self._whole.get(name)) is None:
            cut = PARAMETER.split(PREPARED[name][0])
            pieces = self._whole[name] = [sql.SQL(piece).format(**self._names).as_string(None) for piece in cut]
        return b"".join(
            cast[int(piece) - 1] if place % 2 else piece.encode() for place, piece in enumerate(pieces)
        ).strip()

    def compose(self, statement: str, **values: Any) -> bytes:
        """A statement with its values, all of them in braces."""
        return sql.SQL(statement).format(**self._names, **values).as_bytes(None)

    def fill(self, statement: str, values: Mapping[str, Any]) -> bytes:
        """A statement whose values are `[name]`, with them, as a message."""
        return b"".join(
            literal(values[piece]) if is_value else piece.encode() for piece, is_value in self._pieces(statement)
        )

    def text(self, statement: str, style: str) -> str:
        """A statement for somebody else's connection, whose values are `[name]`; `style` such as "%({})s" or ":{}"."""
        mark = style[0]  # elsewhere, as in the name of a schema, it stands for itself
        escaped = {"%": "%%", ":": "\\:"}[mark]
        return "".join(
            style.format(piece) if is_value else piece.replace(mark, escaped)
            for piece, is_value in self._pieces(statement)
        )

    def _pieces(self, statement: str) -> list[tuple[str, bool]]:
        """A statement's text, and the names of its values, in turn."""
        if (pieces := self._cut.get(statement)) is None:
            made = sql.SQL(statement).format(**self._names).as_string(None)
            cut = VALUE.split(made)
            pieces = self._cut[statement] = [(piece, place % 2 == 1) for place, piece in enumerate(cut)]
        return pieces

    def mark(self, job_id: int, token: str) -> tuple[sql.Composable, sql.Composable]:
        """What notes the backend on a job's row, and what says when the transaction began, if the lease is held.

        The second one is sent under whatever search_path the session has.
        """
        of_job = sql.SQL(
            " j.id OPERATOR(pg_catalog.=) {}::pg_catalog.int8"
            " AND j.lease_token OPERATOR(pg_catalog.=) {}::pg_catalog.uuid"
        ).format(job_id, token)
        mark = sql.SQL("UPDATE {job} j SET backend_pid = pg_catalog.pg_backend_pid() WHERE").format(**self._names)
        check = sql.SQL(
            "SELECT (extract(epoch FROM pg_catalog.now()) OPERATOR(pg_catalog.*) 1000000)::pg_catalog.int8"
            " FROM {job} j WHERE"
        ).format(**self._names)
        return mark + of_job, check + of_job

    def complete(self, job_id: int, token: str, opened_us: int, result: str | None, log: str | None) -> sql.Composable:
        """What completes a job in its own transaction; `result` is JSON text in ASCII, `log` any text."""
        said, lines = (sql.SQL(literal(text).decode()) for text in (result, log))
        values = (job_id, token, opened_us, said, lines)
        return sql.SQL("SELECT {}({}, {}, {}, {}, {})").format(self._complete_job, *values)


@lru_cache(maxsize=8)
def statements(schema: str, *, is_prepared: bool = True) -> Statements:
    """The statements of a schema, put together once."""
    return Statements(schema, is_prepared=is_prepared)
