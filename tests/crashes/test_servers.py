"""A server that cannot write, for a while or because it is a standby: no lock is taken there and nothing runs."""

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cronlock import Cronlock, Run
from cronlock.binaries import reachable_binaries, server_account
from cronlock.embedded import Embedded
from cronlock.migrate import migrate
from cronlock.postmaster import launch
from tests import Make, held, serving, until, value

pytestmark = pytest.mark.anyio
SETTINGS = {"fsync": "off", "max_connections": "40", "shared_buffers": "16MB", "max_wal_senders": "4"}


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="cronlock-test-"))
    path.chmod(0o755)  # root's server runs as another user, who must get through
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def primary(directory: Path) -> Iterator[Embedded]:
    """A server of these tests' own, with cronlock's schema."""
    with Embedded(directory / "primary", settings=SETTINGS) as server:
        migrate(server.url, "cronlock")
        yield server


def query(url: str, statement: str) -> Any:
    with psycopg.connect(url, connect_timeout=5, autocommit=True) as connection:
        cursor = connection.execute(statement)
        row = cursor.fetchone() if cursor.description else None
    return row and row[0]


def on_standby(url: str, port: int) -> str:
    return make_conninfo("", **{**conninfo_to_dict(url), "port": port})


@pytest.fixture
def standby(primary: Embedded, directory: Path) -> Iterator[str]:
    """The URL of a hot standby of the primary; as its data is a copy, it has the same password."""
    binaries = reachable_binaries(server_account())
    place = directory / "standby"
    place.mkdir()
    account = server_account()
    shutil.chown(place, account.uid, account.gid)
    log = (directory / "standby.log").open("ab")
    backup = launch(
        account,
        [str(binaries / "pg_basebackup"), "-d", primary.url, "-D", str(place / "data"), "-R", "-c", "fast"],
        log,
    )
    assert backup.wait(60) == 0, (directory / "standby.log").read_text()
    port = free_port()
    options = {**SETTINGS, "port": str(port), "listen_addresses": "127.0.0.1", "unix_socket_directories": str(place)}
    command = [str(binaries / "postgres"), "-D", str(place / "data")]
    server = launch(account, [*command, *(f"--{name}={setting}" for name, setting in options.items())], log)
    url = on_standby(primary.url, port)
    try:
        wait_for(lambda: query(url, "SELECT pg_is_in_recovery()"))
        yield url
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        log.close()
        shutil.rmtree(place)


def wait_for(is_so: Callable[[], Any], seconds: float = 30.0) -> None:
    limit = time.monotonic() + seconds
    while True:
        try:
            if is_so():
                return
        except psycopg.OperationalError:
            pass
        assert time.monotonic() < limit, "the server does not come to it"
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def with_tasks(cron: Cronlock, ran: list[str]) -> Cronlock:
    """One task that only calls elsewhere, and one that writes."""

    @cron.task("outside")
    async def outside(run: Run) -> None:
        ran.append("outside")

    @cron.task("writing")
    def writing(run: Run) -> None:
        ran.append("writing")
        run.driver.execute("SELECT 1")

    return cron


