"""The commands: what they print, on which stream, and what they exit with."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from typer.testing import CliRunner, Result

from cronlock import __version__, steering
from cronlock.cli import app
from cronlock.cli.connecting import APPLICATION_NAME
from cronlock.explain import span
from cronlock.models import REVISION
from tests import SECRET, Db, rows, statements, value
from tests.commands import APP, COMMAND, Running, cronlock, environment

COMMANDS = (
    "dev",
    "serve",
    "worker",
    "run",
    "enqueue",
    "migrate",
    "secret",
    "tasks",
    "locks",
    "pause",
    "resume",
    "recover",
    "prune",
)
GROUPED = (
    *("runs list", "runs show", "runs why", "runs cancel"),
    *("jobs list", "jobs show", "jobs retry", "jobs cancel", "jobs workers"),
)
HEAVY = {"psycopg", "sqlalchemy", "uvicorn", "pydantic", "alembic", "starlette", "cronlock.app"}
UNREACHABLE = "postgresql://someone:hidden-word@127.0.0.1:1/x"


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with an app, which is the current one."""
    (tmp_path / "shop.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("shop", "asgi", "broken", "early"):
        sys.modules.pop(name, None)
    return tmp_path


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, database_url: str) -> Callable[..., Result]:
    """Call a command in this process, on the test's database and with no secret."""

    def call(*arguments: str, **settings: str) -> Result:
        with monkeypatch.context() as patch:
            for name in ("CRON_SECRET", "CRONLOCK_APP", "CRONLOCK_SCHEMA", "CRONLOCK_DIRECT_URL"):
                patch.delenv(name, raising=False)
            for name, text in {"DATABASE_URL": database_url, **settings}.items():
                patch.setenv(name, text)
            return CliRunner().invoke(app, list(arguments), prog_name="cronlock")

    return call


def write(db: Db, **columns: Any) -> int:
    """Write a row of run as it would be after the fact; its id."""
    given: dict[str, Any] = {
        "nonce": uuid4(),
        "task": "sync",
        "status": "completed",
        "trigger": "http",
        "instance": uuid4(),
        "host": "web-1",
        "pid": 123,
        "lock_name": "sync",
        "lock_key": 1,
        "lock_classid": 0,
        "lock_objid": 1,
    }
    given |= columns
    if given["status"] != "running":
        given.setdefault("finished_at", given.get("started_at") or "now")
    query = psycopg.sql.SQL("INSERT INTO cronlock.run ({}) VALUES ({}) RETURNING id").format(
        psycopg.sql.SQL(", ").join(map(psycopg.sql.Identifier, given)),
        psycopg.sql.SQL(", ").join(map(psycopg.sql.Placeholder, given)),
    )
    row = db.execute(query, given).fetchone()
    assert row is not None
    return int(row[0])


def register(db: Db, *names: str) -> None:
    """Write rows of task, as a server does."""
    for name in names:
        db.execute("INSERT INTO cronlock.task (name, lock_name, lock_key) VALUES (%s, %s, 1)", (name, name))


@contextmanager
def running(url: str, db: Db, *, application: str = "cronlock:sync", task: str = "sync") -> Iterator[int]:
    """A run whose process does nothing about it: its lock on a connection, and its row; the row's id."""
    with psycopg.connect(url, application_name=application) as holder:
        pid, key = holder.execute(
            "SELECT pg_backend_pid(), hashtext(%s)::bigint FROM pg_advisory_xact_lock(hashtext(%s)::bigint)",
            (task, task),
        ).fetchone() or (0, 0)
        place = {"lock_key": key, "lock_classid": (key >> 32) & 0xFFFFFFFF, "lock_objid": key & 0xFFFFFFFF}
        yield write(db, task=task, status="running", backend_pid=pid, lock_name=task, **place)
        try:
            holder.rollback()
        except psycopg.OperationalError:
            pass  # it was ended


# -- help ----------------------------------------------------------------------------------------------------


def test_help_loads_no_driver_and_no_server() -> None:
    code = f"import sys; import cronlock.cli; print(*({HEAVY!r} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


@pytest.mark.parametrize("command", [*COMMANDS, *GROUPED])
def test_every_command_has_help_with_an_example(command: str) -> None:
    result = CliRunner().invoke(app, [*command.split(), "--help"], prog_name="cronlock")
    assert result.exit_code == 0
    assert "Example" in result.stdout
    assert f"cronlock {command}" in " ".join(result.stdout.split())


