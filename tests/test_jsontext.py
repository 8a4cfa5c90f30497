"""JSON that arrives is refused if it cannot be held; JSON that is kept can always be read back."""

import asyncio
import collections
import dataclasses
import decimal
import enum
import itertools
import json
import sys
import time
import types
import uuid
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import psycopg
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cronlock.errors import PayloadError
from cronlock.jsontext import MAX_DEPTH, MAX_DIGITS, clean, clip, dump_result, merge, parse_object, parse_query

UNREADABLE = {"\0", *map(chr, range(0xD800, 0xE000))}


def body_refusal(body: bytes, **options: int) -> str:
    with pytest.raises(PayloadError) as caught:
        parse_object(body, **options)
    assert len(str(caught.value)) < 150
    return str(caught.value)


def short(value: object) -> str:
    """A test's name for a value that may be a megabyte long or refuse to be printed."""
    return ascii(value)[:40] if isinstance(value, (bytes, str)) else type(value).__name__


# --- parse_object


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"a": "\xff"}', "the body is not UTF-8 (byte 7)"),
        (b'{"a": "\xed\xa0\x80"}', "the body is not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "the body is not UTF-8"),
        ('{"a": 1}'.encode("utf-16-le"), "NUL character"),
        (b"{", "the body is not JSON"),
        (b"hello", "the body is not JSON"),
        (b"{} {}", "the body is not JSON"),
        (b"{'a': 1}", "the body is not JSON"),
        (b'{"a": 1,}', "the body is not JSON"),
        (b'{"a": 01}', "the body is not JSON"),
        (b'{"a": "\t"}', "the body is not JSON"),
        (b'{"a": "\\x"}', "the body is not JSON"),
        (b"\xef\xbb\xbf\xef\xbb\xbf{}", "the body is not JSON"),
        (b"[]", "the JSON is not an object"),
        (b'"text"', "the JSON is not an object"),
        (b"null", "the JSON is not an object"),
        (b"5", "the JSON is not an object"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": [Infinity]}', "Infinity is not JSON"),
        (b'{"a": -Infinity}', "-Infinity is not JSON"),
        (b'{"a": 1e400}', "too large for a float"),
        (b'{"a": 1e5000}', "too large for a float"),
        (b'{"a": -1e5000}', "too large for a float"),
        (b'{"a": ' + b"9" * 400 + b".0}", "too large for a float"),
        (b'{"a": ' + b"9" * (MAX_DIGITS + 1) + b"}", "an integer of more than 1000 digits"),
        (b'{"a": -' + b"9" * 5000 + b"}", "an integer of more than 1000 digits"),
        (b'{"a": ' + b"9" * 500_000 + b"}", "an integer of more than 1000 digits"),
        (b'{"a": 1, "a": 1}', "the name 'a' twice"),
        (b'{"b": {"a": 1, "x": 2, "\\u0061": 2}}', "the name 'a' twice"),
        (b'{"a": "\0"}', "NUL character"),
        (b'{"a": 1}\0', "NUL character"),
        (b'{"a": "\\u0000"}', "NUL character in a string"),
        (b'{"a\\u0000": 1}', "NUL character in a string"),
        (b'{"a": ["x", {"b": ["\\u0000"]}]}', "NUL character in a string"),
        (b'{"a": "\\ud83d"}', "half of a surrogate pair"),
        (b'{"a": "\\ude00"}', "half of a surrogate pair"),
        (b'{"a": "\\ude00\\ud83d"}', "half of a surrogate pair"),
        (b'{"\\udfff": 1}', "half of a surrogate pair"),
        (b'{"a": [[["\\uD83Dx"]]]}', "half of a surrogate pair"),
    ],
    ids=short,
)
def test_what_cannot_be_held_is_refused_with_a_short_reason(body: bytes, reason: str) -> None:
    assert reason in body_refusal(body)


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b"", {}),
        (b" \r\n\t", {}),
        (b"{}", {}),
        (b"\xef\xbb\xbf{}", {}),
        (b"\xef\xbb\xbf", {}),
        (b' {"a": {"b": [1, "x", null, true]}} ', {"a": {"b": [1, "x", None, True]}}),
        (b'{"a": "\\ud83d\\ude00"}', {"a": "\U0001f600"}),
        ('{"ä": "\U0001f600"}'.encode(), {"ä": "\U0001f600"}),
        (b'{"a": 9007199254740993}', {"a": 2**53 + 1}),
        (b'{"a": ' + b"9" * 40 + b"}", {"a": 10**40 - 1}),
        (b'{"a": -' + b"9" * MAX_DIGITS + b"}", {"a": 1 - 10**MAX_DIGITS}),
        (b'{"a": 0.1}', {"a": 0.1}),
        (b'{"a": "\\\\u0000"}', {"a": "\\u0000"}),
        (b'{"a": "[[[[{{{{\\"[[[["}', {"a": '[[[[{{{{"[[[['}),
        (b'{"": 1}', {"": 1}),
    ],
    ids=short,
)
def test_what_can_be_held_is_read_unchanged(body: bytes, value: dict[str, Any]) -> None:
    assert parse_object(body) == value


