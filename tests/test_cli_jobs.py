"""The commands about jobs: what they print, and what they exit with."""

import json
import os
import pty
import re
import select
import subprocess
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx2
import psycopg
import pytest
from typer.testing import Result

from cronlock import steering
from cronlock.cli import options
from cronlock.models import JOB_STATUSES
from tests import Db, value
from tests.commands import COMMAND, Running, cronlock, environment
from tests.test_cli import call, shop  # noqa: F401 - fixtures

Call = Callable[..., Result]

APP = """
from cronlock import Cronlock, Run

cron = Cronlock()


@cron.task("report", max_attempts=3, dedupe=("reportId",))
async def report(run: Run, payload: dict) -> dict:
    if payload.get("fails"):
        raise ValueError("no such report")
    return payload
"""


def put(db: Db, number: int = 1, **columns: Any) -> list[int]:
    """Write rows of job_history as if their jobs had ended; their ids."""
    given: dict[str, Any] = {
        "task": "report",
        "queue": "default",
        "priority": 0,
        "payload": "{}",
        "trigger": "http",
        "max_attempts": 3,
        "attempts": 3,
        "losses": 0,
        "enqueued_at": "now",
        "run_at": "now",
        "started_at": "now",
        "status": "failed",
        "error_type": "ValueError",
        "error_message": "no such report",
        **columns,
    }
    query = psycopg.sql.SQL(
        "INSERT INTO cronlock.job_history (id, {}) SELECT nextval('cronlock.job_id'), {} FROM generate_series(1, %(n)s)"
        " RETURNING id"
    ).format(
        psycopg.sql.SQL(", ").join(map(psycopg.sql.Identifier, given)),
        psycopg.sql.SQL(", ").join(
            psycopg.sql.SQL("{}::{}").format(psycopg.sql.Placeholder(name), psycopg.sql.SQL(kind_of(name)))
            for name in given
        ),
    )
    return [row[0] for row in db.execute(query, {**given, "n": number}).fetchall()]


def kind_of(column: str) -> str:
    if column.endswith("_at"):
        return "timestamptz"
    return {"payload": "jsonb"}.get(
        column, "int" if column in ("priority", "max_attempts", "attempts", "losses") else "text"
    )


def test_jobs_are_listed_newest_first_and_those_without_a_worker_say_so(call: Call, db: Db) -> None:  # noqa: F811
    (failed,) = put(db)
    db.execute(
        "INSERT INTO cronlock.job (task, queue, payload, trigger, max_attempts) VALUES ('report', 'q', '{}', 'http', 5)"
    )
    done = call("jobs", "list")
    assert done.exit_code == 0
    head, queued, dead = done.stdout.splitlines()
    assert head.split() == ["JOB", "TASK", "STATUS", "QUEUE", "ATTEMPTS", "ENQUEUED", "DUE", "WHAT"]
    assert queued.endswith("no handler: no worker that is there takes it")
    assert re.split(r"  +", dead)[:5] == [str(failed), "report", "failed", "default", "3 of 3"]
    assert dead.endswith("ValueError: no such report")
    found = json.loads(call("jobs", "list", "--status", "failed", "--json").stdout)["jobs"]
    assert [(row["jobId"], row["errorType"]) for row in found] == [(failed, "ValueError")]
    assert json.loads(call("jobs", "list", "-q", "q", "--json").stdout)["jobs"][0]["status"] == "queued"
    assert json.loads(call("jobs", "list", "-t", "other", "--json").stdout)["jobs"] == []
    wrong = call("jobs", "list", "--status", "dead")
    assert wrong.exit_code == 2
    assert all(status in wrong.stderr for status in JOB_STATUSES)


def test_pages_neither_miss_nor_repeat_a_job(call: Call, db: Db) -> None:  # noqa: F811
    ids = put(db, 5) + put(db, 5, status="completed", error_type=None, error_message=None) + put(db, 4)
    found: list[int] = []
    before: list[str] = []
    while rows := json.loads(call("jobs", "list", "-n", "4", *before, "--json").stdout)["jobs"]:
        found += [row["jobId"] for row in rows]
        before = ["--before", str(found[-1])]
    assert found == ids[::-1]
    assert call("jobs", "list", "-n", "4").stderr == f"older ones: add --before {ids[-4]}\n"


