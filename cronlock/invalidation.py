"""Every statement on what is invalidated, and what a run has said so far.

What a task says is a row for every target, written in the task's own transaction: it is there when that commits, and
never was when it is rolled back, to a savepoint too. So what is said waits only until the next statement of the task
on its connection, before which it is written, or until the message that ends the run.

Who delivers has the target's lease, a random token and a few seconds; every later word about a delivery names it.
"""

import json
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from psycopg import sql

from cronlock.locks import text_of
from cronlock.targets import Invalidation, merged

if TYPE_CHECKING:
    from cronlock.targets import Targets

AT_ONCE = 500
"""How many rows one delivery has at most."""
TEXTS_AT_ONCE = 1000
CHARACTERS_AT_ONCE = 200_000
"""How many texts and characters, but for a single row that has more."""
PRUNE_WINDOW = 1000

# Under whatever search_path and client_encoding the task has.
SAID = (
    b"INSERT INTO %b (target, keys, tags, paths, task, run_id, job_id)"
    b" SELECT t.target, %b::pg_catalog.text[], %b::pg_catalog.text[], %b::pg_catalog.text[], %b, %b"
    b" FROM pg_catalog.unnest(%b::pg_catalog.text[]) AS t(target)"
)

# Of jobs that have no transaction of their own: in the one that writes their end, if their lease is still held.
SAID_BY_JOBS = """
WITH said AS MATERIALIZED (
    SELECT * FROM ROWS FROM (json_to_recordset({rows}::json) AS (id bigint, token uuid, task text, targets text[],
        keys text[], tags text[], paths text[])) WITH ORDINALITY
        AS s(id, token, task, targets, keys, tags, paths, place)),
held AS MATERIALIZED (
    SELECT j.id FROM {job} j WHERE (j.id, j.lease_token) IN (SELECT s.id, s.token FROM said s) FOR NO KEY UPDATE)
INSERT INTO {invalidation} (target, keys, tags, paths, task, job_id)
SELECT t.target, s.keys, s.tags, s.paths, s.task, s.id
  FROM said s JOIN held h ON h.id = s.id CROSS JOIN LATERAL unnest(s.targets) t(target)
 ORDER BY s.place
"""

# What is registered, at most once a minute; and how many rows wait for targets that nobody has had for a while.
REGISTER = """
INSERT INTO {target} AS t (name, kind)
SELECT n.name, n.kind FROM json_to_recordset({rows}::json) AS n(name text, kind text) ORDER BY n.name
    ON CONFLICT (name) DO UPDATE SET kind = excluded.kind, seen_at = clock_timestamp()
 WHERE t.seen_at < clock_timestamp() - interval '30 seconds' OR t.kind <> excluded.kind
"""

# `target >= x AND target <= x` keeps to the index of what waits; see `stats`.
OLDEST = """(SELECT i.created_at FROM {invalidation} i
               WHERE i.target >= t.name AND i.target <= t.name AND i.delivered_at IS NULL
               ORDER BY i.target, i.id LIMIT 1)"""

CLAIM = f"""
WITH free AS MATERIALIZED (
    SELECT t.name FROM {{target}} t
     WHERE t.name = ANY ({{names}}::text[])
       AND (t.lease_until IS NULL OR t.lease_until < clock_timestamp())
       AND (t.retry_at IS NULL OR t.retry_at <= clock_timestamp())
       AND {OLDEST} IS NOT NULL
       FOR NO KEY UPDATE SKIP LOCKED)
UPDATE {{target}} t
   SET lease_token = {{token}}::uuid, lease_until = clock_timestamp() + make_interval(secs => {{seconds}})
  FROM free WHERE t.name = free.name
 RETURNING t.name, t.attempts
"""

RENEW = """
UPDATE {target} t SET lease_until = clock_timestamp() + make_interval(secs => {seconds})
 WHERE t.name = {name} AND t.lease_token = {token}::uuid
 RETURNING t.name
"""

# Also those that were claimed without an answer.
RELEASE = """
UPDATE {target} t SET lease_token = NULL, lease_until = NULL WHERE t.lease_token = {token}::uuid AND t.name = {name}
"""

WAITING = f"""
SELECT i.id, array_to_json(i.keys)::text, array_to_json(i.tags)::text, array_to_json(i.paths)::text
  FROM {{invalidation}} i
 WHERE i.target >= {{name}} AND i.target <= {{name}} AND i.delivered_at IS NULL
 ORDER BY i.target, i.id LIMIT {AT_ONCE}
"""

# The lease is held for as long as this transaction lasts.
MINE = "SELECT 1 FROM {target} t WHERE t.name = {name} AND t.lease_token = {token}::uuid FOR NO KEY UPDATE"

