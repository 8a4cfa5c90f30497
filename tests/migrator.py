"""Migrates in a process of its own: says "ready", waits for a line, migrates, and says how it went.

python -m tests.migrator <url> <schema> <seconds to wait> [<directory of migrations>]
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

from cronlock import migrate


def main() -> None:
    """Migrate once."""
    url, schema, wait, *directory = sys.argv[1:]
    if directory:
        migrate.script_location = lambda: Path(directory[0])
    print("ready", flush=True)
    sys.stdin.readline()
    done = migrate.migrate(url, schema, wait=timedelta(seconds=float(wait)))
    print(json.dumps([done.before, done.after]), flush=True)


if __name__ == "__main__":
    main()
