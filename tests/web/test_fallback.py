"""cronlock's routes before another ASGI application, which gets all else untouched and keeps its lifespan."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Receive, Scope, Send

from cronlock import ConfigError, Cronlock, CronlockError, Run
from tests import AUTH, client_of, serving

pytestmark = pytest.mark.anyio


@pytest.fixture
def cron(make_cron: Callable[..., Cronlock]) -> Cronlock:
    cron = make_cron()

    @cron.task("nightly")
    async def nightly(run: Run) -> str:
        return "done"

    return cron


class Other:
    """An application without a lifespan, as Django's; it remembers what it was called with."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            raise ValueError("can only handle HTTP")
        self.scopes.append(scope)
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            await send({"type": "websocket.send", "text": scope["path"]})
            await send({"type": "websocket.close"})
        elif scope["path"] == "/broken":
            raise ZeroDivisionError("its own fault")
        else:
            await send({"type": "http.response.start", "status": 299, "headers": [(b"x-of", b"other")]})
            await send({"type": "http.response.body", "body": scope["method"].encode()})


async def test_our_routes_come_first_and_all_else_is_the_fallbacks(cron: Cronlock) -> None:
    other = Other()
    async with serving(cron.app(fallback=other)) as client:
        for path in ("/cron/nightly", "/cron/nightly/"):
            assert (await client.post(path)).json()["result"] == "done"
        assert (await client.get("/cron/none")).json() == {"status": "not_found"}
        assert (await client.get("/cron/none", headers={"authorization": ""})).status_code == 401
        assert (await client.delete("/cron/nightly")).status_code == 405
        assert (await client.get("/healthz")).json() == {"status": "ok"}
        assert (await client.get("/readyz")).json() == {"status": "ready"}
        assert other.scopes == []
        for path in ("/", "/cron", "/crontab", "/admin/cron/nightly", "/healthz/", "/CRON/nightly"):
            for method in ("GET", "POST", "HEAD", "PURGE"):
                answer = await client.request(method, path)
                assert (answer.status_code, answer.headers["x-of"]) == (299, "other"), path


async def test_the_fallback_is_called_with_what_the_server_gave_and_nothing_around_it(cron: Cronlock) -> None:
    other = Other()
    app = cron.app(fallback=other)
    seen: list[set[str]] = []

    async def server(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(set(scope))
        await app(scope, receive, send)

    async with client_of(server) as client:
        assert (await client.get("/page")).status_code == 299
        with pytest.raises(ZeroDivisionError, match="its own fault"):
            await client.get("/broken")
    assert [set(scope) for scope in other.scopes] == seen


async def test_probes_can_be_left_to_the_fallback(cron: Cronlock) -> None:
    async with serving(cron.app(fallback=Other(), probes=False)) as client:
        assert (await client.get("/healthz")).status_code == 299
        assert (await client.get("/readyz")).status_code == 299
        assert (await client.get("/cron/nightly")).status_code == 200
    async with serving(cron.app(probes=False)) as client:
        assert (await client.get("/readyz")).json() == {"status": "not_found"}


def test_websockets_are_the_fallbacks_wherever_they_go(cron: Cronlock) -> None:
    with TestClient(cron.app(fallback=Other()), headers=AUTH) as client:
        for path in ("/live", "/cron/nightly"):
            with client.websocket_connect(path) as socket:
                assert socket.receive_text() == path
        assert client.get("/cron/nightly").json()["result"] == "done"


async def test_mounted_below_a_prefix_with_its_fallback(cron: Cronlock) -> None:
    app = Starlette(routes=[Mount("/shop", cron.app(fallback=Other()))], lifespan=cron.lifespan)
    async with serving(app) as client:
        assert (await client.get("/shop/cron/nightly")).json()["result"] == "done"
        assert (await client.get("/shop/cart")).status_code == 299
        assert (await client.get("/cart")).status_code == 404


def test_the_lifespan_of_the_fallback_is_around_ours_and_its_state_is_in_its_requests(cron: Cronlock) -> None:
    steps: list[str] = []

    @cron.task("at-the-end")
    async def at_the_end(run: Run) -> None:
        await asyncio.sleep(0.3)
        steps.append("task ended")

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[dict[str, Any]]:
        steps.append(f"start, open: {cron._process is not None}")
        yield {"engine": "of the fallback"}
        steps.append(f"stop, open: {cron._process is not None}")

    async def page(request: Request) -> Response:
        calling = asyncio.ensure_future(cron.run("at-the-end"))
        await asyncio.sleep(0.1)
        assert not calling.done()
        return JSONResponse(request.state.engine)

    other = Starlette(routes=[Route("/", page)], lifespan=lifespan)
    with TestClient(cron.app(fallback=other), headers=AUTH) as client:
        assert client.get("/").json() == "of the fallback"
    assert steps == ["start, open: False", "task ended", "stop, open: False"]


def failing(at: str) -> ASGIApp:
    """An application whose lifespan fails."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        if at == "startup":
            raise OSError("no such engine")
        yield
        raise OSError("no such engine")

    return Starlette(lifespan=lifespan)


@pytest.mark.parametrize("at", ["startup", "shutdown"])
async def test_a_lifespan_of_the_fallback_that_fails_is_told_and_leaves_nothing_open(cron: Cronlock, at: str) -> None:
    async def live() -> None:
        async with serving(cron.app(fallback=failing(at))) as client:
            assert at == "shutdown"
            assert (await client.get("/cron/nightly")).status_code == 200

    with pytest.raises(CronlockError, match=f"(?s)the {at} of the fallback failed: .*no such engine"):
        await live()
    assert cron._process is None


async def test_a_fallback_whose_lifespan_breaks_off_or_never_returns_does_not_hold_up_the_end(
    cron: Cronlock, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[str] = []

    async def breaking(_: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        raise OSError("the engine broke")

    async def staying(_: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("staying")

    for other in (breaking, staying):
        async with asyncio.timeout(10):
            async with serving(cron.app(fallback=other)) as client:
                assert (await client.get("/cron/nightly")).status_code == 200
    assert ended == ["staying"]
    assert "the lifespan of the fallback broke off" in caplog.text


async def test_a_start_that_is_broken_off_ends_the_lifespan_of_the_fallback(cron: Cronlock) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def slow(_: Scope, receive: Receive, send: Send) -> None:
        try:
            begun.set()
            await asyncio.sleep(3600)
        finally:
            ended.set()

    async def start() -> None:
        async with serving(cron.app(fallback=slow)):
            raise AssertionError("it started")

    starting = asyncio.ensure_future(start())
    await begun.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert ended.is_set()
    assert cron._process is None


def wsgi(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    raise AssertionError("never called")


@pytest.mark.parametrize("wrong", [wsgi, "shop.asgi:application", 3, object()])
def test_what_is_no_asgi_application_is_refused_at_once(cron: Cronlock, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"^fallback=\w+ is no ASGI application"):
        cron.app(fallback=wrong)
