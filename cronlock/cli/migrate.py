"""`cronlock migrate`."""

from typing import Annotated

import typer

from cronlock.cli import connecting, output
from cronlock.cli.options import Json, duration


def migrate(
    wait: Annotated[
        str,
        typer.Option(metavar="DURATION", help="How long to wait for other migrations and busy tables: 90s, 5m."),
    ] = "60s",
    is_sql: Annotated[
        bool, typer.Option("--sql", metavar="", help="Print the SQL of all migrations instead, without a database.")
    ] = False,
    is_json: Json = False,
) -> None:
    """Bring cronlock's schema in the database up to date.

    Safe to run from many places at once: one works, the others wait for it. Uses CRONLOCK_DIRECT_URL if that is set
    (the way around a pooler), else DATABASE_URL. The schema's name is CRONLOCK_SCHEMA (cronlock). A schema that is one
    revision ahead of this cronlock is left as it is, and that is no error: this cronlock works with it.

    Examples: `cronlock migrate --wait 5m` · `cronlock migrate --sql > cronlock.sql`
    """
    settings = connecting.settings()
    limit = duration(wait, "--wait")
    from cronlock import migrate as migrating

    if is_sql:
        migrating.print_script(settings.schema_name)
        return
    url = settings.direct_url or settings.database_url
    with connecting.opened(url, settings):
        pass  # a database that cannot be reached is another error than a migration that fails
    done = migrating.migrate(url, settings.schema_name, wait=limit, report=output.note)
    if is_json:
        output.document({"schema": settings.schema_name, "before": done.before, "after": done.after})
        return
    print(f"{settings.schema_name}: {done.before or 'nothing'} -> {done.after}")
