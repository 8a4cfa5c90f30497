"""The lock of a run: how its transaction is opened, closed and given up, as messages to PostgreSQL.

Each function here gives one simple-protocol message of several statements. Nothing in this module talks to
a server; `database` sends, `runner` decides. What the messages rest on:

- The settings come before the lock, and the lock before the savepoint: an SQL error outside the savepoint
  frees an advisory transaction lock at once, one inside it leaves the lock held.
- The simple protocol leaves no portal open, so a transaction that only holds a lock has no snapshot and no
  xid: VACUUM and migrations pass by it.
- The closing message commits only if `now()` is still the time at which the lock was taken. Whatever a task
  does to end and restart its transaction changes `now()`; taking the lock again would prove nothing.

Functions and types are written with their schema throughout, since a role or a task can set `search_path`.
(PostgreSQL manual: "Explicit Locking", 13.3.5 Advisory Locks; "Message Flow", 55.2.2 Simple Query.)
"""

from collections.abc import Sequence
from datetime import timedelta

from psycopg import sql

from cronlock.database import Server
from cronlock.tasks import Lock, Task

STATEMENT_MARGIN = timedelta(seconds=5)
IDLE_MARGIN = timedelta(seconds=10)
ENDED = "cronlock: this is not the transaction that took the lock"
NO_ROW = "cronlock: no open run row"
SAVEPOINT = "cronlock_task"


def milliseconds(span: timedelta) -> int:
    """A span as PostgreSQL's settings take it, never 0 (which would mean "no limit")."""
    return max(1, int(span / timedelta(milliseconds=1)))


def key_expression(lock: Lock) -> sql.Composable:
    """The lock's key as SQL: PostgreSQL hashes a name itself, so that any program can name the same lock."""
    if lock.number is not None:
        return sql.SQL("({})::pg_catalog.int8").format(lock.number)
    return sql.SQL("pg_catalog.hashtext({}::pg_catalog.text)::pg_catalog.int8").format(lock.name)


def opening(task: Task, server: Server) -> bytes:
    """Open the transaction of a run and try its lock.

    The last row-returning result is (acquired, backend_pid, opened_us, lock_key); `acquired` is None on a
    server that cannot write, where a lock would exclude nobody.
    """
    idle = milliseconds(task.timeout + IDLE_MARGIN)
    statement = milliseconds(task.timeout + STATEMENT_MARGIN)
    lines = [
        sql.SQL("BEGIN ISOLATION LEVEL READ COMMITTED NOT DEFERRABLE"),
        sql.SQL("SET LOCAL statement_timeout = {}").format(statement),
        sql.SQL("SET LOCAL lock_timeout = {}").format(statement),
        sql.SQL("SET LOCAL idle_in_transaction_session_timeout = {}").format(idle),
    ]
    if server.version >= 170000:
        lines.append(sql.SQL("SET LOCAL transaction_timeout = {}").format(idle))
    if server.has_check_interval:
        lines.append(sql.SQL("SET LOCAL client_connection_check_interval = 500"))
    lines += [
        sql.SQL("SET LOCAL application_name = {}").format(f"cronlock:{task.name}"),
        sql.SQL(
            "SELECT CASE WHEN pg_catalog.current_setting('transaction_read_only') OPERATOR(pg_catalog.=) 'off'"
            " THEN pg_catalog.pg_try_advisory_xact_lock({key}) END,"
            " pg_catalog.pg_backend_pid(),"
            " (extract(epoch FROM pg_catalog.now()) OPERATOR(pg_catalog.*) 1000000)::pg_catalog.int8,"
            " {key}"
        ).format(key=key_expression(task.lock)),
        sql.SQL(f"SAVEPOINT {SAVEPOINT}"),
    ]
    return join(lines)


def closing(schema: str, run_id: int, opened_us: int, result: str | None, is_touched: bool) -> bytes:
    """Commit the task's work and the run's `completed` together, or raise.

    Every check is SQL that raises, and COMMIT is the last statement. `is_touched` says whether the task was
    handed its connection: if not, there is nothing of its doing to reset. `result` is ASCII JSON text, so
    the message is the same in every client_encoding a task may have set.
    """
    lines: list[sql.Composable] = []
    if is_touched:
        lines += [
            sql.SQL("SET CONSTRAINTS ALL IMMEDIATE"),
            sql.SQL(f"RELEASE SAVEPOINT {SAVEPOINT}"),
            *RESETS,
            sql.SQL("SET LOCAL search_path = pg_catalog"),
            sql.SQL("SET LOCAL statement_timeout = 30000"),
            sql.SQL("SET LOCAL lock_timeout = 30000"),
        ]
    lines += [
        sql.SQL("SET LOCAL synchronous_commit = on"),
        sql.SQL(
            "SELECT (CASE WHEN (extract(epoch FROM pg_catalog.now()) OPERATOR(pg_catalog.*) 1000000)::pg_catalog.int8"
            " OPERATOR(pg_catalog.=) {opened} THEN 'true' ELSE {ended} END)::pg_catalog.bool"
        ).format(opened=opened_us, ended=ENDED),
        sql.SQL(
            "WITH ended AS (UPDATE {run} SET status = 'completed', finished_at = pg_catalog.clock_timestamp(),"
            " result = {result}::pg_catalog.text"
            " WHERE id OPERATOR(pg_catalog.=) {id} AND status OPERATOR(pg_catalog.=) ANY ('{{running,lost}}')"
            " RETURNING 1)"
            " SELECT (CASE WHEN pg_catalog.count(*) OPERATOR(pg_catalog.=) 1 THEN 'true' ELSE {no_row} END)"
            "::pg_catalog.bool FROM ended"
        ).format(run=sql.Identifier(schema, "run"), result=result, id=run_id, no_row=NO_ROW),
    ]
    if is_touched:
        lines += LEFTOVERS
    lines.append(sql.SQL("COMMIT"))
    return join(lines)


RESETS = [sql.SQL("RESET SESSION AUTHORIZATION"), sql.SQL("RESET ROLE"), sql.SQL("RESET ALL")]
LEFTOVERS = [
    sql.SQL("SELECT pg_catalog.pg_advisory_unlock_all()"),
    sql.SQL("UNLISTEN *"),
    sql.SQL("DISCARD TEMP"),
]


def join(lines: Sequence[sql.Composable]) -> bytes:
    """One message of several statements."""
    return sql.SQL("; ").join(lines).as_bytes(None)


REFUSED = b"COMMIT"  # not ROLLBACK: psycopg drops its prepared statements after one
GIVE_UP = b"ROLLBACK"
GIVE_UP_TOUCHED = join([sql.SQL("ROLLBACK"), *RESETS, *LEFTOVERS])


def stopping(server: Server) -> bytes:
    """Undo the task's work but keep its lock, without a limit, while its code is still coming to an end."""
    lines = [
        sql.SQL(f"ROLLBACK TO SAVEPOINT {SAVEPOINT}"),
        sql.SQL("SET LOCAL statement_timeout = 30000"),
    ]
    if server.version >= 170000:
        lines.append(sql.SQL("SET LOCAL transaction_timeout = 0"))
    return join(lines)


PING = b"SELECT 1"
