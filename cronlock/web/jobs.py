"""`/jobs/{task}` makes a job of a task, `/jobs/{id}` says what became of one.

The order of checks is that of the cron route (`web.cron`): before the secret is right nothing is looked at. An admin
secret opens the second of them, and sees more.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.types import Receive, Scope, Send

from cronlock import documents, enqueue, explain, jsontext, stats
from cronlock.errors import CronlockError, PayloadError
from cronlock.tasks import MOST_PRIORITY, Task
from cronlock.units import parse_moment
from cronlock.web import answers, refusals
from cronlock.web.answers import Answer, plain
from cronlock.web.auth import Bearer, authorization
from cronlock.web.body import TooLarge, read_object, require_json
from cronlock.web.cron import idempotency_key

if TYPE_CHECKING:
    from cronlock.app import Cronlock

OPTIONS = ("delay", "run_at", "priority")
LARGEST_ID = 2**63 - 1


class JobsEndpoint:
    """The ASGI application behind `/jobs/{name}`."""

    def __init__(self, cron: "Cronlock") -> None:
        self._cron = cron
        secrets, admins = cron.settings.require_secrets(), cron.settings.require_admin_secrets()
        self._enqueuers = Bearer(secrets)
        self._admins = Bearer([*admins[0], *admins[1]])
        self._max_body = cron.settings.max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self.answer(scope, receive)
        except (CronlockError, TooLarge) as error:
            answer = refusals.of(error, self._cron.metrics)
        await answer.send(send, is_head=scope["method"] == "HEAD")

    async def answer(self, scope: Scope, receive: Receive) -> Answer:
        """The answer to one request; raises what `__call__` answers."""
        sent = authorization(scope)
        is_admin = self._admins.refusal(sent) is None
        if not is_admin and (refusal := self._enqueuers.refusal(sent)) is not None:
            return refusals.unauthorized(refusal, scope, self._cron.metrics, "cron")
        name, method = scope["path_params"]["name"], scope["method"]
        task, job_id = self._cron.tasks.find(name), number(name)
        if task is None and job_id is None:
            return plain(404, "not_found")
        allowed = [*(["GET"] if job_id is not None else []), *(["POST"] if task is not None else [])]
        if method == "POST" and task is not None:
            if is_admin:
                return plain(403, "forbidden", reason="this secret reads and steers; to enqueue, send CRON_SECRET")
            return await self._enqueue(task, scope, receive)
        if method == "GET" and job_id is not None:
            return await self._read(job_id, is_admin)
        if method == "POST":
            return plain(404, "not_found")
        return plain(405, "method_not_allowed", [(b"allow", ", ".join(allowed).encode())])

    async def _enqueue(self, task: Task, scope: Scope, receive: Receive) -> Answer:
        fields = dict(scope["headers"])
        options = options_of(jsontext.parse_query(scope["query_string"]))
        require_json(fields)
        payload = await read_object(fields, receive, self._max_body)
        key = idempotency_key(scope["headers"])
        wanted = enqueue.order(task, [payload], trigger="http", keys=None if key is None else [key], **options)
        return answers.enqueued(await self._cron.start_enqueue(wanted))

    async def _read(self, job_id: int, is_admin: bool) -> Answer:
        process = await self._cron.open()
        row = await (process.inspector.ask(stats.job, job_id) if is_admin else process.polls.job(job_id))
        if row is None:
            return plain(404, "not_found", reason=f"there is no job {job_id}; it may have been pruned")
        told = explain.job_document(row) if is_admin else row
        return Answer(200, row["status"], documents.dump(told).encode())


def number(text: str) -> int | None:
    """The number of a job; None for any other text."""
    if not (text.isascii() and text.isdigit() and len(text) <= 19) or not 1 <= int(text) <= LARGEST_ID:
        return None
    return int(text)


def options_of(query: Mapping[str, str]) -> dict[str, Any]:
    """The options of an enqueue; raises `PayloadError` for one that is wrong or none."""
    for name in query:
        if name not in OPTIONS:
            raise PayloadError(
                f"the query has {ascii(name)[:60]}; it may have {', '.join(OPTIONS)}. The payload is the body's"
            )
    options: dict[str, Any] = {}
    if (delay := query.get("delay")) is not None:
        options["delay"] = delay
    if (moment := query.get("run_at")) is not None:
        try:
            options["run_at"] = parse_moment(moment)
        except ValueError as error:
            raise PayloadError(f"run_at: {error} (a + in a query is written %2B)") from None
    if (priority := query.get("priority")) is not None:
        digits = priority.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 4):
            raise PayloadError(f"priority must be a whole number from -{MOST_PRIORITY} to {MOST_PRIORITY}")
        options["priority"] = int(priority)
    return options
