"""Targets: who is told what is stale, and how. Declared on a `Cronlock`; `delivery` does the telling.

A webhook is signed as Stripe signs its own: HMAC-SHA256 over the time, a dot and the body, so that neither can be
changed and an old request cannot be sent again later. (RFC 2104; Stripe's documentation, "Verify webhook signatures
manually".)
"""

import hashlib
import hmac
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from pydantic import SecretStr

from cronlock.config import Settings, secret_fault
from cronlock.errors import ConfigError, PayloadError, RegistrationError
from cronlock.tasks import NAME, is_coroutine_function, where
from cronlock.units import parse_duration

SIGNATURE = "Cronlock-Signature"
"""The header of a webhook: `t=<Unix seconds>,v1=<hexadecimal digest>`, a `v1` for each secret."""
CHANNEL = "cronlock_invalidation"
MOST_TEXTS = 1000
LONGEST_TEXT = 1000
LONGEST_BYTES = 2000
"""Of one text in UTF-8: PostgreSQL indexes no more than about 2,700 bytes, and notifies of no more than 8,000."""
LONGEST_PAYLOAD = 7900
LONGEST_TIMEOUT = timedelta(minutes=10)
CHANNEL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.:-]{0,62}")

encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class Invalidation:
    """What is stale: keys, tags and paths, each once.

    `has_gap` is for subscribers: before this something may have been missed, so that anything may be stale.
    """

    keys: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    has_gap: bool = False

    def __len__(self) -> int:
        return len(self.keys) + len(self.tags) + len(self.paths)

    def as_json(self) -> str:
        """As a webhook's body and a NOTIFY's payload have it."""
        return encode({"keys": self.keys, "tags": self.tags, "paths": self.paths})

    @property
    def texts(self) -> list[str]:
        """Keys, tags and paths alike."""
        return [*self.keys, *self.tags, *self.paths]


def said(keys: Iterable[str], tags: Iterable[str], paths: Iterable[str]) -> Invalidation:
    """What a task says, checked.

    Raises `PayloadError` for what is no text of 1 to 1,000 characters (2,000 bytes), and for more than 1,000 of them.
    """
    found = Invalidation(texts("keys", keys), texts("tags", tags), texts("paths", paths))
    if len(found) > MOST_TEXTS:
        raise PayloadError(f"at most {MOST_TEXTS} keys, tags and paths are invalidated at once, not {len(found)}")
    return found


def texts(what: str, given: Iterable[str]) -> tuple[str, ...]:
    """Distinct texts in the order in which they came; raises `PayloadError`."""
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise PayloadError(f"{what} are a list of texts, not {type(given).__name__}")
    found = dict.fromkeys(text(what, one) for one in given)
    return tuple(found)


def text(what: str, given: object) -> str:
    """One key, tag or path; raises `PayloadError`."""
    if not isinstance(given, str):
        raise PayloadError(f"{what} are texts, not {type(given).__name__}")
    if not given:
        raise PayloadError(f"{what} are not empty texts")
    if len(given) > LONGEST_TEXT:
        raise PayloadError(f"{what} have at most {LONGEST_TEXT} characters; {given[:40]!r}.. has {len(given)}")
    try:
        size = len(given.encode())
    except UnicodeEncodeError:
        raise PayloadError(f"{what} cannot have a lone surrogate: {given[:40]!a}") from None
    if "\0" in given:
        raise PayloadError(f"{what} cannot have a NUL character: {given[:40]!a}")
    if size > LONGEST_BYTES:
        raise PayloadError(f"{what} have at most {LONGEST_BYTES} bytes in UTF-8; {given[:40]!r}.. has {size}")
    return str(given)


def merged(parts: Sequence[Invalidation]) -> Invalidation:
    """Several as one: each text once, where it was said first."""
    return Invalidation(
        tuple(dict.fromkeys(one for part in parts for one in part.keys)),
        tuple(dict.fromkeys(one for part in parts for one in part.tags)),
        tuple(dict.fromkeys(one for part in parts for one in part.paths)),
    )


class Webhook:
    """A URL that is sent what is stale: POST of `{"keys": [..], "tags": [..], "paths": [..]}`, signed.

    - `url`: `https://..`, such as a revalidation route of Next.js. An answer of 2xx has delivered; a redirect is a
      failure, and is not followed.
    - `secret`: what the signature is made with, at least 16 characters; several for a rotation
      (CRONLOCK_WEBHOOK_SECRET).
    - `timeout`: how long the whole request may take; "10s", seconds or a timedelta.

    Raises `RegistrationError` for a URL or a timeout that is wrong, `ConfigError` for a secret that will not do.
    """

    kind = "webhook"

    def __init__(
        self, url: str, *, secret: str | Sequence[str] | None = None, timeout: str | float | timedelta = "10s"
    ) -> None:
        self.url = web_address(url)
        self.timeout = limit(timeout)
        given = [secret] if isinstance(secret, str) else list(secret or ())
        for one in given:
            if fault := secret_fault(SecretStr(one)):
                raise ConfigError(f"a webhook's secret {fault}; make one with: cronlock secret")
        self._secrets = tuple(given)

    def secrets(self, settings: Settings) -> tuple[str, ...]:
        """Its own secrets, else the setting's; raises `ConfigError` if there is none."""
        return self._secrets or settings.require_webhook_secrets()


