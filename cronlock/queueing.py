"""Queue mode: a call of a cron URL becomes a job, or is skipped.

The calls of one task are decided one after the other, under the lock of the task's row: of two at once one makes the
job and the other one is skipped by it (`queued_already`), or, as the same occurrence, is given it. What is live is
seen in one snapshot, whether it waits, is due or is under way; a job that ends meanwhile was live when the call was
decided.
"""

import asyncio
from dataclasses import replace
from typing import Any

import psycopg

from cronlock import jobs, locks, runs
from cronlock.database import Database, within
from cronlock.enqueue import Enqueued, order, refused
from cronlock.errors import Unavailable
from cronlock.gate import Call
from cronlock.lending import cut
from cronlock.outcome import Holder, Outcome
from cronlock.recording import HEAD, Recorder
from cronlock.skips import Skips


class Queueing:
    """Decides such calls for one process."""

    def __init__(self, database: Database, recorder: Recorder, skips: Skips, statements: jobs.Statements) -> None:
        self._database = database
        self._recorder = recorder
        self._skips = skips
        self._statements = statements

    async def call(self, call: Call, given: dict[str, Any]) -> Enqueued | Outcome:
        """The job that the call made, or that its occurrence had made before; or how it was skipped.

        Raises `Unavailable` if nothing could be decided, `PayloadError` for a payload that cannot be kept.
        """
        task = call.task
        # What makes two such calls one is their occurrence, not the task's `dedupe`.
        wanted = order(replace(task, dedupe=None), [given], trigger="http", occurrence=call.occurrence)
        key = locks.key_expressions(task)[0].as_bytes(None)
        values = {
            **wanted.options,
            "payload": wanted.payloads[0],
            "cron_key": call.key or "",
            "min_interval": task.min_interval,
            "ttl": max(task.idempotency_ttl, self._database.settings.retention_completed),
            "lock_key": key if call.key is None else key.replace(locks.KEY, locks.text_of(call.key)),
        }
        reason, job_id, wait, lock_key = await self._decide(call, values)
        if reason in (None, "duplicate"):
            return Enqueued(job_id, reason == "duplicate")
        call.renew()
        row = await self._recorder.put(runs.SKIP, call.row(lock_key, facts_of(call, reason)))
        assert row is not None, "the statement gives a row for every nonce"
        holder = None if job_id is None or reason == "paused" else Holder(job_id=job_id)
        return self._skips.outcome(call, lock_key, row[1], reason, holder, wait)

    async def _decide(self, call: Call, values: dict[str, Any]) -> tuple[Any, ...]:
        limit = call.task.acquire_timeout.total_seconds()
        message = b"; ".join(
            (
                HEAD + self._statements.fill(jobs.CALL_LOCK, values),
                self._statements.fill(jobs.CALL, values),
                b"COMMIT",
            )
        )
        seat = await self._database.acquire(True, limit)
        try:
            reply = await within(limit + 1, seat.connection, seat.send(message, -2))
        except psycopg.Error as error:
            cut(seat.connection)  # and with it the transaction
            raise refused(error) from error
        except asyncio.CancelledError:
            cut(seat.connection)
            raise
        finally:
            await seat.give_back()
        if not reply.rows:
            raise Unavailable("database_unavailable", "the task's row was deleted at this moment; call again")
        return reply.rows[0]


def facts_of(call: Call, reason: str) -> dict[str, Any]:
    """What the record of a skip says beyond the call's task and lock."""
    return {
        "reason": reason,
        "key": call.key,
        "occurrence": call.occurrence,
        "scheduled_for": call.scheduled_for,
    }