def test_minus_zero_keeps_its_sign() -> None:
    assert str(parse_object(b'{"a": -0.0}')["a"]) == "-0.0"


def test_nesting_is_allowed_up_to_the_limit() -> None:
    inner = MAX_DEPTH - 1
    assert parse_object(b'{"a":' + b"[" * inner + b"]" * inner + b"}")
    assert "deeper than 64" in body_refusal(b'{"a":' + b"[" * (inner + 1) + b"]" * (inner + 1) + b"}")
    assert parse_object(b'{"a":[]}', max_depth=2) == {"a": []}
    assert "deeper than 1" in body_refusal(b'{"a":[]}', max_depth=1)
    assert "deeper than 2" in body_refusal(b'{"a":[],"b":{"c":{"d":1}}}', max_depth=2)
    assert parse_object(b'{"a":[],"b":{"c":{"d":1}}}', max_depth=3)
    assert parse_object(b'{"a":"\\"[[[[","b":"\\\\","c":"[[[["}', max_depth=1)
    assert "deeper than 1" in body_refusal(b'{"b":"\\\\","c":["x"]}', max_depth=1)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 20_000 + b"]" * 20_000,
        b'{"a":' * 20_000,
        b'{"a":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b"[" * 1_000_000,
        b'\\"' + b"[" * 20_000,
        b'{"a":"x' + b"[" * 20_000,
    ],
    ids=short,
)
@pytest.mark.parametrize("max_depth", [64, 10**9])
def test_twenty_thousand_levels_neither_crash_nor_recurse(body: bytes, max_depth: int) -> None:
    assert body_refusal(body, max_depth=max_depth)


@pytest.mark.parametrize("part", [b'\\"', b"\\\\", b'"', b"[]", b"{", b"a", b"\\", b'{"a":1},', b"1,", b'"\\u0041",'])
def test_a_hostile_megabyte_is_read_in_linear_time(part: bytes) -> None:
    for body in (part, b'{"a":"' + part, b'{"a":[' + part):
        begun = time.perf_counter()
        with pytest.raises(PayloadError):
            parse_object(body + part * (1_000_000 // len(part)))
        assert time.perf_counter() - begun < 3


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**50), 10**50)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5).map(clean), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(max_size=5).map(clean), JSON, max_size=4), st.booleans())
def test_any_good_object_survives(value: dict[str, Any], ensure_ascii: bool) -> None:
    assert parse_object(json.dumps(value, ensure_ascii=ensure_ascii).encode()) == value


@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,\\u0dD8e+-.1 aNIn\0\ufeff', max_size=40).map(str.encode))
def test_any_body_is_an_object_or_a_payload_error(body: bytes) -> None:
    try:
        value = parse_object(body)
    except PayloadError:
        return
    assert isinstance(value, dict)
    assert dump_result(value) == json.dumps(value, separators=(",", ":"))


# --- parse_query


@pytest.mark.parametrize(
    ("query", "value"),
    [
        (b"", {}),
        (b"&&", {}),
        (b"a=1&b=x%20y+z", {"a": "1", "b": "x y z"}),
        (b"a&b=&c==", {"a": "", "b": "", "c": "="}),
        (b"a=1&a=1", {"a": "1"}),
        (b"%C3%A4=%F0%9F%98%80", {"ä": "\U0001f600"}),
        ("ä=\U0001f600".encode(), {"ä": "\U0001f600"}),
        (b"a=1;b=2", {"a": "1;b=2"}),
        (b"a=%2B%26%3D%25", {"a": "+&=%"}),
    ],
)
def test_queries_are_read(query: bytes, value: dict[str, str]) -> None:
    assert parse_query(query) == value


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        (b"a=1&a=2", "the query has 'a' twice, with different values"),
        (b"a=1&%61=2", "the query has 'a' twice"),
        (b"a&a=1", "the query has 'a' twice"),
        (b"=1", "a value without a name"),
        (b"a=%", "a % that is not followed by two hex digits"),
        (b"a=%zz", "a % that is not followed by two hex digits"),
        (b"%4=1", "a % that is not followed by two hex digits"),
        (b"a=%ff", "the query is not UTF-8"),
        (b"a=\xff", "the query is not UTF-8"),
        (b"a=%ed%a0%80", "the query is not UTF-8"),
        (b"a=%C0%80", "the query is not UTF-8"),
        (b"a=%00", "the query has a NUL character"),
        (b"a\0=1", "the query has a NUL character"),
    ],
)
def test_queries_that_cannot_be_held_are_refused(query: bytes, reason: str) -> None:
    with pytest.raises(PayloadError) as caught:
        parse_query(query)
    assert reason in str(caught.value)