DELIVERED = """
WITH mine AS (
    UPDATE {target} t SET attempts = 0, retry_at = NULL, failed_at = NULL, last_error = NULL,
           delivered_at = clock_timestamp()
     WHERE t.name = {name} AND t.lease_token = {token}::uuid RETURNING t.name)
UPDATE {invalidation} i SET delivered_at = clock_timestamp(), attempts = i.attempts + 1
  FROM mine
 WHERE i.target = mine.name AND i.id = ANY ({ids}::bigint[]) AND i.delivered_at IS NULL
 RETURNING i.id
"""

FAILED = """
WITH mine AS (
    UPDATE {target} t
       SET attempts = t.attempts + 1, retry_at = clock_timestamp() + make_interval(secs => {delay}),
           failed_at = coalesce(t.failed_at, clock_timestamp()), last_error = {error}, lease_token = NULL,
           lease_until = NULL
     WHERE t.name = {name} AND t.lease_token = {token}::uuid RETURNING t.name)
UPDATE {invalidation} i SET attempts = i.attempts + 1, last_error = {error}
  FROM mine
 WHERE i.target = mine.name AND i.id = ANY ({ids}::bigint[]) AND i.delivered_at IS NULL
"""

NOTIFY = "SELECT pg_notify({channel}, p.payload) FROM json_array_elements_text({payloads}::json) AS p(payload)"

RAISE = """
INSERT INTO {version} AS v (key, version)
SELECT k.key, 1 FROM json_array_elements_text({keys}::json) AS k(key) ORDER BY k.key
    ON CONFLICT (key) DO UPDATE SET version = v.version + 1, changed_at = clock_timestamp()
"""

VERSIONS = """
SELECT v.key, v.version FROM {version} v WHERE v.key OPERATOR(pg_catalog.=) ANY (CAST({keys} AS pg_catalog.text[]))
"""

# A window of rows in the order of their ids: those over their retention go, whether they were delivered or not.
# Those behind were written later, but for what was written at one moment. A row that somebody has locked is his.
OLD = """
WITH seen AS MATERIALIZED (
    SELECT i.id, i.created_at FROM {invalidation} i WHERE i.id > {after} ORDER BY i.id LIMIT {window}),
old AS MATERIALIZED (
    SELECT s.id FROM seen s WHERE s.created_at < clock_timestamp() - make_interval(secs => {kept}))"""

# By target: how many, and how many of these were never delivered.
GONE = """
SELECT (SELECT coalesce(json_object_agg(g.target, json_build_array(g.number, g.undelivered)), '{{}}')::text
          FROM (SELECT w.target, count(*) AS number, count(*) FILTER (WHERE w.delivered_at IS NULL) AS undelivered
                  FROM gone w GROUP BY w.target) g) AS numbers,
       CASE WHEN count(*) = {window} AND min(s.created_at) < clock_timestamp() - make_interval(secs => {kept})
            THEN max(s.id) END AS after
  FROM seen s
"""

PRUNE = f"""{OLD},
locked AS MATERIALIZED (
    SELECT i.id FROM {{invalidation}} i
     WHERE i.id = ANY (ARRAY(SELECT o.id FROM old o)) FOR UPDATE SKIP LOCKED),
gone AS (
    DELETE FROM {{invalidation}} i WHERE i.id = ANY (ARRAY(SELECT l.id FROM locked l))
 RETURNING i.target, i.delivered_at)
{GONE}"""

PRUNABLE = f"""{OLD},
gone AS (
    SELECT i.target, i.delivered_at FROM {{invalidation}} i WHERE i.id = ANY (ARRAY(SELECT o.id FROM old o)))
{GONE}"""

FORGET = f"""
DELETE FROM {{target}} t
 WHERE t.seen_at < clock_timestamp() - make_interval(secs => {{kept}}) AND {OLDEST} IS NULL
"""

LEFT = f"""
SELECT t.name, extract(epoch FROM clock_timestamp() - t.seen_at)::bigint,
       extract(epoch FROM clock_timestamp() - {OLDEST})::bigint
  FROM {{target}} t
 WHERE t.seen_at < clock_timestamp() - interval '10 minutes' AND {OLDEST} IS NOT NULL
 ORDER BY t.name
"""

ESCAPED = str.maketrans({"\\": "\\\\", '"': '\\"'})
encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
"""Without escapes: a database in SQL_ASCII holds any text, and can read none of these."""


