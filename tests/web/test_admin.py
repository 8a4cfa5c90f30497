"""The admin routes: who may do what, what they answer, and that nobody who looks is in the way of a call."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import psycopg
import pytest
from fastapi import FastAPI

from cronlock import Cronlock, Run, inspecting
from cronlock.web import admin
from tests import SECRET, Db, Make, advisory_locks, rows, serving, until, value
from tests.test_cli import running, write

pytestmark = pytest.mark.anyio

ADMIN = "an-admin-secret-0123456789"
NEXT_ADMIN = "the-next-admin-secret-0123"
READ = "a-reading-secret-0123456789"
READS = ("/admin/tasks", "/admin/runs", "/admin/runs/1", "/admin/locks", "/metrics")
CHANGES = ("/admin/runs/1/cancel", "/admin/tasks/nightly/pause", "/admin/tasks/nightly/resume")


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


@pytest.fixture
def cron(make_cron: Make) -> Cronlock:
    cron = make_cron(admin_secret=f"{NEXT_ADMIN},{ADMIN}", admin_read_secret=READ)

    @cron.task("nightly")
    async def nightly(run: Run) -> dict[str, int]:
        return {"rows_read": 4211}

    @cron.task("failing")
    async def failing(run: Run) -> None:
        raise ValueError("no such supplier")

    return cron


@asynccontextmanager
async def operating(cron: Cronlock, secret: str = ADMIN) -> AsyncIterator[httpx2.AsyncClient]:
    """A client that sends the admin secret."""
    async with serving(cron.app()) as client:
        client.headers.update(bearer(secret))
        yield client


def in_starlette(cron: Cronlock) -> Any:
    return cron.app()


def in_fastapi(cron: Cronlock) -> Any:
    app = FastAPI()
    app.include_router(cron.router)
    return app


apps = pytest.mark.parametrize("make_app", [in_starlette, in_fastapi])


# -- who may -----------------------------------------------------------------------------------------------------


@apps
@pytest.mark.parametrize(("method", "paths"), [("GET", READS), ("POST", CHANGES)])
async def test_without_an_admin_secret_the_routes_are_as_unknown_as_any_path(
    make_cron: Make, make_app: Callable[[Cronlock], Any], method: str, paths: tuple[str, ...]
) -> None:
    cron = make_cron()
    cron.task("nightly")(lambda run: None)
    async with serving(make_app(cron)) as client:
        unknown = await client.request(method, "/admin/nothing")
        for path in paths:
            answer = await client.request(method, path)
            assert (answer.status_code, answer.content) == (404, unknown.content)
            assert {*answer.headers} == {*unknown.headers}


@apps
async def test_the_admin_secrets_read_and_steer_and_the_read_secret_only_reads(
    cron: Cronlock, db: Db, make_app: Callable[[Cronlock], Any]
) -> None:
    async with serving(make_app(cron)) as client:
        await client.get("/cron/nightly")
        for secret in (ADMIN, NEXT_ADMIN, READ):
            codes = {path: (await client.get(path, headers=bearer(secret))).status_code for path in READS}
            assert set(codes.values()) == {200}, codes
            codes = {path: (await client.post(path, headers=bearer(secret))).status_code for path in CHANGES}
            assert set(codes.values()) == ({403} if secret == READ else {200}), codes
        refused = await client.post("/admin/tasks/nightly/pause", headers=bearer(READ))
        assert refused.json() == {
            "status": "forbidden",
            "reason": "this secret may only read; send CRONLOCK_ADMIN_SECRET",
        }
    assert value(db, "SELECT count(*) FROM cronlock.task WHERE paused_at IS NOT NULL") == 0


async def test_with_a_read_secret_alone_nobody_may_change_anything(make_cron: Make, db: Db) -> None:
    cron = make_cron(admin_read_secret=READ)
    async with operating(cron, READ) as client:
        assert (await client.get("/admin/tasks")).status_code == 200
        assert (await client.post("/admin/tasks/nightly/pause")).status_code == 403


@apps
@pytest.mark.parametrize("path", [*READS, *CHANGES])
@pytest.mark.parametrize(
    ("headers", "challenge"),
    [
        ([], "Bearer"),
        ([("authorization", f"Bearer {SECRET}")], 'Bearer error="invalid_token"'),
        ([("authorization", f"Basic {ADMIN}")], 'Bearer error="invalid_token"'),
        ([("authorization", f"Bearer {ADMIN}x")], 'Bearer error="invalid_token"'),
        ([("authorization", f"Bearer {ADMIN}"), ("authorization", f"Bearer {ADMIN}")], 'Bearer error="invalid_token"'),
    ],
    ids=["none", "the cron secret", "basic", "wrong", "twice"],
)
async def test_anything_else_answers_401_before_anything_is_looked_at(
    make_cron: Make,
    make_app: Callable[[Cronlock], Any],
    path: str,
    headers: list[tuple[str, str]],
    challenge: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cron = make_cron(admin_secret=ADMIN, admin_read_secret=READ, database_url="postgresql://nobody@127.0.0.1:1/x")

    async def never(*_: object) -> None:
        raise AssertionError("the database was asked")

    monkeypatch.setattr(inspecting.Inspector, "ask", never)
    transport = httpx2.ASGITransport(app=make_app(cron))
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
        for method in ("GET", "POST", "DELETE"):
            answer = await client.request(method, path, headers=headers)
            assert (answer.status_code, answer.json()) == (401, {"status": "unauthorized"})
            assert answer.headers["www-authenticate"] == challenge
            assert answer.headers["cache-control"] == "no-store"


async def test_the_admin_secrets_do_not_open_cron_routes(cron: Cronlock, db: Db) -> None:
    async with serving(cron.app()) as client:
        for secret in (ADMIN, READ):
            assert (await client.get("/cron/nightly", headers=bearer(secret))).status_code == 401
    assert rows(db, "nightly") == []


async def test_the_log_tells_missing_from_wrong_and_shows_no_header(
    cron: Cronlock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with serving(cron.app()) as client:
        await client.get("/admin/runs?token=abc", headers=bearer(f"{ADMIN}-not"))
        del client.headers["authorization"]
        await client.get("/admin/runs")
    told = [record.__dict__["reason"] for record in caplog.records if record.name == "cronlock.auth"]
    assert told == ["mismatch", "missing"]
    assert not [record for record in caplog.records if ADMIN in str(record.__dict__)]


@pytest.mark.parametrize("path", READS)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
async def test_another_method_answers_405_with_the_one_there_is(cron: Cronlock, path: str, method: str) -> None:
    async with operating(cron) as client:
        answer = await client.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")


# -- bad input ---------------------------------------------------------------------------------------------------

BAD = {
    "/admin/runs/abc": "'abc' is not the number of a run",
    "/admin/runs/0": "'0' is not the number of a run",
    "/admin/runs/-1": "'-1' is not the number of a run",
    "/admin/runs/9223372036854775808": "is not the number of a run",
    "/admin/runs/%D9%A3": "is not the number of a run",
    f"/admin/runs/{'9' * 5000}": "is not the number of a run",
    "/admin/runs?limit=0": "limit must be a whole number from 1 to 200",
    "/admin/runs?limit=201": "limit must be a whole number from 1 to 200",
    "/admin/runs?limit=1e2": "limit must be a whole number from 1 to 200",
    "/admin/runs?before=x": "before must be a whole number from 1 to 9223372036854775807",
    "/admin/runs?status=done": "status must be one of running, completed",
    "/admin/runs?task=A%20B": "'A B' is not the name of a task",
    "/admin/runs?task=a&task=b": "twice, with different values",
    "/admin/runs?since=1d": "the query has 'since'; it may have task, status, before, limit",
    "/admin/runs?task=%00": "NUL",
    "/admin/locks?x=1": "the query has 'x'; it may have nothing",
    "/metrics?x=%zz": "a % that is not followed by two hex digits",
}


@pytest.mark.parametrize(("path", "reason"), BAD.items(), ids=lambda text: text[:40])
async def test_what_cannot_be_read_answers_400_with_a_reason(cron: Cronlock, path: str, reason: str) -> None:
    async with operating(cron) as client:
        answer = await client.get(path)
    assert answer.status_code == 400
    assert reason in answer.json()["reason"]
    assert len(answer.content) < 500


@pytest.mark.parametrize(
    ("path", "body", "code", "reason"),
    [
        ("/admin/tasks/nightly/pause", b"[]", 400, "not an object"),
        ("/admin/tasks/nightly/pause", b'{"by": 7}', 400, "by must be a text of 1 to 200 characters"),
        ("/admin/tasks/nightly/pause", b'{"reason": " "}', 400, "reason must be a text of 1 to 200"),
        ("/admin/tasks/nightly/pause", b'{"until": "x"}', 400, "the body has 'until'; it may have by, reason"),
        ("/admin/tasks/nightly/pause", json.dumps({"by": "x" * 201}).encode(), 400, "by must be"),
        ("/admin/tasks/nightly/pause", b'{"by": "\\u0000"}', 400, "NUL"),
        ("/admin/tasks/NIGHTLY/pause", b"", 400, "'NIGHTLY' is not the name of a task"),
        ("/admin/tasks/unknown/pause", b"", 404, "there is no task 'unknown'"),
        ("/admin/tasks/unknown/resume", b"", 404, "there is no task 'unknown'"),
        ("/admin/runs/4711/cancel", b"", 404, "there is no run 4711"),
        ("/admin/runs/4711/cancel?force=yes", b"", 400, "force must be true or false"),
        ("/admin/tasks/nightly/pause", b'{"reason": "' + b"x" * 2000 + b'"}', 413, "longer than 1024 bytes"),
    ],
)
async def test_a_change_that_cannot_be_read_answers_4xx_and_changes_nothing(
    make_cron: Make, db: Db, path: str, body: bytes, code: int, reason: str
) -> None:
    cron = make_cron(admin_secret=ADMIN, max_body=1024)
    cron.task("nightly")(lambda run: None)
    async with operating(cron) as client:
        answer = await client.post(path, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, reason in answer.json()["reason"]) == (code, True), answer.text
    assert value(db, "SELECT count(*) FROM cronlock.task WHERE paused_at IS NOT NULL") == 0


@pytest.mark.parametrize("sent", ["application/x-www-form-urlencoded", "text/plain", ""])
async def test_a_change_whose_body_is_of_another_content_type_is_refused_and_not_done_without_it(
    cron: Cronlock, db: Db, sent: str
) -> None:
    async with operating(cron) as client:
        said = b'{"by": "ana", "reason": "the supplier is down"}'
        answer = await client.post("/admin/tasks/nightly/pause", content=said, headers={"content-type": sent})
    assert (answer.status_code, "Content-Type: application/json" in answer.json()["reason"]) == (400, True)
    assert value(db, "SELECT count(*) FROM cronlock.task WHERE paused_at IS NOT NULL") == 0


# -- reading -----------------------------------------------------------------------------------------------------


async def test_tasks_runs_and_locks_are_what_the_commands_show(cron: Cronlock, database_url: str, db: Db) -> None:
    async with operating(cron) as client:
        await client.get("/cron/failing", headers=bearer(SECRET))
        (failing, nightly) = (await client.get("/admin/tasks")).json()["tasks"]
        assert (failing["task"], failing["lastStatus"], nightly["lastStatus"]) == ("failing", "failed", None)
        with running(database_url, db, task="nightly", application="cronlock:nightly") as run_id:
            (lock,) = (await client.get("/admin/locks")).json()["locks"]
            assert (lock["task"], lock["runId"]) == ("nightly", run_id)
        answer = await client.get("/admin/runs?status=failed")
        (run,) = answer.json()["runs"]
        assert (run["task"], run["code"], answer.json()["nextBefore"]) == ("failing", "task_raised", None)
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["cache-control"] == "no-store"


async def test_one_run_is_shown_with_everything_about_it(cron: Cronlock, db: Db) -> None:
    async with operating(cron) as client:
        ran = (await client.get("/cron/nightly", headers=bearer(SECRET))).json()["runId"]
        failed = (await client.get("/cron/failing", headers=bearer(SECRET))).json()["runId"]
        run = (await client.get(f"/admin/runs/{ran}")).json()["run"]
        assert (run["runId"], run["result"], run["code"]) == (ran, {"rows_read": 4211}, "completed")
        run = (await client.get(f"/admin/runs/{failed}/")).json()["run"]
        assert run["errorTraceback"].startswith("Traceback")
        assert run["explanation"] == "failed: ValueError: no such supplier; what it wrote was rolled back"
        skipped = write(db, task="nightly", status="skipped", reason="already_running", blocked_by=ran)
        run = (await client.get(f"/admin/runs/{skipped}")).json()["run"]
        assert (run["holder"]["task"], run["skippedInARow"], run["code"]) == ("nightly", 1, "already_running")
        by_hand = write(db, result="no json")
        assert (await client.get(f"/admin/runs/{by_hand}")).json()["run"]["result"] == "no json"
        assert (await client.get("/admin/runs/4711")).json()["reason"] == "there is no run 4711"


async def test_runs_come_in_pages_that_neither_miss_nor_repeat_one(cron: Cronlock, db: Db) -> None:
    ids = [write(db, task="nightly") for _ in range(7)]
    write(db, task="other")
    found: list[int] = []
    async with operating(cron) as client:
        page = (await client.get("/admin/runs?task=nightly&limit=3")).json()
        while page["runs"]:
            found += [run["runId"] for run in page["runs"]]
            if page["nextBefore"] is None:
                break
            write(db, task="nightly")  # what comes meanwhile moves no page
            page = (await client.get(f"/admin/runs?task=nightly&limit=3&before={page['nextBefore']}")).json()
    assert found == ids[::-1]


# -- steering ----------------------------------------------------------------------------------------------------


async def test_a_pause_says_who_and_why_and_holds_for_the_next_call(cron: Cronlock, db: Db) -> None:
    async with operating(cron) as client:
        said = {"by": "ana", "reason": "the supplier is down"}
        answer = await client.post("/admin/tasks/nightly/pause", json=said)
        assert (answer.status_code, answer.json()["pausedBy"], answer.json()["task"]) == (200, "ana", "nightly")
        assert (await client.get("/cron/nightly", headers=bearer(SECRET))).json()["reason"] == "paused"
        resumed = (await client.post("/admin/tasks/nightly/resume")).json()
        assert resumed["wasPausedBy"] == "ana"
        assert (await client.get("/cron/nightly", headers=bearer(SECRET))).json()["status"] == "completed"
        anonymous = (await client.post("/admin/tasks/nightly/pause")).json()
        assert (anonymous["pausedBy"], anonymous["pausedReason"]) == ("admin", None)


async def test_a_cancelled_run_is_answered_with_how_it_ended(make_cron: Make, db: Db) -> None:
    cron = make_cron(admin_secret=ADMIN)
    begun = asyncio.Event()

    @cron.task("endless")
    async def endless(run: Run) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with operating(cron) as client:
        calling = asyncio.ensure_future(client.get("/cron/endless", headers=bearer(SECRET)))
        await begun.wait()
        run_id = value(db, "SELECT id FROM cronlock.run")
        answer = await client.post(f"/admin/runs/{run_id}/cancel", json={"by": "ana"})
        assert answer.status_code == 200, answer.text
        assert {name: answer.json()[name] for name in ("runId", "status", "code", "wasRunning")} == {
            "runId": run_id,
            "status": "cancelled",
            "code": "cancelled_by_operator",
            "wasRunning": True,
        }
        assert "ana" in answer.json()["explanation"]
        assert (await calling).json()["code"] == "cancelled_by_operator"
        again = await client.post(f"/admin/runs/{run_id}/cancel")
        assert (again.status_code, again.json()["wasRunning"], again.json()["status"]) == (200, False, "cancelled")


async def test_a_run_that_does_not_stop_is_202_and_with_force_loses_its_connection(
    cron: Cronlock, database_url: str, db: Db, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(admin, "CANCEL_WAIT", 0.3)
    monkeypatch.setattr(admin, "FORCE_GRACE", 0.3)
    async with operating(cron) as client:
        with running(database_url, db) as run_id:
            caplog.clear()
            asked = await client.post(f"/admin/runs/{run_id}/cancel")
            assert (asked.status_code, asked.json()["status"]) == (202, "running")
            assert asked.json()["explanation"].endswith("admin asked for its end")
            forced = await client.post(f"/admin/runs/{run_id}/cancel?force=true")
        assert (forced.status_code, forced.json()["status"]) == (200, "lost")
        assert (forced.json()["code"], forced.json()["connectionEnded"]) == ("process_gone", True)
        told = [record.__dict__["runId"] for record in caplog.records if record.__dict__.get("event") == "run.lost"]
        assert told == [run_id]
        assert cron.metrics.registry.get_sample_value("cronlock_recoveries_total") == 1


async def test_force_never_ends_the_backend_of_somebody_else(
    cron: Cronlock, database_url: str, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "CANCEL_WAIT", 0.2)
    monkeypatch.setattr(admin, "FORCE_GRACE", 0.2)
    async with operating(cron) as client:
        with running(database_url, db, application="psql") as run_id:
            forced = await client.post(f"/admin/runs/{run_id}/cancel?force=true")
            assert (forced.status_code, forced.json()["connectionEnded"]) == (202, False)
            assert advisory_locks(db) == 1


# -- not in the way ----------------------------------------------------------------------------------------------


async def test_readers_that_are_stuck_are_bounded_and_no_call_waits_for_them(
    cron: Cronlock, database_url: str, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspecting, "LIMIT", "700ms")
    async with operating(cron) as client:
        await client.get("/cron/nightly", headers=bearer(SECRET))
        with psycopg.connect(database_url) as other:
            other.execute("LOCK TABLE cronlock.task IN ACCESS EXCLUSIVE MODE")
            looking = [asyncio.ensure_future(client.get("/admin/tasks")) for _ in range(30)]
            query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'cronlock-admin'"
            await until(lambda: value(db, query) == 2, "both connections are taken")
            other.rollback()
            other.execute("LOCK TABLE cronlock.alembic_version IN ACCESS EXCLUSIVE MODE")
            assert (await client.get("/cron/nightly", headers=bearer(SECRET))).json()["status"] == "completed"
            assert value(db, query) == 2
        answers = await asyncio.gather(*looking)
    codes = [answer.status_code for answer in answers]
    assert codes.count(200) == inspecting.CONNECTIONS + inspecting.WAITING
    assert {answer.json()["reason"] for answer in answers if answer.status_code == 503} == {"admin_busy"}


async def test_a_statement_that_takes_too_long_is_503_and_its_connection_goes_on(
    cron: Cronlock, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspecting, "LIMIT", "200ms")
    async with operating(cron) as client:
        with psycopg.connect(database_url) as other:
            other.execute("LOCK TABLE cronlock.task IN ACCESS EXCLUSIVE MODE")
            answer = await client.get("/admin/tasks")
        assert (answer.status_code, answer.json()["reason"]) == (503, "read_timed_out")
        assert answer.headers["retry-after"]
        assert (await client.get("/admin/tasks")).status_code == 200


async def test_no_connection_is_open_while_nobody_looks(cron: Cronlock, db: Db) -> None:
    query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'cronlock-admin'"
    async with operating(cron) as client:
        await client.get("/cron/nightly", headers=bearer(SECRET))
        assert value(db, query) == 0
        await client.get("/admin/runs")
        assert value(db, query) == 1
    await until(lambda: value(db, query) == 0, "closed with the process")


async def test_without_a_database_the_admin_routes_answer_503_soon(make_cron: Make) -> None:
    cron = make_cron(admin_secret=ADMIN, database_url="postgresql://nobody@127.0.0.1:1/x")
    async with operating(cron) as client, asyncio.timeout(8):
        answer = await client.get("/admin/runs")
    assert (answer.status_code, answer.json()["reason"]) == (503, "database_unavailable")
