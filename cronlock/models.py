"""The tables of cronlock, for migrations, pages and users' own queries."""

from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    DateTime,
    Identity,
    Index,
    Integer,
    Interval,
    MetaData,
    Sequence,
    SmallInteger,
    func,
    text,
)
from sqlalchemy import Text as SqlText
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.dialects.postgresql import UUID as SqlUuid
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

REVISION = "0003"
"""The schema revision that this code reads and writes; a test holds it against the newest migration."""

RUN_STATUSES = ("running", "completed", "failed", "timed_out", "cancelled", "lost", "skipped")
SKIP_REASONS = ("already_running", "duplicate", "too_soon", "paused", "queued_already")
TRIGGERS = ("http", "schedule", "manual", "job")
MODES = ("transaction", "guard", "queue")
JOB_ENDS = ("completed", "failed", "cancelled")
JOB_STATUSES = ("queued", "processing", *JOB_ENDS)
ATTEMPT_ENDS = ("failed", "timed_out", "cancelled", "lost")


def one_of(column: str, words: tuple[str, ...]) -> str:
    """The SQL of "this column holds one of these words"."""
    return f"{column} IN ({', '.join(repr(word) for word in words)})"


class Base(DeclarativeBase):
    """The declarative base; the schema `cronlock` is mapped to the configured one where they differ."""

    metadata = MetaData(
        schema="cronlock",
        naming_convention={
            "ix": "%(table_name)s_%(column_0_N_name)s_idx",
            "uq": "%(table_name)s_%(column_0_N_name)s_key",
            "ck": "%(table_name)s_%(constraint_name)s_check",
            "pk": "%(table_name)s_pkey",
        },
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it once
        str: SqlText,
        int: BigInteger,
        datetime: DateTime(timezone=True),
        timedelta: Interval,
        UUID: SqlUuid(as_uuid=True),
    }


JOB_ID = Sequence("job_id", data_type=BigInteger, metadata=Base.metadata)
"""The numbers of jobs, wherever they are."""


class TaskRow(Base):
    """A task that some process has registered, and whether an operator paused it."""

    __tablename__ = "task"
    __table_args__ = (CheckConstraint(one_of("mode", MODES), name="mode"),)

    name: Mapped[str] = mapped_column(primary_key=True)
    schedule: Mapped[str | None]
    timezone: Mapped[str | None]
    mode: Mapped[str] = mapped_column(server_default="transaction")
    lock_name: Mapped[str | None]
    lock_key: Mapped[int | None]
    options: Mapped[dict[str, Any]] = mapped_column(JSONB, server_default=text("'{}'"))
    paused_at: Mapped[datetime | None]
    paused_by: Mapped[str | None]
    paused_reason: Mapped[str | None]
    first_seen_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    last_seen_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class RunRow(Base):
    """One call of a cron URL for a task, from its answer to its end; skips are rows too."""

    __tablename__ = "run"
    __table_args__ = (
        CheckConstraint(one_of("status", RUN_STATUSES), name="status"),
        CheckConstraint(f"reason IS NULL OR {one_of('reason', SKIP_REASONS)}", name="reason"),
        CheckConstraint("(status = 'skipped') = (reason IS NOT NULL)", name="skipped_has_reason"),
        CheckConstraint("(status = 'running') = (finished_at IS NULL)", name="ended_has_time"),
        CheckConstraint(one_of("trigger", TRIGGERS), name="trigger"),
        Index("run_task_id_idx", "task", text("id DESC")),
        Index(
            "run_failed_idx",
            text("id DESC"),
            postgresql_where=text("status IN ('failed', 'timed_out', 'cancelled', 'lost')"),
        ),
        Index("run_task_run_idx", "task", text("id DESC"), postgresql_where=text("status <> 'skipped'")),
        Index(
            "run_completed_idx",
            "task",
            text("coalesce(key, '')"),
            text("finished_at DESC"),
            postgresql_where=text("status = 'completed'"),
        ),
        Index(
            "run_occurrence_key",
            "task",
            "occurrence",
            unique=True,
            postgresql_where=text("status = 'completed' AND occurrence IS NOT NULL"),
        ),
        Index(
            "run_occurrence_idx",
            "task",
            "occurrence",
            postgresql_where=text("status <> 'skipped' AND occurrence IS NOT NULL"),
        ),
        Index(
            "run_running_idx",
            "lock_classid",
            "lock_objid",
            "backend_pid",
            postgresql_where=text("status = 'running'"),
        ),
    )

    id: Mapped[int] = mapped_column(Identity(always=True, cache=1), primary_key=True)
    nonce: Mapped[UUID] = mapped_column(unique=True)
    task: Mapped[str]
    key: Mapped[str | None]
    status: Mapped[str]
    reason: Mapped[str | None]
    trigger: Mapped[str]
    caller: Mapped[str | None]
    occurrence: Mapped[str | None]
    scheduled_for: Mapped[datetime | None]
    attempt: Mapped[int] = mapped_column(Integer, server_default=text("1"))
    started_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    stopping_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    instance: Mapped[UUID]
    host: Mapped[str]
    pid: Mapped[int] = mapped_column(Integer)
    release: Mapped[str | None]
    backend_pid: Mapped[int | None] = mapped_column(Integer)
    lock_name: Mapped[str | None]
    lock_key: Mapped[int]
    lock_classid: Mapped[int]
    lock_objid: Mapped[int]
    lock_objsubid: Mapped[int] = mapped_column(SmallInteger, server_default=text("1"))
    blocked_by: Mapped[int | None]
    holder_pid: Mapped[int | None] = mapped_column(Integer)
    holder_application: Mapped[str | None]
    result: Mapped[str | None]
    error_type: Mapped[str | None]
    error_message: Mapped[str | None]
    error_traceback: Mapped[str | None]
    error_sqlstate: Mapped[str | None]
    progress_done: Mapped[int | None]
    progress_total: Mapped[int | None]
    log: Mapped[str | None]
    min_interval: Mapped[timedelta | None]
    mode: Mapped[str | None]
    cancel_requested_at: Mapped[datetime | None]
    cancel_requested_by: Mapped[str | None]


