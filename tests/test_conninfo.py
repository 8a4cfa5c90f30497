"""Database URLs as people have them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.conninfo import conninfo_to_dict

from cronlock import conninfo

PASSWORD = "hunter22"


@pytest.mark.parametrize(
    ("given_url", "text"),
    [
        ("postgres://u:p%40w@h/db", "postgresql://u:p%40w@h/db"),
        ("postgresql://u:p@h:5433/db?application_name=a%20b", "postgresql://u:p@h:5433/db?application_name=a%20b"),
        ("postgresql+psycopg://u@h/db", "postgresql://u@h/db"),
        ("postgresql+psycopg2://u@h/db", "postgresql://u@h/db"),
        ("postgresql+asyncpg://u@h/db?ssl=require", "postgresql://u@h/db?sslmode=require"),
        ("postgresql+asyncpg://u@h/db?ssl=verify-full", "postgresql://u@h/db?sslmode=verify-full"),
        ("postgres://u@h/db?ssl=true", "postgresql://u@h/db?sslmode=require"),
        ("postgres://u@h/db?ssl=false", "postgresql://u@h/db?sslmode=disable"),
        ("postgres://u@h/db?ssl=true&sslmode=verify-ca", "postgresql://u@h/db?sslmode=verify-ca"),
        ("postgres://u@h/db?sslmode=no-verify", "postgresql://u@h/db?sslmode=require"),
        ("postgresql:///db?host=/run/x", "postgresql:///db?host=/run/x"),
        ("postgresql://%2Frun%2Fx/db", "postgresql://%2Frun%2Fx/db"),
        ("postgresql://u:p@[::1]:5433/db", "postgresql://u:p@[::1]:5433/db"),
        ("postgresql://h1:1,h2:2/db?target_session_attrs=read-write",) * 2,
        ("postgresql://u:a#b=c@h/db", "postgresql://u:a#b=c@h/db"),
        ("postgres://h/db?", "postgresql://h/db"),
        ("POSTGRES://h/db", "postgresql://h/db"),
        ("  postgres://h/db\n", "postgresql://h/db"),
        ("host=h dbname=db password='a b'", "host=h dbname=db password='a b'"),
        ("host=h\npassword='x://y'", "host=h\npassword='x://y'"),
    ],
)
def test_urls_are_made_into_what_libpq_takes(given_url: str, text: str) -> None:
    found = conninfo.normalise(given_url)
    assert (found.text, found.dropped, found.is_pooled) == (text, (), False)
    assert conninfo_to_dict(found.text)
    assert conninfo.normalise(found.text).text == found.text


def test_parameters_that_libpq_does_not_know_are_left_out_and_named() -> None:
    found = conninfo.normalise(
        "postgres://u:p@h/db?pgbouncer=true&schema=app&connection_limit=1&sslmode=require&pool_timeout=0"
    )
    assert found.text == "postgresql://u:p@h/db?sslmode=require"
    assert found.dropped == ("schema", "connection_limit", "pool_timeout")
    assert found.is_pooled


@pytest.mark.parametrize(("value", "is_pooled"), [("true", True), ("1", True), ("false", False), ("", False)])
def test_pgbouncer_true_says_that_a_pooler_is_there(value: str, is_pooled: bool) -> None:
    assert conninfo.normalise(f"postgres://h/db?pgbouncer={value}").is_pooled is is_pooled


@pytest.mark.parametrize(
    ("url", "part"),
    [
        (f"mysql://u:{PASSWORD}@h/db", "begins with mysql://"),
        (f"https://u:{PASSWORD}@h/db", "begins with https://"),
        (f"jdbc:postgresql://u:{PASSWORD}@h/db", "begins with jdbc:postgresql://"),
        (f"prisma+postgres://h/?api_key={PASSWORD}", "begins with prisma+postgres://"),
        ("sqlite:///app.db", "begins with sqlite://"),
        (PASSWORD, "neither a URL nor libpq keywords"),
        ("", "neither a URL nor libpq keywords"),
        (f"'postgres://u:{PASSWORD}@h/db'", "begins with a quotation mark"),
        (f"postgres://u:{PASSWORD}@x@h/db", "has an @ where none belongs"),
        (f"postgres://u:1/{PASSWORD}@h/db", "has an @ where none belongs"),
        (f"postgres://u:1?{PASSWORD}@h/db", "parameters after the ? that are no name=value"),
        (f"postgres://u:{PASSWORD}/x@h/db", "has an @ where none belongs"),
        (f"postgres://u:{PASSWORD}/db", "has a port that is no number"),
        (f"postgres://u:{PASSWORD}%zz@h/db", "cannot be read by libpq"),
        (f"postgres://u:{PASSWORD}%00@h/db", "cannot be read by libpq"),
        (f"postgres://u:{PASSWORD} x@h/db", "has a space in it"),
        (f"postgres://u:{PASSWORD}\n@h/db", "has a line break"),
        (f"postgres://u:{PASSWORD}\0@h/db", "has a line break"),
        (f"postgres://u:{PASSWORD}\ud800@h/db", "has a line break"),
        ("postgres://h:99999/db", "no number from 1 to 65535"),
        ("postgres://h1:1,h2:0/db", "no number from 1 to 65535"),
        ("postgres://h/db?sslmode=on", "none of disable, allow"),
        (f"password={PASSWORD} x=y", "name='a b'"),
        (f"password={PASSWORD} word host=h", "name='a b'"),
        (f"password={PASSWORD}\0 host=h", "cannot be read by libpq"),
    ],
)
def test_a_url_that_will_not_do_is_refused_without_showing_it(url: str, part: str) -> None:
    with pytest.raises(ValueError, match=re.escape(part)) as caught:
        conninfo.normalise(url)
    assert PASSWORD not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@given(st.text(max_size=40), st.sampled_from(["", "postgres://", "postgres://u:", "host=h password="]))
def test_any_text_is_a_conninfo_that_libpq_reads_or_a_value_error(text: str, start: str) -> None:
    message = ""
    try:
        found = conninfo.normalise(start + text)
    except ValueError as error:
        message = str(error)
    if message:
        assert len(text) < 8 or text not in message
        return
    assert isinstance(conninfo_to_dict(found.text), dict)
    conninfo.label(found.text)
    conninfo.masked(found.text)


@pytest.mark.parametrize(
    ("url", "label"),
    [
        (f"postgresql://u:{PASSWORD}@h/db", "h:5432/db"),
        (f"postgresql://u:{PASSWORD}@h:6543", "h:6543/u"),
        (f"postgresql://u:{PASSWORD}@[::1]:5433/db", "[::1]:5433/db"),
        ("postgresql://h1:1,h2:2/db", "h1:1,h2:2/db"),
        ("host=h1,h2 port=7 dbname=db", "h1:7,h2:7/db"),
        (f"host=/run/x dbname=db password={PASSWORD}", "/run/x:5432/db"),
        ("hostaddr=127.0.0.1 dbname=db", "127.0.0.1:5432/db"),
        ("postgresql:///db", "local socket:5432/db"),
    ],
)
def test_the_label_names_the_place_and_no_credentials(url: str, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGHOST", raising=False)
    monkeypatch.delenv("PGPORT", raising=False)
    assert conninfo.label(url) == label


def test_the_label_knows_what_libpq_takes_from_its_own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGHOST", "other")
    monkeypatch.setenv("PGPORT", "7")
    assert conninfo.label("postgresql:///db") == "other:7/db"


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        (f"postgresql://u:{PASSWORD}@h/db?sslmode=require", "postgresql://u:***@h/db?sslmode=require"),
        (
            f"postgresql://u@h/db?password={PASSWORD}&sslpassword={PASSWORD}&application_name=x",
            "postgresql://u@h/db?password=***&sslpassword=***&application_name=x",
        ),
        (f"postgresql://h/db?p%61ssword={PASSWORD}", "postgresql://h/db?p%61ssword=***"),
        ("postgresql://u@[::1]:5432/db", "postgresql://u@[::1]:5432/db"),
        (f"password='{PASSWORD} x' host=h", "password=*** host=h"),
    ],
)
def test_passwords_are_masked(url: str, masked: str) -> None:
    assert conninfo.masked(url) == masked


def test_passwords_are_found_decoded_unless_they_are_also_a_name() -> None:
    assert conninfo.passwords("postgresql://u:p%40w@h/db?sslpassword=x") == ["p@w", "x"]
    assert conninfo.passwords("postgresql://postgres:postgres@h/db") == []
    assert conninfo.passwords("postgresql://u@h/db") == []
