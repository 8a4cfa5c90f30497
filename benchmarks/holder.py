"""Another process that holds advisory locks: the names are arguments; it ends when its input does."""

import os
import sys

import psycopg

from benchmarks import names


def main() -> None:
    """Take the locks in one transaction, print the backend's process id, and wait."""
    with psycopg.connect(os.environ["DATABASE_URL"], application_name=names.HOLDER) as connection:
        for name in sys.argv[1:]:
            row = connection.execute("SELECT pg_try_advisory_xact_lock(hashtext(%s)::bigint)", (name,)).fetchone()
            assert row == (True,), f"the lock {name} is held already"
        print(connection.info.backend_pid, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
