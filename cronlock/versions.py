"""Reading the versions of cache keys, over any kind of connection."""

from collections.abc import Sequence
from typing import Any

import psycopg
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from cronlock import invalidation
from cronlock.database import Database, ask, unavailable, within
from cronlock.targets import texts


def checked(keys: Sequence[str]) -> list[str]:
    """The keys that are asked for; raises `PayloadError`."""
    return list(texts("cache keys", keys))


def told(keys: Sequence[str], rows: Sequence[Any]) -> dict[str, int]:
    """The versions of all keys, by what the table says."""
    return {**dict.fromkeys(keys, 0), **{str(key): int(version) for key, version in rows}}


async def of_ours(database: Database, keys: Sequence[str]) -> dict[str, int]:
    """On a connection of cronlock's own; raises `Unavailable`."""
    statements = invalidation.statements(database.settings.schema_name)
    seconds = database.settings.acquire_timeout.total_seconds()
    try:
        async with database.recording() as connection:
            (rows,) = await within(seconds, connection, ask(connection, statements.version_message(keys)))
    except psycopg.Error as error:
        raise unavailable(error) from error
    return told(keys, rows)


async def on_async(connection: Any, schema: str, keys: Sequence[str]) -> dict[str, int]:
    """On a caller's connection, which is async; raises TypeError for what is none."""
    statements = invalidation.statements(schema)
    if isinstance(connection, psycopg.AsyncConnection):
        cursor = await connection.execute(statements.versions("%(keys)s"), {"keys": list(keys)})
        return told(keys, await cursor.fetchall())
    if isinstance(connection, (AsyncConnection, AsyncSession, async_scoped_session)):
        result = await connection.execute(text(statements.versions(":keys")), {"keys": list(keys)})
        return told(keys, list(result))
    raise TypeError(
        "cache_versions() takes an async connection of SQLAlchemy or psycopg, or None for one of its own, not"
        f" {type(connection).__name__}; for a synchronous one there is cache_versions_sync()"
    )


def on_sync(connection: Any, schema: str, keys: Sequence[str]) -> dict[str, int]:
    """On a caller's connection, which is not async; raises TypeError for what is none."""
    statements = invalidation.statements(schema)
    if isinstance(connection, psycopg.Connection):
        return told(keys, connection.execute(statements.versions("%(keys)s"), {"keys": list(keys)}).fetchall())
    if isinstance(connection, (Connection, Session, scoped_session)):
        return told(keys, list(connection.execute(text(statements.versions(":keys")), {"keys": list(keys)})))
    raise TypeError(
        f"cache_versions_sync() takes a connection of SQLAlchemy or psycopg, not {type(connection).__name__}"
    )
