"""A real PostgreSQL for every test: one server a session, one database a test, copied from a migrated one.

The server is the embedded one, or the one that CRONLOCK_TEST_URL names (it must allow CREATE DATABASE).
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cronlock import Cronlock
from cronlock.embedded import Embedded
from cronlock.migrate import migrate
from tests import SECRET

SERVER_SETTINGS = {
    "max_connections": "200",
    "max_prepared_transactions": "10",
    "fsync": "off",
    "full_page_writes": "off",
}
numbers = count(1)


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The event loop: asyncio's own, or uvloop's, which `cronlock serve` uses, with CRONLOCK_TEST_LOOP=uvloop."""
    return "asyncio", {"use_uvloop": os.environ.get("CRONLOCK_TEST_LOOP") == "uvloop"}


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """A server on which the tests may create databases and roles."""
    if given := os.environ.get("CRONLOCK_TEST_URL"):
        yield given
        return
    directory = Path(tempfile.mkdtemp(prefix="cronlock-tests-"))
    directory.chmod(0o755)  # root's server runs as another user, who must get through
    try:
        with Embedded(directory / "server", settings=SERVER_SETTINGS) as server:
            yield server.url
    finally:
        shutil.rmtree(directory)


@pytest.fixture(scope="session")
def template(server_url: str) -> Iterator[str]:
    """The name of a migrated database that tests are given copies of."""
    name = f"cronlock_template_{os.getpid()}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        migrate(make_conninfo(server_url, dbname=name), "cronlock")
        yield name
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def database_url(server_url: str, template: str) -> Iterator[str]:
    """A migrated database of the test's own."""
    name = f"cronlock_test_{os.getpid()}_{next(numbers)}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY file_copy")
        yield make_url(server_url, name)
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def empty_url(server_url: str) -> Iterator[str]:
    """An empty database of the test's own."""
    name = f"cronlock_test_{os.getpid()}_{next(numbers)}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        yield make_url(server_url, name)
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def db(database_url: str) -> Iterator["psycopg.Connection[tuple[Any, ...]]"]:
    """An outside observer's connection, in autocommit."""
    with psycopg.connect(database_url, autocommit=True, application_name="observer") as connection:
        yield connection


@pytest.fixture
def make_cron(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Cronlock]:
    """Makes a Cronlock on the test's database; keyword arguments are settings."""
    for name in list(os.environ):
        if name.startswith("CRONLOCK_") and name not in ("CRONLOCK_TEST_URL", "CRONLOCK_PG_BIN"):
            monkeypatch.delenv(name)

    def make(**settings: Any) -> Cronlock:
        return Cronlock(**{"database_url": database_url, "secrets": SECRET, **settings})

    return make


def make_url(server_url: str, database: str) -> str:
    """The URL of a database of the server."""
    parts = psycopg.conninfo.conninfo_to_dict(server_url)
    user, password = parts["user"], parts.get("password", "")
    return f"postgresql://{user}:{password}@{parts['host']}:{parts['port']}/{database}"


@pytest.fixture
def project() -> Path:
    """The root of the checkout."""
    return Path(__file__).parent.parent
