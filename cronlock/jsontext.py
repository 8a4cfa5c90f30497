"""JSON that arrives, and JSON that is kept: whatever passes here can be held by PostgreSQL's jsonb and read
back.

In: `parse_object`, `parse_query` and `merge` refuse, with a short reason, what Python or jsonb cannot hold.
Out: `dump_result` and `clip` never refuse anything; what cannot be kept is cut, with a mark.

jsonb has no NUL and no lone surrogates (PostgreSQL, "JSON Types"), numbers as wide as `numeric`, and as much
nesting as the server's stack allows; the limits here are far below the server's.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set, ValuesView
from itertools import accumulate
from typing import Any, NoReturn
from urllib.parse import unquote_to_bytes

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from cronlock.errors import PayloadError

MAX_DEPTH = 64
MAX_DIGITS = 1000
MIN_LIMIT = 256

TOO_LARGE = 10**MAX_DIGITS
PLAIN = (dict, list, str, int, float, bool, type(None))
ELLIPSIS = "…"
REPLACEMENT = "\ufffd"
SURROGATE = re.compile("[\ud800-\udfff]")
UNREADABLE = re.compile("[\0\ud800-\udfff]")
BRACKET = re.compile(r"[\[\]{}]")
BAD_PERCENT = re.compile(rb"%(?![0-9A-Fa-f]{2})")


def parse_object(body: bytes, *, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    """The JSON object in `body`; an empty one for a body that is empty or only white space.

    One byte order mark at the beginning is passed over (RFC 8259 section 8.1 allows it, and PowerShell sends
    it). Raises `PayloadError` with a short reason, which says nothing of the body's values, for anything else
    than one object, invalid UTF-8, NaN and Infinity, numbers too large for a float, integers of more than
    `MAX_DIGITS` digits, names given twice, NUL characters, lone surrogates and more than `max_depth` levels
    of nesting.
    """
    try:
        text = body.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise PayloadError(f"the body is not UTF-8 (byte {error.start})") from None
    if not text.strip(" \t\r\n"):
        return {}
    if "\0" in text:
        raise PayloadError("the body has a NUL character")
    if _depth(text) > max_depth:
        raise PayloadError(f"the JSON is nested deeper than {max_depth} levels")
    value = _loads(text)
    if not isinstance(value, dict):
        raise PayloadError("the JSON is not an object")
    if "\\u" in text:
        _refuse_unreadable(value)
    return value


def parse_query(query: bytes) -> dict[str, str]:
    """The names and values of a query string, percent-decoded as UTF-8; `a` and `a=` both give a blank value.

    Raises `PayloadError` for a broken percent sequence, invalid UTF-8 (lone surrogates are that), a NUL
    character, a value without a name, and a name given twice with different values.
    """
    found: dict[str, str] = {}
    for pair in filter(None, query.split(b"&")):
        raw_name, _, raw_value = pair.partition(b"=")
        name, value = _unquote(raw_name), _unquote(raw_value)
        if not name:
            raise PayloadError("the query has a value without a name")
        if found.setdefault(name, value) != value:
            raise PayloadError(f"the query has {_shown(name)} twice, with different values")
    return found


def merge(query: Mapping[str, str], body: Mapping[str, Any]) -> dict[str, Any]:
    """Both in one; where a name is in both, the body's value is kept, because it has a type.

    Raises `PayloadError` naming it if the two differ. They are the same if the body's value is that string,
    or if its JSON text is: `?n=1` agrees with `{"n": 1}` and with `{"n": "1"}`, not with `{"n": 1.0}`;
    `?x=null` with null.
    """
    for name, text in query.items():
        if name in body and not _is_same(body[name], text):
            raise PayloadError(f"{_shown(name)} is in the query and in the body with different values")
    return {**query, **body}


def _loads(text: str) -> Any:
    try:
        return json.loads(
            text,
            object_pairs_hook=_object,
            parse_float=_float,
            parse_int=_int,
            parse_constant=_refuse_constant,
        )
    except json.JSONDecodeError as error:
        raise PayloadError(f"the body is not JSON: {error.msg} (character {error.pos})") from None
    except RecursionError:
        raise PayloadError("the JSON is nested too deeply") from None


def _depth(text: str) -> int:
    """How deep the brackets outside strings go; found in linear time and without recursion.

    A string's end cannot be mistaken before the first backslash outside a string, where the parser stops
    anyway.
    """
    outside = "".join(text.replace("\\\\", "").replace('\\"', "").split('"')[::2])
    steps = (1 if bracket[0] in "[{" else -1 for bracket in BRACKET.finditer(outside))
    return max(accumulate(steps), default=0)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise PayloadError(f"the JSON has the name {_shown(twice)} twice in one object")
    return found


def _float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise PayloadError("the JSON has a number too large for a float")
    return number


def _int(text: str) -> int:
    if len(text) > MAX_DIGITS and len(text.lstrip("-")) > MAX_DIGITS:
        raise PayloadError(f"the JSON has an integer of more than {MAX_DIGITS} digits")
    return int(text)


def _refuse_constant(text: str) -> NoReturn:
    raise PayloadError(f"{text} is not JSON")


def _refuse_unreadable(value: Any) -> None:
    """Look at every name and string, without recursion: an escape can make what UTF-8 cannot."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting.extend(item)
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)
        elif isinstance(item, str) and (bad := UNREADABLE.search(item)):
            what = "a NUL character" if bad[0] == "\0" else "half of a surrogate pair"
            raise PayloadError(f"the JSON has {what} in a string")


