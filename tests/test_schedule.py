"""Cron expressions, time zones, and the days on which clocks change."""

import logging
import random
import sys
import zoneinfo
from datetime import UTC, date, datetime, time, timedelta
from functools import cache
from zoneinfo import ZoneInfo

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cronlock.errors import ConfigError
from cronlock.schedule import Schedule, check

ZONES = sorted(zoneinfo.available_timezones() - {"Factory", "localtime", "posixrules"})
MINUTE = timedelta(minutes=1)


def ticks(expression: str, timezone: str, after: datetime, count: int) -> list[str]:
    """The next ticks as the wall clock of the zone shows them."""
    schedule = Schedule.parse(expression, timezone)
    found = []
    for _ in range(count):
        after = schedule.next(after)
        found.append(after.astimezone(schedule.zone).strftime("%d %H:%M %z"))
    return found


def refusal(expression: str, timezone: str = "UTC") -> str:
    with pytest.raises(ConfigError) as caught:
        Schedule.parse(expression, timezone)
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    return str(caught.value)


@pytest.mark.parametrize(
    ("expression", "field", "value"),
    [
        ("*/0 * * * *", "minute", "*/0"),
        ("5-5/0 * * * *", "minute", "5-5/0"),
        ("60 * * * *", "minute", "60"),
        ("10-5 * * * *", "minute", "10-5"),
        ("5,,6 * * * *", "minute", "5,,6"),
        ("-1 * * * *", "minute", "-1"),
        ("1.5 * * * *", "minute", "1.5"),
        ("*/" + "9" * 5000 + " * * * *", "minute", "*/999"),
        ("0 24 * * *", "hour", "24"),
        ("0 0 0 * *", "day of month", "0"),
        ("0 0 ? * *", "day of month", "?"),
        ("0 0 1 JANUARY *", "month", "JANUARY"),
        ("0 0 1 13 *", "month", "13"),
        ("0 0 * * 8", "day of week", "8"),
        ("0 0 * * FRI-SUN", "day of week", "FRI-SUN"),
        ("0 0 * * 5L/2", "day of week", "5L/2"),
        ("0 0 * * 1#2/3", "day of week", "1#2/3"),
    ],
)
def test_a_refusal_names_the_field_and_its_value(expression: str, field: str, value: str) -> None:
    message = refusal(expression)
    assert f"is not a {field} (" in message
    assert value in message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("expression", "part"),
    [
        ("", "needs 5 fields"),
        ("   ", "needs 5 fields"),
        ("hello", "needs 5 fields"),
        ("* * * *", "and has 4"),
        ("0 * * * * *", "and has 6"),
        ("@reboot", "is none of @hourly"),
        ("١ * * * *", "characters that no cron expression has"),
        ("* * * * *\n", "characters that no cron expression has"),
        ("\0 * * * *", "characters that no cron expression has"),
        ("\ud800 * * * *", "characters that no cron expression has"),
        ("0 0 30 2 *", "never comes"),
        ("0 0 31 4,6 *", "never comes"),
        ("0 0 31 2 */1", "never comes"),
        ("0 0 */40 * 1#5", "never comes"),
    ],
)
def test_malformed_text_is_refused_with_a_reason(expression: str, part: str) -> None:
    assert part in refusal(expression)


def test_what_is_no_text_is_refused() -> None:
    assert "a schedule is text" in refusal(5)  # type: ignore[arg-type]


@given(st.text(alphabet="0123456789*/,-L#W? ABJMNOSU@\t\n١", max_size=20) | st.text(max_size=8))
def test_any_text_is_a_schedule_or_a_config_error(expression: str) -> None:
    try:
        Schedule.parse(expression)
    except ConfigError:
        pass


