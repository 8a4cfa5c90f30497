"""Every statement on `run` and `task`.

Records are written many at once: each function here takes a list and gives one statement, so that whatever
waits at one moment costs one message and one commit (see `recording`). A list travels as one JSON text in
pure ASCII, which no client_encoding can change.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from psycopg import sql

from cronlock.locks import key_expressions, quoted
from cronlock.tasks import Task

HERE = "(SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database())"

NOT_HELD = f"""NOT EXISTS (SELECT FROM pg_catalog.pg_locks l
       WHERE l.locktype = 'advisory' AND l.granted AND l.pid = r.backend_pid AND l.database = {HERE}
         AND l.classid::bigint = r.lock_classid AND l.objid::bigint = r.lock_objid
         AND l.objsubid = r.lock_objsubid)"""

LOST = """status = 'lost', finished_at = clock_timestamp(), error_type = 'ProcessGone',
       error_message = 'the process or its connection was gone before it said how the run ended'"""

# Has the task been paused, the occurrence been completed, or the last completed run been too short a time ago? Asked
# for a row `a` before its lock is tried and again once it is held, so that the later answer is the last word. All by
# indexes: run_occurrence_idx and run_completed_idx.
UNWANTED = """
      LEFT JOIN {task} t ON t.name = a.task
      LEFT JOIN LATERAL (
           SELECT min(d.id) AS id FROM {run} d
            WHERE a.occurrence IS NOT NULL AND d.task = a.task AND d.occurrence = a.occurrence
              AND d.status = 'completed') first ON true
      LEFT JOIN LATERAL (
           SELECT c.id FROM {run} c
            WHERE a.min_interval IS NOT NULL AND c.task = a.task AND coalesce(c.key, '') = coalesce(a.key, '')
              AND c.status = 'completed' AND c.finished_at > statement_timestamp() - a.min_interval
            ORDER BY c.finished_at DESC LIMIT 1) recent ON true
      CROSS JOIN LATERAL (
           SELECT CASE WHEN t.paused_at IS NOT NULL THEN 'paused'
                       WHEN first.id IS NOT NULL THEN 'duplicate'
                       WHEN recent.id IS NOT NULL THEN 'too_soon' END AS reason) unwanted"""

# Whole seconds until a call that came too soon would no longer do so.
WAIT = """CASE WHEN m.reason = 'too_soon' THEN (
           SELECT ceil(extract(epoch FROM c.finished_at + m.min_interval - statement_timestamp()))::integer
             FROM {run} c WHERE c.id = m.blocked_by) END"""

HAS_PREDECESSOR = """EXISTS (SELECT FROM {run} r
                WHERE r.status = 'running' AND r.lock_classid = m.lock_classid AND r.lock_objid = m.lock_objid
                  AND r.lock_objsubid = 1 AND r.nonce <> m.nonce)"""

# Its last column says whether a run of that lock is still `running`, which must be lost: see FREE.
BEGIN = f"""
WITH made AS (
    INSERT INTO {{run}} (nonce, task, status, reason, started_at, finished_at, trigger, caller, instance, host, pid,
        release, backend_pid, lock_name, lock_key, lock_classid, lock_objid)
    SELECT b.nonce, b.task, CASE WHEN t.paused_at IS NULL THEN 'running' ELSE 'skipped' END,
           CASE WHEN t.paused_at IS NOT NULL THEN 'paused' END,
           statement_timestamp(), CASE WHEN t.paused_at IS NOT NULL THEN statement_timestamp() END,
           b.trigger, b.caller, {{instance}}, {{host}}, {{pid}}, {{release}}, b.backend_pid, b.lock_name, b.lock_key,
           (b.lock_key >> 32) & 4294967295, b.lock_key & 4294967295
      FROM json_to_recordset({{rows}}::json) AS b(nonce uuid, task text, lock_name text, lock_key bigint,
           backend_pid integer, trigger text, caller text)
      LEFT JOIN {{task}} t ON t.name = b.task
        ON CONFLICT (nonce) DO UPDATE SET nonce = excluded.nonce
 RETURNING nonce, id, status, started_at, lock_classid, lock_objid)
SELECT m.nonce::text, m.id, m.status, btrim(to_json(m.started_at)::text, '"'), {HAS_PREDECESSOR}
  FROM made m
