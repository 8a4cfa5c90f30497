"""How attempts ended, until that is durable: what the worker's next message writes of it.

Plain ends are written by one statement, all others by another. What matches no row is asked after, since an earlier
message of which no answer came may have written it. An end that the database refuses is found by writing one at a
time; less of it is written then, and in the end nothing.
"""

import json
import logging
import time
from dataclasses import replace
from functools import partial

import psycopg

from cronlock.attempt import Attempt, End
from cronlock.invalidation import Outbox
from cronlock.jobs import Statements
from cronlock.link import Part
from cronlock.metrics import JobCounts
from cronlock.outcome import Failure
from cronlock.reporting import JobReport
from cronlock.wire import Row

BATCH = 1000
"""How many ends of a kind one message has at most."""
REFUSED = ("0A", "22", "23", "54")
"""SQLSTATE classes of an end that cannot be written as it is, however often it is sent."""
BLOCKED = ("55P03", "57014")
"""SQLSTATEs of an end whose row somebody has locked for too long."""
SOON = b"SET LOCAL lock_timeout = '200ms'"
ASIDE_FOR = 1.0
"""Seconds after which such an end is tried again."""
UNRECORDABLE = Failure("Unrecordable", "the database refused to keep how the attempt ended; see the worker's log")

log = logging.getLogger("cronlock.worker")