@pytest.mark.parametrize(
    ("nickname", "expression"),
    [
        ("@hourly", "0 * * * *"),
        ("@daily", "0 0 * * *"),
        ("@midnight", "0 0 * * *"),
        ("@weekly", "0 0 * * SUN"),
        ("@monthly", "0 0 1 * *"),
        ("@yearly", "0 0 1 JAN *"),
        (" @Annually ", "0 0 1 1 *"),
    ],
)
def test_nicknames_mean_their_five_fields(nickname: str, expression: str) -> None:
    after = datetime(2026, 5, 6, 7, 8, 9, tzinfo=UTC)
    assert ticks(nickname, "UTC", after, 3) == ticks(expression, "UTC", after, 3)


@pytest.mark.parametrize(
    ("expression", "minutes"),
    [
        ("5/15", "05 20 35 50"),
        ("0/15", "00 15 30 45"),
        ("*/45", "00 45 00 45"),
        ("*/90", "00 00 00 00"),
        ("1-10/20", "01 01 01 01"),
    ],
)
def test_steps_mean_what_the_documentation_says(expression: str, minutes: str) -> None:
    found = ticks(f"{expression} * * * *", "UTC", datetime(2025, 12, 31, 23, 59, tzinfo=UTC), 4)
    assert " ".join(tick[6:8] for tick in found) == minutes


@pytest.mark.parametrize(
    ("expression", "note"),
    [
        ("*/45 * * * *", "'*/45' is minute 0, 45 of every hour, not every 45 minutes"),
        ("0 */5 * * *", "'*/5' is hour 0, 5, 10, 15, 20 of every day, not every 5 hours"),
        ("*/90 * * * *", "'*/90' is only minute 0: the step is longer than the range"),
        ("3,1-10/20 * * * *", "'1-10/20' is only minute 1: the step is longer than the range"),
        ("0 0 13 * 5", "day of month 13 and day of week 5 need not both fit: either is enough"),
    ],
)
def test_what_is_easily_misread_is_said(expression: str, note: str, caplog: pytest.LogCaptureFixture) -> None:
    assert Schedule.parse(expression).notes == (note,)
    check(expression)
    assert [(record.levelno, record.name) for record in caplog.records] == [(logging.WARNING, "cronlock.schedule")]
    assert note in caplog.text


@pytest.mark.parametrize("expression", ["*/5 * * * *", "0 */6 * * *", "5/15 * * * *", "0 0 */2 * 1", "@daily"])
def test_plain_schedules_have_no_notes(expression: str) -> None:
    assert Schedule.parse(expression).notes == ()


@pytest.mark.parametrize(
    ("timezone", "part"),
    [
        ("", "is no name of a time zone"),
        ("+02:00", "is no name of a time zone"),
        ("../etc/passwd", "is no name of a time zone"),
        ("/etc/localtime", "is no name of a time zone"),
        ("Europe/../UTC", "is no name of a time zone"),
        ("zone.tab", "is no name of a time zone"),
        ("Zürich", "is no name of a time zone"),
        ("a\0b", "is no name of a time zone"),
        ("\ud800", "is no name of a time zone"),
        (None, "is no name of a time zone"),
        ("America/NewYork", "did you mean 'America/New_York'?"),
        ("europe/berlin", "did you mean 'Europe/Berlin'?"),
        ("Europe", "there is no time zone 'Europe'"),
        ("A" * 5000, "there is no time zone 'AAA"),
        ("localtime", "means another thing on every machine"),
        ("posixrules", "means another thing on every machine"),
        ("right/UTC", "means another thing on every machine"),
    ],
)
def test_a_wrong_zone_is_an_error_and_never_silently_utc(timezone: str, part: str) -> None:
    message = refusal("0 0 * * *", timezone)
    assert part in message
    assert "time" in message
    assert len(message) < 300


@pytest.mark.parametrize("timezone", ["Europe/Kyiv", "EST", "Etc/GMT+2", "UTC", "America/Argentina/Ushuaia"])
def test_zones_are_found_without_the_systems_files(timezone: str) -> None:
    zoneinfo.reset_tzpath(to=[])
    ZoneInfo.clear_cache()
    try:
        Schedule.parse("0 0 * * *", timezone)
    finally:
        zoneinfo.reset_tzpath()
        ZoneInfo.clear_cache()


