"""What cronlock raises, and the two signals a task may raise.

CronlockError
├── ConfigError            a setting is missing or wrong
├── RegistrationError      a task cannot be registered: its name, its lock, its options
├── EmbeddedError          the embedded PostgreSQL cannot be found or started
├── MigrationError         the schema could not be brought up to date
├── PayloadError           what arrived is not a payload (HTTP 400)
├── PayloadInvalid         a payload that does not fit the task's model (HTTP 422)
├── IdempotencyKeyReused   an idempotency key that has named another payload (HTTP 422)
├── IdempotencyKeyInUse    the first enqueue with this key has not ended yet (HTTP 409)
├── UnknownTask            no task of that name is registered (HTTP 404)
├── Unavailable            nothing was run and nothing was decided; ask again later (HTTP 503)
├── TransactionRefused     a task tried to end the transaction that holds its lock
├── TransactionEnded       that transaction is over, so the work cannot be committed with it
├── StatementRefused       the run is being stopped; no further statement is sent
├── NotInTransaction       a guard run has no connection to hand out; its task opens its own
└── LockLost               the connection that held the lock is gone

Retry and Cancel are signals, not errors: a task raises them to say how its run ends.
"""

from datetime import timedelta
from typing import Any


class CronlockError(Exception):
    """The root of everything cronlock raises on purpose."""


class ConfigError(CronlockError):
    """A setting is missing or wrong; the message names it and gives an example."""


class RegistrationError(CronlockError):
    """A task cannot be registered as it was declared."""


class EmbeddedError(CronlockError):
    """The embedded PostgreSQL cannot be found, made or started."""


class MigrationError(CronlockError):
    """The schema could not be brought up to date."""


class PayloadError(CronlockError):
    """What arrived cannot be a payload; `str()` is the short reason."""


class PayloadInvalid(CronlockError):
    """The payload does not fit the task's model.

    `fields` lists what is wrong, one mapping of `field`, `message` and `type` each.
    """

    def __init__(self, fields: list[dict[str, Any]]) -> None:
        super().__init__("the payload does not fit the task")
        self.fields = fields


class IdempotencyKeyReused(CronlockError):
    """The key was used before, for another payload; `job_id` is the job that it named then."""

    def __init__(self, key: str, job_id: int) -> None:
        super().__init__(f"the idempotency key {key!r} has named another payload before: that of job {job_id}")
        self.key = key
        self.job_id = job_id


class IdempotencyKeyInUse(CronlockError):
    """Another transaction is about to use the key; ask again in `retry_after` seconds."""

    retry_after = 1

    def __init__(self, key: str) -> None:
        super().__init__(
            f"the idempotency key {key!r} is being used by another transaction that has not ended; try again"
        )
        self.key = key


class UnknownTask(CronlockError):
    """No task of that name is registered."""


class Unavailable(CronlockError):
    """Nothing was decided: `reason` is one word for programs, `str()` a sentence for people.

    `retry_after` is in seconds. `run_id` is that of a run whose end is not known (`outcome_unknown`), else None.
    """

    def __init__(self, reason: str, message: str, retry_after: int = 5, run_id: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after = retry_after
        self.run_id = run_id


class TransactionRefused(CronlockError):
    """`commit`, `rollback` or `close` on what a task was handed; the run fails."""


class TransactionEnded(CronlockError):
    """The task's transaction is over although cronlock did not end it."""


class StatementRefused(CronlockError):
    """The run is being stopped or has ended; its connection takes no further statement."""


class NotInTransaction(CronlockError):
    """A task in guard mode asked for `run.connection`, `run.session` or `run.driver`."""


class LockLost(CronlockError):
    """The connection that held the lock is gone, and the lock with it."""


class Retry(Exception):
    """Ends the run as `failed` and asks the caller to come again (HTTP 503).

    `after` is a number of seconds or a `timedelta`.
    """

    def __init__(self, reason: str = "", *, after: float | timedelta = 60) -> None:
        seconds = after.total_seconds() if isinstance(after, timedelta) else float(after)
        if not 0 <= seconds <= 7 * 86400:
            raise ValueError(f"Retry(after={after!r}): give between 0 seconds and 7 days")
        super().__init__(reason or f"asked to be retried after {seconds:g} s")
        self.after = seconds


class Cancel(Exception):
    """Ends the run as `cancelled`; everything it wrote is rolled back."""

    def __init__(self, reason: str = "cancelled by the task") -> None:
        super().__init__(reason)