class JobColumns:
    """What is known of a job in whichever table it is."""

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    task: Mapped[str]
    queue: Mapped[str]
    priority: Mapped[int] = mapped_column(SmallInteger)
    payload: Mapped[dict[str, Any]] = mapped_column(JSONB)
    trigger: Mapped[str]
    occurrence: Mapped[str | None]
    idempotency_key: Mapped[str | None]
    cron_key: Mapped[str | None]
    max_attempts: Mapped[int] = mapped_column(SmallInteger)
    attempts: Mapped[int] = mapped_column(SmallInteger)
    losses: Mapped[int] = mapped_column(SmallInteger)
    enqueued_at: Mapped[datetime]
    run_at: Mapped[datetime]


class LiveColumns(JobColumns):
    """The same of a job that has not ended: what an enqueue need not say has a default."""

    priority: Mapped[int] = mapped_column(SmallInteger, server_default=text("0"))
    attempts: Mapped[int] = mapped_column(SmallInteger, server_default=text("0"))
    losses: Mapped[int] = mapped_column(SmallInteger, server_default=text("0"))
    enqueued_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class JobRow(LiveColumns, Base):
    """A live job: due, or under way in a worker (then it has a lease)."""

    __tablename__ = "job"
    __table_args__ = (
        CheckConstraint(one_of("trigger", TRIGGERS), name="trigger"),
        CheckConstraint("(lease_token IS NULL) = (lease_until IS NULL)", name="lease"),
        Index("job_due_idx", "queue", text("priority DESC"), "id"),
        Index("job_cron_idx", "task", "cron_key", postgresql_where=text("cron_key IS NOT NULL")),
        Index("job_suspect_idx", "queue", "id", postgresql_where=text("losses > 1")),
    )

    id: Mapped[int] = mapped_column(JOB_ID, primary_key=True, server_default=JOB_ID.next_value())
    run_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    cancel_requested_at: Mapped[datetime | None]
    cancel_requested_by: Mapped[str | None]
    started_at: Mapped[datetime | None]
    worker: Mapped[UUID | None]
    lease_token: Mapped[UUID | None]
    lease_until: Mapped[datetime | None]
    backend_pid: Mapped[int | None] = mapped_column(Integer)
    progress_done: Mapped[int | None]
    progress_total: Mapped[int | None]


class WaitingJobRow(LiveColumns, Base):
    """A job that waits for its time: enqueued for later, or to be tried again."""

    __tablename__ = "job_waiting"
    __table_args__ = (
        CheckConstraint(one_of("trigger", TRIGGERS), name="trigger"),
        Index("job_waiting_run_at_idx", "queue", "run_at"),
        Index("job_waiting_cron_idx", "task", "cron_key", postgresql_where=text("cron_key IS NOT NULL")),
    )


