"""Databases for the tests of users: one is migrated, and every test gets a copy of it.

CREATE DATABASE .. TEMPLATE copies files and takes tens of milliseconds; migrating every database anew takes seconds.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import quote, urlencode
from uuid import uuid4

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from cronlock.errors import CronlockError
from cronlock.migrate import migrate

PREFIX = "cronlock_test_"


@contextmanager
def template(server: str, schema: str, prepare: Callable[[str], object]) -> Iterator[str]:
    """A database on `server`, with cronlock in `schema` and whatever `prepare` makes; gives its name.

    `prepare` gets the database's URL. Raises `CronlockError` if no database can be made, `MigrationError`, and what
    `prepare` raises.
    """
    with database(server) as name:
        url = url_of(server, name)
        migrate(url, schema)
        prepare(url)
        with connect(server) as connection:
            # A template with a connection to it cannot be copied, and `prepare` may have left one open in a pool.
            connection.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(sql.Identifier(name)))
            connection.execute(
                "SELECT pg_catalog.pg_terminate_backend(pid, 5000) FROM pg_catalog.pg_stat_activity WHERE datname = %s",
                (name,),
            )
        yield name


@contextmanager
def copy(server: str, template: str) -> Iterator[str]:
    """A copy of the database `template`, dropped at the end with whatever is connected to it; gives its URL."""
    with database(server, template) as name:
        yield url_of(server, name)


@contextmanager
def database(server: str, template: str | None = None) -> Iterator[str]:
    """A database of a name that nobody else has."""
    name = f"{PREFIX}{uuid4().hex[:16]}"
    of = sql.SQL(" TEMPLATE {}").format(sql.Identifier(template)) if template is not None else sql.SQL("")
    with connect(server) as connection:
        try:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)) + of)
        except psycopg.errors.InsufficientPrivilege as error:
            raise CronlockError(f"the role {connection.info.user!r} must be allowed to CREATE DATABASE") from error
    try:
        yield name
    finally:
        with connect(server) as connection:
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


def connect(server: str) -> "psycopg.Connection[tuple[object, ...]]":
    """A connection to the server itself; raises `CronlockError` if there is none to be had."""
    try:
        return psycopg.connect(server, autocommit=True, connect_timeout=10, application_name="cronlock-tests")
    except psycopg.Error as error:
        raise CronlockError(f"no connection to the server for tests: {str(error).strip()}") from error


def url_of(server: str, name: str) -> str:
    """The URL of another database of `server`, with all that its connection string says."""
    params = {key: str(value) for key, value in conninfo_to_dict(server).items() if value is not None}
    user, password = quote(params.pop("user", ""), safe=""), params.pop("password", None)
    host, port = params.pop("host", ""), params.pop("port", "")
    if "/" in host or "," in host:  # a socket's directory, several hosts
        params |= {"host": host} | ({"port": port} if port else {})
        host = port = ""
    params.pop("dbname", None)
    access = user + (f":{quote(password, safe='')}" if password else "")
    place = (f"[{host}]" if ":" in host else host) + (f":{port}" if port else "")
    query = urlencode(params, quote_via=quote)
    return f"postgresql://{access}{'@' if access else ''}{place}/{name}{'?' if query else ''}{query}"
