"""The admin routes: what an operator reads and steers, as JSON, and `/metrics`.

They exist only if an admin secret is set, and CRON_SECRET does not open them. Nothing is looked at before the
secret is right. What they read goes over the connections of the `Inspector`, never over those of runs and records.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from starlette.types import Receive, Scope, Send

from cronlock import documents, explain, jsontext, stats, steering
from cronlock.errors import CronlockError, PayloadError, Unavailable
from cronlock.inspecting import Inspector
from cronlock.jsontext import clip
from cronlock.metrics import Metrics
from cronlock.models import JOB_STATUSES, RUN_STATUSES
from cronlock.recovery import tell_lost
from cronlock.tasks import NAME
from cronlock.web import refusals
from cronlock.web.answers import Answer, plain
from cronlock.web.auth import MISMATCH, Bearer, authorization
from cronlock.web.body import TooLarge, read_object, require_json

if TYPE_CHECKING:
    from cronlock.app import Cronlock

DEFAULT_LIMIT = 50
LARGEST_LIMIT = 200
LARGEST_ID = 2**63 - 1
LONGEST_WORD = 200
CANCEL_WAIT = 1.5
"""Seconds in which a run that was asked to end is expected to."""
FORCE_GRACE = 5.0
"""Seconds that its code has before its connection is ended, where that is asked for."""
JOB_CANCEL_WAIT = 2.5
"""Seconds in which a worker is expected to stop a job."""
RETRY_LIMIT = 10_000
"""How many jobs one request retries at most."""
POLL = 0.1


class Wrong(Exception):
    """What was asked cannot be answered: the HTTP status, and why."""

    def __init__(self, http_status: int, reason: str) -> None:
        super().__init__(reason)
        self.answer = plain(http_status, {400: "bad_request", 404: "not_found"}[http_status], reason=reason)


@dataclass(frozen=True, slots=True)
class Asked:
    """What an admin route is asked."""

    inspector: Inspector
    metrics: Metrics
    max_attempts: int
    path: Mapping[str, str]
    query: Mapping[str, str]
    body: Mapping[str, object]
    accept: str

    def number(self, name: str, default: int | None, largest: int) -> int | None:
        """A positive whole number of the query; raises `Wrong`."""
        if (text := self.query.get(name)) is None:
            return default
        return whole(text, f"{name} must be a whole number from 1 to {largest}", largest)

    def word(self, name: str) -> str | None:
        """A text of the body; raises `Wrong`."""
        value = self.body.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or not value.strip() or len(value) > LONGEST_WORD:
            raise Wrong(400, f"{name} must be a text of 1 to {LONGEST_WORD} characters")
        return value.strip()

    @property
    def run_id(self) -> int:
        """The run that the path names; raises `Wrong`."""
        return whole(self.path["id"], f"{shown(self.path['id'])} is not the number of a run", LARGEST_ID)

    @property
    def job_id(self) -> int:
        """The job that the path names; raises `Wrong`."""
        return whole(self.path["id"], f"{shown(self.path['id'])} is not the number of a job", LARGEST_ID)

    def chosen(self, name: str, among: Sequence[str]) -> str | None:
        """A word of the query that is one of these; raises `Wrong`."""
        if (text := self.query.get(name)) is not None and text not in among:
            raise Wrong(400, f"{name} must be one of {', '.join(among)}")
        return text

    def named(self, name: str) -> str | None:
        """The name of a task or a queue in the query; raises `Wrong`."""
        text = self.query.get(name)
        if text is not None and not NAME.fullmatch(text):
            raise Wrong(400, f"{shown(text)} is not the name of a {name}")
        return text

    @property
    def task(self) -> str:
        """The task that the path names; raises `Wrong`."""
        return name_of(self.path["name"])


def whole(text: str, otherwise: str, largest: int) -> int:
    """A number from 1 to `largest`; raises `Wrong`."""
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and 1 <= int(text) <= largest):
        raise Wrong(400, otherwise)
    return int(text)


def name_of(text: str) -> str:
    """The name of a task; raises `Wrong`."""
    if not NAME.fullmatch(text):
        raise Wrong(400, f"{shown(text)} is not the name of a task")
    return text


def shown(text: str) -> str:
    """What a caller wrote, as an answer may show it."""
    return ascii(clip(text, 60))


def document(http_status: int, /, **facts: Any) -> Answer:
    """An answer of rows."""
    return Answer(http_status, "ok", documents.dump(facts).encode())


async def list_tasks(asked: Asked) -> Answer:
    """Every task that the database knows."""
    return document(200, tasks=await asked.inspector.ask(stats.tasks))


async def list_runs(asked: Asked) -> Answer:
    """Runs, newest first, a page at a time."""
    status = asked.query.get("status")
    if status is not None and status not in RUN_STATUSES:
        raise Wrong(400, f"status must be one of {', '.join(RUN_STATUSES)}")
    task = asked.query.get("task")
    limit = asked.number("limit", DEFAULT_LIMIT, LARGEST_LIMIT) or DEFAULT_LIMIT
    rows = await asked.inspector.ask(
        stats.runs,
        task=None if task is None else name_of(task),
        status=status,
        before=asked.number("before", None, LARGEST_ID),
        limit=limit,
    )
    more = rows[-1]["run_id"] if len(rows) == limit else None
    return document(200, runs=[explain.listed(row) for row in rows], next_before=more)


async def read_run(asked: Asked) -> Answer:
    """Everything about a run."""
    row = explain.document(await run_of(asked))
    return document(200, run={**row, "result": documents.result_of(row["result"])})


async def run_of(asked: Asked) -> stats.Row:
    """The row of the run that the path names; raises `Wrong`."""
    row = await asked.inspector.ask(stats.run, asked.run_id)
    if row is None:
        raise Wrong(404, f"there is no run {asked.run_id}")
    return row


async def cancel_run(asked: Asked) -> Answer:
    """Ask for the end of a run, wait a moment, and say what became of it; with `force`, see to it."""
    force = asked.query.get("force", "false")
    if force not in ("true", "false"):
        raise Wrong(400, "force must be true or false")
    is_forced = force == "true"
    by = asked.word("by") or "admin"
    was_running = await asked.inspector.ask(steering.cancel, asked.run_id, by=by)
    row = await ended(asked, FORCE_GRACE if is_forced else CANCEL_WAIT) if was_running else await run_of(asked)
    was_ended = False
    if row["status"] == "running" and is_forced:
        was_ended = await asked.inspector.ask(steering.terminate, asked.run_id)
        row = await ended(asked, CANCEL_WAIT)
        if row["status"] == "running":  # nobody is there any more to say how it ended
            for lost in await asked.inspector.ask(steering.recover):
                tell_lost(lost["id"], lost["task"], lost["host"], lost["pid"])
                asked.metrics.recovered()
            row = await run_of(asked)
    why = explain.explain(row)
    return document(
        202 if row["status"] == "running" else 200,
        run_id=asked.run_id,
        task=row["task"],
        status=row["status"],
        code=why.code,
        explanation=why.sentence,
        was_running=was_running,
        connection_ended=was_ended,
    )


async def ended(asked: Asked, seconds: float) -> stats.Row:
    """The run when it has ended, or after `seconds`; no connection is kept meanwhile."""
    until = time.monotonic() + seconds
    while True:
        row = await run_of(asked)
        if row["status"] != "running" or time.monotonic() >= until:
            return row
        await asyncio.sleep(POLL)


async def pause_task(asked: Asked) -> Answer:
    """Have the calls of a task skipped from now on."""
    by, reason = asked.word("by") or "admin", asked.word("reason")
    return changed(asked, await asked.inspector.ask(steering.pause, asked.task, by=by, reason=reason))


async def resume_task(asked: Asked) -> Answer:
    """Let the calls of a task run again."""
    return changed(asked, await asked.inspector.ask(steering.resume, asked.task))


def changed(asked: Asked, row: stats.Row | None) -> Answer:
    """The row of a task that was changed; raises `Wrong` if there is none."""
    if row is None:
        raise Wrong(404, f"there is no task {shown(asked.task)}; one is known once a server with it was started")
    return document(200, **row)


async def list_jobs(asked: Asked) -> Answer:
    """Jobs, newest first, a page at a time."""
    limit = asked.number("limit", DEFAULT_LIMIT, LARGEST_LIMIT) or DEFAULT_LIMIT
    rows = await asked.inspector.ask(
        stats.list_jobs,
        task=asked.named("task"),
        queue=asked.named("queue"),
        status=asked.chosen("status", JOB_STATUSES),
        before=asked.number("before", None, LARGEST_ID),
        limit=limit,
    )
    return document(200, jobs=rows, next_before=rows[-1]["job_id"] if len(rows) == limit else None)


async def read_job(asked: Asked) -> Answer:
    """Everything about a job, with its attempts that did not complete."""
    return document(200, job=explain.job_document(await job_of(asked)))


async def job_of(asked: Asked) -> stats.Row:
    """The row of the job that the path names; raises `Wrong`."""
    row = await asked.inspector.ask(stats.job, asked.job_id)
    if row is None:
        raise Wrong(404, f"there is no job {asked.job_id}; it may have been pruned")
    return row


async def cancel_job(asked: Asked) -> Answer:
    """Cancel a job: at once if nobody works on it, else by its worker, for which this waits a moment."""
    by = asked.word("by") or "admin"
    outcome, row = await asked.inspector.ask(steering.cancel_job, asked.job_id, by=by)
    until = time.monotonic() + JOB_CANCEL_WAIT
    while outcome == "asked" and row is not None and row["finished_at"] is None and time.monotonic() < until:
        await asyncio.sleep(POLL)
        row = await job_of(asked)
    if row is None:
        raise Wrong(404, f"there is no job {asked.job_id}; it may have been pruned")
    why = explain.explain_job(row)
    return document(
        200 if row["finished_at"] is not None else 202,
        job_id=asked.job_id,
        task=row["task"],
        status=row["status"],
        is_too_late=outcome == "ended" or row["status"] in ("completed", "failed"),
        code=why.code,
        explanation=why.sentence,
    )


async def retry_job(asked: Asked) -> Answer:
    """Have a job that failed or was cancelled tried again, as the same job."""
    is_retried, row = await asked.inspector.ask(steering.retry_job, asked.job_id, max_attempts=asked.max_attempts)
    if row is None:
        raise Wrong(404, f"there is no job {asked.job_id}; it may have been pruned")
    if not is_retried:
        reason = f"the job is {row['status']}; only one that failed or was cancelled is retried"
        return plain(409, "conflict", reason=reason, jobId=asked.job_id, jobStatus=row["status"])
    return document(200, job_id=asked.job_id, task=row["task"], status=row["status"], max_attempts=row["max_attempts"])


async def retry_jobs(asked: Asked) -> Answer:
    """Have jobs that failed tried again, of one task or (`all=true`) of all; so many at most."""
    task = asked.named("task")
    if (task is None) == (asked.chosen("all", ("true",)) is None):
        raise Wrong(400, "say either task=.. or all=true")
    limit = asked.number("limit", RETRY_LIMIT, RETRY_LIMIT) or RETRY_LIMIT
    number = 0
    after: int | None = 0
    while after is not None and number < limit:
        ids, after = await asked.inspector.ask(
            steering.retry_failed, task=task, max_attempts=asked.max_attempts, limit=limit - number, after=after
        )
        number += len(ids)
    if not number and task is not None and not await asked.inspector.ask(stats.has_task, task):
        raise Wrong(404, f"there is no task {shown(task)} in this database, and no job of it")
    return document(200, task=task, retried=number, is_cut=number == limit)


async def list_workers(asked: Asked) -> Answer:
    """The workers, and what they serve."""
    return document(200, workers=await asked.inspector.ask(stats.workers))


async def list_locks(asked: Asked) -> Answer:
    """Who holds an advisory lock of this database."""
    rows = await asked.inspector.ask(stats.locks)
    return document(200, locks=rows, is_cut=len(rows) == stats.LOCKS_AT_ONCE)


async def read_metrics(asked: Asked) -> Answer:
    """What was counted here, and what the database says; without it, that it is away."""
    try:
        cluster = await asked.inspector.ask(stats.gauges)
    except Unavailable:
        cluster = None
    text, content_type = await asked.inspector.in_thread(asked.metrics.expose, cluster, asked.accept)
    return Answer(200, "ok", text, content_type=content_type.encode())


@dataclass(frozen=True, slots=True)
class Way:
    """One admin route: its path, its method, what it does, and what its query may have."""

    path: str
    method: str
    does: Callable[[Asked], Awaitable[Answer]]
    query: Sequence[str] = ()
    body: Sequence[str] = ()


WAYS = (
    Way("/admin/tasks", "GET", list_tasks),
    Way("/admin/tasks/{name}/pause", "POST", pause_task, body=("by", "reason")),
    Way("/admin/tasks/{name}/resume", "POST", resume_task),
    Way("/admin/runs", "GET", list_runs, query=("task", "status", "before", "limit")),
    Way("/admin/runs/{id}", "GET", read_run),
    Way("/admin/runs/{id}/cancel", "POST", cancel_run, query=("force",), body=("by",)),
    Way("/admin/jobs", "GET", list_jobs, query=("task", "queue", "status", "before", "limit")),
    Way("/admin/jobs/retry", "POST", retry_jobs, query=("task", "all", "limit")),
    Way("/admin/jobs/{id}", "GET", read_job),
    *(Way(f"{place}/{{id}}/cancel", "POST", cancel_job, body=("by",)) for place in ("/admin/jobs", "/jobs")),
    *(Way(f"{place}/{{id}}/retry", "POST", retry_job) for place in ("/admin/jobs", "/jobs")),
    Way("/admin/workers", "GET", list_workers),
    Way("/admin/locks", "GET", list_locks),
    Way("/metrics", "GET", read_metrics),
)


def endpoints(cron: "Cronlock") -> list[tuple[str, "AdminEndpoint"]]:
    """The admin routes by their paths, without and with a slash at the end; none if no admin secret is set.

    Raises `ConfigError` for a secret that will not do.
    """
    steer, read = cron.settings.require_admin_secrets()
    if not steer and not read:
        return []
    made = [AdminEndpoint(cron, way, Bearer((*steer, *read)), Bearer(steer)) for way in WAYS]
    return [(f"{endpoint.path}{slash}", endpoint) for endpoint in made for slash in ("", "/")]


class AdminEndpoint:
    """The ASGI application behind one admin route."""

    def __init__(self, cron: "Cronlock", way: Way, readers: Bearer, operators: Bearer) -> None:
        self._cron = cron
        self._way = way
        self._readers = readers
        self._operators = operators
        self._callers = Bearer(cron.settings.require_secrets())
        self._max_body = cron.settings.max_body
        self.path = way.path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self.answer(scope, receive)
        except Wrong as wrong:
            answer = wrong.answer
        except (PayloadError, TooLarge, Unavailable) as error:
            answer = refusals.of(error, self._cron.metrics)
        except CronlockError as error:
            answer = plain(503, "unavailable", [(b"retry-after", b"30")], reason="misconfigured", message=str(error))
        await answer.send(send, is_head=scope["method"] == "HEAD")

    async def answer(self, scope: Scope, receive: Receive) -> Answer:
        """The answer to one request; raises `Wrong`, `PayloadError`, `TooLarge` or `Unavailable`."""
        sent = authorization(scope)
        if (refusal := self._readers.refusal(sent)) is not None:
            if self._callers.refusal(sent) is None and self.path.startswith("/jobs/"):
                return plain(403, "forbidden", reason="this secret calls and enqueues; send CRONLOCK_ADMIN_SECRET")
            return refusals.unauthorized(refusal, scope, self._cron.metrics, "admin")
        way = self._way
        if scope["method"] != way.method:
            return plain(405, "method_not_allowed", [(b"allow", way.method.encode())])
        if way.method != "GET" and self._operators.refusal(sent) == MISMATCH:
            return plain(403, "forbidden", reason="this secret may only read; send CRONLOCK_ADMIN_SECRET")
        fields = dict(scope["headers"])
        query = known(jsontext.parse_query(scope["query_string"]), way.query, "query")
        process = await self._cron.open()
        asked = Asked(
            inspector=process.inspector,
            metrics=self._cron.metrics,
            max_attempts=self._cron.settings.max_attempts,
            path=scope["path_params"],
            query=query,
            body={},
            accept=fields.get(b"accept", b"").decode("latin-1"),
        )
        if way.method == "POST":
            require_json(fields)
            body = known(await read_object(fields, receive, self._max_body), way.body, "body")
            asked = replace(asked, body=body)
        return await way.does(asked)


def known(given: Mapping[str, Any], names: Sequence[str], place: str) -> Mapping[str, Any]:
    """`given`, if it has no other names than these; raises `Wrong`."""
    for name in given:
        if name not in names:
            allowed = f"it may have {', '.join(names)}" if names else "it may have nothing"
            raise Wrong(400, f"the {place} has {shown(name)}; {allowed}")
    return given