def _unquote(text: bytes) -> str:
    if BAD_PERCENT.search(text):
        raise PayloadError("the query has a % that is not followed by two hex digits")
    try:
        found = unquote_to_bytes(text.replace(b"+", b" ")).decode("utf-8")
    except UnicodeDecodeError:
        raise PayloadError("the query is not UTF-8") from None
    if "\0" in found:
        raise PayloadError("the query has a NUL character")
    return found


def _is_same(value: Any, text: str) -> bool:
    if isinstance(value, str):
        return value == text
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) == text


def _shown(name: str) -> str:
    return ascii(clip(name, 60))


def clean(text: str) -> str:
    """`text` with NUL and lone surrogates replaced by U+FFFD; two halves that belong together are joined."""
    if not UNREADABLE.search(text):
        return text
    if SURROGATE.search(text):
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text.replace("\0", REPLACEMENT)


def clip(text: str, limit: int) -> str:
    """`clean(text)`, cut to at most `limit` characters, the last of them an ellipsis if any were cut."""
    if limit <= 0:
        return ""
    text = clean(text[: 2 * limit + 2])  # every character may be two halves
    return text if len(text) <= limit else text[: limit - 1] + ELLIPSIS


def dump_result(value: Any, *, limit: int = 65536) -> str | None:
    """What a task returned, as JSON text of at most `limit` ASCII characters (256 at least); None for None.

    Never raises, except KeyboardInterrupt and SystemExit. Models, dataclasses, dates, UUIDs, Decimals, bytes
    (base64) and so on are written as pydantic writes them; NaN and the infinities as strings; NUL and lone
    surrogates as U+FFFD. What cannot be held is replaced where it stands by `{"cronlock": "not serialisable",
    "type": .., "reason": ..}`: unknown types, what raises while it is read, iterators, a container inside
    itself, integers of more than `MAX_DIGITS` digits, more than `MAX_DEPTH` levels. A result that is too
    large becomes `{"cronlock": "truncated", "size": .., "head": ..}`, `size` being at least how many
    characters it would have had.
    """
    if value is None:
        return None
    limit = max(limit, MIN_LIMIT)
    try:
        writing = _Writing(limit)
        text = _dumps(writing.plain(value, 1))
        if len(text) <= limit and not writing.is_cut:
            return text
        return _truncated(text, max(writing.size, len(text)), limit)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # no stack or memory left
        return '{"cronlock":"not serialisable","type":"object"}'


