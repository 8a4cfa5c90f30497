"""Cases of callers and of what stands between them and us (HTTP), over real servers where it matters."""

import asyncio
import http.client
import socket
import time
from urllib.parse import urlsplit

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from cronlock import Run
from tests import AUTH, SECRET, Db, Make, advisory_locks, held, rows, serving, until, value
from tests.cases.conftest import Start

pytestmark = pytest.mark.anyio

NOWHERE = "postgresql://nobody:x@127.0.0.1:9/none"
"""A database whose any use would be seen: as a 503."""

# -- H05 ---------------------------------------------------------------------------------------------------

CREDENTIALS = {
    "latin-1": b"Bearer caf\xe9",
    "no UTF-8": b"Bearer \xff\xfe",
    "an emoji": "Bearer 🔑".encode(),
    "64 KB": b"Bearer " + b"a" * 65536,
    "nothing": b"",
    "latin-1 after the secret": f"Bearer {SECRET}".encode() + b"\xe9",
}


def status_of(url: str, authorization: bytes) -> int:
    """The status that a call with these bytes as its header is answered with."""
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port or 0), timeout=10) as caller:
        caller.sendall(b"GET /cron/nightly HTTP/1.1\r\nHost: t\r\nAuthorization: " + authorization + b"\r\n\r\n")
        return int(caller.makefile("rb").readline().split()[1])


def test_raw_bytes_as_credentials_are_401_and_touch_neither_database_nor_log(start: Start) -> None:
    server, url = start(DATABASE_URL=NOWHERE, CRONLOCK_ACQUIRE_TIMEOUT="500ms")
    assert status_of(url, f"Bearer {SECRET}".encode()) == 503, "a use of the database is seen"
    for kind, authorization in CREDENTIALS.items():
        assert status_of(url, authorization) in ((400, 401, 431) if kind == "64 KB" else (401,)), kind
    assert httpx2.get(f"{url}/healthz").status_code == 200
    assert "Traceback" not in server.said
    assert SECRET not in server.said
    assert "aaaa" not in server.said


# -- H08 ---------------------------------------------------------------------------------------------------

FORWARDED = {"Host": "public.example", "X-Forwarded-Proto": "https", "X-Forwarded-Host": "public.example"}


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_no_form_of_the_url_is_redirected_behind_a_proxy(start: Start, db: Db, method: str) -> None:
    _, url = start()
    expected = {"/cron/nightly": 200, "/cron/nightly/": 200, "/cron/nightly?x=1": 200, "/cron/nightly/?x=1": 200}
    expected |= {"//cron/nightly": 404, "//cron/nightly/": 404, "/cron//nightly": 404, "/cron/nightly//": 404}
    expected |= {"/cron": 404, "/cron/": 404}
    for path, status in expected.items():
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
        connection.request(method, path, headers=AUTH | FORWARDED)
        answer = connection.getresponse()
        assert answer.status == status, path
        assert answer.getheader("location") is None
        assert b"127.0.0.1" not in answer.read()
        connection.close()
    assert rows(db, "nightly") == [("completed", None)] * 4


# -- H11 ---------------------------------------------------------------------------------------------------


class Caching(httpx2.AsyncBaseTransport):
    """A proxy that keeps every answer to a GET that does not forbid it (RFC 9111, sections 3 and 4.2.2)."""

    def __init__(self, app: object) -> None:
        self._to_the_app = httpx2.ASGITransport(app=app)  # type: ignore[arg-type]
        self._kept: dict[str, tuple[int, bytes]] = {}
        self.arrivals = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """The answer that is kept, or that of the application."""
        if request.method == "GET" and (kept := self._kept.get(str(request.url))):
            return httpx2.Response(kept[0], content=kept[1])
        self.arrivals += 1
        answer = await self._to_the_app.handle_async_request(request)
        body = await answer.aread()
        if not {"no-store", "no-cache", "private"} & set(answer.headers.get("cache-control", "").split(", ")):
            self._kept[str(request.url)] = (answer.status_code, body)
        return answer