"""

# As BEGIN, for calls that have a key, an occurrence or an interval to keep, a lock of several slots, or a guard.
BEGIN_CHECKED = f"""
WITH made AS (
    INSERT INTO {{run}} (nonce, task, key, status, reason, started_at, finished_at, trigger, caller, occurrence,
        scheduled_for, attempt, min_interval, mode, blocked_by, instance, host, pid, release, backend_pid, lock_name,
        lock_key, lock_classid, lock_objid)
    SELECT a.nonce, a.task, a.key, CASE WHEN unwanted.reason IS NULL THEN 'running' ELSE 'skipped' END,
           unwanted.reason, statement_timestamp(),
           CASE WHEN unwanted.reason IS NOT NULL THEN statement_timestamp() END, a.trigger, a.caller, a.occurrence,
           a.scheduled_for,
           1 + (SELECT count(*) FROM {{run}} e WHERE a.occurrence IS NOT NULL AND e.task = a.task
                   AND e.occurrence = a.occurrence AND e.status <> 'skipped' AND e.nonce <> a.nonce),
           a.min_interval, a.mode,
           CASE unwanted.reason WHEN 'duplicate' THEN first.id WHEN 'too_soon' THEN recent.id END,
           {{instance}}, {{host}}, {{pid}}, {{release}}, a.backend_pid, a.lock_name, a.lock_key,
           (a.lock_key >> 32) & 4294967295, a.lock_key & 4294967295
      FROM json_to_recordset({{rows}}::json) AS a(nonce uuid, task text, key text, occurrence text,
           scheduled_for timestamptz, min_interval interval, mode text, lock_name text, lock_key bigint,
           backend_pid integer, trigger text, caller text){UNWANTED}
        ON CONFLICT (nonce) DO UPDATE SET nonce = excluded.nonce
 RETURNING nonce, id, status, started_at, lock_classid, lock_objid, reason, blocked_by, min_interval, attempt)
SELECT m.nonce::text, m.id, m.status, btrim(to_json(m.started_at)::text, '"'), {HAS_PREDECESSOR},
       m.reason, m.blocked_by, {WAIT}, m.attempt
  FROM made m
"""

# The runs that had the lock before and never said how they ended. One on the taker's own backend cannot have it now.
FREE = f"""
WITH freed AS (
    UPDATE {{run}} r SET {LOST}
      FROM json_to_recordset({{rows}}::json) AS b(nonce uuid, lock_key bigint, backend_pid integer)
     WHERE r.status = 'running' AND r.nonce <> b.nonce AND r.lock_objsubid = 1
       AND r.lock_classid = (b.lock_key >> 32) & 4294967295 AND r.lock_objid = b.lock_key & 4294967295
       AND (r.backend_pid = b.backend_pid OR {NOT_HELD})
 RETURNING b.nonce, r.id, r.task)
SELECT nonce::text, json_agg(json_build_array(id, task))::text FROM freed GROUP BY nonce
"""

SKIP = """
WITH made AS (
    INSERT INTO {run} (nonce, task, key, status, reason, started_at, finished_at, trigger, caller, occurrence,
        scheduled_for, instance, host, pid, release, lock_name, lock_key, lock_classid, lock_objid, blocked_by)
    SELECT a.nonce, a.task, a.key, 'skipped', a.reason, statement_timestamp(), statement_timestamp(), a.trigger,
           a.caller, a.occurrence, a.scheduled_for, {instance}, {host}, {pid}, {release}, a.lock_name, a.lock_key,
           (a.lock_key >> 32) & 4294967295, a.lock_key & 4294967295, a.blocked_by
      FROM json_to_recordset({rows}::json) AS a(nonce uuid, task text, key text, reason text, occurrence text,
           scheduled_for timestamptz, lock_name text, lock_key bigint, trigger text, caller text, blocked_by bigint)
        ON CONFLICT (nonce) DO UPDATE SET nonce = excluded.nonce
 RETURNING nonce, id)
