"""Every setting: its name, its environment name, its default. The only reader of the environment.

`Settings.load()` reads them all and reports all that is wrong at once. What only some commands need is asked
for by them: `Settings.database_url` raises when there is none, `Settings.require_secrets()` when the secrets
will not do. No message, description or representation here shows a secret or a password.
"""

import logging
import os
import re
from datetime import timedelta
from difflib import get_close_matches
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from cronlock import conninfo
from cronlock.errors import ConfigError
from cronlock.scrub import Scrubber
from cronlock.units import Duration, Grace, Lease, Ping, Retention, Size, format_duration, format_size, shown

log = logging.getLogger("cronlock.config")

PREFIX = "CRONLOCK_"
TEST_DATABASE_URL = "CRONLOCK_TEST_DATABASE_URL"
READ_ELSEWHERE = frozenset(
    {"CRONLOCK_APP", "CRONLOCK_PG_BIN", TEST_DATABASE_URL, "CRONLOCK_TEST_LOOP", "CRONLOCK_TEST_URL"}
)
"""Names of the prefix that are no setting: of the command line and of the tests."""

SHORTEST_SECRET = 16
NOT_SECRETS = frozenset({"undefined", "none", "null"})
"""What a missing variable becomes in JavaScript, Python and JSON."""


def _number(value: object) -> object:
    return int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value.strip(), re.ASCII) else value


def _url(value: object) -> object:
    if value is None:
        return None
    found = conninfo.normalise(_text(value))
    if found.dropped:
        log.warning("database URL: left out what PostgreSQL does not know: %s", ", ".join(found.dropped))
    return found.text


def _schema(value: object) -> object:
    text = _text(value)
    if not 1 <= len(text.encode()) <= 63:
        raise ValueError(f"must be 1 to 63 bytes, not {len(text.encode())}")
    if text.startswith("pg_") or text == "information_schema":
        raise ValueError(f"{shown(text)} is a name that PostgreSQL keeps for itself")
    return text


def _namespace(value: object) -> object:
    text = _text(value)
    if len(text.encode()) > 63 or not text.isprintable():
        raise ValueError("must be at most 63 bytes without control characters")
    return text


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be text, not {type(value).__name__}")
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("has a NUL character or is not UTF-8")
    return value


def _secret(value: object) -> SecretStr | None:
    """One secret without the white space around it; None if nothing is left."""
    text = value.get_secret_value() if isinstance(value, SecretStr) else value
    if text is None:
        return None
    if not isinstance(text, str):
        raise ValueError(f"must be text, not {type(text).__name__}")
    if text.strip() and text != text.strip():
        log.warning("removed the white space around a secret; set it without")
    return SecretStr(text.strip()) if text.strip() else None


def _secrets(value: object) -> tuple[SecretStr, ...]:
    """Comma-separated text, or several; empty entries are dropped, so that they can never be matched."""
    if value is None:
        return ()
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise ValueError(f"must be text or a list of texts, not {type(value).__name__}")
    found = [secret for secret in map(_secret, value) if secret is not None]
    return tuple(dict.fromkeys(found))


SkipStatus = Annotated[Literal[200, 409, 503], BeforeValidator(_number)]
Count = Annotated[int, BeforeValidator(_number)]
Url = Annotated[str | None, BeforeValidator(_url)]


def setting(default: Any, *names: str, example: str, about: str, **limits: Any) -> Any:
    """A field with its environment names (the first that is set wins), an example and a description."""
    return Field(default, json_schema_extra={"env": list(names)}, examples=[example], description=about, **limits)


class Environment(PydanticBaseSettingsSource):
    """The environment by the names that the fields give; a blank variable is one that is not set."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """The value of the first of the field's names that is set, the key it is passed on by, and False."""
        values = (os.environ.get(name, "") for name in env_names(field))
        return next((value for value in values if value.strip()), None), key(field_name, field), False

    def __call__(self) -> dict[str, Any]:
        """All that are set."""
        found = (self.get_field_value(field, name) for name, field in self.settings_cls.model_fields.items())
        return {name: value for value, name, _ in found if value is not None}


