"""The HTTP contract: a test for every row of its table."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from typing import Any

import httpx2
import pytest
from pydantic import BaseModel

from cronlock import Cancel, Cronlock, Retry, Run
from cronlock.models import REVISION
from tests import SECRET, Db, Make, advisory_locks, end_holders, held, rows, serving

pytestmark = pytest.mark.anyio


class Report(BaseModel):
    user_id: int
    kind: str = "daily"


@pytest.fixture
def cron(make_cron: Make) -> Cronlock:
    cron = make_cron()

    @cron.task("nightly")
    async def nightly(run: Run) -> dict[str, int]:
        await run.driver.execute("CREATE TABLE IF NOT EXISTS written (a int)")
        await run.driver.execute("INSERT INTO written VALUES (1)")
        return {"rows": 4211}

    @cron.task("report")
    def report(run: Run, payload: Report) -> dict[str, Any]:
        return payload.model_dump()

    @cron.task("echo")
    async def echo(run: Run, payload: dict[str, Any]) -> dict[str, Any]:
        return payload

    @cron.task("failing")
    async def failing(run: Run) -> None:
        await run.driver.execute("CREATE TABLE left_behind (a int)")
        raise ValueError(f"no such host, https://u:hunter22@db/?token=abc and Bearer sk_test_x and {SECRET}")

    @cron.task("later")
    async def later(run: Run) -> None:
        raise Retry(after=60)

    @cron.task("never")
    async def never(run: Run) -> None:
        raise Cancel("no work on Sundays")

    return cron


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", ["/cron/nightly", "/cron/nightly/"])
async def test_a_task_that_ran_answers_200_with_its_result(cron: Cronlock, db: Db, method: str, path: str) -> None:
    async with serving(cron.app()) as client:
        answer = await client.request(method, path)
    assert answer.status_code == 200
    body = answer.json()
    assert set(body) == {"status", "code", "task", "runId", "durationMs", "result"}
    assert (body["status"], body["task"], body["result"]) == ("completed", "nightly", {"rows": 4211})
    assert answer.headers["cronlock-status"] == "completed"
    assert answer.headers["cronlock-run-id"] == str(body["runId"])
    assert answer.headers["cache-control"] == "no-store"
    assert "etag" not in answer.headers
    row = db.execute("SELECT status, result, trigger FROM cronlock.run WHERE id = %s", (body["runId"],)).fetchone()
    assert row == ("completed", '{"rows":4211}', "http")
    assert db.execute("SELECT count(*) FROM written").fetchone() == (1,)


async def test_a_lock_held_by_another_program_answers_200_skipped(cron: Cronlock, db: Db, database_url: str) -> None:
    async with serving(cron.app()) as client, held(database_url, "nightly") as pid:
        answer = await client.get("/cron/nightly")
    body = answer.json()
    assert answer.status_code == 200
    assert (body["status"], body["reason"], body["task"]) == ("skipped", "already_running", "nightly")
    assert body["holder"] == {"pid": pid, "applicationName": "psql"}
    assert answer.headers["cronlock-status"] == "skipped"
    assert rows(db, "nightly") == [("skipped", "already_running")]
    holder = db.execute("SELECT holder_pid, holder_application, blocked_by FROM cronlock.run").fetchone()
    assert holder == (pid, "psql", None)


async def test_a_second_call_is_skipped_while_the_first_runs_and_names_it(make_cron: Make, db: Db) -> None:
    cron, other = make_cron(), make_cron()
    gate, running = asyncio.Event(), asyncio.Event()

    async def slow(run: Run) -> None:
        running.set()
        await gate.wait()

    cron.task("slow")(slow)
    other.task("slow")(slow)
    async with serving(cron.app()) as here, serving(other.app()) as elsewhere:
        first = asyncio.create_task(here.get("/cron/slow"))
        await running.wait()
        in_process = (await here.get("/cron/slow")).json()
        from_outside = (await elsewhere.get("/cron/slow")).json()
        (running_id, instance) = db.execute(
            "SELECT id, instance::text FROM cronlock.run WHERE status = 'running'"
        ).fetchone() or (0, "")
        gate.set()
        assert (await first).json()["runId"] == running_id
    for body in (in_process, from_outside):
        assert (body["status"], body["reason"]) == ("skipped", "already_running")
        assert body["holder"]["runId"] == running_id
        assert body["holder"]["instance"] == instance
        assert body["holder"]["elapsedMs"] >= 0
        assert body["holder"]["startedAt"].startswith("20")
    assert rows(db, "slow") == [("completed", None), *[("skipped", "already_running")] * 2]
    assert db.execute("SELECT DISTINCT blocked_by FROM cronlock.run WHERE status = 'skipped'").fetchall() == [
        (running_id,)
    ]


@pytest.mark.parametrize(
    ("setting", "option", "query", "code"),
    [
        (200, None, "", 200),
        (409, None, "", 409),
        (200, 409, "", 409),
        (409, 200, "", 200),
        (200, None, "?on_skip=409", 409),
        (409, 409, "?on_skip=200", 200),
        (200, None, "?on_skip=503", 503),
    ],
)
async def test_the_status_of_a_skip_is_what_call_task_or_setting_ask_for_in_this_order(
    make_cron: Make, database_url: str, setting: int, option: int | None, query: str, code: int
) -> None:
    cron = make_cron(skip_status=setting)

    @cron.task("nightly", skip_status=option)
    async def nightly(run: Run) -> None: ...

    async with serving(cron.app()) as client, held(database_url, "nightly"):
        answer = await client.get(f"/cron/nightly{query}")
    assert answer.status_code == code
    assert answer.json()["status"] == "skipped"
    assert ("retry-after" in answer.headers) is (code != 200)
    assert int(answer.headers.get("retry-after", "1")) >= 1


async def test_a_task_that_is_paused_while_another_holds_its_lock_is_paused(
    cron: Cronlock, db: Db, database_url: str
) -> None:
    async with serving(cron.app()) as client, held(database_url, "nightly"):
        assert (await client.get("/cron/nightly")).json()["reason"] == "already_running"
        db.execute("UPDATE cronlock.task SET paused_at = now() WHERE name = 'nightly'")
        answer = (await client.get("/cron/nightly")).json()
    assert answer["reason"] == "paused"
    assert "holder" not in answer
    told = "SELECT reason, blocked_by, holder_pid, holder_application FROM cronlock.run ORDER BY id DESC LIMIT 1"
    assert db.execute(told).fetchall() == [("paused", None, None, None)]


async def test_a_paused_task_that_is_registered_after_the_start_is_skipped(cron: Cronlock, db: Db) -> None:
    async with serving(cron.app()) as client:
        db.execute("INSERT INTO cronlock.task (name, lock_name, lock_key, paused_at) VALUES ('late', 'late', 1, now())")
        await (await cron.open()).readiness.look()
        cron.task("late")(lambda run: None)
        assert (await client.get("/cron/late")).json()["reason"] == "paused"


async def test_a_paused_task_is_skipped_and_never_takes_its_lock(cron: Cronlock, db: Db) -> None:
    async with serving(cron.app()) as client:
        db.execute("UPDATE cronlock.task SET paused_at = now(), paused_by = 'me' WHERE name = 'nightly'")
        first = (await client.get("/cron/nightly")).json()
        second = (await client.get("/cron/nightly")).json()
        assert [first["reason"], second["reason"]] == ["paused", "paused"]
        assert "holder" not in first
        db.execute("UPDATE cronlock.task SET paused_at = NULL WHERE name = 'nightly'")
        assert (await client.get("/cron/nightly")).json()["status"] == "completed"
    assert rows(db, "nightly") == [("skipped", "paused"), ("skipped", "paused"), ("completed", None)]


async def test_a_task_that_raised_answers_500_scrubbed_and_leaves_nothing(cron: Cronlock, db: Db) -> None:
    async with serving(cron.app()) as client:
        answer = await client.get("/cron/failing")
    body = answer.json()
    assert answer.status_code == 500
    assert (body["status"], body["error"]["type"]) == ("failed", "ValueError")
    assert "no such host" in body["error"]["message"]
    kept = db.execute("SELECT error_message, error_traceback FROM cronlock.run").fetchone()
    assert kept is not None
    assert "ValueError" in kept[1]
    for text in (answer.text, *kept):
        for secret in ("hunter22", "token=abc", "sk_test_x", SECRET):
            assert secret not in text
    assert "Traceback" not in answer.text
    assert db.execute("SELECT to_regclass('left_behind')").fetchone() == (None,)


async def test_retry_answers_503_with_retry_after(cron: Cronlock, db: Db) -> None:
    async with serving(cron.app()) as client:
        answer = await client.get("/cron/later")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "60"
    assert answer.json()["status"] == "failed"
    assert rows(db, "later") == [("failed", None)]


async def test_cancel_answers_500_cancelled(cron: Cronlock, db: Db) -> None:
    async with serving(cron.app()) as client:
        answer = await client.get("/cron/never")
    assert answer.status_code == 500
    assert answer.json()["status"] == "cancelled"
    assert answer.json()["error"]["message"] == "no work on Sundays"
    assert rows(db, "never") == [("cancelled", None)]


async def test_a_run_cancelled_by_an_operator_answers_500_cancelled(make_cron: Make, db: Db) -> None:
    cron = make_cron()

    @cron.task("endless")
    async def endless(run: Run) -> None:
        db.execute("UPDATE cronlock.run SET cancel_requested_at = now(), cancel_requested_by = 'ana'")
        await asyncio.Event().wait()

    async with serving(cron.app()) as client:
        answer = await client.get("/cron/endless")
    assert answer.status_code == 500
    assert answer.json()["status"] == "cancelled"
    assert "ana" in answer.json()["error"]["message"]
    assert rows(db, "endless") == [("cancelled", None)]


async def test_a_lost_lock_answers_500_lost(make_cron: Make, db: Db) -> None:
    cron = make_cron()

    @cron.task("endless")
    async def endless(run: Run) -> None:
        end_holders(db)
        await asyncio.Event().wait()

    async with serving(cron.app()) as client:
        answer = await client.get("/cron/endless")
    assert answer.status_code == 500
    assert answer.json()["status"] == "lost"
    assert rows(db, "endless") == [("lost", None)]


@pytest.mark.parametrize("kind", ["async sleep", "sleep in a thread", "pg_sleep", "pg_sleep in a thread"])
async def test_a_task_over_its_timeout_answers_504_and_leaves_nothing(make_cron: Make, db: Db, kind: str) -> None:
    cron = make_cron(drain_timeout="5s")

    async def awaiting(run: Run) -> str:
        await run.driver.execute("CREATE TABLE left_behind (a int)")
        await (run.driver.execute("SELECT pg_sleep(9)") if kind == "pg_sleep" else asyncio.sleep(9))
        return "ok"

    def blocking(run: Run) -> str:
        run.driver.execute("CREATE TABLE left_behind (a int)")
        run.driver.execute("SELECT pg_sleep(9)") if kind.startswith("pg") else __import__("time").sleep(2.2)
        return "ok"

    cron.task("slow", timeout="1s")(blocking if kind.endswith("thread") else awaiting)
    async with serving(cron.app()) as client:
        started = asyncio.get_running_loop().time()
        answer = await client.get("/cron/slow")
        assert asyncio.get_running_loop().time() - started < 2
        assert answer.status_code == 504
        assert answer.json()["status"] == "timed_out"
    assert rows(db, "slow") == [("timed_out", None)]
    assert db.execute("SELECT to_regclass('left_behind')").fetchone() == (None,)
    assert advisory_locks(db) == 0


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("Authorization", "Bearer wrong-secret-of-the-right-length")],
        [("Authorization", "Bearer undefined")],
        [("Authorization", "Bearer None")],
        [("Authorization", "Bearer null")],
        [("Authorization", "Bearer ")],
        [("Authorization", "Bearer")],
        [("Authorization", "Bearer    ")],
        [("Authorization", SECRET)],
        [("Authorization", f"Basic {SECRET}")],
        [("Authorization", b"Bearer caf\xe9")],
        [("Authorization", b"Bearer \xff\xfe")],
        [("Authorization", "Bearer 🔑".encode())],
        [("Authorization", "Bearer " + "a" * 65536)],
        [("Authorization", f"Bearer {SECRET}"), ("Authorization", f"Bearer {SECRET}")],
        [("Cookie", f"secret={SECRET}")],
    ],
)
@pytest.mark.parametrize("path", ["nightly", "does-not-exist", f"nightly?token={SECRET}"])
async def test_no_or_a_bad_secret_answers_401_for_real_and_unknown_names_alike(
    make_cron: Make, headers: list[tuple[str, Any]], path: str
) -> None:
    cron = make_cron(database_url="postgresql://nobody:x@127.0.0.1:9/none")  # any use of it would be seen

    @cron.task("nightly")
    async def nightly(run: Run) -> None: ...

    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=cron.app()), base_url="http://t") as client:
        for method in ("GET", "POST", "HEAD", "DELETE"):
            answer = await client.request(method, f"/cron/{path}", headers=headers)
            assert answer.status_code == 401
            if method != "HEAD":
                assert answer.json() == {"status": "unauthorized"}
            sent_a_token = any(name == "Authorization" for name, _ in headers)
            expected = 'Bearer error="invalid_token"' if sent_a_token else "Bearer"
            assert answer.headers["www-authenticate"] == expected
            assert answer.headers["cache-control"] == "no-store"


async def test_every_configured_secret_is_accepted_in_any_case_of_the_scheme(make_cron: Make) -> None:
    cron = make_cron(secrets="new-secret-0123456789,, old-secret-0123456789 ,")

    @cron.task("nightly")
    async def nightly(run: Run) -> None: ...

    async with serving(cron.app()) as client:
        for value, code in (
            ("Bearer new-secret-0123456789", 200),
            ("bearer old-secret-0123456789", 200),
            ("BEARER old-secret-0123456789 ", 200),
            ("Bearer ", 401),
            ("Bearer ,", 401),
        ):
            answer = await client.get("/cron/nightly", headers={"authorization": value})
            assert answer.status_code == code, value


async def test_the_log_tells_missing_from_wrong_and_never_shows_a_header(
    cron: Cronlock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    app = cron.app()
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://t") as client:
        await client.get("/cron/nightly")
        await client.get("/cron/nightly", headers={"authorization": "Bearer guess-me-if-you-can"})
    refused = [record for record in caplog.records if record.name == "cronlock.auth"]
    assert [getattr(record, "reason", None) for record in refused] == ["missing", "mismatch"]
    assert "guess-me" not in "".join(f"{record.__dict__}" for record in caplog.records)


@pytest.mark.parametrize(
    "name",
    ["does-not-exist", "%00", "a%2Fb", "..%2F..%2Fetc", "x" * 10_000, "caf%C3%A9", "cafe%CC%81", "NIGHTLY",
     "nightly%20", "", "nightly//", "nightly/x", "%ff", "cronlock.other"],
)  # fmt: skip
async def test_an_unknown_task_answers_404_and_leaves_no_row(cron: Cronlock, db: Db, name: str) -> None:
    async with serving(cron.app()) as client:
        answer = await client.get(f"/cron/{name}")
    assert answer.status_code == 404
    assert answer.json() == {"status": "not_found"}
    assert db.execute("SELECT count(*) FROM cronlock.run").fetchone() == (0,)


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "TRACE", "BREW"])
async def test_any_other_method_answers_405_and_runs_nothing(cron: Cronlock, db: Db, method: str) -> None:
    async with serving(cron.app()) as client:
        answer = await client.request(method, "/cron/nightly")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET, POST"
    assert db.execute("SELECT count(*) FROM cronlock.run").fetchone() == (0,)


@pytest.mark.parametrize(
    "body",
    [b"{", b"[1]", b'"text"', b"null", b"1", b'{"a": NaN}', b'{"a": Infinity}', b'{"a": 1e5000}', b"\xff\xfe",
     b'{"a": 1, "a": 2}', b'{"a": "\\ud83d"}', b'{"a": "\\u0000"}', b"[" * 20_000 + b"]" * 20_000,
     b'{"a": ' + b"[" * 20_000 + b"]" * 20_000 + b"}", b'{"n": ' + b"9" * 5000 + b"}"],
)  # fmt: skip
async def test_json_that_is_no_proper_object_answers_400_with_a_reason(cron: Cronlock, db: Db, body: bytes) -> None:
    async with serving(cron.app()) as client:
        answer = await client.post("/cron/echo", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["status"] == "bad_request"
    assert 0 < len(answer.json()["reason"]) < 200
    assert db.execute("SELECT count(*) FROM cronlock.run").fetchone() == (0,)


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    ("content_type", "body"),
    [("text/plain", b"{"), ("application/x-www-form-urlencoded", b"a=1"), (None, b""), (None, b"{"),
     ("application/json", b"")],
)  # fmt: skip
async def test_other_content_types_are_ignored(
    cron: Cronlock, method: str, content_type: str | None, body: bytes
) -> None:
    headers = {"content-type": content_type} if content_type else {}
    async with serving(cron.app()) as client:
        answer = await client.request(
            method, "/cron/echo?x=1&on_skip=409&max=3&seconds=2", content=body, headers=headers
        )
    assert answer.status_code == 200
    assert answer.json()["result"] == {"x": "1"}


async def test_query_and_body_are_merged_and_a_contradiction_answers_400(cron: Cronlock) -> None:
    async with serving(cron.app()) as client:
        merged = await client.post("/cron/echo?a=1", json={"b": 2**53 + 1})
        assert merged.json()["result"] == {"a": "1", "b": 2**53 + 1}
        answer = await client.post("/cron/echo?a=1", json={"a": "2"})
        assert answer.status_code == 400
        assert "a" in answer.json()["reason"]
        assert (await client.get("/cron/echo?on_skip=404")).status_code == 400


async def test_a_payload_that_does_not_fit_answers_422_with_the_fields(cron: Cronlock, db: Db) -> None:
    async with serving(cron.app()) as client:
        answer = await client.post("/cron/report", json={"user_id": "x", "kind": 3})
        assert answer.status_code == 422
        assert {problem["field"] for problem in answer.json()["fields"]} == {"user_id", "kind"}
        assert db.execute("SELECT count(*) FROM cronlock.run").fetchone() == (0,)
        fits = await client.get("/cron/report?user_id=7")
        assert fits.json()["result"] == {"user_id": 7, "kind": "daily"}


async def test_a_body_over_the_limit_answers_413_while_it_streams(make_cron: Make, db: Db) -> None:
    cron = make_cron(max_body=1000)

    @cron.task("echo")
    async def echo(run: Run, payload: dict[str, Any]) -> None: ...

    sent = 0

    async def endless() -> AsyncGenerator[bytes, None]:
        nonlocal sent
        while True:
            sent += 1
            yield b" " * 300

    async with serving(cron.app()) as client:
        declared = await client.post("/cron/echo", content=b" " * 1001, headers={"content-type": "application/json"})
        assert declared.status_code == 413
    app = cron.app()
    async with serving(app):
        answers: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": await anext(chunks), "more_body": True}

        async def send(message: Any) -> None:
            answers.append(message)

        chunks = endless()
        scope = {
            "type": "http", "method": "POST", "path": "/cron/echo", "raw_path": b"/cron/echo", "query_string": b"",
            "headers": [(b"authorization", f"Bearer {SECRET}".encode()), (b"content-type", b"application/json")],
            "root_path": "", "scheme": "http", "server": ("t", 80), "client": ("c", 1), "http_version": "1.1",
        }  # fmt: skip
        await app(scope, receive, send)
        await chunks.aclose()
    assert answers[0]["status"] == 413
    assert sent == 4
    assert db.execute("SELECT count(*) FROM cronlock.run").fetchone() == (0,)


async def test_no_database_answers_503_within_the_acquire_timeout(make_cron: Make) -> None:
    cron = make_cron(database_url="postgresql://nobody:x@127.0.0.1:9/none", acquire_timeout="1s")

    @cron.task("nightly")
    async def nightly(run: Run) -> None: ...

    async with serving(cron.app()) as client:
        started = asyncio.get_running_loop().time()
        answer = await client.get("/cron/nightly")
        assert asyncio.get_running_loop().time() - started < 3
    assert answer.status_code == 503
    assert answer.json()["status"] == "unavailable"
    assert answer.json()["reason"] == "database_unavailable"
    assert int(answer.headers["retry-after"]) > 0


async def test_an_unknown_schema_answers_503_with_the_command_that_mends_it(
    make_cron: Make, empty_url: str, db: Db
) -> None:
    db.execute("UPDATE cronlock.alembic_version SET version_num = '9999'")
    for cron, advice in ((make_cron(database_url=empty_url), "cronlock migrate"), (make_cron(), "newer")):

        @cron.task("nightly")
        async def nightly(run: Run) -> None: ...

        async with serving(cron.app()) as client:
            answer = await client.get("/cron/nightly")
            assert answer.status_code == 503
            assert answer.json()["reason"].startswith("schema_")
            assert advice in answer.json()["message"]
            assert (await client.get("/readyz")).json() == {"status": "unavailable"}
    db.execute(f"UPDATE cronlock.alembic_version SET version_num = '{REVISION}'")


async def test_a_full_pool_answers_503_and_harms_nobody(make_cron: Make, db: Db) -> None:
    cron = make_cron(pool_size=1, acquire_timeout="1s")
    gate, running = asyncio.Event(), asyncio.Event()

    @cron.task("slow")
    async def slow(run: Run) -> None:
        running.set()
        await gate.wait()

    @cron.task("quick")
    async def quick(run: Run) -> None: ...

    async with serving(cron.app()) as client:
        first = asyncio.create_task(client.get("/cron/slow"))
        await running.wait()
        answer = await client.get("/cron/quick")
        assert (answer.status_code, answer.json()["reason"]) == (503, "no_connection")
        assert (await client.get("/cron/slow")).json()["status"] == "skipped"
        gate.set()
        assert (await first).json()["status"] == "completed"
        assert (await client.get("/cron/quick")).json()["status"] == "completed"


async def test_a_full_recording_queue_answers_503(make_cron: Make, db: Db) -> None:
    cron = make_cron(record_queue_size=1)

    @cron.task("nightly")
    async def nightly(run: Run) -> None: ...

    db.execute("BEGIN")
    async with serving(cron.app()) as client:
        db.execute("SELECT pg_advisory_xact_lock(hashtext('nightly')::bigint)")
        answers = await asyncio.gather(*(client.get("/cron/nightly") for _ in range(20)))
    db.execute("ROLLBACK")
    reasons = {answer.json()["reason"] for answer in answers}
    assert reasons == {"already_running", "recording_queue_full"}


async def test_shutting_down_answers_503_with_retry_after(cron: Cronlock) -> None:
    async with serving(cron.app()) as client:
        assert (await client.get("/readyz")).status_code == 200
        await cron.drain(0)
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/healthz")).status_code == 200
        answer = await client.get("/cron/nightly")
    assert answer.status_code == 503
    assert answer.json()["reason"] == "shutting_down"
    assert int(answer.headers["retry-after"]) > 0


async def test_every_answer_is_json_of_less_than_4_kb_and_never_cached_or_redirected(make_cron: Make) -> None:
    cron = make_cron()

    @cron.task("big")
    async def big(run: Run) -> list[str]:
        return ["x" * 100] * 1000

    @cron.task("loud")
    async def loud(run: Run) -> None:
        raise RuntimeError("😀" * 5000)

    async with serving(cron.app()) as client:
        for path in (
            "/cron/big",
            "/cron/loud",
            "/cron/none",
            "/elsewhere",
            "/cron",
            "//cron/big",
            "/healthz",
            "/readyz",
        ):
            answer = await client.get(f"http://test{path}", headers={"x-forwarded-proto": "https"})
            assert len(answer.content) < 4096, path
            json.loads(answer.content)
            assert not 300 <= answer.status_code < 400
            assert answer.headers["cache-control"] == "no-store"
            assert "location" not in answer.headers


async def test_a_client_that_goes_away_does_not_stop_the_run(make_cron: Make, db: Db) -> None:
    cron = make_cron()
    gate, running = asyncio.Event(), asyncio.Event()

    @cron.task("slow")
    async def slow(run: Run) -> None:
        running.set()
        await gate.wait()

    async with serving(cron.app()) as client:
        first = asyncio.create_task(client.get("/cron/slow"))
        await running.wait()
        first.cancel()
        await asyncio.wait((first,))
        assert (await client.get("/cron/slow")).json()["status"] == "skipped"
        gate.set()
    assert rows(db, "slow") == [("completed", None), ("skipped", "already_running")]


async def test_probes_are_open_and_say_nothing(cron: Cronlock) -> None:
    app = cron.app()
    async with serving(app) as client:
        for path, body in (("/healthz", {"status": "ok"}), ("/readyz", {"status": "ready"})):
            answer = await client.get(path, headers={"authorization": ""})
            assert (answer.status_code, answer.json()) == (200, body)