SELECT nonce::text, id FROM made
"""

# Who holds the locks that are asked for. Only a holder counts that is foreign or whose run can be seen: between an
# opening and its `running` row there is nobody to name, and the caller asks again. A prepared transaction holds its
# locks without a pid. What is told of a holder is put together once for all its skips.
HELD = f"""
held AS MATERIALIZED (
    SELECT DISTINCT ON (k.lock_key) k.lock_key, l.pid, r.id AS run_id, g.application_name,
           json_build_array(r.id, r.started_at, (extract(epoch FROM clock_timestamp() - r.started_at) * 1000)::bigint,
               r.instance, l.pid, g.application_name)::text AS told
      FROM keyed k
      JOIN pg_locks l ON l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
       AND l.classid::bigint = (k.lock_key >> 32) & 4294967295 AND l.objid::bigint = k.lock_key & 4294967295
       AND l.database = {HERE}
      LEFT JOIN LATERAL (
           SELECT r.id, r.started_at, r.instance FROM {{run}} r
            WHERE r.status = 'running' AND r.lock_classid = (k.lock_key >> 32) & 4294967295
              AND r.lock_objid = k.lock_key & 4294967295 AND r.backend_pid = l.pid AND r.lock_objsubid = 1
            ORDER BY r.id DESC LIMIT 1) r ON true
      LEFT JOIN LATERAL pg_stat_get_activity(l.pid) g ON l.pid IS NOT NULL AND r.id IS NULL
     WHERE r.id IS NOT NULL OR coalesce(g.application_name, '') NOT LIKE 'cronlock:%'
     ORDER BY k.lock_key, r.id DESC NULLS LAST)"""

# The answer to it was lost, and its holder may have gone since: what is written stays.
WRITTEN_BEFORE = "(a.is_resent AND EXISTS (SELECT FROM {run} s WHERE s.nonce = a.nonce))"

# The skips by a holder that can be seen, or by a pause, in one statement; no row for a call that may be tried.
SKIP_SEEN = f"""
WITH asked AS MATERIALIZED (
    SELECT * FROM json_to_recordset({{rows}}::json) AS a(nonce uuid, task text, lock_name text, lock_key bigint,
        trigger text, caller text, is_resent boolean)),
keyed AS (SELECT DISTINCT a.lock_key FROM asked a),
{HELD},
made AS (
    INSERT INTO {{run}} (nonce, task, status, reason, started_at, finished_at, trigger, caller, instance, host, pid,
        release, lock_name, lock_key, lock_classid, lock_objid, blocked_by, holder_pid, holder_application)
    SELECT a.nonce, a.task, 'skipped', CASE WHEN t.paused_at IS NULL THEN 'already_running' ELSE 'paused' END,
           statement_timestamp(), statement_timestamp(), a.trigger, a.caller, {{instance}}, {{host}}, {{pid}},
           {{release}}, a.lock_name, a.lock_key, (a.lock_key >> 32) & 4294967295, a.lock_key & 4294967295,
           CASE WHEN t.paused_at IS NULL THEN h.run_id END,
           CASE WHEN t.paused_at IS NULL AND h.run_id IS NULL THEN h.pid END,
           CASE WHEN t.paused_at IS NULL THEN h.application_name END
      FROM asked a LEFT JOIN {{task}} t ON t.name = a.task LEFT JOIN held h ON h.lock_key = a.lock_key
     WHERE t.paused_at IS NOT NULL OR h.lock_key IS NOT NULL
        OR {WRITTEN_BEFORE}
        ON CONFLICT (nonce) DO UPDATE SET nonce = excluded.nonce
 RETURNING nonce, id, reason, lock_key)
SELECT m.nonce::text, m.id, m.reason, CASE WHEN m.reason <> 'paused' THEN h.told END
  FROM made m LEFT JOIN held h ON h.lock_key = m.lock_key
"""

# As SKIP_SEEN, for calls that have a key, an occurrence or an interval to keep, or a lock of several slots. `slots` are
# the keys of their lock, all of which must be held; empty where the process does not know them yet. A run of the
# same occurrence counts if it holds its own lock, whichever that is.
SKIP_CHECKED = f"""
WITH asked AS MATERIALIZED (
    SELECT a.*, coalesce(a.slots[1], hashtextextended(concat(a.lock_name, chr(31), a.key), 0)) AS lock_key
      FROM json_to_recordset({{rows}}::json) AS a(nonce uuid, task text, key text, occurrence text,
           scheduled_for timestamptz, min_interval interval, lock_name text, slots bigint[], trigger text,
           caller text, is_resent boolean)),
