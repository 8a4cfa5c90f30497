"""What the migrations make: the models' tables, in one schema and nowhere else, whatever surrounds them."""

import asyncio
import contextlib
import io
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic import command
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row
from sqlalchemy import Connection, create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from cronlock import Cronlock, Run, migrate
from cronlock.models import REVISION, RUN_STATUSES, Base
from tests import Db, Make, serving, statements

SCHEMAS = ["cronlock", "cron_ops", 'Cron "Ops"', "100%"]

OBJECTS = """
SELECT n.nspname, d.classid::regclass::text, pg_describe_object(d.classid, d.objid, 0)
  FROM pg_namespace n
  JOIN pg_depend d ON d.refclassid = 'pg_namespace'::regclass AND d.refobjid = n.oid
 WHERE n.nspname NOT LIKE 'pg\\_%' AND n.nspname <> 'information_schema'
"""
COLUMNS = """
SELECT c.relname, c.relkind, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity,
       replace(pg_get_expr(d.adbin, d.adrelid), quote_ident(n.nspname) || '.', '')
  FROM pg_attribute a
  JOIN pg_class c ON c.oid = a.attrelid
  JOIN pg_namespace n ON n.oid = c.relnamespace
  LEFT JOIN pg_attrdef d ON (d.adrelid, d.adnum) = (c.oid, a.attnum)
 WHERE n.nspname = %(schema)s AND a.attnum > 0 AND c.relkind = 'r' AND c.relname <> 'alembic_version'
"""
CONSTRAINTS = """
SELECT c.relname, k.conname, pg_get_constraintdef(k.oid)
  FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = %(schema)s AND k.contype <> 'n' AND c.relname <> 'alembic_version'
"""
INDEXES = """
SELECT i.tablename, i.indexname, replace(i.indexdef, quote_ident(i.schemaname) || '.', '')
  FROM pg_indexes i WHERE i.schemaname = %(schema)s AND i.tablename <> 'alembic_version'
"""


@pytest.fixture
def db(empty_url: str) -> Iterator[Db]:
    with psycopg.connect(empty_url, autocommit=True) as connection:
        yield connection


@contextlib.contextmanager
def connected(url: str) -> Iterator[Connection]:
    """A SQLAlchemy connection, as Alembic takes it."""
    engine = create_engine("postgresql+psycopg://", creator=lambda: migrate.open_transaction(url), poolclass=NullPool)
    with engine.connect() as connection:
        yield connection
        connection.commit()


def alembic(url: str, schema: str, what: str, *arguments: str) -> None:
    """Run one of Alembic's commands through env.py."""
    with connected(url) as connection:
        config = migrate.config(schema)
        config.attributes["connection"] = connection
        getattr(command, what)(config, *arguments)


def described(db: Db, schema: str) -> dict[str, set[tuple[Any, ...]]]:
    """Tables, columns, defaults, constraints and indexes of a schema, without its name."""
    queries = {"columns": COLUMNS, "constraints": CONSTRAINTS, "indexes": INDEXES}
    return {what: set(db.execute(query, {"schema": schema}).fetchall()) for what, query in queries.items()}


def objects(db: Db) -> dict[str, set[str]]:
    """The objects of every schema that is not PostgreSQL's own."""
    found: dict[str, set[str]] = {}
    for schema, _, described in db.execute(OBJECTS).fetchall():
        found.setdefault(schema, set()).add(described)
    return found


def test_empty_to_head_equals_the_models(empty_url: str, db: Db) -> None:
    migrate.migrate(empty_url, "cronlock")
    alembic(empty_url, "cronlock", "check")
    # Alembic compares neither checks nor defaults, so make the models' tables and look at everything.
    db.execute("CREATE SCHEMA modelled")
    with connected(empty_url) as connection:
        Base.metadata.create_all(connection.execution_options(schema_translate_map={"cronlock": "modelled"}))
    migrated, modelled = described(db, "cronlock"), described(db, "modelled")
    for what in migrated:
        assert migrated[what] == modelled[what], what
        assert len(migrated[what]) > 3


