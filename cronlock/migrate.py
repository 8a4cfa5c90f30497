"""Bring the schema up to date, one process at a time, and say what is wrong with it.

Migrators are serialised by a transaction that does nothing but hold an advisory lock, on a connection of
its own; the others poll with the try form. (A waiting lock statement would hold a snapshot, against which
CREATE INDEX CONCURRENTLY deadlocks.) Every migration runs under a short `lock_timeout` and is tried again,
so that it never queues in front of the application for long.

No statement here relies on `search_path`, which a role or a database may have set to anything.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psycopg
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from sqlalchemy import Connection, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from cronlock.errors import MigrationError
from cronlock.revision import is_next

POLL = 0.25
REPORT_EVERY = 5.0
LIMITS = (
    "SET LOCAL search_path = pg_catalog",
    "SET LOCAL lock_timeout = '2s'",
    # A killed migrator's statement ends with it, where the server can see that (not on every platform).
    "DO $$ BEGIN PERFORM pg_catalog.set_config('client_connection_check_interval', '1s', true);"
    " EXCEPTION WHEN OTHERS THEN NULL; END $$",
)
"""What every transaction of a migration begins with."""

alembic = threading.Lock()
"""Alembic keeps what it works on in module globals."""


@dataclass(frozen=True, slots=True)
class Migrated:
    """What a migration found and left: revisions, None for "no schema"."""

    before: str | None
    after: str


def script_location() -> Path:
    """Where the migrations are: inside the installed package, or beside it in a checkout."""
    here = Path(__file__).parent
    packed = here / "_migrations"
    return packed if (packed / "env.py").exists() else here.parent / "migrations"


def config(schema: str) -> Config:
    """Alembic's configuration, made in code."""
    made = Config()
    made.set_main_option("script_location", str(script_location()).replace("%", "%%"))
    made.set_main_option("path_separator", "os")
    made.attributes["schema"] = schema
    return made


def head(schema: str = "cronlock") -> str:
    """The newest revision that this code brings along."""
    revision = ScriptDirectory.from_config(config(schema)).get_current_head()
    if revision is None:
        raise MigrationError("this installation of cronlock has no migrations in it; install it again")
    return revision


def current(connection: "psycopg.Connection[tuple[object, ...]]", schema: str) -> str | None:
    """The revision that the database is at; None where cronlock was never installed."""
    table = sql.Identifier(schema, "alembic_version")
    if connection.execute("SELECT pg_catalog.to_regclass(%s)", (table.as_string(connection),)).fetchone() == (None,):
        return None
    rows = connection.execute(sql.SQL("SELECT version_num FROM {}").format(table)).fetchall()
    if len(rows) > 1:
        raise MigrationError(f"{schema}.alembic_version has {len(rows)} rows; it must have one")
    return str(rows[0][0]) if rows else None


def connect(url: str, *, autocommit: bool = False) -> "psycopg.Connection[tuple[object, ...]]":
    """A connection that prepares nothing: a pooler may be in between, and a portal would hold a snapshot."""
    conninfo = make_conninfo("", **{"client_encoding": "UTF8", **conninfo_to_dict(url)})  # SQL_ASCII gives bytes
    return psycopg.connect(conninfo, autocommit=autocommit, application_name="cronlock:migrate", prepare_threshold=None)


def migrate(
    url: str,
    schema: str,
    *,
    wait: timedelta = timedelta(seconds=60),
    report: Callable[[str], None] = lambda line: None,
) -> Migrated:
    """Upgrade the schema to this code's revision; safe when many processes do it at once.

    `url` must reach the server without a pooler where there is one. `wait` bounds the time spent behind
    other migrators and behind locks on our tables; `report` gets a line at once and then every few seconds.

    A schema that is one revision ahead is left as it is: in a rolling deploy instances of the code before it are
    started again. Raises `MigrationError` when the time is up, or when the database is further ahead than that.
    """
    until = time.monotonic() + wait.total_seconds()
    target = head(schema)
    try:
        with connect(url, autocommit=True) as main:
            if (done := settled(current(main, schema), target, schema)) is not None:
                return done
            with connect(url, autocommit=True) as guard:
                take_lock(guard, schema, until, report)
                before = current(main, schema)
                if (done := settled(before, target, schema)) is None:
                    create_schema(main, schema)
                    upgrade(url, schema, until, report)
                guard.execute("COMMIT")
    except psycopg.Error as error:
        raise MigrationError(f"the database refused: {str(error).strip()}") from error
    return done or Migrated(before, target)