def test_the_help_names_every_command_and_every_exit_code() -> None:
    shown = " ".join(CliRunner().invoke(app, ["--help"], prog_name="cronlock").stdout.split())
    assert all(f" {command} " in shown for command in (*COMMANDS, "runs"))
    assert all(f" {code} " in shown for code in (0, 1, 2, 3, 4, 5, 6, 130))


def test_the_version_is_the_package_s(call: Callable[..., Result]) -> None:
    assert call("--version").stdout == f"cronlock {__version__}\n"


def test_a_secret_is_long_and_safe_in_a_url_and_never_the_same(call: Callable[..., Result]) -> None:
    first, second = call("secret").stdout.strip(), call("secret", "--bytes", "64").stdout.strip()
    assert (len(first), len(second)) == (43, 86)
    assert (first + second).replace("-", "").replace("_", "").isalnum()
    assert first != call("secret").stdout.strip()


# -- errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["migrate", "tasks", "locks", "recover", "runs list", "runs show 1", "pause sync"])
def test_an_unreachable_database_is_exit_code_4_and_no_password_is_shown(
    call: Callable[..., Result], command: str
) -> None:
    result = call(*command.split(), DATABASE_URL=UNREACHABLE)
    assert result.exit_code == 4
    assert result.stdout == ""
    assert "127.0.0.1:1/x cannot be reached" in result.stderr
    assert "hidden-word" not in result.stderr
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_no_database_url_is_exit_code_2_with_an_example(call: Callable[..., Result]) -> None:
    result = call("tasks", DATABASE_URL="")
    assert result.exit_code == 2
    assert "DATABASE_URL=postgresql://" in result.stderr


def test_a_missing_schema_is_exit_code_5_and_says_what_to_run(call: Callable[..., Result], empty_url: str) -> None:
    result = call("runs", "list", DATABASE_URL=empty_url)
    assert (result.exit_code, result.stdout) == (5, "")
    assert "run: cronlock migrate" in result.stderr


def test_a_schema_ahead_of_the_code_is_exit_code_5(call: Callable[..., Result], db: Db) -> None:
    db.execute("UPDATE cronlock.alembic_version SET version_num = '9999'")
    result = call("tasks")
    assert result.exit_code == 5
    assert "newer cronlock" in result.stderr
    assert call("migrate").exit_code == 1


def test_a_setting_that_is_wrong_is_exit_code_2(call: Callable[..., Result]) -> None:
    result = call("tasks", CRONLOCK_TIMEOUT="soon")
    assert result.exit_code == 2
    assert "CRONLOCK_TIMEOUT" in result.stderr


def test_the_commands_name_themselves_so_that_no_one_takes_them_for_holders_of_locks() -> None:
    assert not APPLICATION_NAME.startswith("cronlock:")


# -- migrate -------------------------------------------------------------------------------------------------


def test_migrate_says_from_where_to_where(call: Callable[..., Result], empty_url: str) -> None:
    assert call("migrate", DATABASE_URL=empty_url).stdout == f"cronlock: nothing -> {REVISION}\n"
    again = call("migrate", "--json", DATABASE_URL=empty_url)
    assert json.loads(again.stdout) == {"schema": "cronlock", "before": REVISION, "after": REVISION}


def test_migrate_goes_round_the_pooler_and_into_the_schema_that_is_set(
    call: Callable[..., Result], empty_url: str
) -> None:
    result = call("migrate", DATABASE_URL=UNREACHABLE, CRONLOCK_DIRECT_URL=empty_url, CRONLOCK_SCHEMA="Crons")
    assert result.stdout == f"Crons: nothing -> {REVISION}\n"
    with psycopg.connect(empty_url) as connection:
        assert connection.execute('SELECT count(*) FROM "Crons".run').fetchone() == (0,)


def test_migrate_waits_for_another_one_says_so_and_gives_up(call: Callable[..., Result], empty_url: str) -> None:
    with psycopg.connect(empty_url, application_name="slow migration") as other:
        other.execute("SELECT pg_advisory_xact_lock(hashtextextended('cronlock migrate' || chr(31) || 'cronlock', 0))")
        result = call("migrate", "--wait", "300ms", DATABASE_URL=empty_url)
    assert result.exit_code == 1
    assert "waiting for another migration" in result.stderr
    assert "slow migration" in result.stderr