class Settings(BaseSettings):
    """The settings of one installation. Make it with `Settings.load`."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    database: Url = setting(
        None,
        "CRONLOCK_DATABASE_URL",
        "DATABASE_URL",
        example=conninfo.EXAMPLE,
        about="the database, through a pooler or not",
        validation_alias="database_url",
        repr=False,
    )
    direct_url: Url = setting(
        None,
        "CRONLOCK_DIRECT_URL",
        example=conninfo.EXAMPLE,
        about="the database past the pooler, for migrations and records",
        repr=False,
    )
    secrets: Annotated[tuple[SecretStr, ...], BeforeValidator(_secrets)] = setting(
        (),
        "CRON_SECRET",
        example="$(cronlock secret)",
        about="what callers send as a Bearer token; commas between",
    )
    admin_secrets: Annotated[tuple[SecretStr, ...], BeforeValidator(_secrets)] = setting(
        (),
        "CRONLOCK_ADMIN_SECRET",
        example="$(cronlock secret)",
        about="what reads and steers at the admin routes; commas between",
        validation_alias="admin_secret",
    )
    admin_read_secrets: Annotated[tuple[SecretStr, ...], BeforeValidator(_secrets)] = setting(
        (),
        "CRONLOCK_ADMIN_READ_SECRET",
        example="$(cronlock secret)",
        about="what only reads there, for Prometheus and dashboards",
        validation_alias="admin_read_secret",
    )
    webhook_secrets: Annotated[tuple[SecretStr, ...], BeforeValidator(_secrets)] = setting(
        (),
        "CRONLOCK_WEBHOOK_SECRET",
        example="$(cronlock secret)",
        about="what webhooks of invalidations are signed with; commas between",
        validation_alias="webhook_secret",
    )
    schema_name: Annotated[str, BeforeValidator(_schema)] = setting(
        "cronlock", "CRONLOCK_SCHEMA", example="cronlock", about="the schema that everything is in"
    )
    namespace: Annotated[str, BeforeValidator(_namespace)] = setting(
        "",
        "CRONLOCK_NAMESPACE",
        example="shop",
        about="put before lock names, for two installations in one database",
    )
    pooler: Literal["none", "transaction"] = setting(
        "none", "CRONLOCK_POOLER", example="transaction", about="what is between here and the database"
    )
    skip_status: SkipStatus = setting(
        200, "CRONLOCK_SKIP_STATUS", example="409", about="the HTTP status of a skipped run"
    )
    timeout: Duration = setting(
        timedelta(seconds=120), "CRONLOCK_TIMEOUT", example="120s", about="how long a run may take"
    )
    guard_ping: Ping = setting(
        timedelta(seconds=5),
        "CRONLOCK_GUARD_PING",
        example="5s",
        about="how often the lock of a guard run is pinged; after three times that it is free",
    )
    acquire_timeout: Duration = setting(
        timedelta(seconds=5),
        "CRONLOCK_ACQUIRE_TIMEOUT",
        example="5s",
        about="how long to wait for a connection",
    )
    drain_timeout: Duration = setting(
        timedelta(seconds=25),
        "CRONLOCK_DRAIN_TIMEOUT",
        example="25s",
        about="how long a stop waits for what runs",
    )
    recover_interval: Duration = setting(
        timedelta(seconds=15),
        "CRONLOCK_RECOVER_INTERVAL",
        example="15s",
        about="how often lost runs are looked for",
    )
    lease: Lease = setting(
        timedelta(seconds=30), "CRONLOCK_LEASE", example="30s", about="how long a worker has a job without renewing it"
    )
    presence_grace: Grace = setting(
        timedelta(seconds=3),
        "CRONLOCK_PRESENCE_GRACE",
        example="3s",
        about="how long a worker must be seen to be gone before its jobs are taken",
    )
    worker_concurrency: Count = setting(
        10, "CRONLOCK_WORKER_CONCURRENCY", example="10", about="jobs at once, per worker", ge=1, le=10_000
    )
    max_attempts: Count = setting(
        5, "CRONLOCK_MAX_ATTEMPTS", example="5", about="how often a job is tried", ge=1, le=10_000
    )
    idempotency_ttl: Duration = setting(
        timedelta(hours=1),
        "CRONLOCK_IDEMPOTENCY_TTL",
        example="1h",
        about="how long a second enqueue with the same key gives the first job",
    )
    max_body: Size = setting(1024**2, "CRONLOCK_MAX_BODY", example="1MiB", about="the largest request body")
    pool_size: Count = setting(
        10, "CRONLOCK_POOL_SIZE", example="10", about="connections for runs, per process", ge=1, le=1000
    )
    record_pool_size: Count = setting(
        2,
        "CRONLOCK_RECORD_POOL_SIZE",
        example="2",
        about="connections for recording, per process",
        ge=1,
        le=100,
    )
    record_queue_size: Count = setting(
        10_000,
        "CRONLOCK_RECORD_QUEUE_SIZE",
        example="10000",
        about="records that may wait",
        ge=1,
        le=1_000_000,
    )
    release: Annotated[str | None, Field(max_length=200)] = setting(
        None,
        "CRONLOCK_RELEASE",
        example="2026-11-30.1",
        about="the version of your code, written beside every run",
    )
    retention_skipped: Retention = setting(
        timedelta(days=7), "CRONLOCK_RETENTION_SKIPPED", example="7d", about="how long skipped runs are kept"
    )
    retention_completed: Retention = setting(
        timedelta(days=28),
        "CRONLOCK_RETENTION_COMPLETED",
        example="28d",
        about="how long completed runs are kept",
    )
    retention_failed: Retention = setting(
        timedelta(days=90), "CRONLOCK_RETENTION_FAILED", example="90d", about="how long failed runs are kept"
    )
    retention_invalidated: Retention = setting(
        timedelta(days=7),
        "CRONLOCK_RETENTION_INVALIDATED",
        example="7d",
        about="how long invalidations are kept, delivered or not",
    )
    log_format: Literal["json", "text"] = setting(
        "json", "CRONLOCK_LOG_FORMAT", example="text", about="how log lines are written"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Keyword arguments first, then the environment; no files."""
        return init_settings, Environment(settings_cls)

    @model_validator(mode="before")
    @classmethod
    def _pooler_of_the_url(cls, values: Any) -> Any:
        """`?pgbouncer=true` says that there is a pooler, unless the setting says something itself."""
        if isinstance(values, dict) and "pooler" not in values and is_pooled(values.get("database_url")):
            return {**values, "pooler": "transaction"}
        return values

    @classmethod
    def load(cls, **overrides: Any) -> Self:
        """The settings from keyword arguments and, where there is none, from the environment.

        Raises `ConfigError` that names every setting that is wrong, by both its names, with an example each.
        Warns of environment names of our prefix that are no setting.
        """
        _warn_of_unknown_names()
        problems: list[str] = []
        try:
            return cls(**overrides)
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
            problems = [_problem(str(problem["loc"][0]), problem["type"], problem["msg"]) for problem in found]
        # raised out here: the ValidationError holds what was given, and must not hang on as the context
        raise ConfigError(_report(problems))

    def on(self, database_url: str) -> Self:
        """These settings for another database, which is reached directly; raises `ConfigError` for a wrong URL."""
        kept = {key(name, field): getattr(self, name) for name, field in type(self).model_fields.items()}
        pooler = "transaction" if is_pooled(database_url) else "none"
        return self.load(**{**kept, "database_url": database_url, "direct_url": None, "pooler": pooler})

    @property
    def database_url(self) -> str:
        """The database's connection string, as libpq takes it; raises `ConfigError` if there is none."""
        if self.database is None:
            raise ConfigError(_report([_problem("database_url", "missing", "is not set")]))
        return self.database

    @property
    def database_label(self) -> str:
        """host:port/dbname, for messages; "no database" if none is set."""
        return conninfo.label(self.database) if self.database is not None else "no database"

    def require_secrets(self) -> tuple[str, ...]:
        """The secrets that callers may send; raises `ConfigError` if there is none, or if one will not do.

        One will not do that is shorter than 16 characters, has white space inside, is anything but visible
        ASCII (a header cannot carry it), or is what a missing variable is printed as. The admin secrets, if
        set, are held to the same, and no secret may be of two kinds.
        """
        problems = [*_secret_problems("secrets", self.secrets)]
        if not self.secrets:
            problems.append(_problem("secrets", "missing", "is not set"))
        problems += _secret_problems("admin_secret", self.admin_secrets)
        problems += _secret_problems("admin_read_secret", self.admin_read_secrets)
        for name, secrets, others in (
            ("admin_secret", self.admin_secrets, {"CRON_SECRET": self.secrets}),
            (
                "admin_read_secret",
                self.admin_read_secrets,
                {"CRON_SECRET": self.secrets, "CRONLOCK_ADMIN_SECRET": self.admin_secrets},
            ),
        ):
            for other, theirs in others.items():
                if set(secrets) & set(theirs):
                    problems.append(_problem(name, "value_error", f"is the same as a {other}; make another"))
        if problems:
            raise ConfigError(_report(problems))
        return _texts(self.secrets)

    def require_admin_secrets(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The secrets that may steer and those that may only read, each empty if none is set; raises as above."""
        self.require_secrets()
        return _texts(self.admin_secrets), _texts(self.admin_read_secrets)

    def require_webhook_secrets(self) -> tuple[str, ...]:
        """The secrets that webhooks are signed with; raises `ConfigError` if there is none, or if one will not do."""
        problems = [*_secret_problems("webhook_secret", self.webhook_secrets)]
        if not self.webhook_secrets:
            problems.append(_problem("webhook_secret", "missing", "is not set, and a target is a webhook without one"))
        if problems:
            raise ConfigError(_report(problems))
        return _texts(self.webhook_secrets)

    def retentions(self) -> dict[str, float]:
        """How many seconds rows are kept, by status: `failed` stands for all others; and the `shortest` of them."""
        kept = {
            "skipped": self.retention_skipped.total_seconds(),
            "completed": self.retention_completed.total_seconds(),
            "failed": self.retention_failed.total_seconds(),
        }
        return {**kept, "shortest": min(kept.values())}

    def describe(self) -> dict[str, str]:
        """Every setting by its name, as text that may be printed: secrets and passwords are masked."""
        return {
            key(name, field): _described(name, getattr(self, name)) for name, field in type(self).model_fields.items()
        }

    def scrub(self, text: str) -> str:
        """`text` without the configured secrets, or anything that looks like one; see `cronlock.scrub`."""
        return self._scrubber.scrub(text)

    @cached_property
    def _scrubber(self) -> Scrubber:
        secrets = list(_texts((*self.secrets, *self.admin_secrets, *self.admin_read_secrets, *self.webhook_secrets)))
        urls = [url for url in (self.database, self.direct_url) if url is not None]
        passwords = [password for url in urls for password in conninfo.passwords(url)]
        return Scrubber(value for value in secrets + passwords if value.lower() not in NOT_SECRETS)


def server_for_tests() -> str | None:
    """The server that the tests of users make their databases on, as CRONLOCK_TEST_DATABASE_URL names it, if it does.

    Raises `ConfigError` for a URL that is wrong.
    """
    given = os.environ.get(TEST_DATABASE_URL, "").strip()
    if not given:
        return None
    try:
        return conninfo.normalise(given).text
    except ValueError as error:
        raise ConfigError(f"{TEST_DATABASE_URL} {error}. Example: {conninfo.EXAMPLE}") from None


def env_names(field: FieldInfo) -> list[str]:
    """The environment names of a setting, the one that wins first."""
    extra = field.json_schema_extra
    return [str(name) for name in extra["env"]] if isinstance(extra, dict) and isinstance(extra["env"], list) else []


def key(name: str, field: FieldInfo) -> str:
    """The keyword that a setting is given by."""
    return field.validation_alias if isinstance(field.validation_alias, str) else name


def secret_fault(secret: SecretStr) -> str | None:
    """Why a secret will not do, without any part of it; None if it will."""
    text = secret.get_secret_value()
    if text.lower() in NOT_SECRETS or not text:
        return "is empty or what a missing variable is printed as (undefined, None, null)"
    if len(text.split()) != 1:
        return "has white space inside"
    if not text.isascii() or not text.isprintable():
        return "has control characters or characters that are not ASCII, which a header cannot carry"
    if len(text) < SHORTEST_SECRET:
        return f"has {len(text)} characters; at least {SHORTEST_SECRET} are needed"
    return None


def is_pooled(url: object) -> bool:
    """Whether a database URL says that a pooler is there; a URL that is wrong says nothing."""
    try:
        return isinstance(url, str) and conninfo.normalise(url).is_pooled
    except ValueError:
        return False


def _texts(secrets: tuple[SecretStr, ...]) -> tuple[str, ...]:
    return tuple(secret.get_secret_value() for secret in secrets)


def _secret_problems(name: str, secrets: tuple[SecretStr, ...]) -> list[str]:
    return [
        _problem(name, "value_error", f"{_entry(index, secrets)}{reason}")
        for index, secret in enumerate(secrets)
        if (reason := secret_fault(secret))
    ]


def _entry(index: int, secrets: tuple[SecretStr, ...]) -> str:
    return f"entry {index + 1} of {len(secrets)} " if len(secrets) > 1 else ""


def _described(name: str, value: Any) -> str:
    match value:
        case None | "" | ():
            return "not set"
        case SecretStr():
            return f"set ({len(value)} characters)"
        case tuple():
            return ", ".join(_described(name, item) for item in value)
        case timedelta():
            return format_duration(value)
        case str() if name in ("database", "direct_url"):
            return conninfo.masked(value)
        case int() if name == "max_body":
            return format_size(value)
    return str(value)


def _fields() -> dict[str, FieldInfo]:
    return {key(name, field): field for name, field in Settings.model_fields.items()}


def _problem(name: str, kind: str, message: str) -> str:
    """One line of a report; `kind` is pydantic's name of the fault."""
    field = _fields().get(name)
    if field is None:
        near = get_close_matches(name, _fields(), n=1)
        return f"{ascii(name)[:80]} is not a setting{f'; did you mean {near[0]}?' if near else ''}"
    names = env_names(field)
    example = f"{names[-1]}={(field.examples or [''])[0]}"
    reason = message.removeprefix("Value error, ")
    return f"{name} ({' or '.join(reversed(names))}): {reason}. Example: {example}"


def _report(problems: list[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return "\n".join([f"{len(problems)} settings are wrong:", *(f"  {problem}" for problem in problems)])


def _warn_of_unknown_names() -> None:
    known = {name for field in _fields().values() for name in env_names(field)} | READ_ELSEWHERE
    known = {name for name in known if name.startswith(PREFIX)}
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in known:
            near = get_close_matches(name[len(PREFIX) :], sorted(item.removeprefix(PREFIX) for item in known), n=1)
            hint = f"; did you mean {PREFIX}{near[0]}?" if near else ""
            log.warning("%s in the environment is not a setting of cronlock%s", ascii(name)[1:-1][:80], hint)