def signature(secrets: Sequence[str], at: int, body: bytes) -> str:
    """The header's value for a body that is sent at the Unix second `at`."""
    signed = b"%d.%b" % (at, body)
    digests = [hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest() for secret in secrets]
    return ",".join((f"t={at}", *(f"v1={digest}" for digest in digests)))


class Notify:
    """PostgreSQL's NOTIFY, for caches inside processes: `Cronlock.subscribe` hears it.

    `channel` is its name, at most 63 characters. Raises `RegistrationError` for another one.
    """

    kind = "notify"

    def __init__(self, channel: str = CHANNEL) -> None:
        self.channel = channel_name(channel)


def payloads(change: Invalidation) -> list[str]:
    """As NOTIFY takes it, in as many pieces as its limit of 8,000 bytes asks for."""
    whole = change.as_json()
    if len(whole.encode()) <= LONGEST_PAYLOAD:
        return [whole]
    pieces: list[str] = []
    named = (("keys", change.keys), ("tags", change.tags), ("paths", change.paths))
    part: dict[str, list[str]] = {"keys": [], "tags": [], "paths": []}
    empty = size = len(encode(part))
    for name, found in named:
        for one in found:
            cost = len(encode(one).encode()) + 1
            if size + cost > LONGEST_PAYLOAD and size > empty:
                pieces.append(encode(part))
                part, size = {"keys": [], "tags": [], "paths": []}, empty
            part[name].append(one)
            size += cost
    return [*pieces, encode(part)]


def heard(payload: str) -> Invalidation:
    """What a NOTIFY said; a gap, if it is not one of ours."""
    try:
        found = json.loads(payload)
        return said(found["keys"], found["tags"], found["paths"])
    except (ValueError, TypeError, KeyError, PayloadError):
        return Invalidation(has_gap=True)


class VersionTable:
    """The table `cronlock.cache_version`: every delivery raises the version of each key, tag and path.

    Readers put the version into the keys of their cache, and read it before what they cache.
    """

    kind = "version_table"


class Call:
    """A callable of the user's: `(Invalidation) -> None`, `async def`, or plain and run in a thread.

    `timeout` is how long it may take. What it raises is a failed delivery.
    """

    kind = "callable"

    def __init__(self, function: Callable[[Invalidation], Any], timeout: str | float | timedelta) -> None:
        self.function = function
        self.is_async = is_coroutine_function(function)
        self.timeout = limit(timeout)


Kind = Webhook | Notify | VersionTable | Call


@dataclass(frozen=True, slots=True)
class Target:
    """A name, under which deliveries are written down, and what it stands for."""

    name: str
    to: Kind


class Targets:
    """The targets of one `Cronlock`, in the order in which they were registered."""

    def __init__(self) -> None:
        self._targets: dict[str, Target] = {}

    def __iter__(self) -> Iterator[Target]:
        return iter(self._targets.values())

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, name: str) -> Target:
        return self._targets[name]

    @property
    def names(self) -> list[str]:
        """Their names."""
        return list(self._targets)

    def add(self, name: str, to: Any, timeout: str | float | timedelta) -> None:
        """Register one; raises `RegistrationError`."""
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise RegistrationError(
                f"target {name!r}: a name has 1 to 40 of a-z, 0-9, '.', '_' and '-', and begins with a letter or digit"
            )
        if name in self._targets:
            raise RegistrationError(f"target {name!r} is registered twice; give one of them another name")
        if isinstance(to, (Webhook, Notify, VersionTable)):
            self._targets[name] = Target(name, to)
        elif callable(to) and not isinstance(to, type):
            self._targets[name] = Target(name, Call(to, timeout))
        else:
            raise RegistrationError(
                f"target {name!r} is a Webhook(..), a Notify(), a VersionTable() or a callable, not {shown(to)}"
            )

    def require_secrets(self, settings: Settings) -> None:
        """Raise `ConfigError` if a webhook has no secret to sign with."""
        for target in self:
            if isinstance(target.to, Webhook):
                target.to.secrets(settings)


def shown(given: object) -> str:
    """What was given instead of a target."""
    return (
        f"the class {given.__name__}" if isinstance(given, type) else where(given) if callable(given) else repr(given)
    )


def web_address(given: object) -> str:
    """A URL that can be posted to; raises `RegistrationError`."""
    try:
        parts = urlsplit(given) if isinstance(given, str) else None
        is_good = parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname)
        is_good = is_good and parts is not None and parts.username is None and (parts.port is None or parts.port > 0)
    except ValueError:
        is_good = False
    if not is_good or not isinstance(given, str):
        raise RegistrationError(
            "a webhook's url is such as 'https://shop.example/api/revalidate', with no user and password in it"
        )
    return given


def channel_name(given: object) -> str:
    """The name of a channel; raises `RegistrationError`."""
    if not isinstance(given, str) or not CHANNEL_NAME.fullmatch(given):
        raise RegistrationError(f"a channel has 1 to 63 letters, digits, '_', '.', ':' and '-', not {given!r}")
    return given


def limit(given: str | float | timedelta) -> timedelta:
    """How long a delivery may take; raises `RegistrationError`."""
    try:
        return parse_duration(given, longest=LONGEST_TIMEOUT)
    except ValueError as error:
        raise RegistrationError(f"a target's timeout: {error}") from None