@given(st.binary(max_size=40))
def test_any_query_is_names_and_values_or_a_payload_error(query: bytes) -> None:
    try:
        found = parse_query(query)
    except PayloadError:
        return
    for text in itertools.chain(found, found.values()):
        assert not UNREADABLE & set(text)


# --- merge


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1), ("1", "1"), ("true", True), ("null", None), ("x", "x"), ("0.5", 0.5), ("", ""), ("[1,2]", [1, 2]),
        ('{"a":"ä"}', {"a": "ä"}), ("9007199254740993", 2**53 + 1),
    ],
)  # fmt: skip
def test_the_same_value_in_query_and_body_is_kept_as_the_body_has_it(text: str, value: object) -> None:
    found = merge({"a": text, "q": "1"}, {"a": value, "b": 2})
    assert found == {"a": value, "q": "1", "b": 2}
    assert type(found["a"]) is type(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 2), ("1", 1.0), ("01", 1), ("1", True), ("True", True), ("", None), ('"x"', "x"), ("[1, 2]", [1, 2])],
)
def test_different_values_in_query_and_body_are_refused_by_name(text: str, value: object) -> None:
    with pytest.raises(PayloadError, match=r"^'a' is in the query and in the body with different values$"):
        merge({"a": text}, {"a": value})


# --- dump_result


class Broken:
    """Raises whatever it is asked."""

    def __init__(self, error: type[BaseException] = ValueError) -> None:
        self.error = error

    def __repr__(self) -> str:
        raise self.error

    __str__ = __repr__

    def model_dump(self, **_: object) -> object:
        raise self.error


class BrokenMapping(collections.UserDict[str, Any]):
    def items(self) -> Any:
        raise asyncio.CancelledError


class BrokenModel(pydantic.BaseModel):
    @pydantic.model_serializer
    def fail(self) -> dict[str, Any]:
        raise GeneratorExit


class BrokenClass(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise ValueError


class Nameless(metaclass=BrokenClass):
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise RuntimeError


class Endless(list[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class EndlessItems(collections.UserDict[str, Any]):
    def items(self) -> Any:
        return ((str(number), number) for number in itertools.count())


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Point:
    x: Any
    y: Any = None


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    when: datetime
    what: Any = None
    key: pydantic.SecretStr = pydantic.SecretStr("hidden")


MOMENT = datetime(2026, 11, 30, 12, tzinfo=UTC)
Row = collections.namedtuple("Row", ["id", "name"])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"rows": 4211}, '{"rows":4211}'),
        ([1, 0.5, True, None, "x"], '[1,0.5,true,null,"x"]'),
        ("ä\U0001f600", '"\\u00e4\\ud83d\\ude00"'),
        (0, "0"),
        (False, "false"),
        ("", '""'),
        ({}, "{}"),
        ((1, (2,)), "[1,[2]]"),
        ({1}, "[1]"),
        (frozenset({1}), "[1]"),
        (collections.deque([1]), "[1]"),
        (range(3), "[0,1,2]"),
        ({"a": 1}.keys(), '["a"]'),
        ({"a": 1}.values(), "[1]"),
        (Row(1, "x"), '[1,"x"]'),
        (types.MappingProxyType({"a": 1}), '{"a":1}'),
        (collections.UserDict(a=1), '{"a":1}'),
        (collections.Counter("aa"), '{"a":2}'),
        (float("nan"), '"NaN"'),
        ([float("inf"), -float("inf")], '["Infinity","-Infinity"]'),
        (-0.0, "-0.0"),
        (2**53 + 1, "9007199254740993"),
        (10**40, "1" + "0" * 40),
        (10**MAX_DIGITS - 1, "9" * MAX_DIGITS),
        (decimal.Decimal("1.50"), '"1.50"'),
        (decimal.Decimal("NaN"), '"NaN"'),
        (MOMENT, '"2026-11-30T12:00:00Z"'),
        (date(2026, 11, 30), '"2026-11-30"'),
        (timedelta(minutes=2), '"PT2M"'),
        (uuid.UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        (Path("/a"), '"/a"'),
        (b"\xff\x00", '"_wA="'),
        (bytearray(b"x"), '"eA=="'),
        (Colour.RED, '"red"'),
        (Level.HIGH, "3"),
        (Point(1, MOMENT), '{"x":1,"y":"2026-11-30T12:00:00Z"}'),
        (
            Model(when=MOMENT, what={"a": float("nan"), "b": b"\xff"}),
            '{"when":"2026-11-30T12:00:00Z","what":{"a":"NaN","b":"_w=="},"key":"**********"}',
        ),
        ({None: 1, True: 2, 1.5: 3, 7: 4, (1, "x"): 5}, '{"null":1,"true":2,"1.5":3,"7":4,"[1,\\"x\\"]":5}'),
        ({MOMENT: 1}, '{"2026-11-30T12:00:00Z":1}'),
        ("a\0b", '"a\\ufffdb"'),
        ({"k\0": "\ud800"}, '{"k\\ufffd":"\\ufffd"}'),
        ("\ud83d\ude00", '"\\ud83d\\ude00"'),
    ],
    ids=short,
)
def test_results_are_written_as_json(value: object, text: str) -> None:
    assert dump_result(value) == text


