"""Database URLs as people have them, made into what libpq understands.

Taken: `postgres://`, `postgresql://`, SQLAlchemy's `postgresql+driver://`, the parameters that Prisma,
asyncpg and node-postgres add, and libpq's keyword strings (`host=.. dbname=..`). Which parameters libpq knows
is asked of libpq. No message says any part of a value: libpq's own messages quote the string, with the
password in it.
"""

import re
from dataclasses import dataclass
from urllib.parse import unquote

from psycopg import Error, pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

EXAMPLE = "postgresql://user:password@localhost:5432/app"
ENCODE = "write the special characters of a user name or password percent-encoded, such as %40 for @ and %2F for /"
MASK = "***"

OPTIONS = {option.keyword.decode(): option for option in pq.Conninfo.get_defaults()}
SECRET = {name for name, option in OPTIONS.items() if option.dispchar == b"*"}
SECRET |= {"scram_client_key", "scram_server_key"}

SCHEME = re.compile(r"((?:jdbc:)?[A-Za-z][A-Za-z0-9+._-]*)://")
DRIVER = re.compile(r"postgres(?:ql)?(?:\+[a-z0-9_]+)?")
PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,40}")
SSL_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
SSL_WORDS = {
    "true": "require",
    "1": "require",
    "no-verify": "require",  # node-postgres: encrypted, the certificate not looked at
    "false": "disable",
    "0": "disable",
}


@dataclass(frozen=True, slots=True)
class Conninfo:
    """A connection string for libpq, the parameters left out of it, and whether it said that a pooler is there."""

    text: str
    dropped: tuple[str, ...] = ()
    is_pooled: bool = False


def normalise(text: str) -> Conninfo:
    """Make `text` a connection string that libpq takes.

    Raises ValueError, without any part of the value in it, for another scheme, for what libpq cannot read,
    and for a URL that libpq would read otherwise than it was meant (a raw `@` or `/` in a password).
    """
    text = text.strip()
    if not text.isprintable() and not _is_keywords(text):
        raise ValueError("has a line break or another character that cannot be in a URL")
    if _is_keywords(text):
        _parse(text)
        return Conninfo(text)
    scheme = SCHEME.match(text)
    if text[:1] in ("'", '"'):
        raise ValueError("begins with a quotation mark, which is part of the value here")
    if scheme is None:
        raise ValueError("is neither a URL nor libpq keywords (host=.. dbname=..)")
    if not DRIVER.fullmatch(scheme[1].lower()):
        raise ValueError(f"begins with {scheme[1][:40]}://, not with postgresql://")
    return _url(text[scheme.end() :])


def label(text: str) -> str:
    """host:port/dbname of a normalised connection string, for messages; never a user name or password."""
    params = _parse(text)
    hosts = (params.get("host") or params.get("hostaddr") or _default("host") or "local socket").split(",")
    ports = (params.get("port") or _default("port") or "5432").split(",")
    if len(ports) == 1:
        ports *= len(hosts)
    places = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in zip(hosts, ports, strict=False)]
    database = params.get("dbname") or params.get("user") or _default("dbname") or _default("user") or ""
    return f"{','.join(places)}/{database}"


def masked(text: str) -> str:
    """A normalised connection string with every password in it replaced."""
    if _is_keywords(text):
        params = _parse(text)
        return make_conninfo("", **{name: MASK if name in SECRET else value for name, value in params.items()})
    scheme, _, rest = text.partition("://")
    head, mark, query = rest.partition("?")
    user, at, place = head.rpartition("@")
    name, colon, _ = user.partition(":")
    pairs = [
        f"{key}={MASK}" if unquote(key) in SECRET else f"{key}={value}"
        for key, _, value in (pair.partition("=") for pair in query.split("&"))
    ]
    return f"{scheme}://{name}{colon}{MASK if colon else ''}{at}{place}{mark}{'&'.join(pairs) if query else ''}"


def passwords(text: str) -> list[str]:
    """The secret values of a normalised connection string that tell something apart.

    A password that is also the user's, the host's or the database's name is left out: to mask that word
    everywhere would make every message unreadable and keep nothing secret.
    """
    params = _parse(text)
    names = {value for name, value in params.items() if name not in SECRET}
    return [value for name, value in params.items() if name in SECRET and value and value not in names]


def _is_keywords(text: str) -> bool:
    return "=" in text and not SCHEME.match(text)


def _url(rest: str) -> Conninfo:
    head, _, query = rest.partition("?")
    authority, _, path = head.partition("/")
    if authority.count("@") > 1 or "@" in path:
        raise ValueError(f"has an @ where none belongs; {ENCODE}")
    if " " in rest:
        raise ValueError("has a space in it; in a URL that is written %20")
    kept, dropped, words = _parameters(query)
    if words.get("ssl") and not any(name == "sslmode" for name, _ in kept):
        kept.append(("sslmode", words["ssl"]))
    pairs = "&".join(f"{name}={_ssl_mode(value) if name == 'sslmode' else value}" for name, value in kept)
    text = f"postgresql://{head}{'?' if pairs else ''}{pairs}"
    _parse(text)
    return Conninfo(text, tuple(dropped), words.get("pgbouncer", "").lower() in ("true", "1"))


def _parameters(query: str) -> tuple[list[tuple[str, str]], list[str], dict[str, str]]:
    """What libpq knows, the names of what it does not, and the words that mean something to us."""
    kept: list[tuple[str, str]] = []
    dropped: list[str] = []
    words: dict[str, str] = {}
    for pair in filter(None, query.split("&")):
        raw_name, _, value = pair.partition("=")
        name = unquote(raw_name)
        if not PLAIN_NAME.fullmatch(name):
            raise ValueError(f"has parameters after the ? that are no name=value; {ENCODE}")
        if name in OPTIONS:
            kept.append((name, value))
        elif name in ("ssl", "pgbouncer"):
            words[name] = value
        else:
            dropped.append(name)
    return kept, dropped, words


def _ssl_mode(value: str) -> str:
    mode = SSL_WORDS.get(value.lower(), value)
    if mode and mode not in SSL_MODES:
        raise ValueError(f"has an sslmode that is none of {', '.join(SSL_MODES)}")
    return mode


def _parse(text: str) -> dict[str, str]:
    """libpq's reading of `text`; raises ValueError that quotes nothing of it."""
    try:
        if "\0" in text:
            raise ValueError
        params = {name: str(value) for name, value in conninfo_to_dict(text).items() if value is not None}
    except (Error, ValueError):
        hint = "write a value with spaces as name='a b'" if _is_keywords(text) else ENCODE
        raise ValueError(f"cannot be read by libpq; {hint}") from None
    for port in params.get("port", "").split(","):
        if port and not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65535):
            raise ValueError(f"has a port that is no number from 1 to 65535; {ENCODE}")
    return params


def _default(name: str) -> str:
    """What libpq takes when nothing is said: from its environment, its service file or its own default."""
    value = next((option.val for option in pq.Conninfo.get_defaults() if option.keyword == name.encode()), None)
    return value.decode() if value else ""
