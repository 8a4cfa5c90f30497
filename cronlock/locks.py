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
from cronlock.tasks import Task

STATEMENT_MARGIN = timedelta(seconds=5)
IDLE_MARGIN = timedelta(seconds=10)
# What the functions complete_run and complete_job raise; see migrations/versions.
ENDED = ("cronlock: this is not the transaction that took the lock", "cronlock: this is not the transaction of the job")
NO_ROW = "cronlock: no open run row"
OCCURRENCE_KEY = "run_occurrence_key"
"""The index by which no occurrence completes twice."""
SAVEPOINT = "cronlock_task"
PINGS_MISSED = 3
"""How many pings of a guard may be missing before the server ends its session, and with it the lock."""


def milliseconds(span: timedelta) -> int:
    """A span as PostgreSQL's settings take it, never 0 (which would mean "no limit")."""
    return max(1, int(span / timedelta(milliseconds=1)))


KEY = b"\0k"
OCCURRENCE = b"\0o"
"""Where an opening and a record have the key and the occurrence of their call."""

SEPARATOR = "pg_catalog.chr(31)"
"""Between the parts of what is hashed; no lock name that is typed has it."""


def slot_names(task: Task) -> list[str]:
    """The names of a task's slots; none where its lock is a number."""
    name = task.lock.name
    return [] if name is None else [name, *(f"{name}#{slot}" for slot in range(2, task.max_concurrent + 1))]


def key_expressions(task: Task) -> list[sql.Composable]:
    """The keys of a task's slots as SQL: PostgreSQL hashes the name itself, so that any program can name the same lock.

    With a `key` of the task 64 bits are hashed: among thousands of tenants two would share one of 32. Its text is to
    be put where `KEY` stands.
    """
    lock = task.lock
    if lock.number is not None:
        return [sql.SQL("({})::pg_catalog.int8").format(lock.number)]
    names = slot_names(task)
    if task.key is None:
        hashed = sql.SQL("pg_catalog.hashtext({}::pg_catalog.text)::pg_catalog.int8")
        return [hashed.format(name) for name in names]
    hashed = sql.SQL("pg_catalog.hashtextextended(pg_catalog.concat({}::pg_catalog.text, {}, {}), 0)")
    return [hashed.format(name, sql.SQL(SEPARATOR), sql.SQL(KEY.decode())) for name in names]


class Opening:
    """The message that opens the transaction of a task's runs and tries their lock.

    Its row is (slot, backend_pid, opened_us, keys...): `slot` is the one that was taken, from 1; 0 if none was free,
    -1 if another run of the same occurrence is under way, None on a server that cannot write, where a lock would
    exclude nobody. The message is put together once; a call adds its key and its occurrence.

    A guard's transaction has no limit but the idle timeout that its pings put off, and no savepoint: nothing else
    will ever happen in it.
    """

    def __init__(self, task: Task, server: Server, guard_ping: timedelta) -> None:
        keys = key_expressions(task)
        taking = sql.SQL("pg_catalog.pg_try_advisory_xact_lock({})")
        # Another seed than that of keys: an occurrence may be named like a tenant.
        occurrence = sql.SQL("pg_catalog.hashtextextended(pg_catalog.concat({}::pg_catalog.text, {}, {}), 1)").format(
            task.full_name, sql.SQL(SEPARATOR), sql.SQL(OCCURRENCE.decode())
        )
        slots = [sql.SQL("WHEN {} THEN {}").format(taking.format(key), slot) for slot, key in enumerate(keys, 1)]
        other = sql.SQL("WHEN NOT {} THEN -1").format(taking.format(occurrence))
        self._plain = self._compose(task, server, guard_ping, slots, keys)
        self._of_occurrence = self._compose(task, server, guard_ping, [other, *slots], keys)
        self.row_at = -1 if task.is_guarded else -2
        """The statement of the message that gives the row."""

    @staticmethod
    def _compose(
        task: Task,
        server: Server,
        guard_ping: timedelta,
        cases: Sequence[sql.Composable],
        keys: Sequence[sql.Composable],
    ) -> bytes:
        # A CASE takes one slot after the other; any other way to ask for the first free one takes several.
        row = sql.SQL(
            "SELECT CASE WHEN pg_catalog.current_setting('transaction_read_only') OPERATOR(pg_catalog.<>) 'off'"
            " THEN NULL {} ELSE 0 END, pg_catalog.pg_backend_pid(),"
            " (extract(epoch FROM pg_catalog.now()) OPERATOR(pg_catalog.*) 1000000)::pg_catalog.int8, {}"
        ).format(sql.SQL(" ").join(cases), sql.SQL(", ").join(keys))
        lines = [
            sql.SQL("BEGIN ISOLATION LEVEL READ COMMITTED NOT DEFERRABLE"),
            # One that the server has set already goes on unless it is switched off in between.
            *([sql.SQL("SET LOCAL transaction_timeout = 0")] if server.version >= 170000 else []),
            set_local(opening_settings(task, server, guard_ping)),
            row,
            *([] if task.is_guarded else [sql.SQL(f"SAVEPOINT {SAVEPOINT}")]),
        ]
        return join(lines)

    def message(self, key: str | None, occurrence: str | None) -> bytes:
        """The opening of one run."""
        message = self._plain if occurrence is None else self._of_occurrence
        if key is not None:
            message = message.replace(KEY, text_of(key))
        if occurrence is not None:
            message = message.replace(OCCURRENCE, text_of(occurrence))
        return message


