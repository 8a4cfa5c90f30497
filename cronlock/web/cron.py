"""`/cron/{task}`: authenticate, look the task up, read the payload, run it.

The order is part of the contract: nothing about a task, a method or a body is looked at, and no connection
is taken, before the secret is right.
"""

import logging
from typing import TYPE_CHECKING

from starlette.types import Receive, Scope, Send

from cronlock import jsontext
from cronlock.errors import CronlockError, PayloadError, PayloadInvalid, Unavailable
from cronlock.outcome import Outcome
from cronlock.web import answers
from cronlock.web.answers import Answer, plain
from cronlock.web.auth import Bearer, authorization, report
from cronlock.web.body import TooLarge, read_object

if TYPE_CHECKING:
    from cronlock.app import Cronlock

log = logging.getLogger("cronlock.web")

METHODS = ("GET", "POST")
OWN_PARAMETERS = ("on_skip", "max", "seconds")
SKIP_STATUSES = {"200": 200, "409": 409, "503": 503}
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
        is_head = scope["method"] == "HEAD"
        try:
            answer = await self.answer(scope, receive)
        except Unavailable as error:
            self._cron.metrics.unavailable(error.reason)
            answer = answers.unavailable(error)
        except CronlockError as error:
            log.error("%s", error)
            self._cron.metrics.unavailable("misconfigured")
            answer = plain(503, "unavailable", [(b"retry-after", b"30")], reason="misconfigured")
        await answer.send(send, is_head=is_head)

    async def answer(self, scope: Scope, receive: Receive) -> Answer:
        """The answer to one request; raises `Unavailable`."""
        headers = scope["headers"]
        refusal = self._bearer.refusal(authorization(scope))
        if refusal is not None:
            report(refusal, scope)
            self._cron.metrics.unauthorized("cron", refusal)
            return answers.unauthorized(refusal)
        task = self._cron.tasks.find(scope["path_params"]["task"].removesuffix("/"))
        if task is None:
            return plain(404, "not_found")
        if scope["method"] not in METHODS:
            return plain(405, "method_not_allowed", [(b"allow", b"GET, POST")])
        fields = dict(headers)
        skip_status = task.skip_status
        try:
            given: dict[str, object] = {}
            if scope["query_string"] or b"content-length" in fields or b"content-type" in fields:
                query = jsontext.parse_query(scope["query_string"])
                if asked := query.get("on_skip"):
                    if asked not in SKIP_STATUSES:
                        return plain(400, "bad_request", reason="on_skip must be 200, 409 or 503")
                    skip_status = SKIP_STATUSES[asked]  # type: ignore[assignment]
                body = await read_object(fields, receive, self._max_body)
                own = {name: value for name, value in query.items() if name not in OWN_PARAMETERS}
                given = jsontext.merge(own, body)
            payload = task.validate(given)
        except PayloadError as error:
            return plain(400, "bad_request", reason=str(error))
        except TooLarge:
            return plain(413, "too_large", reason=f"the body is longer than {self._max_body} bytes")
        except PayloadInvalid as error:
            return answers.invalid(error)
        outcome: Outcome = await self._cron.start_call(task, payload, trigger="http", caller=recognise(fields))
        return answers.of(outcome, skip_status)


def recognise(fields: dict[bytes, bytes]) -> str | None:
    """Who seems to call, for information only: every one of these headers can be sent by anybody."""
    for name, caller in CALLERS:
        if name in fields:
            return caller
    agent = fields.get(b"user-agent", b"").split(b" ", 1)[0][:60]
    return agent.decode("ascii", "replace").replace("\0", "") or None
