"""Rows as programs read them: JSON with names in camelCase, moments in ISO 8601, UTC."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID


@dataclass(frozen=True, slots=True)
class Result:
    """What a task returned: the names in it are its own and stay as they are."""

    value: Any


def result_of(text: str | None) -> Result | None:
    """A kept result to be dumped as JSON; as text if somebody wrote something else by hand."""
    if text is None:
        return None
    try:
        return Result(json.loads(text))
    except ValueError:
        return Result(text)


def dump(value: Any, *, indent: int | None = None) -> str:
    """A value of rows as one JSON document."""
    return json.dumps(camel(value), ensure_ascii=False, default=plain, indent=indent)


def camel(value: Any) -> Any:
    """A value with every snake_case name of its mappings in camelCase."""
    if isinstance(value, Mapping):
        return {camel_name(name): camel(item) for name, item in value.items()}
    return [camel(item) for item in value] if isinstance(value, list) else value


def camel_name(name: str) -> str:
    """runId from run_id."""
    first, *more = name.split("_")
    return first + "".join(part.capitalize() for part in more)


def plain(value: Any) -> Any:
    """What JSON has no word for; a span of time is its seconds."""
    match value:
        case datetime():
            return iso(value)
        case timedelta():
            return value.total_seconds()
        case Decimal():
            return float(value)
        case UUID():
            return str(value)
        case Result():
            return value.value
    raise TypeError(f"no JSON for {type(value).__name__}")


def iso(moment: datetime) -> str:
    """ISO 8601 to the millisecond, in UTC."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds")
