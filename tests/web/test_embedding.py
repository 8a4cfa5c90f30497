"""The route inside other applications: mounted in Starlette and FastAPI, included in FastAPI, and bare."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

import psycopg
import pytest
from fastapi import Depends, FastAPI, Header, HTTPException
from starlette.applications import Starlette
from starlette.routing import Mount

from cronlock import ConfigError, Cronlock, RegistrationError, Run
from tests import SECRET, client_of, serving

pytestmark = pytest.mark.anyio
Make = Callable[..., Cronlock]
Db = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def cron(make_cron: Make) -> Cronlock:
    cron = make_cron()

    @cron.task("nightly")
    async def nightly(run: Run) -> str:
        return "done"

    return cron


async def test_mounted_in_starlette_with_the_lifespan_handed_on(cron: Cronlock) -> None:
    app = Starlette(routes=[Mount("/jobs", cron.app())], lifespan=cron.lifespan)
    async with serving(app) as client:
        assert (await client.get("/jobs/cron/nightly")).json()["result"] == "done"
        assert (await client.get("/jobs/readyz")).json() == {"status": "ready"}


async def test_mounted_without_a_lifespan_it_opens_at_the_first_call_and_says_so_once(
    cron: Cronlock, caplog: pytest.LogCaptureFixture
) -> None:
    app = FastAPI()
    app.mount("/jobs", cron.app())
    try:
        async with client_of(app) as client:
            assert (await client.get("/jobs/cron/nightly")).json()["status"] == "completed"
            assert (await client.get("/jobs/cron/nightly")).json()["status"] == "completed"
    finally:
        await cron.close()
    told = [record for record in caplog.records if getattr(record, "event", "") == "lifespan.missing"]
    assert len(told) == 1
    assert "lifespan" in told[0].getMessage()


async def test_included_in_fastapi_with_its_own_lifespan_beside_the_apps(cron: Cronlock) -> None:
    seen: list[str] = []

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        seen.append("start")
        yield
        seen.append("stop")

    app = FastAPI(lifespan=lifespan)
    app.include_router(cron.router, prefix="/internal")
    async with serving(app) as client:
        for path in ("/internal/cron/nightly", "/internal/cron/nightly/"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["result"]) == (200, "done")
        assert (await client.get("/internal/cron/none")).status_code == 404
        assert (await client.delete("/internal/cron/nightly")).status_code == 405
        assert (await client.head("/internal/cron/nightly")).status_code == 405
        unknown = await client.get("/internal/cron/nightly", headers={"authorization": "Bearer no"})
        assert unknown.json() == {"status": "unauthorized"}
        assert "/internal/cron/{task}" not in (await client.get("/openapi.json")).text
    assert seen == ["start", "stop"]


async def test_fastapi_dependencies_of_include_router_hold_for_the_route(cron: Cronlock, db: Db) -> None:
    def only_from_us(x_zone: Annotated[str, Header()] = "") -> None:
        if x_zone != "inside":
            raise HTTPException(403)

    app = FastAPI()
    app.include_router(cron.router, dependencies=[Depends(only_from_us)])
    async with serving(app) as client:
        assert (await client.get("/cron/nightly")).status_code == 403
        assert db.execute("SELECT count(*) FROM cronlock.run").fetchone() == (0,)
        assert (await client.get("/cron/nightly", headers={"x-zone": "inside"})).status_code == 200


async def test_a_post_body_reaches_the_task_through_fastapi(make_cron: Make) -> None:
    cron = make_cron()

    @cron.task("echo")
    async def echo(run: Run, payload: dict[str, Any]) -> dict[str, Any]:
        return payload

    app = FastAPI()
    app.include_router(cron.router)
    async with serving(app) as client:
        assert (await client.post("/cron/echo?a=1", json={"b": 2})).json()["result"] == {"a": "1", "b": 2}


async def test_colliding_locks_stop_the_start(make_cron: Make) -> None:
    cron = make_cron()

    @cron.task("sync-posts-20")
    async def one(run: Run) -> None: ...

    @cron.task("refresh-tenants-347")
    async def other(run: Run) -> None: ...

    with pytest.raises(RegistrationError, match=r"sync-posts-20.*refresh-tenants-347"):
        async with serving(cron.app()):
            raise AssertionError("it started")


@pytest.mark.parametrize("secret", [None, "", "   ", "undefined", "null", "short", "with space in it 0123456789"])
def test_without_a_usable_secret_neither_app_nor_router_can_be_had(make_cron: Make, secret: str | None) -> None:
    cron = make_cron(secrets=secret) if secret is not None else make_cron(secrets="")
    for get in (cron.app, lambda: cron.router):
        with pytest.raises(ConfigError, match="CRON_SECRET"):
            get()


async def test_cron_run_needs_no_secret_and_no_server(make_cron: Make, db: Db) -> None:
    cron = make_cron(secrets="")

    @cron.task("nightly")
    async def nightly(run: Run) -> str:
        return "done"

    async with cron:
        outcome = await cron.run("nightly")
    assert (outcome.status, outcome.result) == ("completed", '"done"')
    assert db.execute("SELECT trigger, caller FROM cronlock.run").fetchone() == ("manual", "code")


async def test_the_caller_is_recognised_but_never_trusted(cron: Cronlock, db: Db) -> None:
    async with serving(cron.app()) as client:
        for headers in (
            {"user-agent": "vercel-cron/1.0", "x-vercel-cron-schedule": "* * * * *"},
            {"user-agent": "Upstash-QStash", "upstash-message-id": "m1"},
            {"user-agent": "Google-Cloud-Scheduler", "x-cloudscheduler-jobname": "j"},
            {"user-agent": "curl/8.5.0"},
        ):
            assert (await client.get("/cron/nightly", headers=headers)).status_code == 200
            without = {**headers, "authorization": ""}
            assert (await client.get("/cron/nightly", headers=without)).status_code == 401
    callers = [row[0] for row in db.execute("SELECT caller FROM cronlock.run ORDER BY id").fetchall()]
    assert callers == ["vercel", "qstash", "cloud-scheduler", "curl/8.5.0"]


async def test_two_event_loops_one_after_the_other_can_use_one_cronlock(cron: Cronlock) -> None:
    for _ in range(2):
        async with serving(cron.app()) as client:
            assert (await client.get("/cron/nightly")).json()["status"] == "completed"


def test_the_secret_is_in_no_representation(cron: Cronlock) -> None:
    assert SECRET not in repr(cron.settings)
    assert SECRET not in str(cron.settings)