keyed AS (SELECT DISTINCT k.lock_key FROM asked a CROSS JOIN LATERAL unnest(a.slots) k(lock_key)),
{HELD},
decided AS MATERIALIZED (
    SELECT a.*, coalesce(unwanted.reason, 'already_running') AS reason,
           CASE WHEN unwanted.reason = 'duplicate' THEN first.id WHEN unwanted.reason = 'too_soon' THEN recent.id
                WHEN unwanted.reason IS NULL THEN coalesce(twin.id, h.run_id) END AS blocked_by,
           CASE WHEN unwanted.reason IS NULL AND twin.id IS NULL AND h.run_id IS NULL THEN h.pid END AS holder_pid,
           CASE WHEN unwanted.reason IS NULL AND twin.id IS NULL THEN h.application_name END AS holder_application,
           CASE WHEN unwanted.reason IS NULL THEN coalesce(twin.told, h.told) END AS told
      FROM asked a{UNWANTED}
      LEFT JOIN LATERAL (
           SELECT r.id, json_build_array(r.id, r.started_at,
                      (extract(epoch FROM clock_timestamp() - r.started_at) * 1000)::bigint, r.instance, NULL, NULL
                  )::text AS told
             FROM {{run}} r
            WHERE a.occurrence IS NOT NULL AND r.task = a.task AND r.occurrence = a.occurrence
              AND r.status = 'running' AND NOT {NOT_HELD}
            ORDER BY r.id DESC LIMIT 1) twin ON true
      LEFT JOIN LATERAL (
           SELECT h.run_id, h.pid, h.application_name, h.told FROM held h
            WHERE h.lock_key = ANY (a.slots)
              AND NOT EXISTS (SELECT FROM unnest(a.slots) s(lock_key)
                               WHERE NOT EXISTS (SELECT FROM held o WHERE o.lock_key = s.lock_key))
            ORDER BY h.run_id LIMIT 1) h ON true
     WHERE unwanted.reason IS NOT NULL OR twin.id IS NOT NULL OR h.told IS NOT NULL
        OR {WRITTEN_BEFORE}),
made AS (
    INSERT INTO {{run}} (nonce, task, key, status, reason, started_at, finished_at, trigger, caller, occurrence,
        scheduled_for, min_interval, instance, host, pid, release, lock_name, lock_key, lock_classid, lock_objid,
        blocked_by, holder_pid, holder_application)
    SELECT a.nonce, a.task, a.key, 'skipped', a.reason, statement_timestamp(), statement_timestamp(), a.trigger,
           a.caller, a.occurrence, a.scheduled_for, a.min_interval, {{instance}}, {{host}}, {{pid}}, {{release}},
           a.lock_name, a.lock_key, (a.lock_key >> 32) & 4294967295, a.lock_key & 4294967295, a.blocked_by,
           a.holder_pid, a.holder_application
      FROM decided a
        ON CONFLICT (nonce) DO UPDATE SET nonce = excluded.nonce
 RETURNING nonce, id, reason, blocked_by, min_interval, lock_key)
SELECT m.nonce::text, m.id, m.reason, d.told, m.blocked_by, {WAIT}, m.lock_key
  FROM made m LEFT JOIN decided d ON d.nonce = m.nonce
"""

# The condition that says nothing new keeps the plan to the index, whatever the table's size was when it was made.
END = """
WITH ended AS MATERIALIZED (
    SELECT * FROM json_to_recordset({rows}::json) AS e(nonce uuid, status text, result text, error_type text,
        error_message text, error_traceback text, error_sqlstate text, log text))
UPDATE {run} r
   SET status = e.status, finished_at = clock_timestamp(), result = e.result,
       error_type = e.error_type, error_message = e.error_message, error_traceback = e.error_traceback,
       error_sqlstate = e.error_sqlstate, log = coalesce(e.log, r.log)
  FROM ended e
 WHERE r.nonce = e.nonce AND r.nonce = ANY (ARRAY(SELECT n.nonce FROM ended n)) AND r.status IN ('running', 'lost')
 RETURNING r.nonce::text
"""

STOPPING = """
UPDATE {run} r SET stopping_at = coalesce(r.stopping_at, clock_timestamp())
  FROM json_to_recordset({rows}::json) AS e(nonce uuid)
 WHERE r.nonce = e.nonce AND r.status = 'running'
 RETURNING r.nonce::text
"""

# How far a run is, and what it has logged so far.
PROGRESS = """
UPDATE {run} r
   SET progress_done = coalesce(e.done, r.progress_done),
       progress_total = CASE WHEN e.done IS NULL THEN r.progress_total ELSE e.total END,
       log = coalesce(e.log, r.log)
  FROM json_to_recordset({rows}::json) AS e(nonce uuid, done bigint, total bigint, log text)
 WHERE r.nonce = e.nonce AND r.status = 'running'
 RETURNING r.nonce::text
"""

RECOVER = f"""
UPDATE {{run}} r SET {LOST}
 WHERE r.status = 'running' AND {NOT_HELD}
 RETURNING r.id, r.task, r.host, r.pid, r.started_at, r.finished_at