def test_migrate_sql_needs_no_database(call: Callable[..., Result], empty_url: str) -> None:
    result = call("migrate", "--sql", DATABASE_URL="", CRONLOCK_SCHEMA="crons")
    assert result.exit_code == 0
    with psycopg.connect(empty_url, autocommit=True) as connection:
        for statement in statements(result.stdout):
            connection.execute(statement.encode())
        assert connection.execute("SELECT count(*) FROM crons.task_health").fetchone() == (0,)


# -- tasks ---------------------------------------------------------------------------------------------------


def test_tasks_without_an_app_are_those_of_the_database(call: Callable[..., Result], db: Db) -> None:
    register(db, "sync")
    write(db, started_at="2026-01-01 10:00+00", finished_at="2026-01-01 10:00:04+00")
    write(db, status="skipped", reason="already_running")
    (task,) = json.loads(call("tasks", "--json").stdout)["tasks"]
    assert (task["task"], task["lastStatus"], task["p50Ms"], task["skipRate"]) == ("sync", "completed", 4000, 0.5)
    assert task["lastStartedAt"] == "2026-01-01T10:00:00.000+00:00"
    header, line = call("tasks").stdout.splitlines()
    assert re.split("  +", header) == [
        "TASK",
        "SCHEDULE",
        "OPTIONS",
        "PAUSED",
        "LAST STATUS",
        "LAST RUN",
        "P50",
        "P95",
        "SKIP RATE",
    ]
    assert line.split() == [
        "sync",
        "-",
        "-",
        "-",
        "completed",
        "2026-01-01T10:00:00.000+00:00",
        "4.0",
        "s",
        "4.0",
        "s",
        "50.0%",
    ]


OPTIONED = """
from cronlock import Cronlock

cron = Cronlock()
cron.task("plain")(lambda run: None)
cron.task("report", mode="queue", queue="slow", max_attempts=3, key="{tenant}", timeout="2m")(lambda run: None)
cron.task("wide", max_concurrent=4, min_interval="90s", max_attempts=1)(lambda run: None)
"""
OPTIONS = {
    "plain": ("transaction", "default", 5, None, 1, None, 120_000),
    "report": ("queue", "slow", 3, "{tenant}", 1, None, 120_000),
    "wide": ("transaction", "default", 1, None, 4, 90_000, 120_000),
}
"""Mode, queue, attempts, key, slots, interval and timeout of each."""


@pytest.mark.parametrize("has_app", [True, False])
def test_tasks_show_the_options_that_are_set_of_an_app_and_of_the_database(
    tmp_path: Path, call: Callable[..., Result], database_url: str, has_app: bool
) -> None:
    (tmp_path / "wares.py").write_text(OPTIONED)
    if not has_app:
        assert cronlock("run", "wares:cron", "plain", cwd=tmp_path, DATABASE_URL=database_url).returncode == 0
    app = ["wares:cron"] if has_app else []
    tasks = json.loads(cronlock("tasks", *app, "--json", cwd=tmp_path, DATABASE_URL=database_url).stdout)["tasks"]
    names = ("mode", "queue", "maxAttempts", "key", "maxConcurrent", "minIntervalMs", "timeoutMs")
    assert {task["task"]: tuple(task[name] for name in names) for task in tasks} == OPTIONS
    _, *lines = cronlock("tasks", *app, cwd=tmp_path, DATABASE_URL=database_url).stdout.splitlines()
    assert [re.split("  +", line)[2] for line in lines] == [
        "-",
        "queue mode, queue slow, 3 attempts, key {tenant}",
        "1 attempt, 4 slots, 1 min 30 s apart",
    ]


def test_tasks_of_an_app_are_shown_beside_the_others(shop: Path, call: Callable[..., Result], db: Db) -> None:
    register(db, "sync", "fail")
    tasks = json.loads(call("tasks", "shop:cron", "--json").stdout)["tasks"]
    assert [(task["task"], task["isRegistered"]) for task in tasks] == [
        ("fail", True),
        ("sleep", True),
        ("stuck", True),
        ("stuck-in-asyncio", True),
        ("sync", False),
    ]
    assert tasks[1]["schedule"] == "*/5 * * * *"


