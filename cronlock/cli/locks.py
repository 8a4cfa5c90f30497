"""`cronlock locks`."""

from cronlock.cli import connecting, output
from cronlock.cli.options import Json

COLUMNS = ("key", "lock", "task", "run", "held for", "pid", "application", "host")


def locks(is_json: Json = False) -> None:
    """Show who holds an advisory lock of this database now: runs, and anybody else.

    `pid` is the database backend's. A prepared transaction that holds one has no backend; `ROLLBACK PREPARED` ends it.

    Example: `cronlock locks`
    """
    settings = connecting.settings()
    from cronlock import stats
    from cronlock.explain import span

    with connecting.connect(settings) as connection:
        rows = stats.locks(connection, settings.schema_name)
    if is_json:
        output.document({"locks": rows})
        return
    output.table(
        COLUMNS,
        [
            (
                row["lock_key"],
                row["lock_name"],
                row["task"],
                row["run_id"],
                span(row["held_ms"]),
                row["backend_pid"],
                application(row),
                f"{row['host']} ({row['process_pid']})" if row["host"] else row["client_addr"],
            )
            for row in rows
        ],
    )
    for row in rows:
        if row["prepared_transaction"] is not None:
            output.note(
                f"a prepared transaction holds lock {row['lock_key']} with no process;"
                f" end it with: ROLLBACK PREPARED '{row['prepared_transaction']}'"
            )
    if not rows:
        output.note("nobody holds an advisory lock")


def application(row: dict[str, object]) -> object:
    """Who it is: the application's name, or that it is a prepared transaction."""
    return "(prepared transaction)" if row["prepared_transaction"] is not None else row["application_name"] or None
