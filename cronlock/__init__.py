"""Cron routes that never overlap, on PostgreSQL alone.

The layers, each of which imports only from those below it:

    cli
    development | fixtures
    serving
    loading | logs | working
    app
    web
    process
    recovery
    readiness
    runner
    stint
    duties | leases
    worker
    claims | ends
    attempts | queueing | transaction
    attempt | closing | skips | stopping
    execution
    context | gate | guard
    enqueuer
    delivery | enqueue | polling | versions
    background | inspecting | link | presence | recording | reporting | sending | steering | subscribing
    explain | metrics | stats
    invalidation | jobs | runs
    locks
    template
    database | migrate | models
    seats
    lending | outcome | targets
    tasks
    keys
    config | embedded | retry | revision | schedule
    cluster
    postmaster
    binaries
    conninfo | documents | lines | scrub | units | wire
    jsontext
    errors
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cronlock.app import Cronlock
    from cronlock.context import Run
    from cronlock.enqueue import Enqueued
    from cronlock.errors import (
        Cancel,
        ConfigError,
        CronlockError,
        IdempotencyKeyInUse,
        IdempotencyKeyReused,
        LockLost,
        NotInTransaction,
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
    from cronlock.targets import Invalidation, Notify, VersionTable, Webhook

__version__ = "0.1.0"

__all__ = [
    "Cancel",
    "ConfigError",
    "Cronlock",
    "CronlockError",
    "Enqueued",
    "Failure",
    "Holder",
    "IdempotencyKeyInUse",
    "IdempotencyKeyReused",
    "Invalidation",
    "LockLost",
    "NotInTransaction",
    "Notify",
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
    "VersionTable",
    "Webhook",
]

MODULES = {
    "Cronlock": "app",
    "Run": "context",
    "Enqueued": "enqueue",
    **dict.fromkeys(("Failure", "Holder", "Outcome"), "outcome"),
    **dict.fromkeys(("Invalidation", "Notify", "VersionTable", "Webhook"), "targets"),
}
"""Where the public names are; those that are not here are in `errors`."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for: the command line answers before a database driver is loaded."""
    if name not in __all__:
        raise AttributeError(f"module 'cronlock' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"cronlock.{MODULES.get(name, 'errors')}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
