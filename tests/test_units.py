"""Durations and sizes: what is read, what is refused."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cronlock.units import (
    LARGEST_BODY,
    LONGEST_RETENTION,
    LONGEST_TIMEOUT,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120s", 120),
        ("2m", 120),
        ("1h", 3600),
        ("7d", 604800),
        ("500ms", 0.5),
        ("1ms", 0.001),
        ("1.5h", 5400),
        (" 90 s ", 90),
        ("120", 120),
        ("0.25", 0.25),
        (120, 120),
        (0.25, 0.25),
        (timedelta(minutes=2), 120),
        ("24d", 24 * 86400),
    ],
)
def test_durations_are_read(value: object, seconds: float) -> None:
    assert parse_duration(value) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "value",
    [
        "", " ", "soon", "1 fortnight", "-5s", "+5s", "0", "0s", "0.0001s", "1e3", "1_000", "١٢s", "５s", "5S", "nan",
        "inf", "1h30m", "5 s s", "9" * 5000, "9" * 5000 + "s", "25d", "24.1d", "5\0s", "5s\ud800", 0, -1, 0.0001,
        float("nan"), float("inf"), float("-inf"), 1e308, 10**400, -(10**400), True, False, None, b"5s", [],
        timedelta(0), timedelta(days=-1), timedelta(microseconds=999), timedelta(days=24, microseconds=1),
        timedelta.max, timedelta.min,
    ],
)  # fmt: skip
def test_what_is_no_duration_is_refused_with_an_example(value: object) -> None:
    with pytest.raises(ValueError, match="'120s'") as caught:
        parse_duration(value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400])
def test_what_is_not_finite_is_no_duration_and_not_cut_to_one(value: float) -> None:
    with pytest.raises(ValueError, match="is not a duration; write it as"):
        parse_duration(value)


def test_the_longest_duration_can_be_given() -> None:
    assert parse_duration("3650d", longest=LONGEST_RETENTION) == LONGEST_RETENTION
    # PostgreSQL takes its timeouts as milliseconds in an int
    assert LONGEST_TIMEOUT / timedelta(milliseconds=1) < 2**31


@given(st.timedeltas(min_value=timedelta(milliseconds=1), max_value=LONGEST_TIMEOUT))
def test_a_duration_is_written_as_it_is_read(span: timedelta) -> None:
    assert parse_duration(format_duration(span)) == span


@given(st.text(max_size=12) | st.floats() | st.integers() | st.timedeltas())
def test_any_value_is_a_duration_within_bounds_or_a_value_error(value: object) -> None:
    try:
        assert timedelta(milliseconds=1) <= parse_duration(value) <= LONGEST_TIMEOUT
    except ValueError:
        pass


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("1MiB", 1048576), ("64KiB", 65536), ("64 kib", 65536), ("1000", 1000), ("1MB", 1000000), ("2kB", 2000),
        ("5B", 5), (1000, 1000), ("128MiB", LARGEST_BODY),
    ],
)  # fmt: skip
def test_sizes_are_read(value: object, size: int) -> None:
    assert parse_size(value) == size


@pytest.mark.parametrize(
    "value",
    ["", "big", "-1", "0", 0, -1, "1.5MiB", "1 MiB x", "1TiB", "129MiB", "9" * 5000, "١", True, None, 1.5, b"1"],
)
def test_what_is_no_size_is_refused_with_an_example(value: object) -> None:
    with pytest.raises(ValueError, match="'1MiB'") as caught:
        parse_size(value)
    assert len(str(caught.value)) < 200


@given(st.integers(1, LARGEST_BODY))
def test_a_size_is_written_as_it_is_read(size: int) -> None:
    assert parse_size(format_size(size)) == size
