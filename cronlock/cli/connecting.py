"""The connection of a command: bounded, named, and with errors that say what to do."""

import getpass
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cronlock.config import Settings
    from cronlock.stats import Connection

APPLICATION_NAME = "cronlock-cli"  # names that begin with "cronlock:" mark the holders of locks
CONNECT_TIMEOUT = 5


def settings() -> "Settings":
    """The settings of the environment; raises `ConfigError`."""
    from cronlock.config import Settings

    return Settings.load()


@contextmanager
def connect(settings: "Settings") -> Iterator["Connection"]:
    """A connection to cronlock's database.

    Raises `ConfigError` without a DATABASE_URL, and `Unavailable` for a database that cannot be reached or used,
    and for a schema that is not there or not one this code works with.
    """
    import psycopg

    from cronlock.errors import Unavailable

    with opened(settings.database_url, settings) as connection:
        try:
            require_revision(connection, settings.schema_name)
            yield connection
        except psycopg.Error as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise Unavailable("database_error", f"the database {settings.database_label} said: {reason}") from error


def require(settings: "Settings") -> None:
    """Raise what `connect` raises: once and at once, where the pools of a process would try, and log, for seconds."""
    with connect(settings):
        pass


@contextmanager
def opened(url: str, settings: "Settings") -> Iterator["Connection"]:
    """A connection in autocommit, whatever is in the database; raises `Unavailable`."""
    import psycopg

    from cronlock.errors import Unavailable

    try:
        connection = psycopg.connect(
            url,
            autocommit=True,
            connect_timeout=CONNECT_TIMEOUT,
            application_name=APPLICATION_NAME,
            prepare_threshold=None,
        )
    except psycopg.Error as error:
        # libpq asks "Is the server running ..?" in a second line; of several hosts each has its lines
        lines = (line.strip() for line in str(error).splitlines() if "Is the server running" not in line)
        reason = settings.scrub(" ".join(lines).removeprefix("connection failed: "))
        raise Unavailable(
            "database_unavailable",
            f"the database {settings.database_label} cannot be reached: {reason}. Check DATABASE_URL.",
        ) from None
    connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    with connection:
        yield connection


def require_revision(connection: "Connection", schema: str) -> None:
    """Raise `Unavailable` if the schema is missing, or at a revision that this code does not work with."""
    import psycopg

    from cronlock import revision, stats
    from cronlock.models import REVISION

    try:
        found = stats.revisions(connection, schema)
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        raise revision.missing(schema) from None
    revision.require(found, REVISION, schema)


def operator() -> str:
    """Who gives a command: user@host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"
