"""Which errors are worth another attempt, and how long to wait for it.

The wait is exponential backoff with full jitter: anything between nothing and twice the last limit, up to a cap.
(Amazon Builders' Library, "Timeouts, retries and backoff with jitter".)
"""

import random
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from cronlock.errors import Cancel, IdempotencyKeyInUse, LockLost, Retry, Unavailable

BASE = 1.0
"""Seconds within which the second attempt begins."""
CAP = 3600.0
"""Seconds that no attempt waits longer for."""
LEAST = 0.05
"""Seconds that every attempt waits at least."""

MOST_DOUBLINGS = 62
"""After so many, any base that is worth the name is over any cap."""

TRANSIENT_STATES = ("08", "40", "53", "57")
"""SQLSTATE classes: connections, conflicts of transactions, resources, an operator's intervention.

(PostgreSQL manual, appendix A.)
"""
TRANSIENT_HTTP = frozenset({408, 425, 429, *range(500, 600)})


def delay(attempt: int, base: float = BASE, cap: float = CAP) -> float:
    """Seconds to wait after the failed `attempt`, which is counted from 1.

    Raises `ValueError` for a base or a cap that is negative or no number.
    """
    if not base >= 0 or not cap >= 0:
        raise ValueError("a base and a cap of retries are numbers of seconds, 0 or more")
    limit = min(cap, base * 2.0 ** min(max(0, attempt - 1), MOST_DOUBLINGS))
    return max(min(LEAST, cap), random.uniform(0, limit))  # noqa: S311 - jitter, not a secret


def is_transient(error: BaseException, retry_on: Sequence[type[BaseException]] | None = None) -> bool:
    """Whether the same call may succeed later.

    `retry_on`, if given, is a task's own list of exception types: those and no others, but for what cannot have been
    the task's fault: a conflict of transactions, a lost connection, a lost lease, a database that is not there.
    """
    if isinstance(error, Retry):
        return True
    if isinstance(error, (Cancel, SystemExit)):
        return False
    if isinstance(error, (IdempotencyKeyInUse, LockLost, Unavailable)):
        return True
    state = sqlstate(error)
    if state is not None and state[:2] in ("08", "40"):
        return True
    if retry_on is not None:
        return isinstance(error, tuple(retry_on))
    if state is not None:
        return state[:2] in TRANSIENT_STATES
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    if (status := http_status(error)) is not None:
        return status in TRANSIENT_HTTP
    return is_network(error) or is_broken(error)


def after(error: BaseException, attempt: int, base: float = BASE, cap: float = CAP) -> float:
    """Seconds to wait for the next attempt: what the error itself asks for, else `delay`."""
    if isinstance(error, Retry):
        return error.after
    asked = retry_after(error)
    return delay(attempt, base, cap) if asked is None else min(max(asked, LEAST), cap)


def sqlstate(error: BaseException) -> str | None:
    """PostgreSQL's code in an error of psycopg or asyncpg, or in one that SQLAlchemy wrapped."""
    for one in (error, getattr(error, "orig", None)):
        state = getattr(one, "sqlstate", None)
        if isinstance(state, str) and len(state) == 5:
            return state
    return None


def http_status(error: BaseException) -> int | None:
    """The status of the answer in an error of httpx, requests, aiohttp or urllib; None for any other error."""
    response: Any = getattr(error, "response", None)
    for one in (getattr(response, "status_code", None), getattr(error, "status", None), getattr(error, "code", None)):
        if isinstance(one, int) and not isinstance(one, bool) and 100 <= one <= 599:
            return int(one)
    return None


def retry_after(error: BaseException) -> float | None:
    """The seconds of a Retry-After header in such an error; a date there is not read."""
    response: Any = getattr(error, "response", None)
    headers: Any = getattr(response, "headers", None) or getattr(error, "headers", None)
    try:
        return float(timedelta(seconds=int(headers["retry-after"])).total_seconds())
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def is_network(error: BaseException) -> bool:
    """Whether it is a client's error of its transport: httpx's, requests', aiohttp's, urllib3's."""
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}
    return not names.isdisjoint(NETWORK_ERRORS)


NETWORK_ERRORS = {
    "httpx.TransportError",
    "httpx2.TransportError",
    "requests.ConnectionError",
    "requests.Timeout",
    "aiohttp.ClientConnectionError",
    "urllib3.HTTPError",
    "urllib.URLError",
    "sqlalchemy.TimeoutError",
}


def is_broken(error: BaseException) -> bool:
    """Whether a driver says that its connection broke, which has no SQLSTATE."""
    return any(
        getattr(one, "sqlstate", "") is None
        and any(kind.__name__ in ("OperationalError", "InterfaceError") for kind in type(one).__mro__)
        for one in (error, getattr(error, "orig", None))
    )