class _Writing:
    """One result on its way to plain dicts, lists, strings and numbers; it stops soon after `limit`
    characters.

    `size` counts no more than what the JSON text will have, so that nothing is cut that would have fitted.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        self.is_cut = False
        self.open: set[int] = set()

    def plain(self, value: Any, depth: int) -> Any:
        """`value` as JSON can hold it, a mark where it cannot be held."""
        try:
            return self._plain(value, depth)
        except (KeyboardInterrupt, SystemExit):
            raise
        except RecursionError:
            return self._mark(value, "nested too deeply")
        except BaseException as error:  # a task's own code is called here; pydantic-core's panics are no Exception
            return self._mark(value, f"reading it raised {_type_name(error)}")

    def _plain(self, value: Any, depth: int) -> Any:
        if value is None or value is True or value is False:
            self.size += 4
            return value
        if isinstance(value, str):
            return self._string(str.__str__(value))
        if isinstance(value, int):
            return self._integer(int.__int__(value))
        if isinstance(value, float):
            return self._float(float.__float__(value))
        if isinstance(value, Mapping):
            return self._inside(value, depth, self._mapping)
        if isinstance(value, (Sequence, Set, ValuesView)) and not isinstance(value, (bytes, bytearray, memoryview)):
            return self._inside(value, depth, self._items)
        if isinstance(value, Iterator):
            return self._mark(value, "an iterator")
        return self.plain(self._jsonable(value), depth)

    def _jsonable(self, value: Any) -> Any:
        try:
            found = to_jsonable_python(value, bytes_mode="base64", fallback=lambda part: _mark(part, "unknown type"))
        except ValueError:
            if not isinstance(value, BaseModel):
                raise
            found = value.model_dump()  # its fields one by one, so that only the one that cannot be held is marked
        return found if type(found) in PLAIN else _mark(value, "unknown type")

    def _string(self, text: str) -> str:
        self.size += len(text) + 2
        return clean(text[: self.limit])

    def _integer(self, number: int) -> Any:
        if abs(number) >= TOO_LARGE:
            return self._mark(number, f"more than {MAX_DIGITS} digits")
        self.size += max(1, number.bit_length() // 4)
        return number

    def _float(self, number: float) -> float | str:
        self.size += 3
        if math.isfinite(number):
            return number
        return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"

    def _inside(self, value: Any, depth: int, read: Any) -> Any:
        if id(value) in self.open:
            return self._mark(value, "it is inside itself")
        if depth > MAX_DEPTH:
            return self._mark(value, f"more than {MAX_DEPTH} levels deep")
        self.open.add(id(value))
        try:
            self.size += 2
            return read(value, depth + 1)
        finally:
            self.open.discard(id(value))

    def _mapping(self, value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, item in value.items():
            if self.size > self.limit:
                self.is_cut = True
                break
            found[self._key(key, depth)] = self.plain(item, depth)
        return found

    def _key(self, key: Any, depth: int) -> str:
        plain = self.plain(key, depth)
        return plain if isinstance(plain, str) else _dumps(plain)

    def _items(self, value: Iterable[Any], depth: int) -> list[Any]:
        found: list[Any] = []
        for item in value:
            if self.size > self.limit:
                self.is_cut = True
                break
            found.append(self.plain(item, depth))
        return found

    def _mark(self, value: Any, reason: str) -> dict[str, str]:
        self.size += 50
        return _mark(value, reason)


def _mark(value: Any, reason: str) -> dict[str, str]:
    return {"cronlock": "not serialisable", "type": _type_name(value), "reason": reason}


def _type_name(value: Any) -> str:
    try:
        return clip(str.__str__(type(value).__name__), 100)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # a metaclass may raise anything
        return "object"


def _dumps(plain: Any) -> str:
    return json.dumps(plain, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def _truncated(text: str, size: int, limit: int) -> str:
    """The mark for a result that is too large, with as much of its JSON text as there is room for."""
    mark = _dumps({"cronlock": "truncated", "size": size, "head": ""}).removesuffix('"}')
    room = limit - len(mark) - 2
    head = _dumps(text[:room])[1:-1][:room]
    is_split = (len(head) - len(head.rstrip("\\"))) % 2  # in ASCII text only \" and \\ are escapes
    return f'{mark}{head[:-1] if is_split else head}"}}'