def test_the_revision_that_the_code_expects_is_the_newest_migration() -> None:
    assert migrate.head() == REVISION


@pytest.mark.parametrize("schema", SCHEMAS)
def test_head_to_base_leaves_nothing_and_the_way_up_is_the_same_again(empty_url: str, db: Db, schema: str) -> None:
    migrate.migrate(empty_url, schema)
    first, made = described(db, schema), objects(db)
    assert set(made) == {schema}
    alembic(empty_url, schema, "downgrade", "base")
    left = objects(db)
    assert set(left) == {schema}
    assert all("alembic_version" in name for name in left[schema])
    assert migrate.migrate(empty_url, schema).before is None
    assert described(db, schema) == first
    assert objects(db) == made


def test_one_step_down_keeps_the_history_of_a_thousand_runs(empty_url: str, db: Db) -> None:
    migrate.migrate(empty_url, "cronlock")
    db.execute(
        """INSERT INTO cronlock.task (name, lock_key) VALUES ('nightly', 1);
        INSERT INTO cronlock.run (nonce, task, status, reason, trigger, started_at, finished_at, instance, host, pid,
                                  backend_pid, lock_key, lock_classid, lock_objid, occurrence, result, error_message)
        SELECT gen_random_uuid(), 'nightly', s, CASE WHEN s = 'skipped' THEN 'already_running' END, 'http',
               now() - n * interval '1 min', CASE WHEN s <> 'running' THEN now() END, gen_random_uuid(), 'host', n,
               n, 1, 0, 1, 'tick-' || n, CASE WHEN s = 'completed' THEN '{"rows": 7}' END,
               CASE WHEN s = 'failed' THEN 'on purpose' END
          FROM generate_series(1, 1000) n,
               LATERAL (SELECT (ARRAY['running', 'completed', 'failed', 'timed_out', 'cancelled', 'lost', 'skipped'])
                               [n % 7 + 1] AS s) chosen"""
    )
    made, health = history(db), db.execute(HEALTH).fetchall()
    assert len(made) == 1000
    assert {run["status"] for run in made} == set(RUN_STATUSES)
    alembic(empty_url, "cronlock", "downgrade", "-1")
    assert db.execute("SELECT version_num FROM cronlock.alembic_version").fetchall() == [(f"{int(REVISION) - 1:04}",)]
    kept = history(db)
    columns = kept[0].keys()
    assert {"id", "task", "status", "reason", "started_at", "finished_at", "occurrence", "result"} <= columns
    assert kept == [{name: run[name] for name in columns} for run in made]
    assert db.execute(HEALTH).fetchall() == health
    migrate.migrate(empty_url, "cronlock")
    assert history(db) == made
    assert db.execute(HEALTH).fetchall() == health


JOBS_AND_WORDS = {
    "job": "INSERT INTO cronlock.job (task, queue, payload, trigger, max_attempts) SELECT 'a', 'b', '{}', 'http', 5",
    "job_waiting": "INSERT INTO cronlock.job_waiting (id, task, queue, payload, trigger, max_attempts, run_at)"
    " SELECT nextval('cronlock.job_id'), 'a', 'b', '{}', 'http', 5, now()",
    "job_history": "INSERT INTO cronlock.job_history (id, task, queue, priority, payload, trigger, max_attempts,"
    " attempts, losses, enqueued_at, run_at, status)"
    " SELECT nextval('cronlock.job_id'), 'a', 'b', 0, '{}', 'http', 5, 1, 0, now(), now(),"
    " (ARRAY['completed', 'failed', 'cancelled'])[n % 3 + 1]",
    "invalidation": "INSERT INTO cronlock.invalidation (target, keys, tags, paths, task)"
    " SELECT 'site', '{k}', '{}', '{}', 'a'",
}