class Ends:
    """Those of one worker: they are added, make a part of each message, and are reported when they are durable."""

    def __init__(self, statements: Statements, outbox: Outbox, worker: str, metrics: JobCounts) -> None:
        self.written = 0
        """How many attempts have ended for good."""
        self._statements = statements
        self._outbox = outbox
        self._worker = worker
        self._metrics = metrics
        self._report = JobReport(worker)
        self._done: list[Attempt] = []
        """Completed, and there is nothing else to say."""
        self._ends: list[tuple[Attempt, End]] = []
        self._given_back: list[Attempt] = []
        self._missing: list[tuple[Attempt, End | None]] = []
        """Ends that matched no row."""
        self._aside: list[tuple[float, Attempt, End]] = []
        """Ends of rows that somebody has locked, and when they are tried again."""
        self._is_careful = False
        """Whether they are written one by one: one of them was refused."""
        self._sending = Batch()

    def __bool__(self) -> bool:
        """Whether something is not written yet."""
        return self.is_waiting or bool(self._aside)

    @property
    def is_waiting(self) -> bool:
        """Whether there is something to write now."""
        return bool(self._done or self._ends or self._given_back or self._missing)

    @property
    def is_careful(self) -> bool:
        """Whether the message that `parts` were made for is for one end alone, which may be refused."""
        return self._is_careful and bool(self._sending.done or self._sending.ends)

    @property
    def held(self) -> list[Attempt]:
        """All whose lease is still needed."""
        sending = self._sending
        ended = [*self._ends, *sending.ends, *((attempt, end) for _, attempt, end in self._aside)]
        return [*self._done, *sending.done, *(attempt for attempt, _ in ended), *self._given_back, *sending.back]

    def due_in(self, seconds: float) -> float:
        """In how many seconds an end that was put aside is tried again; `seconds` if none is sooner."""
        return min((max(0.0, at - time.monotonic()) for at, _, _ in self._aside), default=seconds)

    def add(self, attempt: Attempt, end: End) -> None:
        """An attempt has ended like this."""
        is_plain = end.status == "completed" and end.result is None and attempt.lines is None
        if is_plain and attempt.lending.said is None:
            self._done.append(attempt)
        else:
            self._ends.append((attempt, end))

    def give_back(self, attempt: Attempt) -> None:
        """An attempt is not counted; another worker may take the job."""
        self._given_back.append(attempt)

    def parts(self) -> list[Part]:
        """What the next message is to write; `sent` or `unsent` has to follow."""
        self._take_up()
        most = 1 if self._is_careful else BATCH
        batch = self._sending = Batch()
        batch.ends, self._ends = self._ends[:most], self._ends[most:]
        plain = 0 if self._is_careful and batch.ends else most
        batch.done, self._done = self._done[:plain], self._done[plain:]
        batch.back, self._given_back = self._given_back, []
        batch.missing, self._missing = self._missing, []
        parts = [Part(SOON)] if self.is_careful else []
        if done := batch.done:
            text = self._statements.execute("done", [one.run_id for one in done], [one.token for one in done])
            parts.append(Part(text, partial(self._left, done)))
        if ends := batch.ends:
            if said := [row for one, end in ends if end.status == "completed" for row in one.said]:
                parts.append(Part(self._outbox.of_jobs(said)))
            text = self._statements.execute("end", [end.row(one) for one, end in ends])
            parts.append(Part(text, partial(self._told, ends)))
        if back := batch.back:
            text = self._statements.execute("release", [one.run_id for one in back], [one.token for one in back])
            parts.append(Part(text, partial(self._returned, back)))
        if missing := batch.missing:
            ids, numbers = [one.run_id for one, _ in missing], [one.attempt for one, _ in missing]
            text = self._statements.execute("fates", ids, numbers, self._worker)
            parts.append(Part(text, partial(self._found_out, missing)))
        return parts

    def sent(self) -> None:
        """The message was committed."""
        self._sending = Batch()
        self._is_careful &= bool(self._done or self._ends)

    def unsent(self, error: BaseException) -> None:
        """Whether the message was committed is not known. Sent again, what was matches no row any more."""
        batch, self._sending = self._sending, Batch()
        self._done = batch.done + self._done
        self._ends = batch.ends + self._ends
        self._given_back = batch.back + self._given_back
        self._missing = batch.missing + self._missing
        if isinstance(error, psycopg.Error):
            self._refused(error.sqlstate or "")

    def _refused(self, state: str) -> None:
        """One of the ends may be to blame: find out which, write less of it, and in the end nothing."""
        if state[:2] not in REFUSED and state not in BLOCKED:
            return
        if not self._is_careful:
            self._is_careful = bool(self._done or self._ends)
        elif state in BLOCKED:
            again_at = time.monotonic() + ASIDE_FOR
            if self._ends:
                self._aside.append((again_at, *self._ends.pop(0)))
            elif self._done:
                self._aside.append((again_at, self._done.pop(0), End("completed")))
        elif self._ends and self._ends[0][1].failure is not UNRECORDABLE:
            attempt, end = self._ends[0]
            log.error("how job %s ended was refused", attempt.run_id, extra={"event": "job.refused", "sqlstate": state})
            end = replace(end, result=None, failure=UNRECORDABLE)
            if end.status == "completed" and attempt.lending.said is not None:
                # Perhaps it is what the job said is stale: nobody would be told, so it has not completed.
                attempt.lending.said = None
                end = replace(end, status="failed", attempt_status="failed")
            self._ends[0] = (attempt, end)
        elif self._ends:
            self._missed(self._ends.pop(0)[0])
        elif self._done:
            self._missed(self._done.pop(0))

    def _take_up(self) -> None:
        """Try again to write the ends that were put aside, with care."""
        now = time.monotonic()
        if due := [(attempt, end) for at, attempt, end in self._aside if at <= now]:
            self._aside = [aside for aside in self._aside if aside[0] > now]
            self._ends = due + self._ends
            self._is_careful = True

    def _left(self, done: list[Attempt], rows: list[Row]) -> None:
        """What the statement of plain ends said: how many there were, and which if these are not all."""
        ((count, ids),) = rows
        kept = None if count == len(done) else set(json.loads(ids or "[]"))
        for one in done:
            if kept is None or one.run_id in kept:
                self.completed(one)
            else:
                self._missing.append((one, None))

    def _told(self, ends: list[tuple[Attempt, End]], rows: list[Row]) -> None:
        """What the statement of all other ends said: a row for each whose lease was held."""
        statuses: dict[int, str] = dict(rows)
        for one, end in ends:
            if one.run_id not in statuses:
                self._missing.append((one, end))
            elif end.status == "completed":
                self.completed(one)
            else:
                self._failed(one, end, statuses[one.run_id])

    def _returned(self, back: list[Attempt], rows: list[Row]) -> None:
        """What the statement of those that are given back said: the ids of those whose lease was held."""
        kept = {row[0] for row in rows}
        for one in back:
            if one.run_id in kept:
                self._report.given_back(one.task.name, one.run_id, one.attempt, one.elapsed_ms())

    def _found_out(self, missing: list[tuple[Attempt, End | None]], rows: list[Row]) -> None:
        """What became of those whose end matched no row: written by an earlier message, or lost."""
        fates: dict[int, str] = dict(rows)
        for one, end in missing:
            status = fates.get(one.run_id)
            if status is None:
                self._missed(one)
            elif status == "completed" or end is None:
                self.completed(one)
            else:
                self._failed(one, end, status)

    def completed(self, attempt: Attempt) -> None:
        """An attempt's completion is durable."""
        self.written += 1
        elapsed_ms = attempt.elapsed_ms()
        self._metrics.job_ended(attempt.task.name, "completed", attempt.age_ms + elapsed_ms)
        if attempt.lending.said is not None:
            attempt.lending.said.committed()
        self._report.completed(attempt.task.name, attempt.run_id, attempt.attempt, elapsed_ms)

    def _failed(self, attempt: Attempt, end: End, status: str) -> None:
        self.written += 1
        elapsed_ms = attempt.elapsed_ms()
        self._metrics.job_ended(attempt.task.name, status, attempt.age_ms + elapsed_ms)
        self._report.ended(
            status,
            end.attempt_status or status,
            end.failure,
            attempt.task.name,
            attempt.run_id,
            attempt.attempt,
            elapsed_ms,
            end.delay,
        )

    def _missed(self, attempt: Attempt) -> None:
        """The lease was lost before the end could be written."""
        self.written += 1
        self._metrics.lease_lost()
        self._report.lease_lost(attempt.task.name, attempt.run_id, attempt.attempt, attempt.elapsed_ms())


class Batch:
    """What one message writes."""

    def __init__(self) -> None:
        self.done: list[Attempt] = []
        self.ends: list[tuple[Attempt, End]] = []
        self.back: list[Attempt] = []
        self.missing: list[tuple[Attempt, End | None]] = []
