"""One message and its results: what comes back, what is raised, and what never stays behind."""

import asyncio
import time
from functools import partial
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus

from cronlock import wire
from cronlock.lending import cut, is_gone
from tests import until
from tests.proxy import Proxy

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param}


Connection = psycopg.AsyncConnection[Any]


async def connected(url: str) -> Connection:
    return await psycopg.AsyncConnection.connect(url, autocommit=True)


async def test_every_statement_has_its_result(database_url: str) -> None:
    async with await connected(database_url) as connection:
        results = await wire.send(connection, b"BEGIN; SELECT 1, true, NULL, 'x', 2.5; SELECT 2 WHERE false; COMMIT")
    assert [result.command_status for result in results] == [b"BEGIN", b"SELECT 1", b"SELECT 0", b"COMMIT"]
    assert wire.rows(results[1]) == [(1, True, None, "x", "2.5")]
    assert wire.rows(results[2]) == []


async def test_an_error_is_the_class_of_its_sqlstate_and_leaves_the_connection_usable(database_url: str) -> None:
    async with await connected(database_url) as connection:
        with pytest.raises(psycopg.errors.DivisionByZero, match="division by zero") as raised:
            await wire.send(connection, b"SELECT 1; SELECT 1/0; SELECT 2")
        assert raised.value.sqlstate == "22012"
        assert connection.info.transaction_status is TransactionStatus.IDLE
        assert wire.rows((await wire.send(connection, b"SELECT 3"))[0]) == [(3,)]


async def test_an_error_with_a_code_of_somebodys_own_keeps_it(database_url: str) -> None:
    async with await connected(database_url) as connection:
        with pytest.raises(psycopg.DatabaseError, match="mine") as raised:
            await wire.send(connection, b"DO $$ BEGIN RAISE EXCEPTION 'mine' USING ERRCODE = 'ZZ123'; END $$")
    assert raised.value.sqlstate == "ZZ123"


async def test_what_the_server_said_before_it_went_is_what_is_raised(database_url: str) -> None:
    connection = await connected(database_url)
    with pytest.raises(psycopg.errors.AdminShutdown):
        await wire.send(connection, b"SELECT pg_terminate_backend(pg_backend_pid()), pg_sleep(10)")
    assert connection.closed


async def test_a_cut_connection_ends_the_wait_with_an_error(database_url: str) -> None:
    connection = await connected(database_url)
    asyncio.get_running_loop().call_later(0.05, cut, connection)
    with pytest.raises(psycopg.OperationalError):
        await asyncio.wait_for(wire.send(connection, b"SELECT pg_sleep(10)"), 5)
    assert connection.closed
    with pytest.raises(psycopg.OperationalError):
        await wire.send(connection, b"SELECT 1")


async def test_a_message_larger_than_any_buffer_is_sent_while_its_answer_comes(database_url: str) -> None:
    text = b"'" + b"x" * 30_000_000 + b"'"
    async with await connected(database_url) as connection:
        talk = wire.send(connection, b"SELECT length(" + text + b"); SELECT repeat('y', 10000000)")
        results = await asyncio.wait_for(talk, 30)
    assert wire.rows(results[0]) == [(30_000_000,)]
    assert len(wire.rows(results[1])[0][0]) == 10_000_000


async def test_a_large_message_to_a_server_that_stalls_is_ended_by_a_cut(database_url: str) -> None:
    parts = conninfo_to_dict(database_url)
    async with Proxy(str(parts["host"]), int(parts["port"] or 5432)) as proxy:
        through = {**parts, "port": str(proxy.listening), "sslmode": "disable", "gssencmode": "disable"}
        connection = await connected(make_conninfo("", **through))
        proxy.stall()
        asyncio.get_running_loop().call_later(0.2, cut, connection)
        with pytest.raises(psycopg.OperationalError):
            await asyncio.wait_for(wire.send(connection, b"SELECT '" + b"x" * 30_000_000 + b"'"), 5)
        assert connection.closed


async def test_a_message_to_a_server_that_has_gone_ends_with_what_it_said(database_url: str) -> None:
    """The message is answered by a reset; uvloop tells of it once, with the server's last words, and forgets it."""
    async with await connected(database_url) as other:
        for _ in range(5):
            connection = await connected(database_url)
            await other.execute("SELECT pg_terminate_backend(%s, 5000)", (connection.info.backend_pid,))
            await until(partial(is_gone, connection), "the backend has gone", 5)
            started = time.monotonic()
            with pytest.raises(psycopg.OperationalError):
                await asyncio.wait_for(wire.send(connection, b"SELECT 1; SELECT 2"), 5)
            assert time.monotonic() - started < 1
            await connection.close()


@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_a_connection_that_ends_in_the_middle_ends_the_wait(database_url: str, how: str) -> None:
    parts = conninfo_to_dict(database_url)
    async with Proxy(str(parts["host"]), int(parts["port"] or 5432)) as proxy:
        through = {**parts, "port": str(proxy.listening), "sslmode": "disable", "gssencmode": "disable"}
        connection = await connected(make_conninfo("", **through))
        talk = asyncio.create_task(wire.send(connection, b"SELECT pg_sleep(10)"))
        await asyncio.sleep(0.05)
        assert proxy.cut(how) == 1
        started = time.monotonic()
        with pytest.raises(psycopg.OperationalError):
            await asyncio.wait_for(talk, 5)
        assert time.monotonic() - started < 1
        assert connection.closed


async def test_a_cancelled_message_leaves_the_socket_alone_and_its_connection_in_the_middle(database_url: str) -> None:
    connection = await connected(database_url)
    socket = connection.pgconn.socket
    talk = asyncio.create_task(wire.send(connection, b"SELECT pg_sleep(10)"))
    await asyncio.sleep(0.05)
    talk.cancel()
    with pytest.raises(asyncio.CancelledError):
        await talk
    assert not asyncio.get_running_loop().remove_reader(socket)
    assert connection.info.transaction_status is TransactionStatus.ACTIVE
    await connection.close()


async def test_notifications_that_came_meanwhile_are_nobodys(database_url: str) -> None:
    async with await connected(database_url) as connection:
        await connection.execute("LISTEN here")
        await wire.send(connection, b"NOTIFY here, 'one'; SELECT 1")
        seen: list[psycopg.Notify] = []
        connection.add_notify_handler(seen.append)
        await connection.execute("SELECT 2")
        assert seen == []
        await connection.execute("NOTIFY here, 'two'")
        assert [note.payload for note in seen] == ["two"]
