"""Where Alembic runs: everything, its version table too, lives in cronlock's schema."""

import os

from alembic import context
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.pool import NullPool

from cronlock.config import Settings
from cronlock.migrate import limit
from cronlock.models import Base

schema: str = context.config.attributes.get("schema") or os.environ.get("CRONLOCK_SCHEMA") or "cronlock"


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def url() -> str:
    given = context.config.attributes.get("url")
    if given is None:
        settings = Settings.load()
        given = settings.direct_url or settings.database_url
    return str(given)


def run(connection: Connection | None) -> None:
    if connection is not None:
        limit(connection)
    context.configure(
        connection=connection,
        dialect_name="postgresql" if connection is None else None,
        dialect_opts={"paramstyle": "named"},  # any other doubles every % that is printed
        target_metadata=Base.metadata,
        version_table_schema=schema,
        include_schemas=True,
        include_name=lambda name, kind, _: kind != "schema" or name == schema,
        transaction_per_migration=True,
        literal_binds=connection is None,
    )
    context.config.attributes["schema"] = schema
    with context.begin_transaction():
        if connection is None:
            context.execute(f"CREATE SCHEMA IF NOT EXISTS {quoted(schema)}")
        context.run_migrations()


if context.is_offline_mode():
    run(None)
elif (given := context.config.attributes.get("connection")) is not None:
    run(given)
else:
    import psycopg

    engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(url()), poolclass=NullPool)
    with engine.connect() as connection:
        with connection.begin():
            connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {quoted(schema)}"))
        run(connection)