"""

# The closing message was sent and its answer never came: decided only once the backend has let go.
SETTLE = f"""
UPDATE {{run}} r SET {LOST}
 WHERE r.id = {{id}} AND r.status = 'running' AND {NOT_HELD}
"""

WINDOW = 5000
"""How many rows a pruner looks at in one transaction."""

# A window of rows in the order of their ids, and those of it that are over their retention. A task's last run and its
# last completed one stay, whatever their age; who has a row locked, such as another pruner, has it.
OLD = """
WITH seen AS MATERIALIZED (
    SELECT r.id, r.task, r.status, coalesce(r.finished_at, r.started_at) AS at FROM {run} r
     WHERE r.id > {after} ORDER BY r.id LIMIT {window}),
due AS MATERIALIZED (
    SELECT s.id, s.task, s.status FROM seen s
     WHERE s.status <> 'running'
       AND s.at < clock_timestamp() - make_interval(secs => CASE s.status
               WHEN 'skipped' THEN {skipped} WHEN 'completed' THEN {completed} ELSE {failed} END)),
kept AS MATERIALIZED (
    SELECT t.task, last.id AS last_id, good.id AS good_id
      FROM (SELECT DISTINCT d.task FROM due d WHERE d.status <> 'skipped') t
      LEFT JOIN LATERAL (
            SELECT n.id FROM {run} n
             WHERE n.task >= t.task AND n.task <= t.task AND n.status <> 'skipped'
             ORDER BY n.task, n.id DESC LIMIT 1) last ON true
      LEFT JOIN LATERAL (
            SELECT n.id FROM {run} n
             WHERE n.task >= t.task AND n.task <= t.task AND n.status = 'completed'
             ORDER BY n.task, n.id DESC LIMIT 1) good ON true),
old AS MATERIALIZED (
    SELECT d.id, d.status FROM due d LEFT JOIN kept k ON k.task = d.task
     WHERE d.status = 'skipped' OR (d.id < k.last_id AND d.id IS DISTINCT FROM k.good_id))"""

# The one row: how many rows are gone, by status; after which id the next window begins, or NULL where there is none, or
# where all that comes is younger than the shortest retention.
GONE = """
SELECT (SELECT coalesce(json_object_agg(g.status, g.number), '{{}}')::text
          FROM (SELECT gone.status, count(*) AS number FROM gone GROUP BY gone.status) g) AS numbers,
       CASE WHEN count(*) = {window} AND min(s.at) < clock_timestamp() - make_interval(secs => {shortest})
            THEN max(s.id) END AS after
  FROM seen s
"""

PRUNE = f"""{OLD},
locked AS MATERIALIZED (
    SELECT r.id FROM {{run}} r
     WHERE r.id = ANY (ARRAY(SELECT o.id FROM old o)) FOR UPDATE SKIP LOCKED),
gone AS (
    DELETE FROM {{run}} r WHERE r.id = ANY (ARRAY(SELECT l.id FROM locked l)) RETURNING r.status)
{GONE}"""

PRUNABLE = f"""{OLD},
gone AS (SELECT o.status FROM old o)
{GONE}"""

# A row that says nothing new is left as it is, but for the minute in which the task was seen last.
REGISTER = """
INSERT INTO {task} AS t (name, schedule, timezone, mode, lock_name, lock_key, options)
SELECT name, schedule, timezone, mode, lock_name, lock_key, options
  FROM json_to_recordset({rows}::json) AS n(name text, schedule text, timezone text, mode text, lock_name text,
       lock_key bigint, options jsonb)
 ORDER BY name
    ON CONFLICT (name) DO UPDATE SET schedule = excluded.schedule, timezone = excluded.timezone,
       mode = excluded.mode, lock_name = excluded.lock_name, lock_key = excluded.lock_key, options = excluded.options,
       last_seen_at = clock_timestamp()
 WHERE t.last_seen_at < clock_timestamp() - interval '1 minute'
    OR (t.schedule, t.timezone, t.mode, t.lock_name, t.lock_key, t.options) IS DISTINCT FROM
       (excluded.schedule, excluded.timezone, excluded.mode, excluded.lock_name, excluded.lock_key, excluded.options)
"""

FOREIGN_COLLISIONS = """
SELECT t.name, t.lock_name, n.name, n.lock_name
  FROM {task} t
  JOIN json_to_recordset({rows}::json) AS n(name text, lock_name text, lock_key bigint) USING (lock_key)
 WHERE t.lock_name IS NOT NULL AND n.lock_name IS NOT NULL AND t.lock_name <> n.lock_name
