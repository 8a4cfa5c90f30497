"""`/cron/{task}`: authenticate, look the task up, read the payload, run it.

The order is part of the contract: nothing about a task, a method or a body is looked at, and no connection
is taken, before the secret is right.
"""

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from starlette.types import Receive, Scope, Send

from cronlock import jsontext
from cronlock.enqueue import Enqueued
from cronlock.errors import CronlockError, PayloadError
from cronlock.keys import occurrence_fault
from cronlock.outcome import Outcome
from cronlock.tasks import SkipStatus
from cronlock.web import answers, refusals
from cronlock.web.answers import Answer, plain
from cronlock.web.auth import Bearer, authorization
from cronlock.web.body import TooLarge, read_object
from cronlock.web.work import WORK, work

if TYPE_CHECKING:
    from cronlock.app import Cronlock

METHODS = ("GET", "POST")
OWN_PARAMETERS = ("on_skip", "max", "seconds")
SKIP_STATUSES: dict[str, SkipStatus] = {"200": 200, "409": 409, "503": 503}
ESCAPED = re.compile(rb'\\(["\\])')
CALLERS = (
    (b"x-vercel-cron-schedule", "vercel"),
    (b"upstash-message-id", "qstash"),
    (b"x-cloudscheduler-jobname", "cloud-scheduler"),
)


class CronEndpoint:
    """The ASGI application behind `/cron/{task}`."""

    def __init__(self, cron: "Cronlock") -> None:
        self._cron = cron
        self._bearer = Bearer(cron.settings.require_secrets())
        self._max_body = cron.settings.max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self.answer(scope, receive)
        except (CronlockError, TooLarge) as error:
            answer = refusals.of(error, self._cron.metrics)
        await answer.send(send, is_head=scope["method"] == "HEAD")

    async def answer(self, scope: Scope, receive: Receive) -> Answer:
        """The answer to one request; raises what `__call__` answers."""
        headers = scope["headers"]
        refusal = self._bearer.refusal(authorization(scope))
        if refusal is not None:
            return refusals.unauthorized(refusal, scope, self._cron.metrics, "cron")
        name = scope["path_params"]["task"].removesuffix("/")
        task = self._cron.tasks.find(name)
        if task is None and name != WORK:
            return plain(404, "not_found")
        if scope["method"] not in METHODS:
            return plain(405, "method_not_allowed", [(b"allow", b"GET, POST")])
        if task is None:
            return await work(self._cron, scope)
        fields = dict(headers)
        skip_status = task.skip_status
        given: dict[str, object] = {}
        if scope["query_string"] or b"content-length" in fields or b"content-type" in fields:
            query = jsontext.parse_query(scope["query_string"])
            if asked := query.get("on_skip"):
                if asked not in SKIP_STATUSES:
                    raise PayloadError("on_skip must be 200, 409 or 503")
                skip_status = SKIP_STATUSES[asked]
            body = await read_object(fields, receive, self._max_body)
            own = {name: value for name, value in query.items() if name not in OWN_PARAMETERS}
            given = jsontext.merge(own, body)
        payload = task.validate(given)
        occurrence, scheduled_for = occurrence_of(headers, fields)
        if task.is_queued:
            made = await self._cron.start_queued(
                task, given, caller=recognise(fields), occurrence=occurrence, scheduled_for=scheduled_for
            )
            if isinstance(made, Enqueued):
                return answers.enqueued(made, task=task.name)
            return answers.of(made, skip_status)
        outcome: Outcome = await self._cron.start_call(
            task, payload, trigger="http", caller=recognise(fields), occurrence=occurrence, scheduled_for=scheduled_for
        )
        return answers.of(outcome, skip_status)


def occurrence_of(headers: list[tuple[bytes, bytes]], fields: dict[bytes, bytes]) -> tuple[str | None, str | None]:
    """The occurrence that a request names, and the time it was scheduled for (RFC 3339), each None if it names none.

    `Idempotency-Key` (draft-ietf-httpapi-idempotency-key-header: a quoted string; a bare one is taken too), else
    QStash's message id, the same for every delivery of a message, else Cloud Scheduler's job and time.

    Raises `PayloadError` for a key that is empty, too long or not visible ASCII, and for two different ones.
    """
    time = fields.get(b"x-cloudscheduler-scheduletime")
    scheduled_for = None if time is None else moment(time)
    if b"idempotency-key" in fields:
        return idempotency_key(headers), scheduled_for
    if message := fields.get(b"upstash-message-id"):
        return checked(message, "Upstash-Message-Id"), scheduled_for
    job = fields.get(b"x-cloudscheduler-jobname")
    if job and scheduled_for:
        return checked(job + b"/" + scheduled_for.encode(), "X-CloudScheduler-JobName"), scheduled_for
    return None, scheduled_for


def idempotency_key(headers: list[tuple[bytes, bytes]]) -> str | None:
    """The `Idempotency-Key` of a request, if it has one; raises `PayloadError` as `occurrence_of` does."""
    keys = {value.strip() for name, value in headers if name == b"idempotency-key"}
    if len(keys) > 1:
        raise PayloadError("there are two Idempotency-Key headers with different values")
    return checked(unquoted(keys.pop()), "Idempotency-Key") if keys else None


def unquoted(value: bytes) -> bytes:
    """A structured-field string without its quotes (RFC 9651, section 3.3.3); a bare value as it is."""
    if len(value) < 2 or not value.startswith(b'"') or not value.endswith(b'"'):
        return value
    return ESCAPED.sub(rb"\1", value[1:-1])


def checked(value: bytes, name: str) -> str:
    """The text of an occurrence; raises `PayloadError` naming the header it came in."""
    text = value.decode("ascii", "replace")
    if not text.isascii():
        raise PayloadError(f"{name} has characters that are not ASCII")
    if fault := occurrence_fault(text):
        raise PayloadError(f"{name} {fault}")
    return text


def moment(value: bytes) -> str | None:
    """A time that was sent with its zone, in UTC; None for anything else, since it is for information only."""
    try:
        found = datetime.fromisoformat(value.decode("ascii"))
        is_readable = found.tzinfo is not None and 1 < found.year < 9999  # in every time zone
        return found.astimezone(UTC).isoformat() if is_readable else None
    except (ValueError, OverflowError):
        return None


def recognise(fields: dict[bytes, bytes]) -> str | None:
    """Who seems to call, for information only: every one of these headers can be sent by anybody."""
    for name, caller in CALLERS:
        if name in fields:
            return caller
    agent = fields.get(b"user-agent", b"").split(b" ", 1)[0][:60]
    return agent.decode("ascii", "replace").replace("\0", "") or None
