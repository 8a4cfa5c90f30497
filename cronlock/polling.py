"""What clients that poll are told of jobs: what is asked at one moment is read by one statement.

While one message is under way the next questions gather, as records do: the more callers, the fewer messages each of
them costs. Nothing is kept: no answer is older than its question.
"""

import asyncio
import json
from datetime import datetime
from typing import Any

import psycopg

from cronlock import jobs, wire
from cronlock.database import Database, unavailable
from cronlock.link import Link
from cronlock.recording import HEAD

GROUP = 1000
MOMENTS = ("enqueued_at", "run_at", "started_at", "finished_at")


class Polls:
    """The questions of one process, over a connection of their own, opened by the first one."""

    def __init__(self, database: Database, statements: jobs.Statements) -> None:
        self._seconds = database.settings.acquire_timeout.total_seconds()
        self._statements = statements
        self._link = Link(database, b"")
        self._waiting: list[tuple[int, asyncio.Future[dict[str, Any] | None]]] = []
        self._asking: asyncio.Task[None] | None = None

    async def job(self, job_id: int) -> dict[str, Any] | None:
        """What whoever may enqueue sees of a job; None if there is none. Raises `Unavailable`."""
        future: asyncio.Future[dict[str, Any] | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((job_id, future))
        if self._asking is None:
            self._asking = asyncio.get_running_loop().create_task(self._ask())
        return await future

    async def _ask(self) -> None:
        try:
            await asyncio.sleep(0)
            while self._waiting:
                group, self._waiting = self._waiting[:GROUP], self._waiting[GROUP:]
                await self._ask_for([one for one in group if not one[1].done()])
        finally:
            self._asking = None

    async def _ask_for(self, group: "list[tuple[int, asyncio.Future[dict[str, Any] | None]]]") -> None:
        ids = sorted({job_id for job_id, _ in group})
        try:
            message = HEAD + self._statements.fill(jobs.POLLED, {"ids": ids}) + b"; COMMIT"
            results = await self._link.send(message, self._seconds)
            found = {job_id: document(text) for job_id, text in wire.rows(results[2])}
        except Exception as error:  # a fault of ours, too: nobody may wait for ever
            refusal = unavailable(error) if isinstance(error, psycopg.Error) else error
            for _, future in group:
                if not future.done():
                    future.set_exception(refusal)
            return
        for job_id, future in group:
            if not future.done():
                future.set_result(found.get(job_id))

    async def close(self) -> None:
        """Let what was asked be answered, and close the connection."""
        if self._asking is not None:
            await asyncio.wait((self._asking,), timeout=self._seconds)
        await self._link.close()


def document(text: str) -> dict[str, Any]:
    """A row that came as JSON, whose moments do not depend on how the session writes them."""
    row: dict[str, Any] = json.loads(text)
    return row | {name: datetime.fromisoformat(row[name]) for name in MOMENTS if row[name] is not None}