def test_no_result_is_none() -> None:
    assert dump_result(None) is None


def mark(type_name: str, reason: str) -> dict[str, str]:
    return {"cronlock": "not serialisable", "type": type_name, "reason": reason}


def looped() -> list[Any]:
    value: list[Any] = [1]
    value.append({"self": value})
    return value


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (object(), mark("object", "unknown type")),
        ({"a": 1, "b": [object(), 2]}, {"a": 1, "b": [mark("object", "unknown type"), 2]}),
        (10**5000, mark("int", "more than 1000 digits")),
        ([-(10**MAX_DIGITS)], [mark("int", "more than 1000 digits")]),
        (Point(10**5000), {"x": mark("int", "more than 1000 digits"), "y": None}),
        (iter([1]), mark("list_iterator", "an iterator")),
        (itertools.count(), mark("count", "an iterator")),
        ((n for n in itertools.count()), mark("generator", "an iterator")),
        (looped(), [1, {"self": mark("list", "it is inside itself")}]),
        (BrokenMapping(a=1), mark("BrokenMapping", "reading it raised CancelledError")),
        ([BrokenModel(), 1], [mark("BrokenModel", "reading it raised PydanticSerializationError"), 1]),
        ({"a": Nameless()}, {"a": mark("object", "reading it raised RuntimeError")}),
    ],
    ids=short,
)  # fmt: skip
def test_what_cannot_be_held_is_marked_where_it_stands(value: object, kept: object) -> None:
    text = dump_result(value)
    assert text is not None
    assert json.loads(text) == kept


def test_unknown_types_inside_a_model_are_marked_and_the_rest_is_kept() -> None:
    text = dump_result(Model(when=MOMENT, what={"a": object(), "b": 2}))
    assert text is not None
    assert json.loads(text)["what"] == {"a": mark("object", "unknown type"), "b": 2}


@pytest.mark.parametrize("error", [ValueError, RecursionError, MemoryError, GeneratorExit, asyncio.CancelledError])
def test_whatever_an_object_raises_is_not_raised_on(error: type[BaseException]) -> None:
    class Raising(dict[str, int]):
        def __len__(self) -> int:
            raise error

    class Items(collections.UserDict[str, Any]):
        def items(self) -> Any:
            raise error

    for value in (Broken(error), Items(a=1), Raising(a=1), {Broken(error): 1}, Point(Items())):
        text = dump_result([value])
        assert text is not None
        json.loads(text)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_order_to_stop_is_passed_on(error: type[BaseException]) -> None:
    class Stopping(collections.UserDict[str, Any]):
        def items(self) -> Any:
            raise error

    with pytest.raises(error):
        dump_result([Stopping()])


def test_a_shared_part_is_no_cycle() -> None:
    part = [1]
    assert dump_result([part, part]) == "[[1],[1]]"


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


