"""Which jobs a worker asks for next: from which queue, how many, and behind which one.

A claim begins behind what was claimed last, and now and then, and wherever it found too little, at the front: there
is what was tried before, what has a higher priority, and what was committed late. Where nothing is to be claimed the
worker says that it is idle, looks once more, and only then waits to be told.

Beside a transaction that stays open the rows of ended jobs cannot be removed, and a claim from the front walks through
all of them. So what such claims take is measured, and they get no more than a part of the time; those that begin behind
the last one look at none of them, unless PostgreSQL takes the table for empty (docs/performance-queue.md).
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
CHEAP = 0.002
"""Seconds of the server's that a claim from the front may always take."""
SHARE = 20
"""One that takes longer is not made again before so many times its length have passed, ..."""
FRONT_WITHIN = 60.0
"""... or so many seconds: whoever waits at the front is found in the end."""
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
    queue: "Queue | None" = None
    """None for a suspect, from any queue."""
    is_from_front: bool = True


@dataclass(slots=True)
class Queue:
    """What a worker knows of a queue."""

    name: str
    place: tuple[int, int] | None = None
    """The priority and the id behind which it claims."""
    is_front_seen: bool = False
    """Whether it has looked at the front since it found too little or it was time to."""
    front_at: float = 0.0
    """When it may look there again, in monotonic seconds."""


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
        self._queues = [Queue(name) for name in queues]
        self._tasks = list(tasks)
        self.names = self._tasks
        """The tasks whose jobs are claimed."""
        self._worker = worker
        self._lease = lease
        # Half of the places at once, if there are many: while some jobs run, others are claimed.
        self._chunk = max(CHUNK, concurrency // 2)
        self._clock = (0.0, 0)
        """The server's time before the last claim from the front, and the last id that there was then."""
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
        """Look at the front again, as soon as that may be."""
        self._rescan_at = 0.0

    def next(self, free: int, *, is_suspect_running: bool) -> Claim | None:
        """What is to fill `free` places, if there are any; no suspect beside another one."""
        if free <= 0:
            return None
        now, token = time.monotonic(), str(uuid4())
        if self.has_suspects:
            self.has_suspects = False
            if not is_suspect_running:
                lease = (token, self._lease, self._worker, [queue.name for queue in self._queues], self.names)
                return Claim(self._statements.execute("claim_suspect", *lease), token, 1, now)
        free = min(free, self._chunk)
        if now >= self._rescan_at:
            self._rescan_at = now + RESCAN
            for queue in self._queues:
                queue.is_front_seen = False
            self._at = 0
        queue = self._queues[self._at]
        asked = (token, self._lease, self._worker, queue.name, self.names, free)
        if queue.place is None or (not queue.is_front_seen and now >= queue.front_at):
            return Claim(self._statements.execute("claim", *asked), token, free, now, queue)
        text = self._statements.execute("claim_next", *asked, *queue.place)
        return Claim(text, token, free, now, queue, is_from_front=False)

    def timed(self, claim: Claim, part: Part) -> list[Part]:
        """The part that claims; if it does from the front, between two looks at the server's clock."""
        if claim.queue is None or not claim.is_from_front:
            return [part]
        queue, clock = claim.queue, self._statements.execute("clock")

        def began(rows: list[Row]) -> None:
            ((at, last_id),) = rows
            self._clock = (float(at), last_id)

        def ended(rows: list[Row]) -> None:
            took = float(rows[0][0]) - self._clock[0]
            queue.front_at = 0.0 if took <= CHEAP else time.monotonic() + min(SHARE * took, FRONT_WITHIN)

        return [Part(clock, began), part, Part(clock, ended)]

    def took(self, claim: Claim, rows: list[Row]) -> bool:
        """What a claim brought, the last one last; whether to claim again at once, if there is room."""
        queue = claim.queue
        if queue is None:
            return True
        if rows:
            queue.place = (rows[-1][7], rows[-1][0])
        if len(rows) >= min(claim.asked, BURST):
            self._is_idle = False
        if len(rows) == claim.asked:
            queue.is_front_seen |= claim.is_from_front
            return True
        queue.is_front_seen = False
        if claim.is_from_front:
            priority, last = queue.place or (0, 0)
            queue.place = (priority, max(last, self._clock[1]))
        elif time.monotonic() >= queue.front_at:
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