def test_show_says_what_it_waits_for_with_payload_and_attempts(call: Call, db: Db) -> None:  # noqa: F811
    (job_id,) = put(db, payload='{"reportId": 7}')
    db.execute(
        "INSERT INTO cronlock.job_attempt (job_id, attempt, status, error_type, error_message, error_traceback)"
        " VALUES (%s, 1, 'failed', 'ValueError', 'no such report', 'Traceback: x')",
        (job_id,),
    )
    shown = call("jobs", "show", str(job_id)).stdout
    assert shown.startswith("failed in attempt 3 of 3: ValueError: no such report\n")
    assert re.search(r'^payload +\{"reportId": 7\}$', shown, re.MULTILINE)
    assert "Traceback: x" in shown
    told = json.loads(call("jobs", "show", str(job_id), "--json").stdout)
    assert told["payload"] == {"reportId": 7}
    assert told["attempted"][0]["errorMessage"] == "no such report"
    missing = call("jobs", "show", "4711")
    assert (missing.exit_code, "there is no job 4711" in missing.stderr) == (3, True)


def test_a_job_is_retried_or_it_is_said_why_not(call: Call, db: Db) -> None:  # noqa: F811
    (job_id,) = put(db)
    done = call("jobs", "retry", str(job_id))
    assert (done.exit_code, done.stdout) == (0, f"job {job_id} is queued again, for 5 more attempts\n")
    again = call("jobs", "retry", str(job_id))
    assert again.exit_code == 1
    assert f"job {job_id} is queued; only one that failed or was cancelled is retried" in again.stderr
    assert call("jobs", "retry", "4711").exit_code == 3
    for arguments in ((), ("1", "--all"), ("--all", "--task", "report")):
        assert call("jobs", "retry", *arguments).exit_code == 2


def test_as_many_more_attempts_are_given_as_the_task_has(call: Call, db: Db) -> None:  # noqa: F811
    db.execute("""INSERT INTO cronlock.task (name, options) VALUES ('report', '{"maxAttempts": 2}')""")
    (job_id,) = put(db, max_attempts=32767, attempts=32767)
    (other,) = put(db)
    for one in (job_id, other):
        assert call("jobs", "retry", str(one)).exit_code == 0
    assert db.execute("SELECT max_attempts FROM cronlock.job ORDER BY id").fetchall() == [(32767,), (5,)]


def test_all_that_failed_are_retried(call: Call, db: Db) -> None:  # noqa: F811
    put(db, 1200)
    put(db, 30, task="other")
    put(db, 10, status="cancelled")
    assert call("jobs", "retry", "--task", "other").stdout == "30 jobs are queued again\n"
    assert json.loads(call("jobs", "retry", "--all", "--json").stdout) == {"task": None, "retried": 1200}
    assert call("jobs", "retry", "--all").stdout == "no job has failed\n"
    assert call("jobs", "retry", "--task", "other").stdout == "no job has failed\n"
    for nothing in ("nope", ""):
        missing = call("jobs", "retry", "--task", nothing)
        assert (missing.exit_code, f"there is no task {nothing!r} in this database" in missing.stderr) == (3, True)
    put(db, 1)
    assert call("jobs", "retry", "--all").stdout == "1 job is queued again\n"
    assert value(db, "SELECT count(*) FROM cronlock.job") == 1231


def test_a_job_is_cancelled_by_whoever_gives_the_command(call: Call, db: Db) -> None:  # noqa: F811
    job_id = value(
        db,
        "INSERT INTO cronlock.job_waiting (id, task, queue, payload, trigger, max_attempts, run_at) VALUES"
        " (nextval('cronlock.job_id'), 'report', 'default', '{}', 'http', 5, now() + interval '1 h') RETURNING id",
    )
    done = call("jobs", "cancel", str(job_id))
    assert done.exit_code == 0
    assert done.stdout.startswith(f"job {job_id}: cancelled after 0 attempts: CancelAsked: cancelled by ")
    assert "@" in done.stdout
    (failed,) = put(db)
    late = call("jobs", "cancel", str(failed), "--json")
    assert (late.exit_code, json.loads(late.stdout)["status"]) == (1, "failed")
    assert call("jobs", "cancel", "4711").exit_code == 3