def opening_settings(task: Task, server: Server, guard_ping: timedelta) -> dict[str, str | int]:
    """What is set for the transaction of a run of this task."""
    if task.is_guarded:
        settings: dict[str, str | int] = {
            "statement_timeout": 30000,
            "lock_timeout": 30000,
            "idle_in_transaction_session_timeout": milliseconds(guard_ping * PINGS_MISSED),
        }
    else:
        assert task.timeout is not None, "only a guard run has no timeout"
        idle = milliseconds(task.timeout + IDLE_MARGIN)
        statement = milliseconds(task.timeout + STATEMENT_MARGIN)
        settings = {
            "statement_timeout": statement,
            "lock_timeout": statement,
            "idle_in_transaction_session_timeout": idle,
        }
        if server.version >= 170000:
            settings["transaction_timeout"] = idle
    if server.has_check_interval:
        settings["client_connection_check_interval"] = 500
    return {**settings, "application_name": f"cronlock:{task.name}"}


def text_of(text: str) -> bytes:
    """Any text as SQL in ASCII, the same in every client_encoding a URL may ask for."""
    if text.isascii():
        return quoted(text)
    return b"pg_catalog.convert_from(pg_catalog.decode('%s', 'hex'), 'UTF8')" % text.encode().hex().encode()


def job_opening(task: Task, server: Server, name: str, mark: sql.Composable, check: sql.Composable) -> bytes:
    """Begin the transaction of a job of this task.

    `mark` notes on its row which backend has it, in a transaction before, so that its row is not locked while it runs;
    `check`, the last statement, says whether the lease is still held, and when the transaction began. `name` is what
    the transaction is called in pg_stat_activity.
    """
    limits = [*(["transaction_timeout"] if server.version >= 170000 else [])]
    settings: dict[str, str | int] = dict.fromkeys(("statement_timeout", "lock_timeout", *limits), 0)
    settings["idle_in_transaction_session_timeout"] = 0
    if task.timeout is not None:
        settings |= opening_settings(task, server, timedelta(0))
    elif server.has_check_interval:
        settings["client_connection_check_interval"] = 500
    lines = [
        sql.SQL("BEGIN ISOLATION LEVEL READ COMMITTED"),
        sql.SQL("SET LOCAL search_path = pg_catalog"),
        sql.SQL("SET LOCAL synchronous_commit = off"),  # if it is lost with the server, so is the backend
        mark,
        sql.SQL("COMMIT"),
        sql.SQL("BEGIN ISOLATION LEVEL READ COMMITTED NOT DEFERRABLE"),
        *([sql.SQL("SET LOCAL transaction_timeout = 0")] if server.version >= 170000 else []),
        set_local({**settings, "application_name": name}),
        sql.SQL(f"SAVEPOINT {SAVEPOINT}"),
        check,
    ]
    return join(lines)


def job_closing(complete: sql.Composable, said: bytes = b"") -> bytes:
    """Commit a job's work together with `said` and with its end, which `complete` writes, or raise."""
    lines = [*before_closing(), *([sql.SQL(said.decode())] if said else []), complete, *LEFTOVERS, sql.SQL("COMMIT")]
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


def before_closing() -> list[sql.Composable]:
    """What comes before the end of a transaction that a task had: its constraints are checked, its settings undone."""
    return [
        sql.SQL("SET CONSTRAINTS ALL IMMEDIATE"),
        sql.SQL(f"RELEASE SAVEPOINT {SAVEPOINT}"),
        *RESETS,
        set_local({"search_path": "pg_catalog", "statement_timeout": 30000, "lock_timeout": 30000}),
    ]


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
        complete = sql.SQL("{}SELECT {}({}, {}, {}, {}, {})").format(
            hole, sql.Identifier(schema, "complete_run"), hole, hole, hole, is_touched, hole
        )
        lines = [*before_closing(), complete, *LEFTOVERS] if is_touched else [complete]
        return join([*lines, sql.SQL("COMMIT")]).split(b"\0")

    def message(
        self, run_id: int, opened_us: int, result: str | None, is_touched: bool, log: str | None, also: bytes = b""
    ) -> bytes:
        """The closing of one run.

        `result` is JSON text in ASCII, so that the message is the same in every client_encoding a task may
        have set; `log` is any text; `also` is a statement to be part of it. `is_touched` says whether the task was
        handed its connection: if not, there is nothing of its doing to reset.
        """
        before, start, comma, comma, touched, end = self._pieces[is_touched]
        first = before + also + b"; " if also else before
        said = b"NULL" if result is None else quoted(result)
        lines = b"NULL" if log is None else text_of(log)
        return b"".join((first, start, b"%d" % run_id, comma, b"%d" % opened_us, comma, said, touched, lines, end))


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
