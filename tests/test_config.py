"""Settings: what is taken, what is refused, what is never shown."""

import logging
import os
from datetime import timedelta
from typing import Any

import pytest

from cronlock.config import Settings, env_names, key
from cronlock.errors import ConfigError

GOOD = "Zm9vYmFyYmF6cXV4-0123456789"
OTHER = "another-secret-of-24-chars"
URL = "postgresql://app:hunter22@db.example:5433/shop"
DEFAULTS = {
    "database_url": "not set",
    "direct_url": "not set",
    "secrets": "not set",
    "admin_secret": "not set",
    "admin_read_secret": "not set",
    "webhook_secret": "not set",
    "schema_name": "cronlock",
    "namespace": "not set",
    "pooler": "none",
    "skip_status": "200",
    "timeout": "2m",
    "guard_ping": "5s",
    "acquire_timeout": "5s",
    "drain_timeout": "25s",
    "recover_interval": "15s",
    "lease": "30s",
    "presence_grace": "3s",
    "worker_concurrency": "10",
    "max_attempts": "5",
    "idempotency_ttl": "1h",
    "max_body": "1MiB",
    "pool_size": "10",
    "record_pool_size": "2",
    "record_queue_size": "10000",
    "release": "not set",
    "retention_skipped": "7d",
    "retention_completed": "28d",
    "retention_failed": "90d",
    "retention_invalidated": "7d",
    "log_format": "json",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without any setting."""
    for name in list(os.environ):
        if name.startswith("CRONLOCK_") or name in ("DATABASE_URL", "CRON_SECRET"):
            monkeypatch.delenv(name)
    return monkeypatch


def refusal(**overrides: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Settings.load(**overrides)
    assert caught.value.__context__ is None, "pydantic's error holds the values"
    return str(caught.value)


def secrets_refusal(**overrides: Any) -> str:
    settings = Settings.load(**overrides)
    with pytest.raises(ConfigError) as caught:
        settings.require_secrets()
    return str(caught.value)


def test_defaults_are_as_documented() -> None:
    assert Settings.load().describe() == DEFAULTS


VALUES = {
    "database_url": ("DATABASE_URL", URL, URL),
    "direct_url": ("CRONLOCK_DIRECT_URL", URL, URL),
    "schema_name": ("CRONLOCK_SCHEMA", "Cron Ops", "Cron Ops"),
    "namespace": ("CRONLOCK_NAMESPACE", "shop", "shop"),
    "pooler": ("CRONLOCK_POOLER", "transaction", "transaction"),
    "skip_status": ("CRONLOCK_SKIP_STATUS", "409", 409),
    "timeout": ("CRONLOCK_TIMEOUT", "3m", timedelta(minutes=3)),
    "guard_ping": ("CRONLOCK_GUARD_PING", "2s", timedelta(seconds=2)),
    "acquire_timeout": ("CRONLOCK_ACQUIRE_TIMEOUT", "500ms", timedelta(milliseconds=500)),
    "drain_timeout": ("CRONLOCK_DRAIN_TIMEOUT", "1h", timedelta(hours=1)),
    "recover_interval": ("CRONLOCK_RECOVER_INTERVAL", "30", timedelta(seconds=30)),
    "lease": ("CRONLOCK_LEASE", "2s", timedelta(seconds=2)),
    "presence_grace": ("CRONLOCK_PRESENCE_GRACE", "5s", timedelta(seconds=5)),
    "worker_concurrency": ("CRONLOCK_WORKER_CONCURRENCY", "50", 50),
    "max_attempts": ("CRONLOCK_MAX_ATTEMPTS", "1", 1),
    "idempotency_ttl": ("CRONLOCK_IDEMPOTENCY_TTL", "1d", timedelta(days=1)),
    "max_body": ("CRONLOCK_MAX_BODY", "64KiB", 65536),
    "pool_size": ("CRONLOCK_POOL_SIZE", "20", 20),
    "record_pool_size": ("CRONLOCK_RECORD_POOL_SIZE", "3", 3),
    "record_queue_size": ("CRONLOCK_RECORD_QUEUE_SIZE", "5", 5),
    "release": ("CRONLOCK_RELEASE", "v1.2", "v1.2"),
    "retention_skipped": ("CRONLOCK_RETENTION_SKIPPED", "1d", timedelta(days=1)),
    "retention_completed": ("CRONLOCK_RETENTION_COMPLETED", "365d", timedelta(days=365)),
    "retention_failed": ("CRONLOCK_RETENTION_FAILED", "12h", timedelta(hours=12)),
    "retention_invalidated": ("CRONLOCK_RETENTION_INVALIDATED", "2d", timedelta(days=2)),
    "log_format": ("CRONLOCK_LOG_FORMAT", "text", "text"),
}


@pytest.mark.parametrize("name", VALUES)
def test_each_setting_is_read_from_its_environment_name(name: str, environment: pytest.MonkeyPatch) -> None:
    variable, text, value = VALUES[name]
    environment.setenv(variable, text)
    assert getattr(Settings.load(), name) == value


@pytest.mark.parametrize("name", VALUES)
def test_a_keyword_argument_beats_the_environment(name: str, environment: pytest.MonkeyPatch) -> None:
    variable, text, value = VALUES[name]
    environment.setenv(variable, "not good for anything")
    assert getattr(Settings.load(**{name: text}), name) == value


def test_every_field_is_in_the_table_of_this_test() -> None:
    fields = {key(name, field): env_names(field) for name, field in Settings.model_fields.items()}
    assert set(fields) == set(DEFAULTS)
    for name, (variable, *_) in VALUES.items():
        assert variable in fields[name]


def test_our_own_name_of_the_database_wins(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("DATABASE_URL", "postgres://h/one")
    assert Settings.load().database_url == "postgresql://h/one"
    environment.setenv("CRONLOCK_DATABASE_URL", "postgres://h/two")
    assert Settings.load().database_url == "postgresql://h/two"
    environment.setenv("CRONLOCK_DATABASE_URL", " ")
    assert Settings.load().database_url == "postgresql://h/one"


def test_a_blank_variable_is_one_that_is_not_set(environment: pytest.MonkeyPatch) -> None:
    for field in Settings.model_fields.values():
        for name in env_names(field):
            environment.setenv(name, "  ")
    assert Settings.load().describe() == DEFAULTS


@pytest.mark.parametrize("name", ["lease", "presence_grace"])
def test_a_lease_and_a_grace_that_no_worker_could_keep_are_refused(name: str) -> None:
    assert f"CRONLOCK_{name.upper()}): '1.9s' is too short" in refusal(**{name: "1.9s"})
    assert "write at least '2s'" in refusal(**{name: "1.9s"})
    assert "longer than 1h" in refusal(**{name: "61m"})


def test_settings_cannot_be_changed() -> None:
    settings = Settings.load()
    with pytest.raises(ValueError, match="frozen"):
        settings.pool_size = 3


def test_a_missing_database_is_said_where_it_is_needed() -> None:
    settings = Settings.load()
    with pytest.raises(ConfigError, match=r"^database_url \(DATABASE_URL or .*not set.*DATABASE_URL=postgresql://"):
        _ = settings.database_url
    assert settings.database_label == "no database"
    assert Settings.load(database_url=URL).database_label == "db.example:5433/shop"


def test_everything_that_is_wrong_is_said_at_once_with_both_names_and_an_example(
    environment: pytest.MonkeyPatch,
) -> None:
    environment.setenv("DATABASE_URL", "mysql://u:hunter22@h/db")
    environment.setenv("CRONLOCK_TIMEOUT", "soon")
    environment.setenv("CRONLOCK_MAX_BODY", "-1")
    environment.setenv("CRONLOCK_POOLER", "session")
    message = refusal(pool_size=0, schema_name="x" * 64, timout=5)
    assert message.splitlines()[0] == "7 settings are wrong:"
    for part in (
        "database_url (DATABASE_URL or CRONLOCK_DATABASE_URL): begins with mysql://",
        "Example: DATABASE_URL=postgresql://user:password@localhost:5432/app",
        "timeout (CRONLOCK_TIMEOUT): 'soon' is not a duration",
        "Example: CRONLOCK_TIMEOUT=120s",
        "max_body (CRONLOCK_MAX_BODY): '-1' is not a size",
        "pooler (CRONLOCK_POOLER): Input should be 'none' or 'transaction'. Example: CRONLOCK_POOLER=transaction",
        "pool_size (CRONLOCK_POOL_SIZE): Input should be greater than or equal to 1",
        "schema_name (CRONLOCK_SCHEMA): must be 1 to 63 bytes, not 64",
        "'timout' is not a setting; did you mean timeout?",
    ):
        assert part in message
    assert "hunter22" not in message


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        ({"schema_name": ""}, "must be 1 to 63 bytes"),
        ({"schema_name": "ü" * 32}, "must be 1 to 63 bytes, not 64"),
        ({"schema_name": "a\0b"}, "NUL character"),
        ({"schema_name": "a\udcffb"}, "is not UTF-8"),
        ({"schema_name": "pg_cron"}, "PostgreSQL keeps for itself"),
        ({"schema_name": None}, "must be text"),
        ({"namespace": "a\nb"}, "without control characters"),
        ({"namespace": "x" * 64}, "at most 63 bytes"),
        ({"skip_status": 418}, "200, 409 or 503"),
        ({"skip_status": "two"}, "200, 409 or 503"),
        ({"pool_size": "ten"}, "valid integer"),
        ({"record_pool_size": 101}, "less than or equal to 100"),
        ({"record_queue_size": 0}, "greater than or equal to 1"),
        ({"log_format": "xml"}, "'json' or 'text'"),
        ({"release": "x" * 201}, "at most 200 characters"),
        ({"database_url": 5}, "must be text, not int"),
        ({"database_url": "postgres://u:hunter22@x@h/db"}, "has an @ where none belongs"),
        ({"direct_url": "redis://:hunter22@h"}, "begins with redis://"),
        ({"secrets": 5}, "must be text or a list of texts"),
        ({"secrets": [b"hunter22"]}, "must be text, not bytes"),
        ({"admin_secret": 5}, "must be text or a list of texts, not int"),
        ({"timeout": "25d"}, "longer than 24d"),
        ({"retention_failed": "9999d"}, "longer than 3650d"),
        ({"database": URL}, "'database' is not a setting; did you mean database_url?"),
        ({"x\n" * 99: 1}, "is not a setting"),
    ],
)
def test_a_wrong_setting_is_refused_with_a_reason(overrides: dict[str, Any], part: str) -> None:
    message = refusal(**overrides)
    assert part in message
    assert "hunter22" not in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["cronlock", "Cron Ops", '"x"', "a;b", "ü" * 31, "x" * 63, "%s", "sch'ema"])
def test_odd_schema_names_are_allowed(name: str) -> None:
    assert Settings.load(schema_name=name).schema_name == name


def test_unknown_names_of_our_prefix_are_warned_of_with_the_nearest(
    environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environment.setenv("CRONLOCK_TIMOUT", "hunter22")
    environment.setenv("CRONLOCK_ZZZ", "hunter22")
    environment.setenv("CRONLOCK_APP", "main:cron")
    Settings.load()
    assert [(record.name, record.levelno, record.getMessage()) for record in caplog.records] == [
        (
            "cronlock.config",
            logging.WARNING,
            "CRONLOCK_TIMOUT in the environment is not a setting of cronlock; did you mean CRONLOCK_TIMEOUT?",
        ),
        ("cronlock.config", logging.WARNING, "CRONLOCK_ZZZ in the environment is not a setting of cronlock"),
    ]


def test_parameters_left_out_of_the_url_are_warned_of_by_name_only(caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings.load(database_url="postgres://u:hunter22@h/d?pgbouncer=true&schema=app&connection_limit=77")
    assert settings.database_url == "postgresql://u:hunter22@h/d"
    assert [record.getMessage() for record in caplog.records] == [
        "database URL: left out what PostgreSQL does not know: schema, connection_limit"
    ]


def test_pgbouncer_in_the_url_sets_the_pooler_unless_it_is_given(environment: pytest.MonkeyPatch) -> None:
    url = "postgres://h/d?pgbouncer=true"
    assert Settings.load(database_url=url).pooler == "transaction"
    assert Settings.load(database_url=url, pooler="none").pooler == "none"
    assert Settings.load(direct_url=url).pooler == "none"
    environment.setenv("CRONLOCK_POOLER", "none")
    assert Settings.load(database_url=url).pooler == "none"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (GOOD, (GOOD,)),
        (f"{GOOD},", (GOOD,)),
        (f",{GOOD}", (GOOD,)),
        (f"{GOOD},,{OTHER}", (GOOD, OTHER)),
        (f" , {GOOD} ,\n{OTHER}\n", (GOOD, OTHER)),
        (f"{GOOD},{GOOD}", (GOOD,)),
    ],
)
def test_several_secrets_are_comma_separated_and_empty_entries_are_dropped(
    text: str, found: tuple[str, ...], environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("CRON_SECRET", text)
    assert Settings.load().require_secrets() == found
    assert Settings.load(secrets=text.split(",")).require_secrets() == found


def test_white_space_around_a_secret_is_stripped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert Settings.load(secrets=f"{GOOD}\n").require_secrets() == (GOOD,)
    assert Settings.load(secrets=GOOD, admin_secret=f" {OTHER}").require_admin_secrets() == ((OTHER,), ())
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["removed the white space around a secret; set it without"] * 2


@pytest.mark.parametrize("text", [None, "", "   ", ",", " , ,", "\t\n"])
def test_no_secret_is_fatal_where_secrets_are_needed_and_nowhere_else(
    text: str | None, environment: pytest.MonkeyPatch
) -> None:
    if text is not None:
        environment.setenv("CRON_SECRET", text)
    assert Settings.load(database_url=URL).database_url == URL
    message = secrets_refusal()
    assert message == "secrets (CRON_SECRET): is not set. Example: CRON_SECRET=$(cronlock secret)"


@pytest.mark.parametrize(
    ("secret", "part"),
    [
        ("undefined", "what a missing variable is printed as"),
        ("UNDEFINED", "what a missing variable is printed as"),
        ("None", "what a missing variable is printed as"),
        ("null", "what a missing variable is printed as"),
        ("x", "has 1 characters; at least 16 are needed"),
        ("fifteen-letters", "has 15 characters; at least 16 are needed"),
        ("two words of enough letters", "has white space inside"),
        ("tab\tinside-of-enough-letters", "has white space inside"),
        ("nbsp\u00a0inside-of-enough-letters", "has white space inside"),
        ("café-with-enough-letters", "not ASCII"),
        ("nul\0with-enough-letters", "control characters"),
        ("delete\x7fwith-enough-letters", "control characters"),
        ("half\ud83d-a-pair-with-enough", "not ASCII"),
    ],
)
def test_a_secret_that_will_not_do_is_fatal_and_not_shown(secret: str, part: str) -> None:
    for message in (
        secrets_refusal(secrets=secret),
        secrets_refusal(secrets=[GOOD, secret]),
        secrets_refusal(secrets=GOOD, admin_secret=secret),
        secrets_refusal(secrets=GOOD, admin_read_secret=[secret]),
    ):
        assert part in message
        assert "$(cronlock secret)" in message
        assert len(secret) < 3 or secret not in message.replace("(undefined, None, null)", "")
        assert secret[:5] not in message.replace("(undefined, None, null)", "") or len(secret) < 3
    assert "CRONLOCK_ADMIN_SECRET" in secrets_refusal(secrets=GOOD, admin_secret=secret)
    assert "entry 2 of 2" in secrets_refusal(secrets=[GOOD, secret])


def test_sixteen_characters_are_enough() -> None:
    assert Settings.load(secrets="sixteen-letters!").require_secrets() == ("sixteen-letters!",)


def test_an_admin_secret_must_be_another_one() -> None:
    message = secrets_refusal(secrets=f"{OTHER},{GOOD}", admin_secret=GOOD)
    assert message.startswith("admin_secret (CRONLOCK_ADMIN_SECRET): is the same as a CRON_SECRET")
    assert GOOD not in message


def test_a_read_secret_must_be_another_one_than_both_of_the_others() -> None:
    for others in ({"secrets": f"{OTHER},{GOOD}"}, {"secrets": OTHER, "admin_secret": GOOD}):
        message = secrets_refusal(**others, admin_read_secret=f"a-third-secret-0123,{GOOD}")
        assert message.startswith("admin_read_secret (CRONLOCK_ADMIN_READ_SECRET): is the same as a CRON")
        assert GOOD not in message


def test_admin_secrets_are_rotated_as_the_others_are() -> None:
    settings = Settings.load(secrets=GOOD, admin_secret=f"{OTHER}, a-third-secret-0123", admin_read_secret="a" * 16)
    assert settings.require_admin_secrets() == ((OTHER, "a-third-secret-0123"), ("a" * 16,))
    assert Settings.load(secrets=GOOD).require_admin_secrets() == ((), ())


def test_all_faults_of_the_secrets_are_said_at_once() -> None:
    message = secrets_refusal(secrets="short,null", admin_secret="short", admin_read_secret="short")
    assert message.startswith("7 settings are wrong:")


def test_nothing_that_is_printed_shows_a_secret_or_a_password() -> None:
    keywords = f"host=h password='{GOOD}9'"
    settings = Settings.load(
        database_url=URL, direct_url=keywords, secrets=f"{GOOD},{OTHER}", admin_secret="a-third-secret-0123"
    )
    described = settings.describe()
    assert described["database_url"] == "postgresql://app:***@db.example:5433/shop"
    assert described["direct_url"] == "password=*** host=h"
    assert described["secrets"] == f"set ({len(GOOD)} characters), set ({len(OTHER)} characters)"
    assert described["admin_secret"] == "set (19 characters)"
    for text in (str(described), repr(settings), str(settings), f"{settings!r}"):
        for part in ("hunter22", GOOD, GOOD[:8], OTHER, "third"):
            assert part not in text


def test_what_is_configured_is_scrubbed() -> None:
    settings = Settings.load(
        database_url=URL,
        direct_url="postgres://app:p%40ssw0rd@h/shop",
        secrets=f"{GOOD},{OTHER}",
        admin_secret="a-third-secret-0123",
    )
    text = f"no route to db.example: {GOOD} {OTHER} a-third-secret-0123 hunter22 p@ssw0rd p%40ssw0rd (app)"
    assert settings.scrub(text) == "no route to db.example: *** *** *** *** *** *** (app)"


def test_words_that_stand_for_nothing_are_not_scrubbed_from_messages() -> None:
    settings = Settings.load(database_url="postgres://postgres:postgres@h/d", secrets="undefined")
    assert settings.scrub("undefined column of postgres") == "undefined column of postgres"
