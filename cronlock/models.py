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
    SmallInteger,
    func,
    text,
)
from sqlalchemy import Text as SqlText
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.dialects.postgresql import UUID as SqlUuid
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

REVISION = "0002"
"""The schema revision that this code reads and writes; a test holds it against the newest migration."""

RUN_STATUSES = ("running", "completed", "failed", "timed_out", "cancelled", "lost", "skipped")
SKIP_REASONS = ("already_running", "duplicate", "too_soon", "paused", "queued_already")
TRIGGERS = ("http", "schedule", "manual", "job")
MODES = ("transaction", "guard", "queue")


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