def test_tasks_of_an_app_are_shown_without_a_database_with_a_note(shop: Path, call: Callable[..., Result]) -> None:
    result = call("tasks", DATABASE_URL=UNREACHABLE, CRONLOCK_APP="shop:cron")
    assert result.exit_code == 0
    assert "*/5 * * * *" in result.stdout
    assert "cannot be reached" in result.stderr


# -- runs ----------------------------------------------------------------------------------------------------


def test_runs_are_listed_newest_first_by_task_status_age_and_page(call: Callable[..., Result], db: Db) -> None:
    old = write(db, started_at="2020-01-01 00:00+00")
    first = write(db)
    failed = write(db, status="failed", error_type="ValueError", error_message="no\x1b[31m\nsuch supplier")
    other = write(db, task="other")

    def ids(*arguments: str) -> list[int]:
        return [run["runId"] for run in json.loads(call("runs", "list", "--json", *arguments).stdout)["runs"]]

    assert ids() == [other, failed, first, old]
    assert ids("--task", "sync", "--since", "24h") == [failed, first]
    assert ids("-s", "failed") == [failed]
    assert ids("-n", "2") == [other, failed]
    assert ids("-n", "2", "--before", str(failed)) == [first, old]
    shown = call("runs", "list", "-n", "2")
    assert f"--before {failed}" in shown.stderr
    assert shown.stdout.splitlines()[2].endswith("ValueError: no\\x1b[31m such supplier")


def test_a_status_that_does_not_exist_is_refused(call: Callable[..., Result]) -> None:
    result = call("runs", "list", "--status", "done")
    assert result.exit_code == 2
    assert "timed_out" in result.stderr


def test_runs_of_a_task_that_is_not_known_say_which_are(call: Callable[..., Result], db: Db) -> None:
    register(db, "sync")
    assert "known: sync" in call("runs", "list", "-t", "snyc").stderr


def test_a_skip_is_explained_by_the_run_that_held_the_lock(call: Callable[..., Result], db: Db) -> None:
    holder = write(db, started_at="2026-01-01 10:00:00+00", finished_at="2026-01-01 10:00:15+00")
    skipped = write(
        db, status="skipped", reason="already_running", blocked_by=holder, started_at="2026-01-01 10:00:12+00"
    )
    sentence = (
        f"skipped: run {holder} of sync held the lock, started 12.0 s before, on host web-1 (process 123);"
        " it ended completed 3.0 s later"
    )
    assert call("runs", "show", str(skipped)).stdout.splitlines()[0] == sentence
    shown = json.loads(call("runs", "show", str(skipped), "--json").stdout)
    assert (shown["runId"], shown["explanation"], shown["blockedBy"]) == (skipped, sentence, holder)
    known = {"task": "sync", "status": "completed", "host": "web-1", "pid": 123, "elapsedMs": 12000, "leftMs": 3000}
    assert known.items() <= shown["holder"].items()
    assert call("runs", "why", str(skipped)).stdout == f"run {skipped} of sync [already_running]: {sentence}\n"
    why = json.loads(call("runs", "why", str(skipped), "--json").stdout)
    assert why == {"runId": skipped, "task": "sync", "code": "already_running", "explanation": sentence}
    (listed,) = json.loads(call("runs", "list", "--json", "-s", "skipped").stdout)["runs"]
    assert listed["code"] == shown["code"] == "already_running"


def test_why_writes_no_control_characters(call: Callable[..., Result], db: Db) -> None:
    run_id = write(db, status="failed", error_type="ValueError", error_message="no\x1b[31m supplier")
    assert "\x1b" not in call("runs", "why", str(run_id)).stdout + call("runs", "show", str(run_id)).stdout


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"status": "skipped", "reason": "paused"}, "skipped: the task was paused"),
        (
            {"status": "skipped", "reason": "already_running", "holder_pid": 77, "holder_application": "psql"},
            "skipped: database backend 77 (psql) held the lock; it is not one of cronlock's runs",
        ),
        (
            {"status": "skipped", "reason": "already_running", "blocked_by": 9999},
            "skipped: run 9999 held the lock (its row has been pruned since)",
        ),
        (
            {"status": "failed", "error_type": "ValueError", "error_message": "no", "error_traceback": "Trace\n  x"},
            "failed: ValueError: no; what it wrote was rolled back",
        ),
    ],
)
def test_every_end_is_explained(call: Callable[..., Result], db: Db, columns: dict[str, Any], sentence: str) -> None:
    shown = call("runs", "show", str(write(db, **columns))).stdout
    assert shown.splitlines()[0] == sentence
    assert ("Trace" in shown) == ("error_traceback" in columns)


