"""Cron routes that never overlap, on PostgreSQL alone.

The layers, each of which imports only from those below it:

    cli
    app
    web
    recovery
    readiness
    runner
    execution
    gate | context
    recording
    runs
    locks
    database | models | migrate
    lending | outcome
    tasks
    schedule | config | scrub | jsontext | embedded
    errors
"""

from cronlock.app import Cronlock
from cronlock.context import Run
from cronlock.errors import (
    Cancel,
    ConfigError,
    CronlockError,
    LockLost,
    PayloadError,
    PayloadInvalid,
    RegistrationError,
    Retry,
    StatementRefused,
    TransactionEnded,
    TransactionRefused,
    Unavailable,
    UnknownTask,
)
from cronlock.outcome import Failure, Holder, Outcome

__version__ = "0.1.0"

__all__ = [
    "Cancel",
    "ConfigError",
    "Cronlock",
    "CronlockError",
    "Failure",
    "Holder",
    "LockLost",
    "Outcome",
    "PayloadError",
    "PayloadInvalid",
    "RegistrationError",
    "Retry",
    "Run",
    "StatementRefused",
    "TransactionEnded",
    "TransactionRefused",
    "Unavailable",
    "UnknownTask",
]
