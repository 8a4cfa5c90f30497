"""`key="{tenant}"`: one lock for each value of some fields of the payload."""

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from enum import Enum
from string import Formatter
from typing import Any

from pydantic import BaseModel, SecretBytes, SecretStr

from cronlock.errors import ConfigError, PayloadInvalid

LONGEST = 200
NOT_PLAIN = (BaseModel, Mapping, list, tuple, set, frozenset, bytes, bytearray, memoryview, SecretStr, SecretBytes)
"""What has no text that tells its values apart; a secret's is stars."""


@dataclass(frozen=True, slots=True)
class Key:
    """A template such as "{tenant}" or "{region}/{shard}", and the fields it names."""

    template: str
    fields: tuple[str, ...]

    @classmethod
    def parse(cls, template: str) -> "Key":
        """Read a template; raises `ConfigError` for one that names no field, or anything but plain names."""
        wrong = ConfigError(
            f"key={template!r} must name fields of the payload in braces, such as key='{{tenant}}', and nothing else"
        )
        if not isinstance(template, str) or not template.isprintable() or len(template) > LONGEST:
            raise wrong
        try:
            parts = list(Formatter().parse(template))
        except ValueError:
            raise wrong from None
        named = [(name, spec, conversion) for _, name, spec, conversion in parts if name is not None]
        if not named or any(not name.isidentifier() or spec or conversion for name, spec, conversion in named):
            raise wrong
        return cls(template, tuple(dict.fromkeys(name for name, _, _ in named)))

    def fill(self, payload: Any) -> str:
        """The key of a validated payload, 1 to 200 characters.

        Raises `PayloadInvalid` for a field that is missing, null or empty, that is no plain value, or has a NUL
        character, and for a key that is longer.
        """
        values = {name: plain(name, find(payload, name)) for name in self.fields}
        made = self.template.format_map(values)
        if len(made) > LONGEST:
            longest = max(values, key=lambda name: len(values[name]))
            raise wrong(longest, f"makes a key of {len(made)} characters; it may have {LONGEST}")
        return made

    def not_held(self, payload: Any) -> PayloadInvalid:
        """The 422 for a key of this payload that the database's encoding does not have."""
        foreign = [name for name in self.fields if not plain(name, find(payload, name)).isascii()]
        return wrong(
            (foreign or self.fields)[0], "has characters that the database cannot hold, and a key is made of it"
        )


def find(payload: Any, name: str) -> Any:
    """A field of a mapping, a model or any other object; None if it has none."""
    return payload.get(name) if isinstance(payload, Mapping) else getattr(payload, name, None)


def plain(name: str, value: Any) -> str:
    """One value as the text that a key is made of; the same whether it came as 7 or as "7"."""
    if isinstance(value, Enum):
        value = value.value
    if value is None:
        raise wrong(name, "is needed: the task's key is made of it", "missing")
    not_plain = wrong(name, "must be one plain value: the task's key is made of it")
    if isinstance(value, NOT_PLAIN) or is_dataclass(value):
        raise not_plain
    try:
        text = str(value)
    except Exception:  # an integer of thousands of digits, or a class of the task's own
        raise not_plain from None
    if not text:
        raise wrong(name, "must not be empty: the task's key is made of it")
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise wrong(name, "has a character that a key cannot have")
    return text


def wrong(name: str, message: str, kind: str = "value_error") -> PayloadInvalid:
    """The 422 for a field that a key cannot be made of."""
    return PayloadInvalid([{"field": name, "message": message, "type": kind}])


LONGEST_OCCURRENCE = 255


def occurrence_fault(occurrence: str) -> str | None:
    """Why a text cannot name an occurrence or an enqueue; None if it can."""
    if not isinstance(occurrence, str) or not 0 < len(occurrence) <= LONGEST_OCCURRENCE:
        return f"must have 1 to {LONGEST_OCCURRENCE} characters"
    return None if occurrence.isprintable() else "has control characters"
