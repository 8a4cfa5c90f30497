"""`/jobs/..`: what an enqueue over HTTP is answered, who sees what of a job, retry and cancel."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx2
import psycopg
import pytest
from fastapi import FastAPI
from pydantic import BaseModel

from cronlock import Cancel, Cronlock, Retry, Run
from tests import SECRET, Db, Make, serving, value
from tests.web.test_admin import ADMIN, READ, bearer
from tests.working import working

pytestmark = pytest.mark.anyio

JSON = {"content-type": "application/json"}


class Report(BaseModel):
    user: int
    kind: str = "daily"


@pytest.fixture
def cron(make_cron: Make) -> Cronlock:
    cron = make_cron(admin_secret=ADMIN, admin_read_secret=READ)
    add_tasks(cron)
    return cron


def add_tasks(cron: Cronlock) -> None:
    @cron.task("report", max_attempts=2, retry_delay=0.05)
    async def report(run: Run, payload: Report) -> dict[str, Any]:
        return payload.model_dump()

    @cron.task("echo")
    async def echo(run: Run, payload: dict[str, Any]) -> dict[str, Any]:
        return payload

    @cron.task("failing", max_attempts=2, retry_delay=0.05)
    async def failing(run: Run) -> None:
        if run.attempt < 2:
            raise Retry("not yet", after=0)
        raise ValueError(f"no such supplier; {SECRET}")

    @cron.task("sleepy", mode="guard")
    async def sleepy(run: Run, payload: dict[str, Any]) -> None:
        await asyncio.sleep(float(payload.get("lasts", 30)))

    @cron.task("never")
    async def never(run: Run) -> None:
        raise Cancel("not today")

    @cron.task("once-each", dedupe="payload")
    async def once_each(run: Run, payload: dict[str, Any]) -> None: ...

    @cron.task("by-field", dedupe=("user",))
    async def by_field(run: Run, payload: dict[str, Any]) -> None: ...

    @cron.task("by-call", dedupe=lambda payload: payload["user"]["name"])
    async def by_call(run: Run, payload: dict[str, Any]) -> None: ...


@asynccontextmanager
async def at_work(make_cron: Make) -> AsyncIterator[None]:
    """A worker of the same tasks, in this process."""
    other = make_cron(lease="2s")
    add_tasks(other)
    async with other, working(other, concurrency=5):
        yield


async def ended(client: httpx2.AsyncClient, job_id: int, *statuses: str) -> dict[str, Any]:
    """The job once it has ended, or has one of these statuses; as an admin sees it."""
    async with asyncio.timeout(15):
        while True:
            answer = await client.get(f"/jobs/{job_id}", headers=bearer(ADMIN))
            body: dict[str, Any] = answer.json()
            if body["status"] in (statuses or ("completed", "failed", "cancelled")):
                return body
            await asyncio.sleep(0.02)


def in_starlette(cron: Cronlock) -> Any:
    return cron.app()


def in_fastapi(cron: Cronlock) -> Any:
    app = FastAPI()
    app.include_router(cron.router)
    return app


# -- enqueue -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_app", [in_starlette, in_fastapi])
@pytest.mark.parametrize("slash", ["", "/"])
async def test_an_enqueue_answers_202_and_its_worker_completes_the_job(
    cron: Cronlock, make_cron: Make, db: Db, make_app: Any, slash: str
) -> None:
    async with serving(make_app(cron)) as client:
        answer = await client.post(f"/jobs/report{slash}", json={"user": 7})
        assert answer.status_code == 202
        job_id = answer.json()["jobId"]
        assert answer.json() == {"status": "queued", "jobId": job_id, "duplicate": False}
        assert answer.headers["cronlock-status"] == "queued"
        assert answer.headers["cache-control"] == "no-store"
        assert db.execute("SELECT task, trigger, payload FROM cronlock.job").fetchall() == [
            ("report", "http", {"user": 7})
        ]
        async with at_work(make_cron):
            assert (await ended(client, job_id))["result"] == {"user": 7, "kind": "daily"}


async def test_a_job_may_have_no_payload(cron: Cronlock, db: Db) -> None:
    async with serving(cron.app()) as client:
        assert (await client.post("/jobs/echo")).status_code == 202
        assert (await client.post("/jobs/echo", content=b"", headers=JSON)).status_code == 202
    assert db.execute("SELECT payload FROM cronlock.job").fetchall() == [({},), ({},)]


NOTHING_ELSE = [
    ({}, 401),
    (bearer("wrong-secret-0123456789"), 401),
    (bearer(ADMIN), 403),
    (bearer(READ), 403),
]


@pytest.mark.parametrize(("headers", "code"), NOTHING_ELSE)
async def test_only_the_cron_secret_enqueues(cron: Cronlock, db: Db, headers: dict[str, str], code: int) -> None:
    async with serving(cron.app()) as client:
        del client.headers["authorization"]
        assert (await client.post("/jobs/echo", json={}, headers=headers)).status_code == code
        if code == 401:
            codes = [
                (await client.request(method, path, headers=headers)).status_code
                for method in ("GET", "POST", "PUT", "HEAD")
                for path in ("/jobs/nothing", "/jobs/1", "/jobs/echo")
            ]
            assert set(codes) == {401}, "nothing is looked at before the secret"
    assert value(db, "SELECT count(*) FROM cronlock.job") == 0


@pytest.mark.parametrize(
    ("method", "path", "code", "allow"),
    [
        ("POST", "/jobs/misspelt", 404, None),
        ("POST", "/jobs/1", 404, None),
        ("GET", "/jobs/misspelt", 404, None),
        ("GET", "/jobs/1", 404, None),
        ("GET", "/jobs/99999999999999999999", 404, None),
        ("GET", "/jobs/echo", 405, "POST"),
        ("PUT", "/jobs/echo", 405, "POST"),
        ("HEAD", "/jobs/echo", 405, "POST"),
        ("DELETE", "/jobs/1", 405, "GET"),
        ("POST", "/jobs/1/retry", 403, None),
        ("POST", "/jobs/1/cancel", 403, None),
    ],
)
async def test_what_there_is_not_answers_404_and_another_method_405(
    cron: Cronlock, method: str, path: str, code: int, allow: str | None
) -> None:
    async with serving(cron.app()) as client:
        answer = await client.request(method, path)
    assert (answer.status_code, answer.headers.get("allow")) == (code, allow)


async def test_the_cron_secret_is_told_that_a_retry_needs_another_one(cron: Cronlock) -> None:
    async with serving(cron.app()) as client:
        answer = await client.post("/jobs/1/retry")
        other = await client.post("/jobs/1/retry", headers=bearer("wrong-secret-0123456789"))
    reason = "this secret calls and enqueues; send CRONLOCK_ADMIN_SECRET"
    assert answer.json() == {"status": "forbidden", "reason": reason}
    assert (other.status_code, other.json()) == (401, {"status": "unauthorized"})


async def test_without_an_admin_secret_nobody_retries_or_cancels(make_cron: Make) -> None:
    async with serving(make_cron().app()) as client:
        codes = [(await client.post(f"/jobs/1/{what}")).status_code for what in ("retry", "cancel")]
        assert codes == [404, 404]


@pytest.mark.parametrize(
    ("body", "headers", "query", "reason"),
    [
        (b"[1]", JSON, "", "not an object"),
        (b"{", JSON, "", "not JSON"),
        (b'{"a":NaN}', JSON, "", "NaN is not JSON"),
        (b"a=1", {"content-type": "application/x-www-form-urlencoded"}, "", "Content-Type"),
        (b"{}", {}, "", "Content-Type"),
        (b"{}", JSON, "?user=1", "it may have delay, run_at, priority"),
        (b"{}", JSON, "?delay=soon", "not a duration"),
        (b"{}", JSON, "?delay=-1s", "duration"),
        (b"{}", JSON, "?delay=99999d", "longer"),
        (b"{}", JSON, "?run_at=tomorrow", "is no time such as"),
        (b"{}", JSON, "?run_at=2026-12-01T10:00:00", "time zone"),
        (b"{}", JSON, "?run_at=9999-12-31T23:59:59-12:00", "at most"),
        (b"{}", JSON, "?run_at=2900-12-31T23:59:59Z", "at most"),
        (b"{}", JSON, "?run_at=2026-12-01T10:00:00Z&delay=1s", "excludes delay"),
        (b"{}", JSON, "?priority=high", "whole number"),
        (b"{}", JSON, "?priority=1001", "from -1000 to 1000"),
        (b"{}", JSON, "?priority=%C2%B2", "whole number"),
        (b"{}", JSON, "?priority=--1", "whole number"),
    ],
)
async def test_what_cannot_be_an_enqueue_answers_400_and_leaves_nothing(
    cron: Cronlock, db: Db, body: bytes, headers: dict[str, str], query: str, reason: str
) -> None:
    async with serving(cron.app()) as client:
        answer = await client.post(f"/jobs/echo{query}", content=body, headers=headers)
    assert answer.status_code == 400, answer.text
    assert answer.json()["status"] == "bad_request"
    assert reason in answer.json()["reason"]
    assert value(db, "SELECT count(*) FROM cronlock.job_status") == 0


async def test_a_payload_that_does_not_fit_answers_422_with_the_fields(cron: Cronlock, db: Db) -> None:
    async with serving(cron.app()) as client:
        answer = await client.post("/jobs/report", json={"user": "nobody"})
    assert answer.status_code == 422
    assert [field["field"] for field in answer.json()["fields"]] == ["user"]
    assert value(db, "SELECT count(*) FROM cronlock.job") == 0


async def test_a_body_that_is_too_long_answers_413(make_cron: Make) -> None:
    cron = make_cron(max_body=100)
    add_tasks(cron)
    async with serving(cron.app()) as client:
        assert (await client.post("/jobs/echo", json={"a": "x" * 80})).status_code == 202
        assert (await client.post("/jobs/echo", json={"a": "x" * 100})).status_code == 413


async def test_without_a_database_an_enqueue_answers_503(make_cron: Make) -> None:
    cron = make_cron(database_url="postgresql://nobody:x@127.0.0.1:9/none", acquire_timeout="300ms")
    add_tasks(cron)
    async with serving(cron.app()) as client:
        answer = await client.post("/jobs/echo", json={})
        assert (answer.status_code, answer.json()["reason"]) == (503, "database_unavailable")
        assert answer.headers["retry-after"] == "5"
        assert (await client.get("/jobs/1")).status_code == 503


async def test_a_server_that_stops_takes_no_job(cron: Cronlock, db: Db) -> None:
    async with serving(cron.app()) as client:
        await cron.drain(0)
        answer = await client.post("/jobs/echo", json={})
        assert (answer.status_code, answer.json()["reason"]) == (503, "shutting_down")
    assert value(db, "SELECT count(*) FROM cronlock.job") == 0


async def test_delay_run_at_and_priority_are_kept(cron: Cronlock, db: Db) -> None:
    later = datetime.now(UTC) + timedelta(hours=3)
    async with serving(cron.app()) as client:
        for query in ("?delay=90m&priority=-5", f"?run_at={later.isoformat().replace('+', '%2B')}", "?priority=7"):
            assert (await client.post(f"/jobs/echo{query}", json={})).status_code == 202, query
    minutes = "round(extract(epoch FROM run_at - clock_timestamp()) / 60)::int"
    waiting = db.execute(f"SELECT priority, {minutes} FROM cronlock.job_waiting ORDER BY id").fetchall()
    assert waiting == [(-5, 90), (0, 180)]
    assert db.execute("SELECT priority FROM cronlock.job").fetchall() == [(7,)]


# -- keys --------------------------------------------------------------------------------------------------------


async def test_a_second_enqueue_with_a_key_is_given_the_first_job_whatever_became_of_it(
    cron: Cronlock, make_cron: Make, db: Db
) -> None:
    key = {"idempotency-key": "report:7"}

    async def again(client: httpx2.AsyncClient) -> dict[str, Any]:
        answer = await client.post("/jobs/report?delay=1h&priority=3", json={"kind": "daily", "user": 7}, headers=key)
        assert answer.status_code == 202
        return dict(answer.json())

    async with serving(cron.app()) as client:
        first = (await client.post("/jobs/report", json={"user": 7, "kind": "daily"}, headers=key)).json()
        assert first["duplicate"] is False
        told = {"status": "queued", "jobId": first["jobId"], "duplicate": True}
        assert await again(client) == told, "other options and another order of names are no difference"
        async with at_work(make_cron):
            await ended(client, first["jobId"])
        assert await again(client) == told
        other = await client.post("/jobs/echo", json={}, headers=key)
        assert other.json()["duplicate"] is False, "another task has keys of its own"
        db.execute("UPDATE cronlock.idempotency_key SET expires_at = now() - interval '1 second'")
        assert (await again(client))["duplicate"] is False


@pytest.mark.parametrize("other", [{"user": 8}, {"user": 7.0}, {"user": 7, "kind": "daily", "x": None}, {}])
async def test_a_key_of_another_payload_answers_422_with_the_first_job(
    cron: Cronlock, db: Db, other: dict[str, Any]
) -> None:
    key = {"idempotency-key": "a"}
    async with serving(cron.app()) as client:
        first = (await client.post("/jobs/echo", json={"user": 7}, headers=key)).json()
        answer = await client.post("/jobs/echo", json=other, headers=key)
    assert answer.status_code == 422
    body = answer.json()
    assert (body["status"], body["jobId"]) == ("unprocessable", first["jobId"])
    assert f"job {first['jobId']}" in body["reason"]
    assert value(db, "SELECT count(*) FROM cronlock.job") == 1


async def test_a_key_that_another_transaction_keeps_open_answers_409_in_two_seconds(
    cron: Cronlock, database_url: str
) -> None:
    async with (
        serving(cron.app()) as client,
        await psycopg.AsyncConnection.connect(database_url) as connection,
    ):
        await cron.enqueue(connection, "echo", {}, idempotency_key="a")
        answer = await client.post("/jobs/echo", json={}, headers={"idempotency-key": "a"})
        assert (answer.status_code, answer.headers["retry-after"]) == (409, "1")
        assert answer.json()["status"] == "conflict"
        assert answer.json()["reason"].endswith("has not ended; try again")
        await connection.rollback()
        answer = await client.post("/jobs/echo", json={}, headers={"idempotency-key": "a"})
        assert (answer.status_code, answer.json()["duplicate"]) == (202, False)


async def test_a_task_says_itself_what_makes_two_jobs_one(cron: Cronlock, db: Db) -> None:
    async def enqueue(task: str, payload: Any, **headers: str) -> tuple[int, Any]:
        answer = await client.post(f"/jobs/{task}", json=payload, headers=headers)
        return answer.status_code, answer.json().get("duplicate")

    async with serving(cron.app()) as client:
        assert await enqueue("once-each", {"a": 1, "b": 2}) == (202, False)
        assert await enqueue("once-each", {"b": 2, "a": 1}) == (202, True)
        assert await enqueue("once-each", {"a": 2}) == (202, False)
        assert await enqueue("once-each", {"a": 2}, **{"idempotency-key": "mine"}) == (202, False)
        assert await enqueue("by-field", {"user": 1, "x": 1}) == (202, False)
        assert await enqueue("by-field", {"user": 1, "x": 1}) == (202, True)
        assert await enqueue("by-field", {"user": 1, "x": 2}) == (422, None)
        assert await enqueue("by-call", {"user": {"name": "ana"}}) == (202, False)
        assert await enqueue("by-call", {"user": {"name": "ana"}}) == (202, True)
        assert await enqueue("by-call", {}) == (400, None)
        assert await enqueue("by-call", {"user": {"name": 5}}) == (400, None)
        assert await enqueue("by-call", {"user": {"name": ""}}) == (400, None)


# -- what is seen ------------------------------------------------------------------------------------------------


async def test_two_hundred_polls_at_once_are_all_answered_each_with_its_own_job(
    cron: Cronlock, make_cron: Make, db: Db
) -> None:
    async with serving(cron.app()) as client:
        made = await cron.enqueue_many(None, "echo", [{"n": n} for n in range(40)])
        async with at_work(make_cron):
            await ended(client, made[-1].job_id, "completed")
        made += await cron.enqueue_many(None, "echo", [{}] * 40)
        made += await cron.enqueue_many(None, "echo", [{}] * 20, delay="1h")
        ids = [one.job_id for one in made] * 2
        answers = await asyncio.gather(*(client.get(f"/jobs/{job_id}") for job_id in [*ids, 10**9]))
        assert [answer.status_code for answer in answers] == [200] * 200 + [404]
        assert [answer.json()["jobId"] for answer in answers[:-1]] == ids
        status = [answer.json()["status"] for answer in answers[:-1]]
        assert status == (["completed"] * 40 + ["queued"] * 60) * 2
        whole = (await client.get(f"/jobs/{ids[0]}", headers=bearer(ADMIN))).json()
        assert answers[0].json() == {name: whole[name] for name in OPEN}
        (moment,) = db.execute("SELECT finished_at FROM cronlock.job_history WHERE id = %s", (ids[0],)).fetchall()
        assert datetime.fromisoformat(answers[0].json()["finishedAt"]) == moment[0].replace(
            microsecond=moment[0].microsecond // 1000 * 1000
        )
        db.execute("DELETE FROM cronlock.job_history WHERE id = %s", (ids[0],))
        assert (await client.get(f"/jobs/{ids[0]}")).status_code == 404, "nothing is kept"


async def test_polls_are_503_without_a_database_and_go_on_with_it(make_cron: Make, db: Db) -> None:
    cron = make_cron(acquire_timeout="500ms")
    add_tasks(cron)
    async with serving(cron.app()) as client:
        job = await cron.enqueue(None, "echo")
        assert (await client.get(f"/jobs/{job.job_id}")).status_code == 200
        db.execute("ALTER VIEW cronlock.job_status RENAME TO away")
        answers = await asyncio.gather(*(client.get(f"/jobs/{job.job_id}") for _ in range(30)))
        assert {(answer.status_code, answer.json()["reason"]) for answer in answers} == {(503, "schema_unknown")}
        db.execute("ALTER VIEW cronlock.away RENAME TO job_status")
        with db.transaction():
            db.execute("LOCK TABLE cronlock.job_history IN ACCESS EXCLUSIVE MODE")
            answer = await client.get(f"/jobs/{job.job_id}")
            assert (answer.status_code, answer.json()["status"]) == (503, "unavailable")
        assert (await client.get(f"/jobs/{job.job_id}")).json()["status"] == "queued"


OPEN = {
    *("jobId", "task", "status", "attempts", "maxAttempts", "enqueuedAt", "runAt", "startedAt", "finishedAt"),
    *("progressDone", "progressTotal"),
}


async def test_who_enqueues_sees_the_status_and_only_an_admin_secret_the_rest(cron: Cronlock, make_cron: Make) -> None:
    async with serving(cron.app()) as client, at_work(make_cron):
        job_id = (await client.post("/jobs/failing", json={})).json()["jobId"]
        seen = await ended(client, job_id)
        answer = await client.get(f"/jobs/{job_id}/")
        assert set(answer.json()) == OPEN
        assert (answer.json()["status"], answer.json()["attempts"], answer.json()["maxAttempts"]) == ("failed", 2, 2)
        assert answer.headers["cronlock-status"] == "failed"
        assert "supplier" not in answer.text
        assert (await client.get(f"/jobs/{job_id}", headers=bearer(READ))).json() == seen
        assert (await client.get(f"/admin/jobs/{job_id}", headers=bearer(READ))).json() == {"job": seen}
        assert SECRET not in json.dumps(seen)
    assert set(seen) > OPEN
    assert (seen["errorType"], seen["payload"]) == ("ValueError", {})
    assert seen["explanation"].startswith("failed in attempt 2 of 2: ValueError: no such supplier")
    tried = [(one["attempt"], one["status"], one["errorType"]) for one in seen["attempted"]]
    assert tried == [(1, "failed", "Retry"), (2, "failed", "ValueError")]
    assert "Traceback" in seen["attempted"][1]["errorTraceback"]


async def test_a_job_says_what_it_waits_for(cron: Cronlock, make_cron: Make, db: Db) -> None:
    async def why(job_id: int) -> tuple[str, str]:
        body = (await client.get(f"/jobs/{job_id}", headers=bearer(READ))).json()
        return body["code"], body["explanation"]

    async with serving(cron.app()) as client:
        later = (await client.post("/jobs/echo?delay=10m", json={})).json()["jobId"]
        assert (await why(later))[0] == "waiting"
        queued = (await client.post("/jobs/echo", json={})).json()["jobId"]
        code, sentence = await why(queued)
        assert code == "no_worker"
        assert "no worker that is there serves the queue 'default'" in sentence
        db.execute("UPDATE cronlock.task SET paused_at = now() WHERE name = 'echo'")
        assert (await why(queued))[0] == "paused"
        db.execute("UPDATE cronlock.task SET paused_at = NULL")
        elsewhere = make_cron()
        elsewhere.task("another")(lambda run: None)
        async with elsewhere, working(elsewhere):
            assert (await why(queued))[0] == "no_handler"
            listed = (await client.get("/admin/jobs?status=queued", headers=bearer(READ))).json()["jobs"]
            assert [(row["jobId"], row["hasNoWorker"]) for row in listed] == [(queued, True), (later, False)]
        async with at_work(make_cron):
            assert (await ended(client, queued))["code"] == "completed"
            sleeping = (await client.post("/jobs/sleepy", json={})).json()["jobId"]
            seen = await ended(client, sleeping, "processing")
            assert seen["code"] == "processing"


# -- retry and cancel --------------------------------------------------------------------------------------------


async def test_a_failed_job_is_tried_again_as_itself_and_its_attempts_are_counted_on(
    cron: Cronlock, make_cron: Make, db: Db
) -> None:
    async with serving(cron.app()) as client:
        async with at_work(make_cron):
            job_id = (await client.post("/jobs/failing", json={})).json()["jobId"]
            await ended(client, job_id)
        forbidden = await client.post(f"/jobs/{job_id}/retry", headers=bearer(READ))
        assert forbidden.status_code == 403
        answer = await client.post(f"/jobs/{job_id}/retry", headers=bearer(ADMIN))
        assert (answer.status_code, answer.json()["status"], answer.json()["maxAttempts"]) == (200, "queued", 4)
        again = await client.post(f"/jobs/{job_id}/retry", headers=bearer(ADMIN))
        assert (again.status_code, again.json()["jobStatus"]) == (409, "queued")
        async with at_work(make_cron):
            seen = await ended(client, job_id)
        assert [one["attempt"] for one in seen["attempted"]] == [1, 2, 3]
        assert (await client.post("/jobs/12345/retry", headers=bearer(ADMIN))).status_code == 404
        done = (await client.post("/jobs/echo", json={})).json()["jobId"]
        async with at_work(make_cron):
            await ended(client, done)
        assert (await client.post(f"/jobs/{done}/retry", headers=bearer(ADMIN))).status_code == 409
    assert value(db, "SELECT count(*) FROM cronlock.job_history WHERE id = %s", job_id) == 1


async def test_failed_jobs_are_retried_together(cron: Cronlock, make_cron: Make, db: Db) -> None:
    db.execute(
        """INSERT INTO cronlock.job_history (id, task, queue, priority, payload, trigger, max_attempts, attempts,
               losses, enqueued_at, run_at, status)
           SELECT nextval('cronlock.job_id'), CASE WHEN n % 3 = 0 THEN 'echo' ELSE 'report' END, 'default', 0, '{}',
                  'http', 5, 5, 3, now(), now(), CASE WHEN n % 10 = 0 THEN 'cancelled' ELSE 'failed' END
             FROM generate_series(1, 1500) n"""
    )
    async with serving(cron.app()) as client:
        client.headers.update(bearer(ADMIN))
        assert (await client.post("/admin/jobs/retry")).status_code == 400
        assert (await client.post("/admin/jobs/retry?task=echo&all=true")).status_code == 400
        answer = await client.post("/admin/jobs/retry?task=echo")
        assert answer.json() == {"task": "echo", "retried": 450, "isCut": False}
        answer = await client.post("/admin/jobs/retry?all=true&limit=600")
        assert answer.json() == {"task": None, "retried": 600, "isCut": True}
        answer = await client.post("/admin/jobs/retry?all=true")
        assert answer.json()["retried"] == 300
        assert (await client.post("/admin/jobs/retry?task=echo")).json()["retried"] == 0
        unknown = await client.post("/admin/jobs/retry?task=nope")
        assert (unknown.status_code, "there is no task 'nope'" in unknown.json()["reason"]) == (404, True)
    kept = db.execute("SELECT status, count(*) FROM cronlock.job_history GROUP BY status").fetchall()
    assert kept == [("cancelled", 150)]
    assert db.execute("SELECT DISTINCT attempts, max_attempts, losses FROM cronlock.job").fetchall() in (
        [(5, 10, 0), (5, 7, 0)],
        [(5, 7, 0), (5, 10, 0)],
    )


async def test_a_job_is_cancelled_in_whatever_state_it_is_and_the_answer_says_so(
    cron: Cronlock, make_cron: Make, db: Db
) -> None:
    async def cancel(job_id: int) -> tuple[int, str, bool]:
        answer = await client.post(f"/jobs/{job_id}/cancel", json={"by": "ana"}, headers=bearer(ADMIN))
        body = answer.json()
        return answer.status_code, body["status"], body["isTooLate"]

    async with serving(cron.app()) as client:
        queued = (await client.post("/jobs/echo", json={})).json()["jobId"]
        later = (await client.post("/jobs/echo?delay=1h", json={})).json()["jobId"]
        assert await cancel(queued) == (200, "cancelled", False)
        assert await cancel(later) == (200, "cancelled", False)
        assert await cancel(queued) == (200, "cancelled", True), "the second time it had ended"
        async with at_work(make_cron):
            sleeping = (await client.post("/jobs/sleepy", json={})).json()["jobId"]
            await ended(client, sleeping, "processing")
            assert await cancel(sleeping) == (200, "cancelled", False), "its worker stops it"
            tried = (await ended(client, sleeping))["attempted"]
            assert [(one["attempt"], one["status"]) for one in tried] == [(1, "cancelled")], "its worker wrote it"
            done = (await client.post("/jobs/echo", json={})).json()["jobId"]
            await ended(client, done)
            assert await cancel(done) == (200, "completed", True)
        assert (await client.post("/jobs/12345/cancel", headers=bearer(ADMIN))).status_code == 404
        assert (await client.post(f"/jobs/{done}/cancel", headers=bearer(READ))).status_code == 403
        seen = await ended(client, queued)
    assert (seen["code"], seen["errorMessage"]) == ("cancelled", "cancelled by ana")
    assert value(db, "SELECT count(*) FROM cronlock.job_history") == 4


async def test_a_job_that_its_worker_gives_back_does_not_run_again_after_a_cancel(
    cron: Cronlock, make_cron: Make, db: Db
) -> None:
    """The worker drains in the moment in which it is asked for."""
    async with serving(cron.app()) as client:
        async with at_work(make_cron):
            sleeping = (await client.post("/jobs/sleepy", json={})).json()["jobId"]
            await ended(client, sleeping, "processing")
            db.execute("UPDATE cronlock.job SET cancel_requested_at = now(), cancel_requested_by = 'ana'")
        seen = await ended(client, sleeping)
    assert seen["status"] == "cancelled"
    assert value(db, "SELECT count(*) FROM cronlock.job") == 0


async def test_a_job_of_a_dead_worker_is_cancelled_at_once_and_never_again_taken(
    cron: Cronlock, make_cron: Make, db: Db
) -> None:
    async with serving(cron.app()) as client:
        job_id = (await client.post("/jobs/echo", json={})).json()["jobId"]
        db.execute(
            "UPDATE cronlock.job SET attempts = 1, worker = gen_random_uuid(), lease_token = gen_random_uuid(),"
            " lease_until = now() - interval '1 second', started_at = now()"
        )
        answer = await client.post(f"/jobs/{job_id}/cancel", headers=bearer(ADMIN))
        assert answer.json()["status"] == "cancelled"
        async with at_work(make_cron):
            after = (await client.post("/jobs/echo", json={})).json()["jobId"]
            await ended(client, after)
        assert (await ended(client, job_id))["attempts"] == 1


async def test_a_cancel_that_races_with_the_end_leaves_one_end_and_tells_it(
    cron: Cronlock, make_cron: Make, db: Db
) -> None:
    async with serving(cron.app()) as client, at_work(make_cron):
        told: dict[int, str] = {}
        for number in range(200):
            lasts = 10.0 if number % 50 == 7 else 0.002 * (number % 10)
            job_id = (await client.post("/jobs/sleepy", json={"lasts": lasts})).json()["jobId"]
            await asyncio.sleep(0.001 * (number % 17))
            answer = await client.post(f"/jobs/{job_id}/cancel", headers=bearer(ADMIN))
            assert answer.status_code == 200, answer.text
            told[job_id] = answer.json()["status"]
    found: dict[int, str] = dict(db.execute("SELECT id, status FROM cronlock.job_history").fetchall())
    assert found == told
    assert set(told.values()) == {"cancelled", "completed"}
    assert value(db, "SELECT count(*) FROM cronlock.job") == 0
