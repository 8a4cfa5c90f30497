"""What is answered where a request was refused: for its secret, for what it holds, or for what cannot be done now."""

import logging

from starlette.types import Scope

from cronlock.errors import (
    CronlockError,
    IdempotencyKeyInUse,
    IdempotencyKeyReused,
    PayloadError,
    PayloadInvalid,
    Unavailable,
)
from cronlock.metrics import Metrics
from cronlock.web import answers
from cronlock.web.answers import Answer, plain
from cronlock.web.auth import report
from cronlock.web.body import TooLarge

log = logging.getLogger("cronlock.web")


def unauthorized(refusal: str, scope: Scope, metrics: Metrics, route: str) -> Answer:
    """The secret did not open the route, which is `cron` or `admin` to the metrics; logged and counted."""
    report(refusal, scope)
    metrics.unauthorized(route, refusal)
    return answers.unauthorized(refusal)


def of(error: CronlockError | TooLarge, metrics: Metrics) -> Answer:
    """The answer that an error means. That the server cannot work is counted, and logged if it is set up wrong."""
    match error:
        case Unavailable():
            metrics.unavailable(error.reason)
            return answers.unavailable(error)
        case PayloadInvalid():
            return answers.invalid(error)
        case PayloadError():
            return plain(400, "bad_request", reason=str(error))
        case TooLarge():
            return plain(413, "too_large", reason=str(error))
        case IdempotencyKeyReused():
            return answers.reused(error)
        case IdempotencyKeyInUse():
            return answers.in_use(error)
    log.error("%s", error)
    metrics.unavailable("misconfigured")
    return plain(503, "unavailable", [(b"retry-after", b"30")], reason="misconfigured")