def test_the_result_is_json_in_json(call: Callable[..., Result], db: Db) -> None:
    for result in ({"rows": 3}, {"rows_total": 1, "rowsTotal": 2, "_of": [{"a_b": 1}]}, "no json"):
        text = result if isinstance(result, str) else json.dumps(result)
        shown = json.loads(call("runs", "show", str(write(db, result=text)), "--json").stdout)
        assert shown["result"] == result


@pytest.mark.parametrize("verb", ["show", "why", "cancel"])
def test_an_unknown_run_is_exit_code_3(call: Callable[..., Result], verb: str) -> None:
    result = call("runs", verb, "4711")
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == "cronlock: there is no run 4711; see: cronlock runs list\n"


def test_cancelling_what_has_ended_changes_nothing(call: Callable[..., Result], db: Db) -> None:
    run_id = write(db)
    result = call("runs", "cancel", str(run_id))
    assert result.exit_code == 1
    assert "had already ended" in result.stdout
    assert value(db, "SELECT cancel_requested_at FROM cronlock.run") is None


def test_cancelling_a_run_whose_process_is_gone_closes_it_as_lost(
    call: Callable[..., Result], db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cronlock.cli.runs.CANCEL_WAIT", 0.1)
    run_id = write(db, status="running", backend_pid=1)
    result = call("runs", "cancel", str(run_id), "--json")
    assert result.exit_code == 0
    assert [json.loads(result.stdout)[name] for name in ("status", "code")] == ["lost", "process_gone"]


def test_force_ends_the_backend_of_code_that_does_not_stop(
    call: Callable[..., Result], database_url: str, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cronlock.cli.runs.CANCEL_WAIT", 0.3)
    monkeypatch.setattr("cronlock.cli.runs.FORCE_WAIT", 0.5)
    with running(database_url, db) as run_id:
        asked = call("runs", "cancel", str(run_id))
        assert asked.exit_code == 1
        assert "--force" in asked.stderr
        ended = call("runs", "cancel", str(run_id), "--force")
    assert ended.exit_code == 0
    assert rows(db, "sync") == [("lost", None)]
    assert "@" in value(db, "SELECT cancel_requested_by FROM cronlock.run")


@pytest.mark.parametrize("holder", ["another name", "no lock"])
def test_force_leaves_a_backend_alone_that_is_not_the_run_s_any_more(database_url: str, db: Db, holder: str) -> None:
    with running(database_url, db, application="psql" if holder == "another name" else "cronlock:sync") as run_id:
        if holder == "no lock":
            db.execute("UPDATE cronlock.run SET lock_objid = 4711")
        with psycopg.connect(database_url, autocommit=True) as connection:
            assert not steering.terminate(connection, "cronlock", run_id)
        assert value(db, "SELECT count(*) FROM pg_stat_activity a JOIN cronlock.run r ON r.backend_pid = a.pid") == 1


# -- locks, recover, pause -----------------------------------------------------------------------------------


def test_locks_shows_runs_and_everybody_else(call: Callable[..., Result], database_url: str, db: Db) -> None:
    with running(database_url, db) as run_id, psycopg.connect(database_url, application_name="psql") as other:
        other.execute("SELECT pg_advisory_lock(8492019482019283)")
        locks = json.loads(call("locks", "--json").stdout)["locks"]
        assert {(lock["task"], lock["runId"], lock["applicationName"]) for lock in locks} == {
            ("sync", run_id, "cronlock:sync"),
            (None, None, "psql"),
        }
        assert {lock["lockKey"] for lock in locks} == {
            value(db, "SELECT hashtext('sync')::bigint"),
            8492019482019283,
        }
        shown = call("locks").stdout
        assert "web-1 (123)" in shown
        assert "8492019482019283" in shown


def test_locks_shows_a_prepared_transaction_and_its_end(call: Callable[..., Result], database_url: str, db: Db) -> None:
    with psycopg.connect(database_url) as other:
        other.execute("SELECT pg_advisory_xact_lock(hashtext('sync')::bigint)")
        other.execute("PREPARE TRANSACTION 'forgotten'")
    try:
        (lock,) = json.loads(call("locks", "--json").stdout)["locks"]
        assert (lock["preparedTransaction"], lock["backendPid"]) == ("forgotten", None)
        assert lock["heldMs"] is not None
        assert "ROLLBACK PREPARED 'forgotten'" in call("locks").stderr
    finally:
        db.execute("ROLLBACK PREPARED 'forgotten'")


def test_recover_closes_the_runs_that_hold_no_lock_and_no_others(
    call: Callable[..., Result], database_url: str, db: Db
) -> None:
    lost = write(db, status="running", backend_pid=1)
    with running(database_url, db, task="alive", application="cronlock:alive"):
        (closed,) = json.loads(call("recover", "--json").stdout)["recovered"]
        assert (closed["runId"], closed["task"]) == (lost, "sync")
        assert rows(db, "alive") == [("running", None)]
    assert rows(db, "sync") == [("lost", None)]


def test_pause_and_resume_say_by_whom_and_why(call: Callable[..., Result], db: Db) -> None:
    register(db, "sync")
    paused = json.loads(call("pause", "sync", "--reason", "supplier is down", "--json").stdout)
    assert paused["pausedReason"] == "supplier is down"
    assert "@" in paused["pausedBy"]
    assert "supplier is down" in call("tasks").stdout
    assert "runs again" in call("resume", "sync").stdout
    assert "was not paused" in call("resume", "sync").stdout
    assert value(db, "SELECT paused_at FROM cronlock.task") is None


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_a_task_that_is_not_known_is_exit_code_3_and_the_known_ones_are_named(
    call: Callable[..., Result], db: Db, verb: str
) -> None:
    register(db, "sync", "other")
    result = call(verb, "snyc")
    assert result.exit_code == 3
    assert "known: other, sync" in result.stderr


# -- the app -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reference", ["shop:cron", "shop:make", "shop:Tasks.cron"])
def test_an_app_is_an_attribute_a_dotted_one_or_a_function_that_gives_it(
    shop: Path, call: Callable[..., Result], reference: str
) -> None:
    assert call("tasks", reference).exit_code == 0


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        ("shop", "does not name an app: write module:attribute"),
        ("shop.py:cron", "did you mean shop:cron?"),
        ("nowhere:cron", "there is no module 'nowhere'"),
        ("shop:corn", "has no attribute 'corn'; it has shop:cron, shop:also"),
        ("shop:APP", "shop:APP is a str, not a Cronlock"),
        ("asgi:app", "asgi:app is a Starlette, not a Cronlock; it has asgi:cron"),
    ],
)
def test_each_way_not_to_name_an_app_has_its_own_message(
    shop: Path, call: Callable[..., Result], reference: str, told: str
) -> None:
    (shop / "shop.py").write_text(f"{APP}\nAPP = 'x'\n")
    (shop / "asgi.py").write_text(
        "from shop import cron\nfrom starlette.applications import Starlette\napp = Starlette()"
    )
    result = call("tasks", reference)
    assert result.exit_code == 2
    assert told in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("body", ["import not_installed", "1 / 0", "def ("])