def test_deep_nesting_is_cut_at_the_limit() -> None:
    assert dump_result(nested(MAX_DEPTH)) == "[" * MAX_DEPTH + "]" * MAX_DEPTH
    for levels in (MAX_DEPTH + 1, 100_000):
        text = dump_result(nested(levels))
        assert text is not None
        assert text.startswith("[" * MAX_DEPTH + '{"cronlock":"not serialisable","type":"list","reason":"more than 64')


def test_a_stack_that_is_nearly_full_is_survived() -> None:
    def fill(levels: int) -> str | None:
        return fill(levels - 1) if levels else dump_result(nested(MAX_DEPTH))

    outcomes = set()
    for spare in range(0, 300, 3):
        try:
            outcomes.add(fill(sys.getrecursionlimit() - spare - 60) is not None)
        except RecursionError:
            continue
    assert outcomes == {True}


@pytest.mark.parametrize(
    "value",
    [
        "x" * 70_000,
        "x" * 10_000_000,
        ["y" * 100] * 1000,
        {"k" * 70_000: 1},
        {str(n): n for n in range(20_000)},
        list(range(100_000)),
        "\U0001f600" * 10_000,
        '"' * 40_000,
        [[]] * 100_000,
        [None] * 70_000,
        [object()] * 2000,
        Endless(),
        EndlessItems(),
    ],
    ids=short,
)
def test_what_is_too_large_is_cut_with_a_mark(value: object) -> None:
    begun = time.perf_counter()
    text = dump_result(value)
    assert time.perf_counter() - begun < 3
    assert text is not None
    assert len(text) <= 65536
    found = json.loads(text)
    assert set(found) == {"cronlock", "size", "head"}
    assert found["cronlock"] == "truncated"
    assert found["size"] > 65536
    assert len(text) > 65530


def test_a_cut_is_told_even_if_what_is_left_would_fit() -> None:
    names = {chr(number): number for number in range(0xD800, 0xE000)}  # all of them become U+FFFD
    text = dump_result(names, limit=256)
    assert text is not None
    assert json.loads(text)["cronlock"] == "truncated"


def test_with_no_memory_left_there_is_still_a_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cronlock.jsontext._dumps", mock.Mock(side_effect=MemoryError))
    assert dump_result({"a": 1}) == '{"cronlock":"not serialisable","type":"object"}'


def test_a_result_that_doubles_with_every_level_is_cut_in_time() -> None:
    value: list[Any] = ["x" * 100]
    for _ in range(50):
        value = [value, value]
    begun = time.perf_counter()
    assert '"cronlock":"truncated"' in str(dump_result(value))
    assert time.perf_counter() - begun < 3


def test_the_limit_is_exact_and_nothing_is_cut_that_fits() -> None:
    for part in (object(), True, 12, 2**60, "x", [[]], 10**5000, 0.5, MOMENT, Point(1), {"a": None}):
        whole = dump_result([part] * 20, limit=65536)
        assert whole is not None
        assert dump_result([part] * 20, limit=max(256, len(whole))) == whole
    value = {"a": "x" * 291}
    assert dump_result(value, limit=299) == json.dumps(value, separators=(",", ":"))
    text = dump_result(value, limit=298)
    assert text is not None
    assert len(text) == 298
    assert json.loads(text) == {"cronlock": "truncated", "size": 299, "head": '{"a":"' + "x" * 244}
    assert dump_result(value, limit=-5) == dump_result(value, limit=256)


@given(st.text(alphabet='"\\a', min_size=300), st.integers(256, 300))
def test_a_cut_never_splits_an_escape(value: str, limit: int) -> None:
    text = dump_result(value, limit=limit)
    assert text is not None
    assert limit - 1 <= len(text) <= limit
    assert json.dumps(value).startswith(json.loads(text)["head"])


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-60, 60).map(lambda power: (1 if power > 0 else -1) * 7 ** (power * power))
    | st.floats()
    | st.text(max_size=30)
    | st.text(st.sampled_from('\0\ud83d\ude00a"\\\x1f\x7f\u2028'), max_size=10)
    | st.binary(max_size=10)
    | st.decimals()
    | st.datetimes()
    | st.timedeltas()
    | st.uuids()
    | st.complex_numbers()
    | st.builds(Broken)
    | st.builds(BrokenModel)
    | st.builds(mock.MagicMock)
    | st.builds(object),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers() | st.none() | st.floats(), inner, max_size=5)
        | st.builds(Point, inner, inner)
        | inner.map(lambda value: Model(when=MOMENT, what=value))
    ),
    max_leaves=20,
)


