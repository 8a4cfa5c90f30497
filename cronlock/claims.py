"""Which jobs a worker asks for next: from which queue, how many, and behind which one.

A claim begins behind what was claimed last, and now and then, and wherever it found too little, at the front. Where
nothing is to be claimed the worker says that it is idle, looks once more, and only then waits to be told.
"""

import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import timedelta
from uuid import uuid4

from cronlock.jobs import Statements
from cronlock.link import Part
from cronlock.wire import Row

CHUNK = 50
"""How many places at least one claim fills, if so many are free."""
BURST = 10
"""So many jobs found at once are a stream of them, for which nobody has to be told of each."""
RESCAN = 1.0
"""Seconds after which a claim begins at the front again."""
DISOWN_FOR = 20.0
"""Seconds after which a message of which no answer came has surely ended: its statements have less."""
DISOWN_EVERY = 1.0


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement that claims, when it was made, and what it asks for."""

    text: bytes
    token: str
    asked: int
    at: float
    queue: str | None = None
    """None for a suspect, from any queue."""
    is_from_front: bool = True


class Claims:
    """Those of one worker. `queues` are asked in their order, for the jobs of `tasks` that are not paused."""

    def __init__(
        self, statements: Statements, queues: Sequence[str], tasks: Sequence[str], worker: str, lease: timedelta,
        concurrency: int,
    ) -> None:  # fmt: skip
        self.is_said_idle = False
        """Whether the worker's row says that nothing is to be claimed."""
        self.has_suspects = False
        """Whether one was seen to wait; asked for on another connection, so that no claim is late for it."""
        self._statements = statements
        self._queues = list(queues)
        self._tasks = list(tasks)
        self.names = self._tasks
        """The tasks whose jobs are claimed."""
        self._worker = worker
        self._lease = lease
        # Half of the places at once, if there are many: while some jobs run, others are claimed.
        self._chunk = max(CHUNK, concurrency // 2)
        self._places: dict[str, tuple[int, int]] = {}
        """Of a queue: the priority and the id that were claimed last."""
        self._at = 0
        """The queue that is asked."""
        self._rescan_at = 0.0
        self._doubted: dict[str, float] = {}
        """Tokens of claims of which no answer came, and when that was."""
        self._disown_at = 0.0
        self._is_idle = False

    def pause(self, names: AbstractSet[str]) -> None:
        """Claim no job of these tasks, and those of all others."""
        self.names = [name for name in self._tasks if name not in names]

    def rescan(self) -> None:
        """Begin the next claim at the front."""
        self._rescan_at = 0.0

    def next(self, free: int, *, is_suspect_running: bool) -> Claim | None:
        """What is to fill `free` places, if there are any; no suspect beside another one."""
        if free <= 0:
            return None
        now, token = time.monotonic(), str(uuid4())
        if self.has_suspects:
            self.has_suspects = False
            if not is_suspect_running:
                lease = (token, self._lease, self._worker, self._queues, self.names)
                return Claim(self._statements.execute("claim_suspect", *lease), token, 1, now)
        free = min(free, self._chunk)
        if now >= self._rescan_at:
            self._rescan_at = now + RESCAN
            self._places.clear()
            self._at = 0
        queue = self._queues[self._at]
        asked = (token, self._lease, self._worker, queue, self.names, free)
        if (place := self._places.get(queue)) is None:
            return Claim(self._statements.execute("claim", *asked), token, free, now, queue)
        text = self._statements.execute("claim_next", *asked, *place)
        return Claim(text, token, free, now, queue, is_from_front=False)

    def took(self, claim: Claim, rows: list[Row]) -> bool:
        """What a claim brought, the last one last; whether to claim again at once, if there is room."""
        if claim.queue is None:
            return True
        if rows:
            self._places[claim.queue] = (rows[-1][7], rows[-1][0])
        if len(rows) >= min(claim.asked, BURST):
            self._is_idle = False
        if len(rows) == claim.asked:
            return True
        self._places.pop(claim.queue, None)
        if not claim.is_from_front:
            return True
        self._at += 1
        if self._at < len(self._queues):
            return True
        self._at = 0
        if len(rows) >= BURST:
            return True
        was_said, self._is_idle = self.is_said_idle, True
        return not was_said  # once more, after others can see that it is idle

    def lost(self, claim: Claim | None) -> None:
        """No answer came: what it may have taken is disowned, and nothing is known of the queue."""
        if claim is not None:
            self._doubted[claim.token] = time.monotonic()
        self._is_idle = self.is_said_idle = False
        self._rescan_at = 0.0

    def parts(self) -> list[Part]:
        """What a message says of claims that are over: those that are given back, and that the worker is idle."""
        parts = []
        now = time.monotonic()
        if self._doubted and now >= self._disown_at:
            self._disown_at = now + DISOWN_EVERY
            # Again and again, since their messages may still be under way.
            self._doubted = {token: since for token, since in self._doubted.items() if now - since < DISOWN_FOR}
            if self._doubted:
                parts.append(Part(self._statements.execute("disown", self._worker, list(self._doubted))))
        if (is_idle := self._is_idle) != self.is_said_idle:

            def said(_: list[Row]) -> None:
                self.is_said_idle = is_idle

            parts.append(Part(self._statements.execute("idle", self._worker, is_idle), said))
        return parts