class Statements:
    """The statements of one schema, as messages for a transaction whose search_path is pg_catalog."""

    def __init__(self, schema: str) -> None:
        named = {"invalidation": "invalidation", "target": "invalidation_target", "version": "cache_version"}
        self._names: dict[str, sql.Composable] = {
            name: sql.Identifier(schema, table) for name, table in {**named, "job": "job"}.items()
        }
        self._said = self._names["invalidation"].as_bytes(None)

    def fill(self, statement: str, **values: Any) -> bytes:
        """A statement with its values; a tuple is written as an array, a list as JSON."""
        made = {name: sql.SQL(written(value)) for name, value in values.items()}
        return sql.SQL(statement).format(**self._names, **made).as_bytes(None)

    def said(
        self, targets: Sequence[str], change: Invalidation, task: str, run_id: int | None, job_id: int | None
    ) -> bytes:
        """What a task said, for the task's own transaction, whatever search_path it has."""
        lists = tuple(array(one) for one in (change.keys, change.tags, change.paths))
        numbers = b", ".join(b"NULL" if number is None else b"%d" % number for number in (run_id, job_id))
        values = (self._said, *lists, text_of(task), numbers, array(targets))
        return SAID % values

    def version_message(self, keys: Sequence[str]) -> bytes:
        """The reading of versions as a message."""
        return self.fill(VERSIONS, keys=tuple(keys))

    def versions(self, style: str) -> str:
        """The reading of versions for somebody else's connection; `style` is how it writes the value `keys`."""
        return sql.SQL(VERSIONS).format(**self._names, keys=sql.SQL(style)).as_string(None)


def written(value: Any) -> str:
    """A value as SQL in ASCII."""
    match value:
        case None:
            return "NULL"
        case int() | float():
            return repr(value)
        case str():
            return text_of(value).decode()
        case tuple():
            return array(value).decode()
    return text_of(encode(value)).decode()


def array(items: Sequence[str] | Sequence[int]) -> bytes:
    """An array of texts or of numbers, as the text of an array in ASCII."""
    inside = (str(one) if isinstance(one, int) else f'"{one.translate(ESCAPED)}"' for one in items)
    return b"(%b)" % text_of("{" + ",".join(inside) + "}")


@lru_cache(maxsize=8)
def statements(schema: str) -> Statements:
    """The statements of a schema, put together once."""
    return Statements(schema)


class Said:
    """What one run has said is stale and that is not written yet; any thread of its task may say more."""

    def __init__(self, outbox: "Outbox", task: str, run_id: int, *, is_job: bool) -> None:
        self._outbox = outbox
        self._task = task
        self._run_id = run_id
        self._is_job = is_job
        self._waiting: list[Invalidation] = []
        self._lock = threading.Lock()

    @property
    def is_waiting(self) -> bool:
        """Whether there is something to write."""
        return bool(self._waiting)

    def add(self, change: Invalidation) -> None:
        """Say that this is stale."""
        if len(change):
            with self._lock:
                self._waiting.append(change)

    def drop(self) -> None:
        """Forget what waits: it was said within what is rolled back now."""
        with self._lock:
            self._waiting = []

    def take(self) -> bytes:
        """What waits, as statements of the run's transaction; nothing waits after that."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        targets = self._outbox.targets()
        ids = (None, self._run_id) if self._is_job else (self._run_id, None)
        parts = grouped(waiting) if targets else []
        return b"; ".join(self._outbox.statements.said(targets, part, self._task, *ids) for part in parts)

    def rows(self, token: str) -> list[dict[str, Any]]:
        """What waits, for `SAID_BY_JOBS`; it waits until the job's end is durable."""
        targets = self._outbox.targets()
        with self._lock:
            parts = grouped(self._waiting) if targets else []
        return [
            {
                "id": self._run_id,
                "token": token,
                "task": self._task,
                "targets": targets,
                "keys": part.keys,
                "tags": part.tags,
                "paths": part.paths,
            }
            for part in parts
        ]

    def committed(self) -> None:
        """What was said is there for others."""
        self._outbox.wake()


def grouped(changes: Sequence[Invalidation]) -> list[Invalidation]:
    """As few as hold them, in their order, none with more texts than one delivery has."""
    groups: list[list[Invalidation]] = []
    size = 0
    for change in changes:
        if not groups or size + len(change) > TEXTS_AT_ONCE:
            groups.append([])
            size = 0
        groups[-1].append(change)
        size += len(change)
    return [merged(group) for group in groups]


class Woken(Protocol):
    """Who delivers, as the outbox knows it."""

    def wake(self) -> None:
        """Something was said and is committed."""

    def unheard(self) -> None:
        """Something was said, and there is no target."""


class Outbox:
    """Where the runs of one process write what they say, and who is woken when it is there."""

    def __init__(self, statements: Statements, targets: "Targets", deliverer: Woken) -> None:
        self.statements = statements
        self.wake = deliverer.wake
        self._targets = targets
        self._unheard = deliverer.unheard

    def targets(self) -> list[str]:
        """The names of those that are told."""
        names = self._targets.names
        if not names:
            self._unheard()
        return names

    def of_jobs(self, rows: list[dict[str, Any]]) -> bytes:
        """What jobs without a transaction have said."""
        return self.statements.fill(SAID_BY_JOBS, rows=rows)
