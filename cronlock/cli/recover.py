"""`cronlock recover`."""

from cronlock.cli import connecting, output
from cronlock.cli.options import Json


def recover(is_json: Json = False) -> None:
    """Close the runs whose process died before it said how they ended, as `lost`.

    Every server does this on its own, every few seconds; a lock needs no recovery, it goes with its connection.

    Example: `cronlock recover --json`
    """
    settings = connecting.settings()
    from cronlock import steering

    with connecting.connect(settings) as connection:
        rows = steering.recover(connection, settings.schema_name)
    closed = [{"run_id": row.pop("id"), **row} for row in rows]
    if is_json:
        output.document({"recovered": closed})
    elif closed:
        output.table(closed[0], [row.values() for row in closed])
    else:
        output.note("no run was lost")
