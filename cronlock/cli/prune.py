"""`cronlock prune`."""

import time
from collections import Counter
from typing import Annotated

import typer

from cronlock.cli import connecting, output
from cronlock.cli.options import Json

TELL_EVERY = 2.0
LIMIT = "5s"
"""How long one window may take."""


def prune(
    is_dry: Annotated[
        bool, typer.Option("--dry-run", metavar="", help="Count what would be deleted, and delete nothing.")
    ] = False,
    is_json: Json = False,
) -> None:
    """Delete the rows of runs that are older than their retention, as every server's timer does by itself.

    Skipped runs are kept CRONLOCK_RETENTION_SKIPPED (7d), completed ones CRONLOCK_RETENTION_COMPLETED (28d), all others
    CRONLOCK_RETENTION_FAILED (90d). What runs, and a task's last run and last completed run, stay. Goes through the
    table in small transactions, oldest first; stop it at any time, and what it has deleted stays deleted.

    Examples: `cronlock prune --dry-run` · `CRONLOCK_RETENTION_SKIPPED=1d cronlock prune`
    """
    settings = connecting.settings()
    from cronlock import stats, steering

    total: Counter[str] = Counter()
    told = time.monotonic()
    done = "would be deleted" if is_dry else "deleted"
    with connecting.connect(settings) as connection:
        before = stats.STATEMENT_TIMEOUT.set(LIMIT)
        try:
            for after, numbers in steering.prune(
                connection, settings.schema_name, settings.retentions(), is_dry=is_dry
            ):
                total += numbers
                if after and time.monotonic() - told >= TELL_EVERY:
                    told = time.monotonic()
                    output.note(f"up to run {after}: {total.total():,} {done}")
        except KeyboardInterrupt:
            output.note(f"stopped: {total.total():,} {done}; the same command goes on")
            raise
        finally:
            stats.STATEMENT_TIMEOUT.reset(before)
    if is_json:
        by_status = [{"status": status, "rows": rows} for status, rows in sorted(total.items())]
        output.document({"rows": total.total(), "is_dry_run": is_dry, "by_status": by_status})
        return
    each = ", ".join(f"{rows:,} {status}" for status, rows in sorted(total.items()))
    print(f"{total.total():,} rows {done}{f' ({each})' if each else ''}")