def test_a_machine_with_no_zones_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("tzdata")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tzdata", None)
    zoneinfo.reset_tzpath(to=[])
    ZoneInfo.clear_cache()
    try:
        assert Schedule.parse("0 0 * * *", "UTC").next(datetime(2026, 1, 1, tzinfo=UTC)).day == 2
        assert "there is no time zone 'Europe/Kyiv'" in refusal("0 0 * * *", "Europe/Kyiv")
    finally:
        zoneinfo.reset_tzpath()
        ZoneInfo.clear_cache()


def test_next_needs_a_time_zone_and_answers_in_utc() -> None:
    schedule = Schedule.parse("0 9 * * *", "Asia/Tokyo")
    with pytest.raises(ValueError, match="time zone"):
        schedule.next(datetime(2026, 1, 1))
    found = schedule.next(datetime(2026, 1, 1, 9, 0, tzinfo=ZoneInfo("Asia/Tokyo")))
    assert (found, found.tzinfo) == (datetime(2026, 1, 2, tzinfo=UTC), UTC)


@pytest.mark.parametrize("after", [datetime.max, datetime.max - timedelta(hours=30)])
def test_the_end_of_the_calendar_is_a_clear_error(after: datetime) -> None:
    schedule = Schedule.parse("0 0 1 * *", "Pacific/Kiritimati")
    with pytest.raises(ValueError, match="has no tick after"):
        schedule.next(after.replace(tzinfo=UTC))


def test_a_tick_in_the_hour_that_is_left_out_comes_once_right_after_it() -> None:
    before = datetime(2026, 3, 28, 12, tzinfo=UTC)
    assert ticks("30 2 * * *", "Europe/Berlin", before, 2) == ["29 03:00 +0200", "30 02:30 +0200"]
    assert ticks("*/20 2 * * *", "Europe/Berlin", before, 2) == ["29 03:00 +0200", "30 02:00 +0200"]
    assert ticks("0 */2 * * *", "Europe/Berlin", before.replace(hour=23), 3) == [
        "29 03:00 +0200",
        "29 04:00 +0200",
        "29 06:00 +0200",
    ]


def test_a_tick_in_the_hour_that_comes_twice_comes_once() -> None:
    before = datetime(2026, 10, 24, 12, tzinfo=UTC)
    assert ticks("30 2 * * *", "Europe/Berlin", before, 2) == ["25 02:30 +0200", "26 02:30 +0100"]
    second_hour = datetime(2026, 10, 25, 1, 10, tzinfo=UTC)
    assert ticks("30 2 * * *", "Europe/Berlin", second_hour, 1) == ["26 02:30 +0100"]


def test_every_hour_means_every_hour_that_passes() -> None:
    assert ticks("30 * * * *", "Europe/Berlin", datetime(2026, 10, 24, 23, 45, tzinfo=UTC), 3) == [
        "25 02:30 +0200",
        "25 02:30 +0100",
        "25 03:30 +0100",
    ]
    assert ticks("30 * * * *", "Europe/Berlin", datetime(2026, 3, 29, 0, tzinfo=UTC), 2) == [
        "29 01:30 +0100",
        "29 03:30 +0200",
    ]
    assert ticks("0,45 0-23 * * *", "Australia/Lord_Howe", datetime(2026, 4, 4, 14, 40, tzinfo=UTC), 3) == [
        "05 01:45 +1100",
        "05 01:45 +1030",
        "05 02:00 +1030",
    ]


def test_a_day_that_is_left_out_has_its_ticks_once_after_it() -> None:
    # Samoa had no 30 December 2011
    before = datetime(2011, 12, 30, tzinfo=UTC)
    assert ticks("0 12 * * *", "Pacific/Apia", before, 2) == ["31 00:00 +1400", "31 12:00 +1400"]


