"""The load: callers that call one server after the other, and keep every answer."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from itertools import count

import httpx2
import psycopg

from tests import AUTH
from tests.campaign.servers import Server
from tests.campaign.tables import CALLER
from tests.campaign.tasks import KINDS, Kind

PATIENCE = 60.0
"""Seconds that a call waits for its answer: longer than any fault lasts."""
ENDINGS = ("well", "error", "retry", "cancel", "sql")
ENDING_WEIGHTS = (80, 8, 3, 3, 6)
LASTS = (5, 20, 50, 150, 500)
"""Milliseconds."""
LASTS_WEIGHTS = (30, 30, 20, 15, 5)
LATE_LASTS = (5, 700, 1500)
"""Milliseconds, around the timeout of the tasks that may be late."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call was answered; no code if its connection broke."""

    call: int
    server: str
    code: int | None
    status: str | None
    run_id: int | None
    timeline: int | None


@dataclass
class Callers:
    """So many callers at once while `run` runs."""

    servers: Sequence[Server]
    seed: str
    number: int
    pause: float
    """Seconds between the calls of one caller, at most."""
    answers: list[Answer] = field(default_factory=list)
    calls: int = 0
    broken: int = 0
    unavailable: int = 0
    _numbers: "count[int]" = field(default_factory=lambda: count(1))
    _stopping: bool = False
    _tasks: "list[asyncio.Task[None]]" = field(default_factory=list)

    def begin(self, client: httpx2.AsyncClient) -> None:
        """Begin to call."""
        self._tasks = [
            asyncio.create_task(self._call_on(client, random.Random(f"{self.seed} caller {number}")))
            for number in range(self.number)
        ]

    async def stop(self) -> None:
        """Call no more, and wait for the answers that are due."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def abandon(self) -> None:
        """End at once."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check(self) -> None:
        """Raise what ended a caller before its time."""
        for task in self._tasks:
            if task.done() and not self._stopping:
                task.result()

    async def _call_on(self, client: httpx2.AsyncClient, chance: random.Random) -> None:
        while not self._stopping:
            pick, kind = chance.random(), chance.choice(KINDS)
            if not (ready := [server for server in self.servers if server.is_ready]):
                await asyncio.sleep(0.1)
                continue
            server = ready[int(pick * len(ready))]
            path = f"{server.url}/cron/{kind.name}?{self._query(kind, chance)}"
            pause = chance.uniform(0, self.pause)
            answer = await self._call(client, server, path)
            self.answers.append(answer)
            await asyncio.sleep(pause if answer.code is not None else max(pause, 0.05))

    def _query(self, kind: Kind, chance: random.Random) -> str:
        (ends,) = chance.choices(ENDINGS, ENDING_WEIGHTS)
        (lasts,) = chance.choices(LASTS, LASTS_WEIGHTS)
        if kind.lock == "late":
            lasts = chance.choice(LATE_LASTS)
        return f"lasts={lasts}&where={chance.choice(('sql', 'python'))}&ends={ends}"

    async def _call(self, client: httpx2.AsyncClient, server: Server, path: str) -> Answer:
        call, timeline = next(self._numbers), server.timeline
        self.calls += 1
        headers = {**AUTH, "user-agent": f"{CALLER}{call}"}
        try:
            found = await client.get(f"{path}&call={call}", headers=headers, timeout=PATIENCE)
            body = found.json()
        except (httpx2.HTTPError, ValueError):
            self.broken += 1
            return Answer(call, server.name, None, None, None, None)
        status = body.get("status")
        self.unavailable += status == "unavailable"
        same = timeline if timeline == server.timeline else None
        return Answer(call, server.name, found.status_code, status, body.get("runId"), same)

    def write(self, *urls: str) -> None:
        """Move the answers so far into these databases."""
        copy = "COPY campaign.answer (call, server, code, status, run_id, timeline) FROM STDIN"
        for url in urls:
            with psycopg.connect(url) as connection, connection.cursor() as cursor, cursor.copy(copy) as into:
                for answer in self.answers:
                    into.write_row(astuple(answer))
        self.answers.clear()
