"""`cronlock tasks`."""

from typing import TYPE_CHECKING, Any

from cronlock.cli import connecting, output
from cronlock.cli.options import App, Json, app_of

if TYPE_CHECKING:
    from datetime import timedelta

COLUMNS = ("task", "schedule", "options", "paused", "last status", "last run", "p50", "p95", "skip rate")


def tasks(app: App = None, is_json: Json = False) -> None:
    """Show the tasks: schedule, options, whether paused, last run, usual durations, rate of skipped calls.

    Of the options the table shows what is not as usual: mode, queue, attempts, `key`, slots (`max_concurrent`) and
    `min_interval`; --json has them all.

    Without APP, those that servers have registered in the database. With APP, those that it registers, beside the
    others; they are shown also if the database cannot be reached.

    Examples: `cronlock tasks` · `cronlock tasks main:cron --json`
    """
    reference = app_of(app)
    rows = known() if reference is None else merged(reference)
    if is_json:
        output.document({"tasks": rows})
        return
    output.table(COLUMNS, map(cells, rows))
    if not rows:
        output.note("no task is known here yet: name your app, or start a server with it")


def known() -> list[dict[str, Any]]:
    """The tasks of the database."""
    settings = connecting.settings()
    from cronlock import stats

    with connecting.connect(settings) as connection:
        return stats.tasks(connection, settings.schema_name)


def merged(reference: str) -> list[dict[str, Any]]:
    """The tasks of the app with what the database knows of them, then the others of the database."""
    from cronlock import stats
    from cronlock.errors import Unavailable
    from cronlock.loading import load

    cron = load(reference)
    rows: dict[str, dict[str, Any]] = {}
    try:
        with connecting.connect(cron.settings) as connection:
            rows = {row["task"]: row for row in stats.tasks(connection, cron.settings.schema_name)}
    except Unavailable as error:
        output.note(f"cronlock: only what the app says is shown; {error}")
    registered = {
        task.name: {
            **rows.get(task.name, {}),
            "task": task.name,
            "schedule": task.schedule,
            "timezone": task.timezone if task.schedule else None,
            "mode": task.mode,
            "lock_name": task.lock.name,
            "timeout_ms": milliseconds(task.timeout),
            "queue": task.queue,
            "max_attempts": task.max_attempts,
            "key": task.key.template if task.key else None,
            "max_concurrent": task.max_concurrent,
            "min_interval_ms": milliseconds(task.min_interval),
            "is_registered": True,
        }
        for task in cron.tasks
    }
    others = [{**row, "is_registered": False} for name, row in rows.items() if name not in registered]
    return [*(registered[name] for name in sorted(registered)), *others]


def milliseconds(duration: "timedelta | None") -> int | None:
    """A span as a whole number."""
    return None if duration is None else round(duration.total_seconds() * 1000)


def options(row: dict[str, Any]) -> str | None:
    """What a task has that is not as usual; a server of an older release may not have said all of it."""
    from cronlock.explain import span
    from cronlock.tasks import Task

    told = []
    if (mode := row.get("mode")) and mode != Task.mode:
        told.append(f"{mode} mode")
    if (queue := row.get("queue")) and queue != Task.queue:
        told.append(f"queue {queue}")
    if (attempts := row.get("max_attempts")) and attempts != Task.max_attempts:
        told.append(f"{attempts} attempts" if attempts > 1 else "1 attempt")
    if key := row.get("key"):
        told.append(f"key {key}")
    if (slots := row.get("max_concurrent") or 1) > 1:
        told.append(f"{slots} slots")
    if interval := row.get("min_interval_ms"):
        told.append(f"{span(interval)} apart")
    return ", ".join(told) or None


def cells(row: dict[str, Any]) -> tuple[Any, ...]:
    """A row of the table."""
    from cronlock.explain import span

    paused = None
    if row.get("paused_at") is not None:
        paused = f"by {row['paused_by'] or '?'}" + (f": {row['paused_reason']}" if row["paused_reason"] else "")
    zone = row.get("timezone")
    skip_rate = row.get("skip_rate")
    return (
        row["task"],
        f"{row['schedule']}{f' {zone}' if zone and zone != 'UTC' else ''}" if row["schedule"] else None,
        options(row),
        paused,
        row.get("last_status"),
        row.get("last_started_at"),
        span(row.get("p50_ms")),
        span(row.get("p95_ms")),
        None if skip_rate is None else f"{skip_rate:.1%}",
    )