def test_clocks_that_go_back_over_midnight_do_not_hang_the_search() -> None:
    # Newfoundland went from 00:01 back to 23:01
    after = datetime(2007, 11, 4, 2, 37, tzinfo=UTC)
    assert ticks("*/18 0 * * *", "Canada/Newfoundland", after, 2) == ["04 00:18 -0330", "04 00:36 -0330"]


@cache
def changes(timezone: str) -> list[datetime]:
    """The moments from 2005 to 2032 at which the zone's clocks are put forward or back."""
    zone, found = ZoneInfo(timezone), []
    left, step = datetime(2005, 1, 1, tzinfo=UTC), timedelta(days=20)
    while left.year < 2032:
        low, high = left, left + step
        left = high
        old = low.astimezone(zone).utcoffset()
        if old == high.astimezone(zone).utcoffset():
            continue
        while high - low > timedelta(seconds=1):
            middle = (low + (high - low) / 2).replace(microsecond=0)
            low, high = (middle, high) if middle.astimezone(zone).utcoffset() == old else (low, middle)
        found.append(high)
    return found


def field(numbers: range) -> st.SearchStrategy[set[int]]:
    return st.just(set(numbers)) | st.sets(st.sampled_from(numbers), min_size=1, max_size=4)


def wall_ticks(day: date, minutes: set[int], hours: set[int]) -> list[datetime]:
    return [datetime.combine(day, time(hour, minute)) for hour in sorted(hours) for minute in sorted(minutes)]


def expected(zone: ZoneInfo, after: datetime, minutes: set[int], hours: set[int]) -> datetime:
    """The next tick, found by looking at every minute of three days."""
    start = after.astimezone(UTC).replace(second=0, microsecond=0) - timedelta(days=1, hours=12)
    shown: dict[datetime, list[datetime]] = {}
    for index in range(60 * 24 * 4):
        moment = start + index * MINUTE
        shown.setdefault(moment.astimezone(zone).replace(tzinfo=None, fold=0), []).append(moment)
    first_day, last_day = min(shown).date() + timedelta(days=1), max(shown).date()
    found: list[datetime] = []
    for number in range((last_day - first_day).days):
        for tick in wall_ticks(first_day + number * timedelta(days=1), minutes, hours):
            if len(hours) == 24:
                found += shown.get(tick, [])
            elif tick in shown:
                found.append(shown[tick][0])
            else:
                found.append(shown[min(later for later in shown if later > tick)][0])
    return min(moment for moment in found if moment > after)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(ZONES),
    st.randoms(use_true_random=False),
    field(range(60)),
    field(range(24)) | field(range(4)),
    st.integers(-5 * 3600, 5 * 3600),
)
def test_the_next_tick_is_the_one_that_looking_at_every_minute_finds(
    timezone: str, chance: random.Random, minutes: set[int], hours: set[int], seconds: int
) -> None:
    assume(changes(timezone))
    after = chance.choice(changes(timezone)) + timedelta(seconds=seconds)
    expression = f"{','.join(map(str, minutes))} {','.join(map(str, hours))} * * *"
    found = Schedule.parse(expression, timezone).next(after)
    assert found > after
    assert found == expected(ZoneInfo(timezone), after, minutes, hours)


EXPRESSIONS = ["* * * * *", "*/7 * * * *", "30 2 * * *", "0 0 * * *", "59 23 L * *", "15 */6 * * 1-5", "0 3 13 * 5"]


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(ZONES),
    st.randoms(use_true_random=False),
    st.sampled_from(EXPRESSIONS),
    st.integers(-90000, 90000),
    st.integers(0, 99),
)
def test_next_is_later_and_asking_again_before_it_gives_the_same(
    timezone: str, chance: random.Random, expression: str, seconds: int, percent: int
) -> None:
    assume(changes(timezone))
    after = chance.choice(changes(timezone)) + timedelta(seconds=seconds)
    schedule = Schedule.parse(expression, timezone)
    found = schedule.next(after)
    assert found > after
    assert schedule.next(after + (found - after) * percent / 100) == found
    assert schedule.next(after.astimezone(schedule.zone)) == found
