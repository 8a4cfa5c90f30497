"""Durations, sizes and times as people write them: "120s", "7d", "64KiB"; how they are read, written and limited."""

import math
import re
from datetime import datetime, timedelta
from typing import Annotated

from pydantic import BeforeValidator

SHORTEST_DURATION = timedelta(milliseconds=1)  # shorter is 0 ms to PostgreSQL, which means "no limit"
LONGEST_TIMEOUT = timedelta(days=24)  # PostgreSQL's timeouts are milliseconds in 31 bits: 24.8 days
SHORTEST_PING, LONGEST_PING = timedelta(milliseconds=100), timedelta(hours=1)
SHORTEST_LEASE = SHORTEST_GRACE = timedelta(seconds=2)
LONGEST_RETENTION = timedelta(days=3650)
LARGEST_BODY = 128 * 1024**2  # jsonb holds strings below 256 MiB

DURATION = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?(ms|s|m|h|d|)", re.ASCII)
UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "": 1.0, "ms": 0.001}
SIZE = re.compile(r"([0-9]{1,12}) ?(b|kb|mb|gb|kib|mib|gib|)", re.ASCII | re.IGNORECASE)
SIZES = {"": 1, "b": 1, "kb": 1000, "mb": 1000**2, "gb": 1000**3, "kib": 1024, "mib": 1024**2, "gib": 1024**3}


def parse_duration(value: object, *, longest: timedelta = LONGEST_TIMEOUT) -> timedelta:
    """A span of time from "120s", "2m", "1h", "7d", "500ms", a number of seconds (or one as text) or a
    timedelta.

    Raises ValueError, with an example, for anything else, for less than a millisecond and for more than
    `longest`.
    """
    if isinstance(value, timedelta):
        span = value
    else:
        seconds = _seconds(value)
        if seconds is None:
            raise ValueError(f"{shown(value)} is not a duration; write it as '120s', '2m', '1h', '7d' or '500ms'")
        span = timedelta(seconds=max(0, min(seconds, longest.total_seconds() + 1)))
    if span < SHORTEST_DURATION:
        raise ValueError(f"{shown(value)} is not a duration of at least 1ms, such as '120s'")
    if span > longest:
        raise ValueError(f"{shown(value)} is longer than {format_duration(longest)}; write it as '120s' or '7d'")
    return span


def format_duration(span: timedelta) -> str:
    """As `parse_duration` reads it, in the largest unit that leaves no rest."""
    milliseconds, rest = divmod(span, timedelta(milliseconds=1))
    if rest:
        return f"{span / timedelta(milliseconds=1):.3f}ms"
    for unit, length in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if milliseconds % length == 0:
            return f"{milliseconds // length}{unit}"
    return f"{milliseconds}ms"


def parse_size(value: object) -> int:
    """A number of bytes from 1000, "1000", "64KiB", "1MiB" or "1MB"; raises ValueError, with an example."""
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        found = SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
        if found is None:
            raise ValueError(f"{shown(value)} is not a size; write it as '1MiB', '64KiB' or '1000'")
        size = int(found[1]) * SIZES[found[2].lower()]
    if not 1 <= size <= LARGEST_BODY:
        raise ValueError(f"{shown(value)} is not a size from 1 byte to {format_size(LARGEST_BODY)}, such as '1MiB'")
    return size


def format_size(size: int) -> str:
    """As `parse_size` reads it."""
    for unit in ("GiB", "MiB", "KiB"):
        if size and not size % SIZES[unit.lower()]:
            return f"{size // SIZES[unit.lower()]}{unit}"
    return str(size)


def parse_moment(text: str) -> datetime:
    """Read an ISO 8601 time with its zone; raises ValueError."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{shown(text)} is no time such as 2026-12-24T18:00:00Z") from None
    if moment.tzinfo is None:
        raise ValueError(f"{shown(text)} has no time zone; write it as 2026-12-24T18:00:00Z")
    return moment


def shown(value: object) -> str:
    """What was given, in a message: in ASCII, and not at any length."""
    text = ascii(value) if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:59]}.."


def _seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if isinstance(value, str):
        found = DURATION.fullmatch(value.strip())
        return float(found[1]) * UNITS[found[2]] if found else None
    try:
        seconds = float(value)
    except OverflowError:
        return None
    return seconds if math.isfinite(seconds) else None


def _retention(value: object) -> timedelta:
    return parse_duration(value, longest=LONGEST_RETENTION)


def _ping(value: object) -> timedelta:
    return _at_least(SHORTEST_PING, value, "a ping")


def _lease(value: object) -> timedelta:
    return _at_least(SHORTEST_LEASE, value, "a lease, which is renewed three times while it lasts")


def _grace(value: object) -> timedelta:
    return _at_least(SHORTEST_GRACE, value, "a worker to take a lost connection up again")


def _at_least(shortest: timedelta, value: object, what: str) -> timedelta:
    span = parse_duration(value, longest=LONGEST_PING)
    if span < shortest:
        raise ValueError(f"{shown(value)} is too short for {what}; write at least '{format_duration(shortest)}'")
    return span


Duration = Annotated[timedelta, BeforeValidator(parse_duration)]
Ping = Annotated[timedelta, BeforeValidator(_ping)]
Lease = Annotated[timedelta, BeforeValidator(_lease)]
Grace = Annotated[timedelta, BeforeValidator(_grace)]
Retention = Annotated[timedelta, BeforeValidator(_retention)]
Size = Annotated[int, BeforeValidator(parse_size)]
