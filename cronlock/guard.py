"""The guard of a run whose task opens its own transactions.

The lock sits in a transaction that does nothing else: it has no snapshot, no transaction id and no table, so VACUUM,
CREATE INDEX CONCURRENTLY and migrations pass it by. It is pinged, and the server ends a session that it has not heard
of for three pings. A ping that has no answer within one interval is a lock that may be lost: its socket is shut down
and the task is cancelled, at least one interval before anybody else can have the lock.

A ping is a simple-protocol message: a prepared one would leave a portal open, and with it a snapshot.
"""

import asyncio
import time
from collections.abc import Callable

import psycopg

from cronlock import locks
from cronlock.database import within
from cronlock.errors import LockLost
from cronlock.seats import AsyncSeat


class Guard:
    """Keeps one lock and knows whether it is still held; `lose` is called once with a sentence when it is not.

    `interval` is in seconds; `heard` is when a message was sent last that the server has answered, in monotonic ones.
    """

    def __init__(self, seat: AsyncSeat, interval: float, heard: float, lose: Callable[[str], None]) -> None:
        self._seat = seat
        self._interval = interval
        self._lose = lose
        self._heard = heard
        self._is_over = asyncio.Event()

    async def watch(self) -> None:
        """Ping until `end`, or until a ping is not answered."""
        while not await self._is_ended_within(self._heard + self._interval - time.monotonic()):
            sent = time.monotonic()
            try:
                await within(self._interval, self._seat.connection, self._seat.send(locks.PING))
            except psycopg.Error:
                self._lose("the connection that guarded the run did not answer its ping; its lock may be gone")
                return
            self._heard = sent

    def end(self) -> None:
        """Ping no more."""
        self._is_over.set()

    def check(self) -> None:
        """Raise `LockLost` if the last ping that was answered is too old to say that the lock is held; any thread."""
        silent = time.monotonic() - self._heard
        if silent > 2 * self._interval:
            raise LockLost(f"the connection that guards the run has not answered for {silent:.1f} s")

    async def _is_ended_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._is_over.wait(), max(0.0, seconds))
        except TimeoutError:
            return False
        return True
