"""`cronlock prune`."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from cronlock.cli import connecting, output
from cronlock.cli.options import Json

if TYPE_CHECKING:
    from cronlock.stats import Connection

LIMIT = "5s"
"""How long one window may take."""


def prune(
    is_dry: Annotated[
        bool, typer.Option("--dry-run", metavar="", help="Count what would be deleted, and delete nothing.")
    ] = False,
    is_json: Json = False,
) -> None:
    """Delete what is older than its retention, as the timer of every server and worker does by itself.

    Skipped runs are kept CRONLOCK_RETENTION_SKIPPED (7d), completed runs and jobs CRONLOCK_RETENTION_COMPLETED (28d),
    all others CRONLOCK_RETENTION_FAILED (90d). What has not ended, and a task's last run and last completed run, stay.
    Idempotency keys go when they have expired, invalidations after CRONLOCK_RETENTION_INVALIDATED (7d), delivered or
    not. Goes through the tables in small transactions, oldest first; stop it at
    any time, and what it has deleted stays deleted.

    Examples: `cronlock prune --dry-run` · `CRONLOCK_RETENTION_SKIPPED=1d cronlock prune`
    """
    settings = connecting.settings()
    from cronlock import stats, steering

    totals: dict[str, Counter[str]] = {
        "runs": Counter(),
        "jobs": Counter(),
        "keys": Counter(),
        "invalidations": Counter(),
    }
    done = "would be deleted" if is_dry else "deleted"
    schema, retentions = settings.schema_name, settings.retentions()

    def windows(connection: "Connection") -> Iterator[tuple[str, int, Counter[str]]]:
        for after, numbers in steering.prune(connection, schema, retentions, is_dry=is_dry):
            yield "runs", after, numbers
        for after, numbers in steering.prune_jobs(connection, schema, retentions, is_dry=is_dry):
            yield "jobs", after, numbers
        for number in steering.prune_keys(connection, schema, is_dry=is_dry):
            yield "keys", 0, Counter({"expired": number} if number else {})
        kept = settings.retention_invalidated.total_seconds()
        for after, numbers in steering.prune_invalidations(connection, schema, kept, is_dry=is_dry):
            yield "invalidations", after, numbers

    with connecting.connect(settings) as connection, output.progress(f"rows {done}") as tell:
        before = stats.STATEMENT_TIMEOUT.set(LIMIT)
        try:
            for name, after, numbers in windows(connection):
                totals[name] += numbers
                number = sum(total.total() for total in totals.values())
                tell(number, f"up to {name.removesuffix('s')} {after}: {number:,} {done}" if after else None)
        except KeyboardInterrupt:
            number = sum(total.total() for total in totals.values())
            output.note(f"stopped: {number:,} {done}; the same command goes on")
            raise
        finally:
            stats.STATEMENT_TIMEOUT.reset(before)
    number = sum(total.total() for total in totals.values())
    each = {name: [{"status": status, "rows": rows} for status, rows in sorted(total.items())]
            for name, total in totals.items()}  # fmt: skip
    if is_json:
        output.document(
            {
                "rows": number,
                "is_dry_run": is_dry,
                "by_status": each["runs"],
                "jobs_by_status": each["jobs"],
                "keys": totals["keys"].total(),
                "invalidations_by_status": each["invalidations"],
            }
        )
        return
    print(f"{number:,} rows {done}{shown(totals)}")


def shown(totals: "dict[str, Counter[str]]") -> str:
    """What they were: runs by their status, then jobs, then keys, then invalidations."""
    told = [", ".join(f"{rows:,} {status}" for status, rows in sorted(totals["runs"].items()))]
    told += [", ".join(f"{rows:,} {status}" for status, rows in sorted(totals["jobs"].items())) + " jobs"]
    told += [f"{totals['keys'].total():,} idempotency keys"]
    told += [
        ", ".join(f"{rows:,} {status}" for status, rows in sorted(totals["invalidations"].items())) + " invalidations"
    ]
    kept = [text for text, total in zip(told, totals.values(), strict=True) if total]
    return f" ({'; '.join(kept)})" if kept else ""
