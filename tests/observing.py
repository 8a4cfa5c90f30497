"""What is left in a database: locks, open transactions, rows."""

from typing import Any

from tests import Db

LOCKS = """
SELECT l.pid, a.application_name, a.state, a.query FROM pg_locks l JOIN pg_stat_activity a USING (pid)
 WHERE l.locktype = 'advisory' AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
IN_TRANSACTION = """
SELECT pid, application_name, state, query FROM pg_stat_activity
 WHERE datname = current_database() AND pid <> pg_backend_pid() AND state LIKE 'idle in transaction%'
"""


def locks(db: Db) -> list[tuple[Any, ...]]:
    """The advisory locks of this database that anybody holds or waits for, and who."""
    return db.execute(LOCKS).fetchall()


def in_transaction(db: Db) -> list[tuple[Any, ...]]:
    """The other sessions of this database that are idle in a transaction."""
    return db.execute(IN_TRANSACTION).fetchall()


def is_quiet(db: Db) -> bool:
    """Whether nobody holds a lock or keeps a transaction open."""
    return not locks(db) and not in_transaction(db)


def statuses(db: Db, task: str | None = None) -> list[str]:
    """The statuses of a task's runs, or of all, in order."""
    query = "SELECT status FROM cronlock.run WHERE %(task)s::text IS NULL OR task = %(task)s ORDER BY id"
    return [status for (status,) in db.execute(query, {"task": task}).fetchall()]