class EndedJobRow(JobColumns, Base):
    """A job that has ended."""

    __tablename__ = "job_history"
    __table_args__ = (
        CheckConstraint(one_of("status", JOB_ENDS), name="status"),
        Index("job_history_failed_idx", "id", postgresql_where=text("status = 'failed'")),
        Index(
            "job_history_cron_idx",
            "task",
            "cron_key",
            text("finished_at DESC"),
            postgresql_where=text("cron_key IS NOT NULL AND status = 'completed'"),
        ),
    )

    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    worker: Mapped[UUID | None]
    status: Mapped[str]
    result: Mapped[str | None]
    error_type: Mapped[str | None]
    error_message: Mapped[str | None]
    log: Mapped[str | None]


class AttemptRow(Base):
    """An attempt at a job that did not complete, with its error."""

    __tablename__ = "job_attempt"
    __table_args__ = (CheckConstraint(one_of("status", ATTEMPT_ENDS), name="status"),)

    job_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    attempt: Mapped[int] = mapped_column(SmallInteger, primary_key=True, autoincrement=False)
    status: Mapped[str]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    worker: Mapped[UUID | None]
    error_type: Mapped[str | None]
    error_message: Mapped[str | None]
    error_traceback: Mapped[str | None]
    error_sqlstate: Mapped[str | None]
    log: Mapped[str | None]


class IdempotencyKeyRow(Base):
    """A key that has named an enqueue, and the job that it gave; it outlives the job."""

    __tablename__ = "idempotency_key"
    __table_args__ = (Index("idempotency_key_expires_at_idx", "expires_at"),)

    task: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    fingerprint: Mapped[str]
    job_id: Mapped[int]
    expires_at: Mapped[datetime]


class WorkerRow(Base):
    """A worker process, and the lock by which others see that it is there."""

    __tablename__ = "worker"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    host: Mapped[str]
    pid: Mapped[int] = mapped_column(Integer)
    release: Mapped[str | None]
    queues: Mapped[list[str]] = mapped_column(ARRAY(SqlText))
    tasks: Mapped[list[str]] = mapped_column(ARRAY(SqlText))
    concurrency: Mapped[int] = mapped_column(Integer)
    presence_key: Mapped[int]
    has_presence: Mapped[bool] = mapped_column(server_default=text("false"))
    is_idle: Mapped[bool] = mapped_column(server_default=text("false"))
    is_draining: Mapped[bool] = mapped_column(server_default=text("false"))
    started_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    seen_until: Mapped[datetime]


class InvalidationRow(Base):
    """What a task said is stale, for one target; delivered once its transaction has committed."""

    __tablename__ = "invalidation"
    __table_args__ = (Index("invalidation_waiting_idx", "target", "id", postgresql_where=text("delivered_at IS NULL")),)

    id: Mapped[int] = mapped_column(Identity(always=True, cache=1), primary_key=True)
    target: Mapped[str]
    keys: Mapped[list[str]] = mapped_column(ARRAY(SqlText))
    tags: Mapped[list[str]] = mapped_column(ARRAY(SqlText))
    paths: Mapped[list[str]] = mapped_column(ARRAY(SqlText))
    task: Mapped[str]
    run_id: Mapped[int | None]
    job_id: Mapped[int | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    delivered_at: Mapped[datetime | None]
    attempts: Mapped[int] = mapped_column(Integer, server_default=text("0"))
    last_error: Mapped[str | None]


class InvalidationTargetRow(Base):
    """A target that some process has registered, who delivers to it now, and how that fares."""

    __tablename__ = "invalidation_target"
    __table_args__ = (CheckConstraint("(lease_token IS NULL) = (lease_until IS NULL)", name="lease"),)

    name: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]
    lease_token: Mapped[UUID | None]
    lease_until: Mapped[datetime | None]
    attempts: Mapped[int] = mapped_column(Integer, server_default=text("0"))
    retry_at: Mapped[datetime | None]
    failed_at: Mapped[datetime | None]
    last_error: Mapped[str | None]
    delivered_at: Mapped[datetime | None]
    seen_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class CacheVersionRow(Base):
    """How often a key, tag or path was invalidated; readers put it into their cache keys."""

    __tablename__ = "cache_version"

    key: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int]
    changed_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