def test_one_step_down_is_refused_with_a_reason_while_there_are_jobs_that_it_could_not_keep(
    empty_url: str, db: Db
) -> None:
    migrate.migrate(empty_url, "cronlock")
    for insert in JOBS_AND_WORDS.values():
        db.execute(f"{insert} FROM generate_series(1, 250) n")
    with pytest.raises(DBAPIError, match="500 live ones and 250 that have ended, and 250 invalidations"):
        alembic(empty_url, "cronlock", "downgrade", "0002")
    assert db.execute("SELECT version_num FROM cronlock.alembic_version").fetchall() == [(REVISION,)]
    for table in JOBS_AND_WORDS:
        assert db.execute(f"SELECT count(*) FROM cronlock.{table}").fetchone() == (250,)


@pytest.mark.parametrize("table", JOBS_AND_WORDS)
def test_one_row_is_enough_to_refuse_a_step_down_and_what_was_delivered_is_not(
    empty_url: str, db: Db, table: str
) -> None:
    migrate.migrate(empty_url, "cronlock")
    db.execute(f"{JOBS_AND_WORDS[table]} FROM generate_series(1, 1) n")
    with pytest.raises(DBAPIError, match="cannot keep jobs"):
        alembic(empty_url, "cronlock", "downgrade", "0002")
    db.execute(f"DELETE FROM cronlock.{table}")
    db.execute(f"{JOBS_AND_WORDS['invalidation']} FROM generate_series(1, 9) n")
    db.execute("UPDATE cronlock.invalidation SET delivered_at = now()")
    alembic(empty_url, "cronlock", "downgrade", "0002")
    assert db.execute("SELECT version_num FROM cronlock.alembic_version").fetchall() == [("0002",)]
    migrate.migrate(empty_url, "cronlock")
    assert db.execute("SELECT count(*) FROM cronlock.job_status").fetchone() == (0,)


HEALTH = "SELECT task, last_run_id, last_status, last_completed_id FROM cronlock.task_health"


def history(db: Db) -> list[dict[str, Any]]:
    """Every run, by the names of its columns."""
    with db.cursor(row_factory=dict_row) as cursor:
        return cursor.execute("SELECT * FROM cronlock.run ORDER BY id").fetchall()


HOSTILE = """
CREATE SCHEMA hostile;
CREATE FUNCTION hostile.trap() RETURNS void LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'a hostile object was used'; END $$;
CREATE TABLE hostile.run (id bigint, status text);
CREATE TABLE hostile.task (name text);
CREATE TABLE hostile.alembic_version (version_num text);
INSERT INTO hostile.alembic_version VALUES ('0001');
"""
HOSTILE_FUNCTIONS = {
    "now()": "timestamptz",
    "clock_timestamp()": "timestamptz",
    "statement_timestamp()": "timestamptz",
    "hashtext(text)": "integer",
    "pg_try_advisory_xact_lock(bigint)": "boolean",
    "pg_advisory_unlock_all()": "void",
    "pg_backend_pid()": "integer",
    "set_config(text, text, boolean)": "text",
    "current_setting(text)": "text",
    "current_schema()": "name",
    "version()": "text",
    "to_regclass(text)": "regclass",
    "lower(text)": "text",
    "hashtextextended(text, bigint)": "bigint",
    "chr(integer)": "text",
    "pg_stat_get_activity(integer)": "void",
    "json_to_recordset(json)": "record",
}
HOSTILE_OPERATORS = ["bigint = bigint", "text = text", "name = name", "name = text", "numeric * integer",
                     "text || text", "bigint & bigint", "bigint >> integer", "text <> text", "bigint <> bigint",
                     "oid = oid", "name ~~ text", "text ~~ text", "uuid = uuid"]  # fmt: skip


