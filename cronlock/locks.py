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
# What the function complete_run raises; see migrations/versions.
ENDED = "cronlock: this is not the transaction that took the lock"
NO_ROW = "cronlock: no open run row"
SAVEPOINT = "cronlock_task"
LOCK_AT = -2


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

    The row of statement `LOCK_AT` is (acquired, backend_pid, opened_us, lock_key); `acquired` is None on a
    server that cannot write, where a lock would exclude nobody.
    """
    idle = milliseconds(task.timeout + IDLE_MARGIN)
    statement = milliseconds(task.timeout + STATEMENT_MARGIN)
    settings: dict[str, str | int] = {
        "statement_timeout": statement,
        "lock_timeout": statement,
        "idle_in_transaction_session_timeout": idle,
        "application_name": f"cronlock:{task.name}",
    }
    if server.version >= 170000:
        settings["transaction_timeout"] = idle
    if server.has_check_interval:
        settings["client_connection_check_interval"] = 500
    lines = [
        sql.SQL("BEGIN ISOLATION LEVEL READ COMMITTED NOT DEFERRABLE"),
        # One that the server has set already goes on unless it is switched off in between.
        *([sql.SQL("SET LOCAL transaction_timeout = 0")] if server.version >= 170000 else []),
        set_local(settings),
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


RESETS = [sql.SQL("RESET SESSION AUTHORIZATION"), sql.SQL("RESET ROLE"), sql.SQL("RESET ALL")]
LEFTOVERS = [sql.SQL("UNLISTEN *"), sql.SQL("CLOSE ALL"), sql.SQL("DISCARD TEMP"), sql.SQL("DISCARD SEQUENCES")]
LEFT_AT = {True: -6, False: -1}
"""The statement of a closing (True) and of a giving up that says in its last column whether the task left something
that only goes with its connection; see complete_run."""


def set_local(settings: dict[str, str | int]) -> sql.Composable:
    """SET LOCAL of several settings in one statement, which is cheaper to send and to answer."""
    calls = [
        sql.SQL("pg_catalog.set_config({}, {}, true)").format(name, str(value)) for name, value in settings.items()
    ]
    return sql.SQL("SELECT {}").format(sql.SQL(", ").join(calls))


def join(lines: Sequence[sql.Composable]) -> bytes:
    """One message of several statements."""
    return sql.SQL("; ").join(lines).as_bytes(None)


class Closing:
    """The message that commits a task's work and its run's `completed` together, or raises.

    Every check is SQL that raises, and COMMIT is the last statement. The two that matter, is this still the
    transaction that took the lock and is the row still open, are in the function `complete_run` of the schema,
    whose plan a session keeps. The message is put together once; a run adds its numbers and its result.
    """

    def __init__(self, schema: str) -> None:
        self._pieces = {is_touched: self._compose(schema, is_touched) for is_touched in (False, True)}

    @staticmethod
    def _compose(schema: str, is_touched: bool) -> list[bytes]:
        hole = sql.SQL("\0")
        before = [
            sql.SQL("SET CONSTRAINTS ALL IMMEDIATE"),
            sql.SQL(f"RELEASE SAVEPOINT {SAVEPOINT}"),
            *RESETS,
            set_local({"search_path": "pg_catalog", "statement_timeout": 30000, "lock_timeout": 30000}),
        ]
        complete = sql.SQL("SELECT {}({}, {}, {}, {})").format(
            sql.Identifier(schema, "complete_run"), hole, hole, hole, is_touched
        )
        lines = [*before, complete, *LEFTOVERS] if is_touched else [complete]
        return join([*lines, sql.SQL("COMMIT")]).split(b"\0")

    def message(self, run_id: int, opened_us: int, result: str | None, is_touched: bool) -> bytes:
        """The closing of one run.

        `result` is JSON text in ASCII, so that the message is the same in every client_encoding a task may
        have set. `is_touched` says whether the task was handed its connection: if not, there is nothing of
        its doing to reset.
        """
        start, comma, comma, end = self._pieces[is_touched]
        said = b"NULL" if result is None else quoted(result)
        return b"".join((start, b"%d" % run_id, comma, b"%d" % opened_us, comma, said, end))


def quoted(text: str) -> bytes:
    """ASCII text as an SQL literal; right whatever standard_conforming_strings says."""
    text = text.replace("'", "''")
    if "\\" in text:
        return b" E'" + text.replace("\\", "\\\\").encode("ascii") + b"'"
    return b"'" + text.encode("ascii") + b"'"


REFUSED = b"COMMIT"  # not ROLLBACK: psycopg drops its prepared statements after one
CLEAN_UP = join(
    [
        *RESETS,
        *LEFTOVERS,
        sql.SQL(
            "SELECT pg_catalog.pg_advisory_unlock_all(),"
            " EXISTS (SELECT FROM pg_catalog.pg_prepared_statements p WHERE p.from_sql)"
        ),
    ]
)


def giving_up(is_touched: bool, record: bytes = b"") -> bytes:
    """Undo the task's work and free its lock; `record` is a transaction to run right after that.

    Being part of the same message, the record needs no other slot of a pooler than the one the run has.
    """
    return b"; ".join(part for part in (b"ROLLBACK", record, CLEAN_UP if is_touched else b"") if part)


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
