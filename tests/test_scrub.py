"""Secrets are masked wherever and however they are spelt, and the cause stays readable."""

import base64
import json
import re
import time
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cronlock.scrub import Scrubber

SECRET = "p@ss/wörd+with \"quotes\" & 'more'"
TOKEN = "Zm9vYmFyYmF6cXV4-0123456789_abcdef"


@pytest.mark.parametrize(
    "spelling",
    [
        SECRET,
        quote(SECRET),
        quote(SECRET, safe=""),
        quote_plus(SECRET),
        re.sub("%..", lambda match: match[0].lower(), quote(SECRET, safe="")),
        json.dumps({"a": SECRET}),
        json.dumps({"a": SECRET}, ensure_ascii=False),
        repr({"a": SECRET}),
        base64.b64encode(SECRET.encode()).decode(),
        base64.urlsafe_b64encode(SECRET.encode()).decode().rstrip("="),
    ],
)
def test_a_configured_secret_is_masked_in_every_spelling(spelling: str) -> None:
    text = Scrubber([SECRET]).scrub(f"the call with {spelling} failed: no route")
    assert "***" in text
    assert text.startswith("the call with")
    assert text.endswith("failed: no route")
    for part in ("wörd", "w%C3", "w\\u00f6", "quotes", "more", spelling[6:14]):
        assert part not in text


@pytest.mark.parametrize("user", ["", "a", "ab", "abc", "admin"])
def test_a_secret_inside_other_base64_is_masked(user: str) -> None:
    encoded = base64.b64encode(f"{user}:{TOKEN}:rest".encode()).decode()
    text = Scrubber([TOKEN]).scrub(f"<{encoded}>")
    assert "***" in text
    assert len(text) < len(encoded) - len(TOKEN)


def test_base64_for_urls_is_known_too() -> None:
    secret = "s?>~" * 5
    encoded = base64.urlsafe_b64encode(secret.encode()).decode()
    assert "-" in encoded
    assert Scrubber([secret]).scrub(f"<{encoded}>") == "<***>"


def test_a_secret_that_holds_another_is_masked_whole() -> None:
    assert Scrubber(["abcdefgh", "abcdefghijklmnop"]).scrub("x abcdefghijklmnop y") == "x *** y"


def test_a_secret_that_is_not_utf_8_is_masked_too() -> None:
    assert Scrubber(["\udcff-secret"]).scrub("the \udcff-secret") == "the ***"


def test_very_short_values_are_not_looked_for() -> None:
    assert Scrubber(["e", "", "null"]).scrub("the null pointer") == "the null pointer"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("refused: Bearer sk_test_x", "refused: Bearer ***"),
        ("refused: bearer   abc.def-ghi~+/= (401)", "refused: bearer   *** (401)"),
        ("Authorization: Bearer abc123 failed with 401", "Authorization: *** failed with 401"),
        ("AUTHORIZATION: Basic dXNlcjpwYXNz", "AUTHORIZATION: ***"),
        ("authorization: abcdef", "authorization: ***"),
        ('Authorization: Digest username="u", response="6629fae4"\nnext', "Authorization: ***\nnext"),
        ("{'authorization': 'Bearer abc'}", "{'authorization': '***'}"),
        ('{"Authorization":"Token abc"}', '{"Authorization":"***"}'),
        ('"{\\"Authorization\\":\\"Token abc\\"}"', '"{\\"Authorization\\":\\"***\\"}"'),
        ("[(b'authorization', b'Bearer abc')]", "[(b'authorization', b'***')]"),
        ("Proxy-Authorization: Basic dXNlcjpwYXNz", "Proxy-Authorization: ***"),
        ("sent Basic dXNlcjpwYXNzd29yZA== to h", "sent Basic *** to h"),
        ("GET https://u:pw@h/?token=abc gave 500", "GET https://u:***@h/?token=*** gave 500"),
        ("https://u:p@w@h/x", "https://u:***@h/x"),
        ("redis://:hunter22@h:6379/0", "redis://:***@h:6379/0"),
        ("postgresql+asyncpg://u:pa%2Fss@[::1]:5432/d", "postgresql+asyncpg://u:***@[::1]:5432/d"),
        ("postgres://u:pa/ss?#x@h/d is no URL", "postgres://u:***@h/d is no URL"),
        ("https://0123456789abcdef0123@sentry.example/1", "https://***@sentry.example/1"),
        (
            "/a?x=1&api_key=k1&access_token=t&key=k2&signature=s&secret=z&password=p&y=2",
            "/a?x=1&api_key=***&access_token=***&key=***&signature=***&secret=***&password=***&y=2",
        ),
        ("/a?X-Amz-Signature=abc&X-Amz-Date=1", "/a?X-Amz-Signature=***&X-Amz-Date=1"),
        ("host=h user=u password=hunter22 dbname=d", "host=h user=u password=*** dbname=d"),
        (r"host=h password='it\'s here' dbname=d", "host=h password=*** dbname=d"),
        ("PASSWORD = hunter22 host=h", "PASSWORD = *** host=h"),
        ("AWS_SECRET_ACCESS_KEY=abc/def+ghi", "AWS_SECRET_ACCESS_KEY=***"),
        ('export CRON_SECRET="a b c" && x', 'export CRON_SECRET="***" && x'),
        ("{'password': 'x\\'y', 'host': 'h'}", "{'password': '***', 'host': 'h'}"),
        ('{"client_secret": "x\\"y", "host": "h"}', '{"client_secret": "***", "host": "h"}'),
        ("token eyJhbGciOiJI.eyJzdWIiOiIx.abc_-DEF ended", "token *** ended"),
        ("key sk_live_0123456789 and ghp_0123456789abcdef", "key *** and ***"),
        ("xoxb-1234567890-abc", "***"),
    ],
)
def test_what_looks_like_a_secret_is_masked_and_the_rest_is_kept(text: str, masked: str) -> None:
    assert Scrubber().scrub(text) == masked