def test_an_error_in_the_app_s_own_module_is_shown_with_its_traceback_and_no_other(
    shop: Path, call: Callable[..., Result], body: str
) -> None:
    (shop / "broken.py").write_text(f"x = 1\n{body}\n")
    result = call("tasks", "broken:cron")
    assert result.exit_code == 2
    assert "broken.py" in result.stderr
    assert "line 2" in result.stderr
    assert "loading.py" not in result.stderr
    assert result.stderr.rstrip().endswith("the module 'broken' was found, but cannot be imported (see above)")


def test_a_setting_that_the_app_s_module_lacks_is_one_sentence(shop: Path, call: Callable[..., Result]) -> None:
    (shop / "early.py").write_text("from shop import cron\napp = cron.app()\n")
    result = call("tasks", "early:cron")
    assert result.exit_code == 2
    assert "while importing early: " in result.stderr
    assert "Traceback" not in result.stderr


# -- run -----------------------------------------------------------------------------------------------------


def test_run_prints_what_a_call_would_be_answered_and_needs_no_secret(shop: Path, database_url: str, db: Db) -> None:
    done = cronlock(
        "run", "sleep", "--payload", "-", cwd=shop, text='{"lasts": 0.01}',
        DATABASE_URL=database_url, CRONLOCK_APP="shop:cron", CRON_SECRET="",
    )  # fmt: skip
    assert done.returncode == 0
    answer = json.loads(done.stdout)
    assert (answer["status"], answer["result"], answer["runId"]) == ("completed", {"slept": 0.01}, 1)
    assert value(db, "SELECT trigger FROM cronlock.run") == "manual"


