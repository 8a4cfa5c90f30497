"""Secrets taken out of text that is stored, logged or answered, the cause left readable.

Two kinds: the secrets that are configured, in every spelling in which libraries print them, and what looks
like a secret to anyone (Authorization values, passwords in URLs and connection strings, tokens in queries).

The text may be hostile, so every pattern is linear in it: no repeat can begin again inside what another one
passed over, or it is bounded.
"""

import json
import re
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Iterable
from urllib.parse import quote, quote_plus

from cronlock.jsontext import clean

MASK = "***"
SHORTEST = 6
"""Configured values shorter than this are not looked for: they would be found in every other word."""

NAMES = (
    r"(?:tokens?|secrets?|passw(?:or)?d|passwd|pwd|passphrase|signature|credentials?"
    r"|(?:api|access|private|secret|client|account|shared|server|encryption)[_-]?key)"
)
NAME_PARTS = ("token", "secret", "passw", "pwd", "passphrase", "signature", "credential", "key")
BLANK = r"[ \t]{0,4}"
BARE = r"[^\s&#\"'<>,;(){}\[\]\\]+"
DOUBLE = r'"(?:[^"\\]|\\.)*"'
SINGLE = r"'(?:[^'\\]|\\.)*'"
DATABASES = r"(?:postgres(?:ql)?|mysql|mariadb|mongodb|rediss?|amqps?)(?:\+[a-z0-9_]{1,16})?"
PLAIN_WORDS = (
    r"(?!(?:auth|authentication|authorization|error|is|not|realm|required|scheme|tokens?|was)(?![^\s.,:;!?)]))"
)

PATTERNS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    # (what a text must have, in lower case, for the pattern to be tried; the pattern; what it becomes)
    # authorization: scheme token, as a header, an entry of a dict, a pair of an ASGI scope
    (
        ("authorization",),
        rf"(authorization(?:\\?[\"'])?{BLANK}[:=,]{BLANK}(?:b?\\?[\"'])?)"
        r"(?:digest[ \t][^\r\n]*|(?:[a-z][a-z0-9_-]{0,20}[ \t]{1,4})?[^\s\"',;)}\]\\]+)",
        rf"\1{MASK}",
    ),
    (("bearer",), rf"\b(bearer[ \t]{{1,8}}){PLAIN_WORDS}[^\s\"',;)}}\]\\]+", rf"\1{MASK}"),
    (("basic",), r"\b(basic[ \t]{1,8})[a-z0-9+/_-]{6,}={1,2}", rf"\1{MASK}"),
    # scheme://user:password@host; a raw / in the password of a database's URL; a token as the user
    (("://",), r"(://[^\s/?#:@\"'<>]*:)[^\s/?#\"'<>]*@", rf"\1{MASK}@"),
    (
        ("://",),
        rf"({DATABASES}://[^\s/?#:@\"'<>]{{0,64}}:)(?!\d{{1,5}}/|\*{{3}}@)[^\s\"'<>@]{{1,256}}@",
        rf"\1{MASK}@",
    ),
    (("://",), r"(://)[^\s/?#:@\"'<>]{16,}@", rf"\1{MASK}@"),
    # name=value in queries, connection strings and environments; "name": "value" in JSON and in a dict
    (NAME_PARTS, rf"({NAMES}{BLANK}={BLANK}\\?\")(?:[^\"\\]|\\[^\"])*", rf"\1{MASK}"),
    (NAME_PARTS, rf"({NAMES}{BLANK}={BLANK})(?:{SINGLE}|{BARE})", rf"\1{MASK}"),
    (("=",), rf"([?&;](?:key|sig|code|auth|jwt)=){BARE}", rf"\1{MASK}"),
    (NAME_PARTS, rf"({NAMES}[\"']?{BLANK}:{BLANK}){DOUBLE}", rf'\1"{MASK}"'),
    (NAME_PARTS, rf"({NAMES}[\"']?{BLANK}:{BLANK}b?){SINGLE}", rf"\1'{MASK}'"),
    # what is a secret by its shape: JSON Web Tokens; Stripe and GitHub; Slack
    (("eyj",), r"(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*", MASK),
    (("_",), r"(?<!\w)(?:(?:sk|rk)_(?:live|test)|whsec|gh[pousr]|github_pat)_\w{8,}", MASK),
    (("xox",), r"(?<![\w-])xox[abeprs]-[\w-]{8,}", MASK),
)
COMPILED = [
    (needles, re.compile(pattern, re.IGNORECASE | re.DOTALL), becomes) for needles, pattern, becomes in PATTERNS
]


class Scrubber:
    """Masks the given secrets, and what looks like one."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        values = [clean(value) for value in secrets if len(value) >= SHORTEST]
        spellings = {spelling for value in values for spelling in _spellings(value)}
        self._spellings = sorted(spellings, key=lambda spelling: (-len(spelling), spelling))

    def scrub(self, text: str) -> str:
        """`text` with every secret replaced by ***, and NUL and lone surrogates by U+FFFD.

        Takes time linear in the text. Cut a text after scrubbing it, never before: half a secret is not
        recognised.
        """
        text = clean(text)
        for spelling in self._spellings:
            text = text.replace(spelling, MASK)
        lower = text.lower()
        for needles, pattern, becomes in COMPILED:
            if any(needle in lower for needle in needles):
                text = pattern.sub(becomes, text)
        return text


def _spellings(secret: str) -> set[str]:
    """A secret as it is, in a URL, in a JSON or Python string, and in base64 wherever it begins there."""
    found = {
        secret,
        quote(secret),
        quote(secret, safe=""),
        quote_plus(secret),
        json.dumps(secret)[1:-1],
        json.dumps(secret, ensure_ascii=False)[1:-1],
        repr(secret)[1:-1],
    }
    found |= {re.sub("%[0-9A-F]{2}", lambda match: match[0].lower(), spelling) for spelling in found}
    raw = secret.encode()
    for encode in (b64encode, urlsafe_b64encode):
        found.add(encode(raw).decode())
        for before in range(3):
            # the characters that depend on this secret alone when `before` bytes precede it ("user:" in Basic)
            encoded = encode(b"\0" * before + raw).decode()
            found.add(encoded[(0, 2, 3)[before] : (before + len(raw)) * 8 // 6])
    return {spelling for spelling in found if len(spelling) >= SHORTEST}