def check_kept(text: str, limit: int) -> None:
    """What holds for every kept result."""
    assert text.isascii()
    assert len(text) <= limit
    waiting, levels = [json.loads(text)], 0
    while waiting:
        levels += 1
        following: list[Any] = []
        for value in waiting:
            if isinstance(value, dict):
                following += [*value, *value.values()]
            elif isinstance(value, list):
                following += value
            elif isinstance(value, str):
                assert not UNREADABLE & set(value)
            elif isinstance(value, int):
                assert abs(value) < 10**MAX_DIGITS
        waiting = following
    assert levels <= MAX_DEPTH + 3


@settings(deadline=None)
@given(VALUES, st.sampled_from([256, 300, 65536]))
def test_any_result_is_kept_as_json_that_can_be_read_back(value: object, limit: int) -> None:
    text = dump_result(value, limit=limit)
    if text is None:
        assert value is None
    else:
        check_kept(text, limit)


@given(JSON)
def test_plain_results_are_kept_unchanged(value: object) -> None:
    text = dump_result(value)
    assert (json.loads(text) if text is not None else None) == value


HARD: list[Any] = [
    "\0", "\ud800", "\ud83d\ude00", {"\0": "\udfff"}, float("nan"), float("inf"), 1e308, 5e-324, -0.0,
    10**MAX_DIGITS - 1, 10**5000, 2**53 + 1, nested(MAX_DEPTH), nested(1000), looped(), "x" * 100_000,
    ["\u2028\x7f\x1f\"\\"] * 50, {None: 1, 1.5: 2}, b"\xff\0", Broken(), Endless(), decimal.Decimal("1e5000"),
    Model(when=MOMENT, what=["\0", object()]), [[]] * 100_000, {"a": {"b": ["\\u0000"]}}, "\\ud800",
]  # fmt: skip


def test_every_kept_result_can_be_cast_to_jsonb(server_url: str) -> None:
    with psycopg.connect(server_url) as connection:

        @settings(max_examples=60, deadline=None)
        @given(VALUES)
        def cast(value: object) -> None:
            text = dump_result(value)
            row = connection.execute("SELECT (%s::text)::jsonb::text", [text]).fetchone()
            assert row is not None
            assert (row[0] is None) == (text is None)
            if text is not None:
                # jsonb keeps the last of two equal names, as Python does, and numbers by their value
                assert json.loads(row[0], parse_float=decimal.Decimal) == json.loads(text, parse_float=decimal.Decimal)

        for value in HARD:
            cast.hypothesis.inner_test(value)  # type: ignore[attr-defined]
        cast()


# --- clean and clip


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("plain ä \U0001f600", "plain ä \U0001f600"),
        ("a\0b", "a\ufffdb"),
        ("x\ud800", "x\ufffd"),
        ("\udc00x", "\ufffdx"),
        ("\ud83d\ude00", "\U0001f600"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
        ("\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
    ],
)
def test_nul_and_lone_surrogates_are_replaced(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned
    assert clip(text, 100) == cleaned


@pytest.mark.parametrize(
    ("text", "limit", "clipped"),
    [
        ("abcdef", 6, "abcdef"),
        ("abcdefg", 6, "abcde…"),
        ("abcdef", 1, "…"),
        ("a", 1, "a"),
        ("abc", 0, ""),
        ("abc", -1, ""),
        ("", 5, ""),
        ("\ud83d\ude00" * 3, 3, "\U0001f600" * 3),
        ("\ud83d\ude00" * 4, 3, "\U0001f600" * 2 + "…"),
        ("abc\ud83d", 3, "ab…"),
    ],
)
def test_text_is_clipped_by_characters_with_an_ellipsis(text: str, limit: int, clipped: str) -> None:
    assert clip(text, limit) == clipped


@given(st.text(), st.integers(-3, 40))
def test_clipped_text_fits_and_can_be_stored(text: str, limit: int) -> None:
    found = clip(text, limit)
    assert len(found) <= max(0, limit)
    assert not UNREADABLE & set(found)
    assert found == clean(text) or limit <= 0 or found.endswith("…")


def test_clipping_a_huge_text_does_not_read_all_of_it() -> None:
    text = "\0" * 50_000_000
    begun = time.perf_counter()
    assert clip(text, 3) == "\ufffd\ufffd…"
    assert time.perf_counter() - begun < 0.05