"""

CANCEL_ASKED = """
SELECT id, coalesce(cancel_requested_by, '') FROM {run}
 WHERE id = ANY ({ids}::bigint[]) AND cancel_requested_at IS NOT NULL AND status = 'running'
"""

PAUSED = "SELECT name FROM {task} WHERE paused_at IS NOT NULL"

# `task >= x AND task <= x` keeps to an index by task; see `stats`.
USUAL = """
SELECT t.name, (SELECT extract(epoch FROM percentile_disc(0.5) WITHIN GROUP (ORDER BY w.finished_at - w.started_at))
                  FROM (SELECT r.started_at, r.finished_at FROM {run} r
                         WHERE r.task >= t.name AND r.task <= t.name AND r.status = 'completed'
                         ORDER BY r.task, r.id DESC LIMIT 20) w)::float8
  FROM {task} t WHERE t.name = ANY ({names}::text[])
"""


encode = json.JSONEncoder(separators=(",", ":")).encode

RECORDS = (BEGIN, BEGIN_CHECKED, FREE, STOPPING, PROGRESS, END, SKIP, SKIP_SEEN, SKIP_CHECKED)
"""The statements that write records, in the order in which one message has them."""

LISTS = (*RECORDS, REGISTER, FOREIGN_COLLISIONS)
"""The statements that take a list of rows."""


@dataclass(frozen=True, slots=True)
class Instance:
    """This process, as its runs name it: a UUID, never the host's name alone."""

    id: UUID
    host: str
    pid: int
    release: str | None


class Statements:
    """The statements of this module for one schema and one process, as messages."""

    def __init__(self, schema: str, instance: Instance) -> None:
        self._names: dict[str, Any] = {
            "run": sql.Identifier(schema, "run"),
            "task": sql.Identifier(schema, "task"),
            "instance": sql.SQL("{}::uuid").format(str(instance.id)),
            "host": sql.SQL("{}::text").format(instance.host),
            "pid": sql.SQL("{}::integer").format(instance.pid),
            "release": sql.SQL("{}::text").format(instance.release),
        }
        # Records are sent by the thousand, so all but their rows is put together once.
        self._halves = {text: self._split(text) for text in LISTS}
        self._prepared = {text: f"cronlock_{number}".encode() for number, text in enumerate(RECORDS)}

    def _split(self, text: str) -> tuple[bytes, bytes]:
        made = sql.SQL(text).format(rows=sql.SQL("\0"), **self._names).as_bytes(None)
        before, after = made.split(b"\0")
        return before, after

    def rows(self, text: str, rows: Sequence[dict[str, Any]]) -> bytes:
        """One of the statements that take a list, with its list of rows."""
        before, after = self._halves[text]
        return b"".join((before, quoted(encode(rows)), after))

    def prepare(self) -> bytes:
        """A message after which `execute` works on a connection: planning them costs more than running them."""
        lines = [b"BEGIN; SET LOCAL search_path = pg_catalog; DEALLOCATE ALL"]  # what a broken try left
        for text in RECORDS:
            before, after = self._halves[text]
            lines.append(b"".join((b"PREPARE ", self._prepared[text], b" (json) AS ", before, b"$1", after)))
        return b"; ".join((*lines, b"COMMIT"))

    def execute(self, text: str, rows: Sequence[dict[str, Any]]) -> bytes:
        """As `rows`, on a connection that was sent `prepare`."""
        return b"".join((b"EXECUTE ", self._prepared[text], b"(", quoted(encode(rows)), b")"))

    def fill(self, text: str, **values: Any) -> bytes:
        """A statement with its values."""
        return sql.SQL(text).format(**self._names, **values).as_bytes(None)


def lock_keys(tasks: Sequence[Task]) -> bytes:
    """A message that gives (task, lock key) for every slot of these tasks, the names hashed by the server.

    A task with a `key` has no lock that all its runs share.
    """
    keyed = [(task.name, key) for task in tasks if task.key is None for key in key_expressions(task)]
    if not keyed:
        return b"SELECT NULL::text, NULL::bigint WHERE false"
    rows = [sql.SQL("({}::text, {})").format(name, key) for name, key in keyed]
    return sql.SQL("SELECT * FROM (VALUES {}) AS keyed(task, lock_key)").format(sql.SQL(", ").join(rows)).as_bytes(None)