def make_hostile(db: Db) -> None:
    """A schema in front of pg_catalog, with the names that cronlock uses."""
    db.execute(HOSTILE)
    for signature, kind in HOSTILE_FUNCTIONS.items():
        db.execute(
            f"CREATE FUNCTION hostile.{signature} RETURNS {kind} LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE EXCEPTION 'a hostile function was used'; END $$"
        )
    for number, operator in enumerate(HOSTILE_OPERATORS):
        left, symbol, right = operator.split()
        kind = "boolean" if symbol in ("=", "<>", "~~") else {"*": "numeric", "||": "text"}.get(symbol, "bigint")
        db.execute(
            f"CREATE FUNCTION hostile.op{number}({left}, {right}) RETURNS {kind} LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE EXCEPTION 'a hostile operator was used'; END $$"
        )
        db.execute(
            f"CREATE OPERATOR hostile.{symbol} (LEFTARG = {left}, RIGHTARG = {right}, FUNCTION = hostile.op{number})"
        )
    db.execute(f'ALTER DATABASE "{db.info.dbname}" SET search_path = hostile, pg_catalog, public')


@pytest.mark.parametrize("schema", ["cron_ops", 'Cron "Ops"'])
def test_nothing_of_a_hostile_search_path_is_used_and_nothing_is_made_elsewhere(
    empty_url: str, db: Db, make_cron: Make, schema: str
) -> None:
    make_hostile(db)
    with psycopg.connect(empty_url) as trapped, pytest.raises(psycopg.errors.RaiseException):
        trapped.execute("SELECT now()")
    before = objects(db)
    migrate.migrate(empty_url, schema)
    alembic(empty_url, schema, "downgrade", "base")
    migrate.migrate(empty_url, schema)
    made = objects(db)
    assert made.pop(schema)
    assert made == before
    cron = make_cron(database_url=empty_url, schema_name=schema)
    statuses = asyncio.run(call_all(cron))
    assert statuses == {"works": "completed", "raises": "failed", "hangs": "timed_out", "blocks": "completed"}
    assert objects(db).keys() - {schema} == before.keys()
    assert db.execute("SELECT count(*) FROM hostile.run").fetchone() == (0,)


@pytest.mark.parametrize("schema", ["cronlock", 'Cron "Ops"'])
def test_an_empty_search_path_is_enough(empty_url: str, db: Db, make_cron: Make, schema: str) -> None:
    db.execute(f"ALTER DATABASE \"{db.info.dbname}\" SET search_path = ''")
    migrate.migrate(empty_url, schema)
    alembic(empty_url, schema, "downgrade", "base")
    migrate.migrate(empty_url, schema)
    assert set(objects(db)) == {schema}
    statuses = asyncio.run(call_all(make_cron(database_url=empty_url, schema_name=schema)))
    assert statuses == {"works": "completed", "raises": "failed", "hangs": "timed_out", "blocks": "completed"}
    assert set(objects(db)) == {schema}


async def call_all(cron: Cronlock) -> dict[str, str]:
    """Run a task of each kind; the statuses they ended with."""

    @cron.task("works")
    async def works(run: Run) -> None:
        await run.driver.execute("SELECT 1")

    @cron.task("raises")
    async def raises(run: Run) -> None:
        await run.driver.execute("SELECT 1")
        raise ValueError("asked to fail")

    @cron.task("hangs", timeout="300ms")
    async def hangs(run: Run) -> None:
        await run.driver.execute("SELECT pg_sleep(30)")

    @cron.task("blocks")
    def blocks(run: Run) -> None:
        run.connection.exec_driver_sql("SELECT 1")

    async with serving(cron.app()) as client:
        return {
            name: (await client.get(f"/cron/{name}")).json()["status"]
            for name in ("works", "raises", "hangs", "blocks")
        }