@pytest.mark.parametrize(
    "text",
    [
        'duplicate key value violates unique constraint "user_email"\nDETAIL:  Key (email)=(a@b.example) exists.',
        'connection to server at "127.0.0.1", port 5432 failed: FATAL:  password authentication failed for user "u"',
        "Bearer token missing",
        "Unexpected token: } at line 3",
        "lockKey=8492019482019283 monkey=1",
        "http://localhost:3000/path/@scope/pkg 404",
        "postgresql://localhost:5432/app?application_name=a@b refused",
        "https://example.com/a?b=c#d",
        "secretary: Ms Key",
        "ssh://git@github.com/x",
        "mail to someone@example.com at 10:30",
        "division by zero",
    ],
)
def test_ordinary_messages_are_left_as_they_are(text: str) -> None:
    assert Scrubber(["0123456789abcdefXYZ"]).scrub(text) == text


def test_nul_and_lone_surrogates_are_replaced() -> None:
    assert Scrubber().scrub("a\0b\ud800c\ud83d\ude00") == "a\ufffdb\ufffdc\U0001f600"


@given(st.text(), st.text(max_size=30), st.text(max_size=30))
def test_no_secret_comes_through(secret: str, before: str, after: str) -> None:
    secret = "s3cr3t" + secret.replace("*", "x").encode("utf-8", "replace").decode()
    assert secret not in Scrubber([secret]).scrub(before + secret + after)


@given(st.text(alphabet="aB:/@?&='\" \\\n*.-0_%", max_size=60))
def test_scrubbing_twice_changes_nothing_more(text: str) -> None:
    scrubber = Scrubber()
    once = scrubber.scrub(text)
    assert scrubber.scrub(once) == once


HOSTILE = {
    "letters": "a",
    "spaces": " ",
    "schemes": "://",
    "schemes with users": "a://a:",
    "database schemes": "postgres://a:",
    "users without end": "://a:b",
    "at signs": "@",
    "colons": ":",
    "bearers": "bearer ",
    "bearers and spaces": "bearer" + " " * 50,
    "authorizations": "authorization: ",
    "authorizations without value": "authorization:authorization",
    "digests": "authorization: digest ",
    "basics": "basic aaaaaaaa",
    "passwords": "password=",
    "open single quotes": "password='",
    "open double quotes": 'password="',
    "escapes": "password='\\'",
    "json names": '"password": "',
    "dict names": "'password': '",
    "names": "secret",
    "names and blanks": "secret    ",
    "query names": "?key=",
    "tokens": "eyJ",
    "dashed tokens": "eyJ-",
    "dotted tokens": "eyJaaaaaaaa.",
    "backslashes": "\\",
    "stripe": "sk_live_",
    "slack": "xoxb-",
}


@pytest.mark.parametrize("repeated", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_takes_time_linear_in_its_length(repeated: str) -> None:
    assert seconds(repeated * (200_000 // len(repeated))) < 3  # about 0.1; a quadratic pattern takes minutes


@pytest.mark.parametrize("filling", ["a", "\\", "\\'", " ", "a/", "a-", "a."])
def test_an_opening_with_no_end_takes_time_linear_in_its_length(filling: str) -> None:
    openings = ["password='", '"password": "', "://a:", "eyJ", "authorization: digest ", "bearer "]
    assert seconds("".join(f"\n{opening}{filling * (30_000 // len(filling))}" for opening in openings)) < 3


def test_a_megabyte_of_everything_is_scrubbed_in_seconds() -> None:
    assert seconds("".join(repeated * (40_000 // len(repeated)) for repeated in HOSTILE.values())) < 10


def seconds(text: str) -> float:
    begun = time.perf_counter()
    Scrubber([SECRET, TOKEN]).scrub(text)
    return time.perf_counter() - begun
