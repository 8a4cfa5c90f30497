"""Another process that holds advisory locks: the names are arguments; it ends when its input does.

It speaks the simple protocol, which leaves no snapshot open: one that is held for as long as the locks would keep
VACUUM from removing anything during the whole benchmark.
"""

import os
import sys

import psycopg

from benchmarks import names


def main() -> None:
    """Take the locks in one transaction, print the backend's process id, and wait."""
    url = os.environ["DATABASE_URL"]
    with psycopg.connect(url, application_name=names.HOLDER, cursor_factory=psycopg.ClientCursor) as connection:
        for name in sys.argv[1:]:
            row = connection.execute("SELECT pg_try_advisory_xact_lock(hashtext(%s)::bigint)", (name,)).fetchone()
            assert row == (True,), f"the lock {name} is held already"
        print(connection.info.backend_pid, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
