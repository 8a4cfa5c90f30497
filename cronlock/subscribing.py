"""Hearing what a `Notify` target says, for a cache inside a process.

LISTEN needs a connection of its own that no pooler shares out. Nothing is kept for one who is not there: after every
beginning, and whenever something was said that cannot be read, `has_gap` says that anything may be stale.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress

import psycopg
from psycopg import sql

from cronlock.config import Settings
from cronlock.database import network, within
from cronlock.errors import ConfigError
from cronlock.targets import Invalidation, channel_name, heard

CONNECT_WITHIN = 5.0
PAUSE = (0.2, 5.0)
PING = 15.0
"""Seconds of silence after which the connection is asked whether it is there."""

log = logging.getLogger("cronlock.invalidation")


async def subscribe(settings: Settings, channel: str) -> AsyncIterator[Invalidation]:
    """What is said on a channel, for ever; raises `ConfigError` where only a pooler is known."""
    name = channel_name(channel)
    if settings.pooler == "transaction" and not settings.direct_url:
        raise ConfigError(
            "a pooler in transaction mode carries no NOTIFY: set CRONLOCK_DIRECT_URL to the database past it"
        )
    url = network(settings.direct_url or settings.database_url)
    pause = PAUSE[0]
    while True:
        connection: psycopg.AsyncConnection[tuple[object, ...]] | None = None
        try:
            async with asyncio.timeout(CONNECT_WITHIN):
                connection = await psycopg.AsyncConnection.connect(url, autocommit=True, prepare_threshold=None)
                await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(name)))
            yield Invalidation(has_gap=True)
            pause = PAUSE[0]
            while True:
                async for said in connection.notifies(timeout=PING):
                    yield heard(said.payload)
                await within(CONNECT_WITHIN, connection, connection.execute("SELECT 1"))
        except (psycopg.Error, TimeoutError) as error:
            log.debug("the listening connection broke off", exc_info=error)
        finally:
            if connection is not None:
                with suppress(psycopg.Error):
                    await connection.close()
        await asyncio.sleep(pause)
        pause = min(2 * pause, PAUSE[1])
