"""pytest's fixtures for the tests of tasks; pytest loads this module as the plugin `cronlock` (docs/testing.md).

It is loaded in every project that has cronlock installed, so nothing is imported before a test asks for a fixture.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from cronlock import Cronlock, Outcome

SERVER_SETTINGS = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off"}
"""What is lost when the machine fails is of no worth."""


@contextmanager
def explained() -> Iterator[None]:
    """Let a test end with the sentence of an error of ours, not with its traceback."""
    from cronlock import CronlockError

    try:
        yield
    except CronlockError as error:
        pytest.fail(f"cronlock: {error}", pytrace=False)


@pytest.fixture(scope="session")
def cronlock_server() -> Iterator[str]:
    """The URL of a PostgreSQL on which databases can be made: CRONLOCK_TEST_DATABASE_URL, or one of our own.

    Our own is made in a temporary directory and ends with the session; each worker of pytest-xdist has one.
    """
    import shutil
    import tempfile
    from pathlib import Path

    from cronlock.config import TEST_DATABASE_URL, server_for_tests
    from cronlock.embedded import Embedded
    from cronlock.errors import EmbeddedError

    with explained():
        given = server_for_tests()
    if given is not None:
        yield given
        return
    directory = tempfile.mkdtemp(prefix="cronlock-pytest-")
    try:
        server = Embedded(Path(directory), settings=SERVER_SETTINGS)
        try:
            server.start()
        except EmbeddedError as error:
            pytest.fail(f"cronlock: {error}\nOr name a server for tests: {TEST_DATABASE_URL}=..", pytrace=False)
        with server:
            yield server.url
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def cronlock_schema() -> str:
    """The schema that cronlock is in; override it if your `Cronlock` has a `schema_name` that is no environment's."""
    from cronlock.config import Settings

    with explained():
        return Settings.load().schema_name


@pytest.fixture(scope="session")
def cronlock_prepare() -> Callable[[str], object]:
    """Override it: a function that gets the URL of a database with cronlock's tables and makes yours in it.

    It is called once a session; every test's database is a copy of what it left.
    """
    return lambda url: None


@pytest.fixture(scope="session")
def cronlock_template(
    cronlock_server: str, cronlock_schema: str, cronlock_prepare: Callable[[str], object]
) -> Iterator[str]:
    """The name of the prepared database that tests are given copies of."""
    from cronlock.template import template

    with explained(), template(cronlock_server, cronlock_schema, cronlock_prepare) as name:
        yield name


@pytest.fixture
def cronlock_database(cronlock_server: str, cronlock_template: str) -> Iterator[str]:
    """The URL of a database of the test's own, with cronlock's tables and yours; dropped after the test."""
    from cronlock.template import copy

    with explained(), copy(cronlock_server, cronlock_template) as url:
        yield url


@pytest.fixture
def cronlock_run(cronlock_database: str) -> "Callable[..., Outcome]":
    """Runs a task in the test's database: `cronlock_run(cron, "sync-inventory", {"pace": 0})`; gives its `Outcome`.

    For tests that are not async; others write `async with cron.using(cronlock_database)`.
    """

    def run(cron: "Cronlock", name: str, payload: dict[str, Any] | None = None, **options: Any) -> "Outcome":
        with cron.using(cronlock_database):
            return cron.run_sync(name, payload, **options)

    return run
