"""What is answered: status, headers and a JSON body below 4 KB for everything that can happen."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from starlette.types import Send

from cronlock.enqueue import Enqueued
from cronlock.errors import IdempotencyKeyInUse, IdempotencyKeyReused, PayloadInvalid, Unavailable
from cronlock.explain import code
from cronlock.jsontext import clip
from cronlock.outcome import Outcome, dump
from cronlock.web.auth import CHALLENGE

RESULT_LIMIT = 3000
FIELDS_LIMIT = 3000
FIELD_LIMIT = 200
STATUS = {"completed": 200, "failed": 500, "timed_out": 504, "cancelled": 500, "lost": 500}


@dataclass(slots=True)
class Answer:
    """An HTTP answer; `headers` are those beyond the ones every answer has."""

    code: int
    status: str
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()
    content_type: bytes = b"application/json"

    async def send(self, send: Send, *, is_head: bool = False) -> None:
        """Send it; an answer to HEAD has no body."""
        headers = [
            (b"content-type", self.content_type),
            (b"content-length", b"%d" % len(self.body)),
            (b"cache-control", b"no-store"),
            (b"cronlock-status", self.status.encode()),
            *self.headers,
        ]
        await send({"type": "http.response.start", "status": self.code, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if is_head else self.body})


def plain(code: int, status: str, headers: Iterable[tuple[bytes, bytes]] = (), **facts: Any) -> Answer:
    """An answer about a call that became no run."""
    return Answer(code, status, dump({"status": status, **facts}).encode(), tuple(headers))


def unauthorized(refusal: str) -> Answer:
    """No secret, or none of those that open this route; only the header tells which."""
    return plain(401, "unauthorized", [(b"www-authenticate", CHALLENGE[refusal])])


def invalid(error: PayloadInvalid) -> Answer:
    """The fields that are wrong, as many as an answer has room for; names come from the caller and are cut."""
    fields: list[dict[str, str]] = []
    for problem in error.fields:
        cut = {name: clip(str(value), FIELD_LIMIT) for name, value in problem.items()}
        if len(dump([*fields, cut]).encode()) > FIELDS_LIMIT:
            break
        fields.append(cut)
    return plain(422, "unprocessable", fields=fields)


def enqueued(made: Enqueued, **facts: Any) -> Answer:
    """A job was made, or had been made by the same key or occurrence before."""
    return plain(202, "queued", **facts, jobId=made.job_id, duplicate=made.is_duplicate)


def reused(error: IdempotencyKeyReused) -> Answer:
    """The key is another payload's."""
    return plain(422, "unprocessable", reason=clip(str(error), FIELD_LIMIT * 3), jobId=error.job_id)


def in_use(error: IdempotencyKeyInUse) -> Answer:
    """Nobody can say yet whose the key is."""
    headers = [(b"retry-after", b"%d" % error.retry_after)]
    return plain(409, "conflict", headers, reason=clip(str(error), FIELD_LIMIT * 3))


def unavailable(error: Unavailable) -> Answer:
    """Nothing was run, or it is not known how a run ended; come again."""
    headers = [(b"retry-after", str(error.retry_after).encode())]
    facts: dict[str, Any] = {"reason": error.reason, "message": str(error)}
    if error.run_id is not None:
        headers.append((b"cronlock-run-id", str(error.run_id).encode()))
        facts["runId"] = error.run_id
    return plain(503, "unavailable", headers, **facts)


def of(outcome: Outcome, skip_status: int) -> Answer:
    """The answer of a call that became a run, or was skipped."""
    headers = [(b"cronlock-run-id", b"%d" % outcome.run_id)]
    if outcome.status == "skipped":
        return skipped(outcome, skip_status, headers)
    body: dict[str, Any] = {
        "status": outcome.status,
        "code": code(outcome),
        "task": outcome.task,
        "runId": outcome.run_id,
        "durationMs": outcome.duration_ms,
    }
    http_status = 503 if outcome.is_retry else STATUS[outcome.status]
    if outcome.is_retry:
        headers.append((b"retry-after", str(outcome.retry_after).encode()))
    if outcome.failure is not None:
        body["error"] = {"type": outcome.failure.type, "message": outcome.failure.message}
    text = dump(body)
    if outcome.status == "completed":
        text = f'{text[:-1]},"result":{shown(outcome.result)}}}'
    return Answer(http_status, outcome.status, text.encode(), tuple(headers))


def skipped(outcome: Outcome, http_status: int, headers: list[tuple[bytes, bytes]]) -> Answer:
    """The answer of a skip; there may be thousands a second, and all but the holder is safe in JSON as it is."""
    if http_status != 200:
        headers.append((b"retry-after", str(outcome.retry_after).encode()))
    holder = f',"holder":{outcome.holder.json}' if outcome.holder is not None else ""
    text = (
        f'{{"status":"skipped","code":"{outcome.reason}","reason":"{outcome.reason}","task":"{outcome.task}",'
        f'"runId":{outcome.run_id},"durationMs":{outcome.duration_ms}{holder}}}'
    )
    return Answer(http_status, "skipped", text.encode(), tuple(headers))


def shown(result: str | None) -> str:
    """A result as the answer shows it: whole if it is short, else a mark that says how long it is."""
    if result is None:
        return "null"
    if len(result) <= RESULT_LIMIT:
        return result
    return dump({"cronlock": "truncated", "size": len(result), "head": result[:500]})