async def test_a_proxy_that_caches_whatever_it_may_hands_every_call_on(make_cron: Make, database_url: str) -> None:
    cron = make_cron()

    @cron.task("nightly")
    async def nightly(run: Run) -> None: ...

    @cron.task("held")
    async def held_elsewhere(run: Run) -> None: ...

    @cron.task("failing")
    async def failing(run: Run) -> None:
        raise ValueError("on purpose")

    def hello(request: Request) -> PlainTextResponse:
        return PlainTextResponse("hello")

    other = Caching(Starlette(routes=[Route("/", hello)]))
    async with httpx2.AsyncClient(transport=other, base_url="http://t") as client:
        assert [(await client.get("/")).text for _ in range(5)] == ["hello"] * 5
    assert other.arrivals == 1, "it does cache"

    app = cron.app()
    cache = Caching(app)
    called = [("nightly", 200), ("held", 200), ("held?on_skip=409", 409), ("held?on_skip=503", 503), ("failing", 500)]
    called += [("none", 404), ("nightly?on_skip=1", 400)]
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=cache, base_url="http://t") as client,
        held(database_url, "held"),
    ):
        for path, status in (*called, ("nightly?unauthorized", 401)):
            headers = {} if status == 401 else AUTH
            before = cache.arrivals
            for _ in range(5):
                answer = await client.get(f"/cron/{path}", headers=headers)
                assert answer.status_code == status
                assert answer.headers["cache-control"] == "no-store"
                assert not {"etag", "last-modified", "expires"} & answer.headers.keys()
            assert cache.arrivals == before + 5, path


# -- H14 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("query", "status"), [("", 200), ("?on_skip=409", 409)])
async def test_thirty_calls_while_the_lock_is_held_are_skips_at_once_and_no_failures(
    make_cron: Make, db: Db, database_url: str, query: str, status: int
) -> None:
    cron = make_cron()

    @cron.task("nightly")
    async def nightly(run: Run) -> None: ...

    async with serving(cron.app()) as client, held(database_url, "nightly"):
        for _ in range(30):
            began = time.monotonic()
            answer = await client.get(f"/cron/nightly{query}")
            assert time.monotonic() - began < 1
            assert answer.status_code == status
            assert (answer.json()["status"], answer.json()["reason"]) == ("skipped", "already_running")
    assert rows(db, "nightly") == [("skipped", "already_running")] * 30
    health = db.execute("SELECT calls, skipped, failed, success_rate FROM cronlock.task_health").fetchone()
    assert health == (30, 30, 0, None)


# -- H16 ---------------------------------------------------------------------------------------------------

NAMES = ["does-not-exist", "%00", "a%2Fb", "..%2F..%2Fetc", "x" * 10_000, "caf%C3%A9", "cafe%CC%81", "NIGHTLY",
         "nightly%20", "nightly%00", "%6eightly%2e", "nightly;x=1", "nightly%3Fx"]  # fmt: skip


async def test_names_that_are_not_registered_are_404_with_the_secret_and_401_without_and_cost_no_database(
    make_cron: Make,
) -> None:
    cron = make_cron(database_url=NOWHERE, acquire_timeout="500ms")

    @cron.task("nightly")
    async def nightly(run: Run) -> None: ...

    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=cron.app()), base_url="http://t") as client:
        known = await client.get("/cron/nightly")
        assert (await client.get("/cron/nightly", headers=AUTH)).status_code == 503, "a use of the database is seen"
        for name in NAMES:
            for method in ("GET", "POST"):
                refused = await client.request(method, f"/cron/{name}")
                assert (refused.status_code, refused.content) == (401, known.content), name
                assert refused.headers == known.headers
                unknown = await client.request(method, f"/cron/{name}", headers=AUTH)
                assert (unknown.status_code, unknown.json()) == (404, {"status": "not_found"}), name
    await cron.close()


# -- H17 ---------------------------------------------------------------------------------------------------


async def test_a_call_that_a_proxy_sends_again_to_another_instance_is_one_run_and_one_skip(
    start: Start, db: Db
) -> None:
    """The proxy gives the first instance a second, hangs up, and asks the other one."""
    urls = [start()[1] for _ in range(2)]
    async with httpx2.AsyncClient(headers=AUTH, timeout=10) as client:
        with pytest.raises(httpx2.ReadTimeout):
            await client.get(f"{urls[0]}/cron/slow?pause=3", timeout=1)
        again = await client.get(f"{urls[1]}/cron/slow?pause=3")
        assert (again.status_code, again.json()["reason"]) == (200, "already_running")
        running = value(db, "SELECT id FROM cronlock.run WHERE status = 'running'")
        assert again.json()["holder"]["runId"] == running
        await until(lambda: rows(db, "slow")[0] == ("completed", None), "the first one ends")
        assert rows(db, "slow") == [("completed", None), ("skipped", "already_running")]
        assert db.execute("SELECT run_id FROM effect").fetchall() == [(running,)] * 2
        # An instance that is asked by several callers at once accepts or refuses, and never drops what it accepted.
        answers = await asyncio.gather(*(client.get(f"{urls[n % 2]}/cron/slow?pause=0.5") for n in range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert sorted({answer.json()["status"] for answer in answers}) == ["completed", "skipped"]
    await until(lambda: advisory_locks(db) == 0, "the locks are free")