def test_a_failed_run_is_exit_code_1(shop: Path, database_url: str) -> None:
    done = cronlock("run", "shop:cron", "fail", cwd=shop, DATABASE_URL=database_url)
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"] == {"type": "ValueError", "message": "the supplier is down"}
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("options", "code"), [([], 0), (["--fail-on-skip"], 6)])
def test_a_skipped_run_is_exit_code_0_or_6_if_asked_for(
    shop: Path, database_url: str, options: list[str], code: int
) -> None:
    with psycopg.connect(database_url, application_name="psql") as other:
        other.execute("SELECT pg_advisory_xact_lock(hashtext('sleep')::bigint)")
        done = cronlock("run", "shop:cron", "sleep", *options, cwd=shop, DATABASE_URL=database_url)
    assert done.returncode == code
    assert json.loads(done.stdout)["holder"]["applicationName"] == "psql"


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["shop:cron", "slep"], 3, "known: fail, sleep, stuck"),
        (["shop:cron", "sleep", "--payload", '{"lasts": "long"}'], 2, "lasts: "),
        (["shop:cron", "sleep", "--payload", "[1]"], 2, "not an object"),
        (["shop:cron"], 2, "no task was given"),
        ([], 2, "name the app and the task"),
    ],
)
def test_a_run_that_cannot_be_asked_for_is_refused_before_it_begins(
    shop: Path, database_url: str, db: Db, arguments: list[str], code: int, told: str
) -> None:
    done = cronlock("run", *arguments, cwd=shop, DATABASE_URL=database_url)
    assert (done.returncode, done.stdout) == (code, "")
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert value(db, "SELECT count(*) FROM cronlock.run") == 0


@pytest.mark.parametrize("task", ["sleep", "stuck"])
def test_an_interrupted_run_is_cancelled_and_recorded(shop: Path, database_url: str, db: Db, task: str) -> None:
    payload = ["--payload", '{"lasts": 60}'] if task == "sleep" else []
    env = environment(DATABASE_URL=database_url, CRONLOCK_LOG_FORMAT="text")
    with Running("run", "shop:cron", task, *payload, cwd=shop, env=env) as run:
        run.until_says(f"{task} started")
        run.send(signal.SIGINT)
        assert run.ends(10) == 130
        assert '"status": "cancelled"' in run.said
    assert rows(db, task) == [("cancelled", None)]
    if task == "sleep":
        assert "SIGINT" in value(db, "SELECT error_message FROM cronlock.run")


def test_a_run_is_cancelled_from_outside(shop: Path, database_url: str, db: Db, call: Callable[..., Result]) -> None:
    env = environment(DATABASE_URL=database_url, CRONLOCK_LOG_FORMAT="text")
    with Running("run", "shop:cron", "sleep", "--payload", '{"lasts": 60}', cwd=shop, env=env) as run:
        run.until_says("sleep started")
        cancelled = call("runs", "cancel", "1")
        assert cancelled.exit_code == 0
        assert cancelled.stdout.startswith("run 1: cancelled: ")
        assert run.ends(10) == 1


def test_python_m_cronlock_is_the_same_command() -> None:
    assert COMMAND[1:] == ("-m", "cronlock")
    assert SECRET not in " ".join(COMMAND)


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [(None, "-"), (0, "0 ms"), (999, "999 ms"), (12_340, "12.3 s"), (245_000, "4 min 5 s"), (7_380_000, "2 h 3 min")],
)
def test_a_span_is_written_in_two_units_at_most(milliseconds: int | None, text: str) -> None:
    assert span(milliseconds) == text