def settled(revision: str | None, target: str, schema: str) -> Migrated | None:
    """What there is to say of a schema that is left as it is; raises `MigrationError` if this code does not know it."""
    if revision is None:
        return None
    if revision == target or is_next(revision, target):
        return Migrated(revision, revision)
    refuse_unknown(revision, schema)
    return None


def print_script(schema: str) -> None:
    """Print the SQL of all migrations on stdout, for whoever applies it by hand; no database is asked."""
    command.upgrade(config(schema), "head", sql=True)


def refuse_unknown(revision: str, schema: str) -> None:
    """Raise `MigrationError` if the database is at a revision this code does not know."""
    known = [script.revision for script in ScriptDirectory.from_config(config(schema)).walk_revisions()]
    if revision not in known:
        raise MigrationError(
            f"the schema {schema!r} is at revision {revision!r}, which this cronlock does not know (it knows up to"
            f" {known[0]!r}): the database is ahead of this code. Install the newer cronlock here."
        )


def take_lock(
    guard: "psycopg.Connection[tuple[object, ...]]", schema: str, until: float, report: Callable[[str], None]
) -> None:
    """Open the transaction that serialises migrators, or raise `MigrationError` when `until` has come."""
    reported = float("-inf")
    key = "pg_catalog.hashtextextended('cronlock migrate' || pg_catalog.chr(31) || {}, 0)"
    take = psycopg.sql.SQL(f"SELECT pg_catalog.pg_try_advisory_xact_lock({key})").format(schema)
    while True:
        guard.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
        guard.execute("SET LOCAL search_path = pg_catalog")
        guard.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
        if guard.info.server_version >= 170000:
            guard.execute("SET LOCAL transaction_timeout = 0")
        row = guard.execute(take).fetchone()
        if row == (True,):
            return
        held = holder(guard, key, schema)
        guard.execute("COMMIT")
        if time.monotonic() > until:
            raise MigrationError(f"another migration has not finished in time; {held}")
        if time.monotonic() - reported > REPORT_EVERY:
            reported = time.monotonic()
            report(f"waiting for another migration; {held}")
        time.sleep(POLL)


def holder(guard: "psycopg.Connection[tuple[object, ...]]", key: str, schema: str) -> str:
    """One phrase about who holds the migration lock: pid, application, age."""
    row = guard.execute(
        sql.SQL(
            f"""SELECT l.pid, coalesce(a.application_name, ''),
                   round(extract(epoch FROM clock_timestamp() - a.xact_start))
              FROM pg_catalog.pg_locks l LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
             WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
               AND ((l.classid::bigint << 32) | l.objid::bigint) = {key}
               AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d
                                  WHERE d.datname = pg_catalog.current_database())"""
        ).format(schema)
    ).fetchone()
    if row is None:
        return "its lock has just been freed"
    age = f", for {row[2]} s" if row[2] is not None else ""
    return f"its lock is held by backend {row[0]} ({row[1] or 'no application name'}){age}"


def create_schema(connection: "psycopg.Connection[tuple[object, ...]]", schema: str) -> None:
    """Create the schema if it is not there (IF NOT EXISTS alone asks for CREATE on the database even then)."""
    query = "SELECT FROM pg_catalog.pg_namespace WHERE nspname OPERATOR(pg_catalog.=) %s::pg_catalog.name"
    if connection.execute(query, (schema,)).fetchone() is not None:
        return
    connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))


def open_transaction(url: str) -> "psycopg.Connection[tuple[object, ...]]":
    """A connection for SQLAlchemy, which looks around on it before anything else."""
    connection = connect(url)
    connection.execute("SET LOCAL search_path = pg_catalog")
    return connection


def limit(connection: Connection) -> None:
    """Let every transaction that begins on `connection` begin with `LIMITS`."""
    event.listen(connection, "begin", begin)


def begin(connection: Connection) -> None:
    for statement in LIMITS:
        connection.exec_driver_sql(statement)


def upgrade(url: str, schema: str, until: float, report: Callable[[str], None]) -> None:
    """Run the migrations; one that cannot get its table locks gives up and is tried again until `until`."""
    engine = create_engine("postgresql+psycopg://", creator=lambda: open_transaction(url), poolclass=NullPool)
    made = config(schema)
    while True:
        try:
            with alembic, engine.connect() as connection:
                made.attributes["connection"] = connection
                command.upgrade(made, "head")
                connection.commit()
            return
        except DBAPIError as error:
            busy = getattr(error.orig, "sqlstate", None) == "55P03"
            if not busy or time.monotonic() > until:
                raise MigrationError(f"the migration failed: {str(error.orig).strip()}") from error
            report("the tables are in use by an older transaction; trying again")
            time.sleep(POLL)