def dump_program(db: Db) -> str:
    """A pg_dump that is not older than the server, which it would refuse."""
    for found in ("pg_dump", *map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_dump")))):
        with contextlib.suppress(OSError):
            said = subprocess.run([found, "--version"], capture_output=True, check=True).stdout.split()
            if int(said[2].split(b".")[0]) * 10000 + 9999 >= db.info.server_version:
                return found
    pytest.skip(f"there is no pg_dump for a server of version {db.info.server_version}")


def test_a_dump_can_be_restored_with_an_empty_search_path(empty_url: str, db: Db, server_url: str) -> None:
    pg_dump = dump_program(db)
    migrate.migrate(empty_url, "cronlock")
    db.execute("INSERT INTO cronlock.task (name, lock_key) VALUES ('nightly', 1)")
    name = f"{db.info.dbname}_restored"
    db.execute(f"CREATE DATABASE {name} TEMPLATE template0")
    try:
        dumped = subprocess.run([pg_dump, empty_url], capture_output=True, check=True).stdout
        assert b"set_config('search_path', '', false)" in dumped
        restored_url = make_conninfo(server_url, dbname=name)
        subprocess.run(
            ["psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", restored_url], input=dumped, check=True, capture_output=True
        )
        assert migrate.migrate(restored_url, "cronlock").before == REVISION
        with psycopg.connect(restored_url, autocommit=True) as restored:
            assert described(restored, "cronlock") == described(db, "cronlock")
            assert restored.execute("SELECT task, calls FROM cronlock.task_health").fetchall() == [("nightly", 0)]
    finally:
        db.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


def script(schema: str) -> str:
    """What `cronlock migrate --sql` prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        migrate.print_script(schema)
    return said.getvalue()


@pytest.mark.parametrize("schema", SCHEMAS)
def test_the_printed_sql_makes_what_a_migration_makes(empty_url: str, db: Db, schema: str) -> None:
    for statement in statements(script(schema)):
        db.execute(statement.encode())
    printed, names = described(db, schema), objects(db)
    db.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(schema)))
    migrate.migrate(empty_url, schema)
    assert described(db, schema) == printed
    assert objects(db) == names


LEFT_OUT = {
    "prefer-robust-stmts": "each migration is one transaction: it is there whole or not at all",
    "require-timeout-settings": "set by each migration, SET LOCAL",
    "require-statement-timeout": "set by each migration, SET LOCAL",
    "require-lock-timeout": "set by each migration, SET LOCAL",
    "prefer-text-field": "the version table is Alembic's",
    "prefer-bigint-over-int": "process ids and attempts; whatever counts rows is a bigint",
    "prefer-bigint-over-smallint": "objsubid as pg_locks has it",
}
"""Rules of squawk that do not hold here, and why."""


def test_a_linter_finds_no_migration_that_blocks_the_application(tmp_path: Path) -> None:
    file = tmp_path / "cronlock.sql"
    file.write_text(script("cronlock"))
    excluded = [f"--exclude={rule}" for rule in LEFT_OUT]
    linted = subprocess.run([str(Path(sys.executable).parent / "squawk"), *excluded, str(file)], capture_output=True)
    assert linted.returncode == 0, linted.stdout.decode()


@pytest.mark.stress
def test_the_wheel_brings_the_migrations_along(project: Path, tmp_path: Path, empty_url: str) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(project)]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        packed.extractall(tmp_path / "unpacked")
    assert {"cronlock/_migrations/env.py", "cronlock/_migrations/versions/0001_task_and_run.py"} <= set(names)
    assert "cronlock/py.typed" in names
    assert {name.split("/")[0] for name in names} - {wheel.name.rsplit("-", 3)[0] + ".dist-info"} == {"cronlock"}
    code = (
        f"import cronlock.migrate as m; print(m.script_location()); print(m.migrate({empty_url!r}, 'cronlock').after)"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "unpacked", check=True, capture_output=True)
    location, revision = ran.stdout.decode().splitlines()
    assert Path(location) == tmp_path / "unpacked" / "cronlock" / "_migrations"
    assert revision == REVISION