def test_enqueue_writes_a_job_as_the_route_does(database_url: str, db: Db, tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(APP)

    def enqueue(*arguments: str, text: str | None = None) -> "subprocess.CompletedProcess[str]":
        return cronlock("enqueue", *arguments, cwd=tmp_path, text=text, DATABASE_URL=database_url)

    first = json.loads(enqueue("main:cron", "report", "--payload", '{"reportId": 7}').stdout)
    assert (first["status"], first["duplicate"]) == ("queued", False)
    again = enqueue("main:cron", "report", "--payload", "-", "--delay", "1h", text='{"reportId": 7}')
    assert json.loads(again.stdout) == {**first, "duplicate": True}
    later = enqueue(
        "main:cron", "report", "--delay", "1h", "--priority", "-5", "--queue", "slow", "--idempotency-key", "x"
    )
    assert later.returncode == 0, later.stderr
    assert db.execute("SELECT priority, queue FROM cronlock.job_waiting").fetchall() == [(-5, "slow")]
    reused = enqueue("main:cron", "report", "--payload", '{"reportId": 7, "x": 1}')
    assert (reused.returncode, f"job {first['jobId']}" in reused.stderr) == (1, True)
    for arguments, code, said in (
        (("main:cron", "misspelt"), 3, "there is no task 'misspelt'"),
        (("main:cron", "report", "--payload", "{"), 2, "not JSON"),
        (("main:cron", "report", "--delay", "soon"), 2, "--delay: 'soon' is not a duration"),
        (("main:cron", "report", "--delay", "-5s"), 2, "--delay: '-5s' is not a duration"),
        (("main:cron", "report", "--run-at", "soon"), 2, "--run-at: 'soon' is no time such as 2026-12-24T18:00:00Z"),
        (("main:cron", "report", "--run-at", "2026-12-01T10:00:00"), 2, "has no time zone"),
        (("main:cron",), 2, "no task was given: name one of main:cron"),
        ((), 2, "name the app and the task"),
    ):
        done = enqueue(*arguments)
        assert (done.returncode, said in done.stderr) == (code, True), done.stderr


def test_a_worker_shows_itself_and_answers_prometheus_with_what_it_counted(
    database_url: str, db: Db, tmp_path: Path
) -> None:
    (tmp_path / "main.py").write_text(APP)
    env = environment(DATABASE_URL=database_url, CRONLOCK_LOG_FORMAT="text")
    with Running("worker", "main:cron", "--metrics-port", "0", cwd=tmp_path, env=env) as worker:
        said = worker.until_says("working for")
        found = re.search(r"metrics are on (http://127\.0\.0\.1:\d+/metrics)", said)
        assert found
        listed = cronlock("jobs", "workers", "--json", cwd=tmp_path, DATABASE_URL=database_url)
        (row,) = json.loads(listed.stdout)["workers"]
        assert (row["pid"], row["queues"], row["tasks"]) == (worker.process.pid, ["default"], ["report"])
        shown = cronlock("jobs", "workers", cwd=tmp_path, DATABASE_URL=database_url).stdout
        assert "report" in shown
        for payload in ('{"reportId": 1}', '{"reportId": 2, "fails": 1}'):
            cronlock("enqueue", "main:cron", "report", "--payload", payload, cwd=tmp_path, DATABASE_URL=database_url)
        worker.until_says("report failed")
        text = httpx2.get(found[1]).text
        assert 'cronlock_jobs_ended_total{status="completed",task="report"} 1.0' in text
        assert 'cronlock_jobs_ended_total{status="failed",task="report"} 1.0' in text
        assert 'cronlock_job_start_seconds_count{task="report"} 2.0' in text
        assert 'cronlock_job_finish_seconds_count{task="report"} 2.0' in text
        port = found[1].split(":")[2].split("/")[0]
        taken = cronlock("worker", "main:cron", "--metrics-port", port, cwd=tmp_path, DATABASE_URL=database_url)
        assert (taken.returncode, "cannot be listened on" in taken.stderr) == (2, True)


def test_on_a_terminal_a_bar_is_drawn_and_elsewhere_none(database_url: str, db: Db, tmp_path: Path) -> None:
    put(db, 1200)
    leader, follower = pty.openpty()
    env = {**environment(DATABASE_URL=database_url), "TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen([*COMMAND, "jobs", "retry", "--all"], cwd=tmp_path, env=env, stderr=follower) as command:
        os.close(follower)
        drawn = b""
        while select.select([leader], [], [], 10)[0]:
            try:
                drawn += os.read(leader, 4096)
            except OSError:  # its end, on Linux
                break
        assert command.wait(10) == 0
    os.close(leader)
    assert b"jobs queued again" in drawn
    put(db, 10)
    quiet = cronlock("jobs", "retry", "--all", cwd=tmp_path, DATABASE_URL=database_url)
    assert (quiet.stdout, quiet.stderr) == ("10 jobs are queued again\n", "")


NOT_UTF8 = b"a\xff"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("enqueue", "main:cron", "report", "--payload", NOT_UTF8), " of --payload"),
        (("enqueue", "main:cron", "report", b"--payload=" + NOT_UTF8), " of --payload"),
        (("run", "main:cron", "report", "--payload", NOT_UTF8), " of --payload"),
        (("run", "main:cron", NOT_UTF8), ""),
        (("jobs", "list", "-t", NOT_UTF8), " of -t"),
        (("jobs", "list", "-q", NOT_UTF8), " of -q"),
        (("jobs", "retry", "--task", NOT_UTF8), " of --task"),
        (("pause", NOT_UTF8), ""),
        (("pause", "report", "--reason", NOT_UTF8), " of --reason"),
        (("resume", NOT_UTF8), ""),
        (("runs", "list", "-t", NOT_UTF8), " of -t"),
    ],
)
def test_an_argument_that_is_not_utf8_is_named_in_one_line(
    arguments: tuple[str | bytes, ...], named: str, database_url: str, tmp_path: Path
) -> None:
    (tmp_path / "main.py").write_text(APP)
    env = environment(DATABASE_URL=database_url)
    done = subprocess.run([*COMMAND, *arguments], cwd=tmp_path, env=env, capture_output=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(rf"cronlock: the argument{named} is not UTF-8: .*a\\xff\n", done.stderr.decode()), done.stderr


@pytest.mark.parametrize(
    "settings",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
    ids=["ascii", "the C locale"],
)
def test_a_terminal_that_lacks_a_character_is_shown_an_escape_and_takes_one_in_utf8(
    settings: dict[str, str], database_url: str, db: Db, tmp_path: Path
) -> None:
    (tmp_path / "main.py").write_text(APP)
    payload = {"x": "ключ é \U0001f511"}
    text = json.dumps(payload, ensure_ascii=False)

    def command(*arguments: str) -> str:
        env = {**environment(DATABASE_URL=database_url), **settings}
        encoded = [each.encode() for each in (*COMMAND, *arguments)]
        done = subprocess.run(encoded, cwd=tmp_path, env=env, capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.decode("ascii")

    job_id = json.loads(command("enqueue", "main:cron", "report", "--payload", text))["jobId"]
    assert value(db, "SELECT payload FROM cronlock.job") == payload
    assert r"\u043a\u043b\u044e\u0447 \u00e9 \ud83d\udd11" in command("jobs", "show", str(job_id))
    assert json.loads(command("jobs", "show", str(job_id), "--json"))["payload"] == payload
    assert json.loads(command("run", "main:cron", "report", "--payload", text))["result"] == payload


@pytest.mark.parametrize("text", ["2126-12-24T18:00Z", "2126-12-24T18:00:00.5+01:00", "2126-12-24 18:00:00Z"])
def test_run_at_is_read_as_the_route_reads_it(text: str) -> None:
    assert options.moment(text, "--run-at") == datetime.fromisoformat(text)


UNREACHABLE = "postgresql://someone@127.0.0.1:1/shop"


@pytest.mark.parametrize("command", ["enqueue main:cron report", "run main:cron report", "worker main:cron"])
def test_an_unreachable_database_is_told_once_with_its_name_and_its_cause(command: str, tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(APP)
    done = cronlock(*command.split(), cwd=tmp_path, DATABASE_URL=UNREACHABLE)
    assert done.returncode == 4
    (line,) = done.stderr.splitlines()
    assert line.startswith("cronlock: the database 127.0.0.1:1/shop cannot be reached: ")
    assert line.endswith("Connection refused. Check DATABASE_URL.")


@pytest.mark.parametrize("command", ["enqueue main:cron report", "run main:cron report", "worker main:cron"])
def test_a_database_without_the_schema_is_told_once(command: str, empty_url: str, tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(APP)
    done = cronlock(*command.split(), cwd=tmp_path, DATABASE_URL=empty_url)
    assert done.returncode == 5
    (line,) = done.stderr.splitlines()
    assert "cronlock migrate" in line


def test_a_run_without_a_task_is_told_which_there_are(database_url: str, tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(APP)
    done = cronlock("run", "main:cron", cwd=tmp_path, DATABASE_URL=database_url)
    assert (done.returncode, "no task was given" in done.stderr, "report" in done.stderr) == (2, True, True)


@pytest.mark.parametrize("queues", ["", ",", " , "])
def test_a_worker_is_not_started_for_no_queue(queues: str, tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(APP)
    done = cronlock("worker", "main:cron", "--queues", queues, cwd=tmp_path, DATABASE_URL=UNREACHABLE)
    assert (done.returncode, "--queues: no queue is named" in done.stderr) == (2, True)


def test_a_retry_is_told_as_it_was_made_though_a_worker_takes_the_job_at_once(
    call: Call,  # noqa: F811
    db: Db,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (job_id,) = put(db)
    retry_job = steering.retry_job

    def retry_and_take(*arguments: Any, **options: Any) -> Any:
        told = retry_job(*arguments, **options)
        db.execute("UPDATE cronlock.job SET attempts = attempts + 1")
        return told

    monkeypatch.setattr(steering, "retry_job", retry_and_take)
    assert call("jobs", "retry", str(job_id)).stdout == f"job {job_id} is queued again, for 5 more attempts\n"


def test_one_attempt_is_told_as_one(call: Call, db: Db) -> None:  # noqa: F811
    (cancelled,) = put(db, status="cancelled", attempts=1)
    assert "cancelled after 1 attempt:" in call("jobs", "show", str(cancelled)).stdout
    db.execute("""INSERT INTO cronlock.task (name, options) VALUES ('report', '{"maxAttempts": 1}')""")
    assert call("jobs", "retry", str(cancelled)).stdout == f"job {cancelled} is queued again, for 1 more attempt\n"