async def test_a_server_that_becomes_read_only_gets_503_and_works_again_after_it(
    make_cron: Make, primary: Embedded
) -> None:
    ran: list[str] = []
    cron = with_tasks(make_cron(database_url=primary.url, recover_interval="1h"), ran)
    with psycopg.connect(primary.url, autocommit=True) as db:
        async with serving(cron.app()) as client:
            assert (await client.get("/cron/outside")).status_code == 200
            before = value(db, "SELECT count(*) FROM cronlock.run")
            read_only(db, "on")
            for name in ("outside", "writing", "outside"):
                answer = await client.get(f"/cron/{name}")
                assert (answer.status_code, answer.json()["reason"]) == (503, "read_only")
                assert int(answer.headers["retry-after"]) > 0
            assert ran == ["outside"]
            assert value(db, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0
            assert value(db, "SELECT count(*) FROM cronlock.run") == before
            read_only(db, "off")
            for name in ("outside", "writing"):
                assert (await client.get(f"/cron/{name}")).status_code == 200
    assert ran == ["outside", "outside", "writing"]


def read_only(db: "psycopg.Connection[tuple[Any, ...]]", state: str) -> None:
    """Make the whole server so, and wait until new connections find it so."""
    db.execute("SET default_transaction_read_only = off")
    db.execute(f"ALTER SYSTEM SET default_transaction_read_only = {state}")
    db.execute("SELECT pg_reload_conf()")
    url = make_conninfo("", **{**conninfo_to_dict(db.info.dsn), "password": db.info.password})
    wait_for(lambda: query(url, "SHOW default_transaction_read_only") == state)


async def test_a_process_that_starts_on_a_read_only_server_gets_503_and_works_after_it(
    make_cron: Make, primary: Embedded
) -> None:
    ran: list[str] = []
    cron = with_tasks(make_cron(database_url=primary.url, recover_interval="1h"), ran)
    with psycopg.connect(primary.url, autocommit=True) as db:
        read_only(db, "on")
        async with serving(cron.app()) as client:
            answer = await client.get("/cron/outside")
            assert (answer.status_code, answer.json()["reason"]) == (503, "read_only")
            assert ran == []
            read_only(db, "off")
            assert (await client.get("/cron/outside")).status_code == 200
    assert ran == ["outside"]


async def test_a_standby_grants_no_lock_and_works_after_its_promotion(
    make_cron: Make, primary: Embedded, standby: str
) -> None:
    """PostgreSQL itself grants the lock there while the primary's is held: two servers, two runs of one task."""
    ran: list[str] = []
    here, there = (
        with_tasks(make_cron(database_url=url, recover_interval="1h"), ran) for url in (primary.url, standby)
    )
    async with serving(here.app()) as primary_client, serving(there.app()) as client:
        async with held(primary.url, "outside"), held(standby, "outside"):
            pass  # so it is
        assert (await primary_client.get("/cron/outside")).status_code == 200
        for name in ("outside", "writing", "outside"):
            answer = await client.get(f"/cron/{name}")
            assert (answer.status_code, answer.json()["reason"]) == (503, "read_only")
        assert ran == ["outside"]
        assert query(standby, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0
        assert query(standby, "SELECT pg_promote(true, 30)") is True
        await until(lambda: query(standby, "SHOW transaction_read_only") == "off", "it is promoted")
        for name in ("outside", "writing"):
            assert (await client.get(f"/cron/{name}")).status_code == 200
    assert ran == ["outside", "outside", "writing"]


async def test_a_server_whose_lock_table_is_full_gets_503_and_works_again_after_it(
    make_cron: Make, primary: Embedded
) -> None:
    ran: list[str] = []
    cron = with_tasks(make_cron(database_url=primary.url, recover_interval="1h"), ran)
    async with serving(cron.app()) as client:
        assert (await client.get("/cron/outside")).status_code == 200
        with psycopg.connect(primary.url, autocommit=True) as db:
            fill_the_lock_table(db)
            answer = await client.get("/cron/outside")
            assert (answer.status_code, answer.json()["status"]) == (503, "unavailable")
            assert answer.json()["reason"] == "lock_table_full"
        wait_for(lambda: query(primary.url, "SELECT count(*) FROM pg_locks") < 100)
        assert (await client.get("/cron/outside")).status_code == 200
        assert (await client.get("/cron/writing")).status_code == 200


def fill_the_lock_table(db: "psycopg.Connection[tuple[Any, ...]]") -> None:
    number = 0
    for step in (1000, 100, 10, 1):
        while True:
            try:
                db.execute(
                    f"SELECT pg_advisory_lock(1000000 + g) FROM generate_series({number}, {number + step - 1}) g"
                )
            except psycopg.errors.OutOfMemory:
                break
            number += step
