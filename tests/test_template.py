"""Databases for users' tests: their URLs, their copies, their end."""

from collections.abc import Callable

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from cronlock.errors import CronlockError
from cronlock.template import copy, template, url_of


@pytest.mark.parametrize(
    ("server", "url"),
    [
        ("postgresql://me:a@127.0.0.1:5433/postgres", "postgresql://me:a@127.0.0.1:5433/t"),
        ("postgresql://me@db/x?sslmode=require", "postgresql://me@db/t?sslmode=require"),
        ("host=db user=me password='p w/@:%'", "postgresql://me:p%20w%2F%40%3A%25@db/t"),
        ("postgresql://[::1]:5433/x", "postgresql://[::1]:5433/t"),
        ("host=/var/run/postgresql port=5433 user=me", "postgresql://me@/t?host=%2Fvar%2Frun%2Fpostgresql&port=5433"),
        ("postgresql://me@a:1,b:2/x", "postgresql://me@/t?host=a%2Cb&port=1%2C2"),
        ("", "postgresql:///t"),
    ],
)
def test_the_url_of_another_database_keeps_all_that_the_server_needs(server: str, url: str) -> None:
    assert url_of(server, "t") == url
    assert conninfo_to_dict(url) == {**conninfo_to_dict(server), "dbname": "t"}


def test_copies_have_what_was_prepared_and_are_gone_afterwards(server_url: str) -> None:
    with template(server_url, "cronlock", lambda url: prepare(url)) as name:
        with copy(server_url, name) as one, copy(server_url, name) as other:
            assert one != other
            with psycopg.connect(one) as connection, psycopg.connect(other) as another:
                connection.execute("INSERT INTO item VALUES (1)")
                connection.commit()
                assert connection.execute("SELECT count(*) FROM cronlock.run").fetchone() == (0,)
                assert another.execute("SELECT count(*) FROM item").fetchone() == (0,)
        with pytest.raises(psycopg.OperationalError, match="not currently accepting connections"):
            psycopg.connect(url_of(server_url, name))
    for url in (one, other, url_of(server_url, name)):
        with pytest.raises(psycopg.OperationalError, match="does not exist"):
            psycopg.connect(url)


def prepare(url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE item (n int)")


def test_a_copy_whose_connections_are_still_open_is_dropped(server_url: str) -> None:
    with template(server_url, "cronlock", prepare) as name, copy(server_url, name) as url:
        connection = psycopg.connect(url)
    with pytest.raises(psycopg.OperationalError):
        connection.execute("SELECT 1")
    connection.close()


def broken(_: str) -> None:
    raise ZeroDivisionError


def unusual(url: str) -> None:
    """A table that cannot be dropped is no hindrance, nor is a template that its maker has dropped."""
    database = conninfo_to_dict(url)["dbname"]
    with psycopg.connect(url_of(url, "postgres"), autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {database}")
    raise ZeroDivisionError


@pytest.mark.parametrize("prepare", [broken, unusual])
def test_a_prepare_that_fails_leaves_no_database(server_url: str, prepare: Callable[[str], object]) -> None:
    query = "SELECT count(*) FROM pg_database WHERE datname LIKE 'cronlock\\_test\\_%'"
    with psycopg.connect(server_url, autocommit=True) as connection:
        before = connection.execute(query).fetchone()
        with pytest.raises(ZeroDivisionError), template(server_url, "cronlock", prepare):
            raise AssertionError("it was prepared")
        assert connection.execute(query).fetchone() == before


def test_a_server_that_is_not_there_is_an_error_of_ours() -> None:
    server = "postgresql://me:secret-word@127.0.0.1:1/x"
    with (
        pytest.raises(CronlockError, match="no connection to the server for tests"),
        template(server, "cronlock", prepare),
    ):
        raise AssertionError("it was prepared")
