"""Cron expressions: five fields, or @hourly and its kind, in a time zone. Pure: nothing here reads a clock.

cronsim reads the fields and finds the ticks of a clock on the wall; which moments those are is decided here.

What the fields mean:

- minute 0-59, hour 0-23, day of month 1-31, month 1-12 or JAN-DEC, day of week 0-7 or SUN-SAT (0 and 7 are
  Sunday).
- `5/15` begins at 5 and goes to the end of the field: 5, 20, 35, 50. `*/45` in the minutes is 0 and 45 of every
  hour, not every 45 minutes; `Schedule.notes` says so.
- `L` is the last day of the month, `LW` its last weekday, `5L` its last Friday, `1#2` its second Monday.
- If both day of month and day of week are given, either is enough; if one of them begins with `*`, both must fit
  (as in Debian's cron, man 5 crontab).

When the clocks change: a tick in the hour that is left out comes once, right after it; a tick in the hour that
comes twice comes once, the first time. Expressions that name every hour (`30 * * * *`, `*/15 * * * *`) follow the
hours that really pass: both of the repeated one, none of the missing one.
"""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from difflib import get_close_matches
from functools import lru_cache
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from cronlock.errors import ConfigError

log = logging.getLogger("cronlock.schedule")

FIELDS = ("minute", "hour", "day of month", "month", "day of week")
RANGES = ("0-59", "0-23", "1-31, L or LW", "1-12 or JAN-DEC", "0-7 or SUN-SAT")
WHOLES = {0: ("hour", 60), 1: ("day", 24)}
NICKNAMES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
EXAMPLE = "'*/5 * * * *' or '@hourly'"
ZONE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_+-]*(?:/[A-Za-z0-9_+-]+)*", re.ASCII)
NOT_ZONES = {"localtime", "posixrules", "Factory"}  # files beside the zones: this machine's own, or none
PROBE = datetime(2024, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A cron expression in a time zone, checked.

    `expression` and `timezone` are as they were given, `fields` the five fields in capitals, `notes`
    sentences on what the expression means where that is easily misread.
    """

    expression: str
    timezone: str
    fields: tuple[str, ...]
    zone: tzinfo
    is_hourly: bool
    notes: tuple[str, ...]

    @classmethod
    def parse(cls, expression: str, timezone: str = "UTC") -> "Schedule":
        """Read an expression; raises `ConfigError` naming the field and its value, or the time zone."""
        fields = _fields(expression)
        is_hourly = len(_values(1, fields[1])) == 24
        schedule = cls(expression, timezone, fields, _zone(timezone), is_hourly, tuple(_notes(fields)))
        if schedule._find(PROBE) is None:
            raise ConfigError(f"schedule {_shown(expression)} never comes: there is no such day")
        return schedule

    def next(self, after: datetime) -> datetime:
        """The first tick after `after`, in UTC.

        UTC because two times of one zone compare by the clock on the wall, which goes back once a year; show it
        with `.astimezone(schedule.zone)`. Raises ValueError if `after` has no time zone, or if no tick is left
        before the year 9999.
        """
        if after.tzinfo is None:
            raise ValueError("Schedule.next needs a datetime with a time zone")
        tick = self._find(after)
        if tick is None:
            raise ValueError(f"schedule {_shown(self.expression)} has no tick after {after.isoformat()}")
        return tick

    def _find(self, after: datetime) -> datetime | None:
        """The earliest moment after `after` at which the wall clock shows a tick for the first or second time."""
        again: datetime | None = None
        try:
            for tick in self._wall_ticks(after.astimezone(self.zone)):
                first, second = self._moments(tick)
                if again is None and second is not None and second > after:
                    again = second
                if first is not None and first > after:
                    return min(first, again or first)
        except OverflowError:
            pass
        return again

    def _wall_ticks(self, local: datetime) -> Iterator[datetime]:
        """Ticks of the wall clock, without a zone, from `local` on, or from where it will be put back to."""
        put_back = max(_offset(local, 0) - _offset(local, 1), timedelta())
        return CronSim(" ".join(self.fields), local.replace(tzinfo=None) - put_back)

    def _moments(self, tick: datetime) -> tuple[datetime | None, datetime | None]:
        """When the wall clock shows `tick` for the first and for the second time, as far as this schedule counts it."""
        first, second = (tick.replace(tzinfo=self.zone, fold=fold).astimezone(UTC) for fold in (0, 1))
        if first > second:  # never shown: read by the offset before the gap it is later than by the one after it
            return (None if self.is_hourly else _gap_end(second, first, self.zone)), None
        return first, second if self.is_hourly else None


def check(expression: str, timezone: str = "UTC") -> None:
    """Raise `ConfigError` if the expression or the zone is wrong; warn in the log of what is easily misread."""
    for note in Schedule.parse(expression, timezone).notes:
        log.warning("schedule %s: %s", _shown(expression), note)


def _fields(expression: str) -> tuple[str, ...]:
    if not isinstance(expression, str):
        raise ConfigError(f"a schedule is text, such as {EXAMPLE}, not {type(expression).__name__}")
    if not expression.isascii() or not expression.replace("\t", " ").isprintable():
        raise ConfigError(f"schedule {_shown(expression)} has characters that no cron expression has")
    text = expression.strip()
    if text.startswith("@"):
        if text.lower() not in NICKNAMES:
            raise ConfigError(f"schedule {_shown(expression)} is none of {', '.join(NICKNAMES)}")
        text = NICKNAMES[text.lower()]
    fields = tuple(text.upper().split())
    if len(fields) != 5:
        raise ConfigError(
            f"schedule {_shown(expression)} needs 5 fields ({', '.join(FIELDS)}) and has {len(fields)};"
            f" write it as {EXAMPLE}"
        )
    for index, field in enumerate(fields):
        if not _is_readable(_alone(index, field)):
            raise ConfigError(
                f"schedule {_shown(expression)}: {_shown(field)} is not a {FIELDS[index]} ({RANGES[index]};"
                " also lists 1,2, rising ranges 1-5, and steps */5 of at least 1)"
            )
    if not _is_readable(fields):
        raise ConfigError(f"schedule {_shown(expression)} never comes: no such day of month {_shown(fields[2])}")
    return fields


def _is_readable(fields: tuple[str, ...]) -> bool:
    try:
        CronSim(" ".join(fields), PROBE)
    # `5L/2` fails an assertion of cronsim's, a step of 5,000 digits Python's int()
    except (CronSimError, AssertionError, TypeError, ValueError):
        return False
    return True


def _notes(fields: tuple[str, ...]) -> Iterator[str]:
    """What a step, or two kinds of days, really mean where that is easily misread."""
    for index, field in enumerate(fields):
        for part in field.split(","):
            step = int(part.partition("/")[2] or 1)
            values = _values(index, part) if step > 1 else []
            if len(values) == 1:
                yield f"{part!r} is only {FIELDS[index]} {values[0]}: the step is longer than the range"
            elif part.startswith("*/") and index in WHOLES and WHOLES[index][1] % step:
                name, listed = FIELDS[index], ", ".join(map(str, values))
                yield f"{part!r} is {name} {listed} of every {WHOLES[index][0]}, not every {step} {name}s"
    if not fields[2].startswith("*") and not fields[4].startswith("*"):
        yield f"day of month {fields[2]} and day of week {fields[4]} need not both fit: either is enough"


def _values(index: int, part: str) -> list[int]:
    """The numbers that one part of a field stands for, in order."""
    read = CronSim(" ".join(_alone(index, part)), PROBE)
    found = (read.minutes, read.hours, read.days, read.months, read.weekdays)[index]
    return sorted(value for value in found if isinstance(value, int) and value >= 0)


def _alone(index: int, field: str) -> tuple[str, ...]:
    return ("*",) * index + (field,) + ("*",) * (4 - index)


def _zone(name: str) -> tzinfo:
    if name == "UTC":
        return UTC
    if not isinstance(name, str) or not ZONE_NAME.fullmatch(name):
        raise ConfigError(
            f"timezone {_shown(name)} is no name of a time zone; give one such as 'Europe/Berlin' or 'UTC'"
        )
    if name in NOT_ZONES or name.partition("/")[0] in ("posix", "right"):
        raise ConfigError(
            f"timezone {_shown(name)} means another thing on every machine; give one such as 'Europe/Berlin'"
        )
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, LookupError):
        near = get_close_matches(name, sorted(_zone_names()), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "is the package tzdata installed?"
        raise ConfigError(f"there is no time zone {_shown(name)}; {hint}") from None


def _offset(local: datetime, fold: int) -> timedelta:
    return local.replace(fold=fold).utcoffset() or timedelta()


def _gap_end(before: datetime, after: datetime, zone: tzinfo) -> datetime:
    """The moment between the two, both in UTC, at which the clocks of the zone are put forward."""
    old = before.astimezone(zone).utcoffset()
    while after - before > timedelta(seconds=1):
        middle = (before + (after - before) / 2).replace(microsecond=0)
        if middle.astimezone(zone).utcoffset() == old:
            before = middle
        else:
            after = middle
    return after


@lru_cache(maxsize=1)
def _zone_names() -> frozenset[str]:
    return frozenset(available_timezones())


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:79]}.."
