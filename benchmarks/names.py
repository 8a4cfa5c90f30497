"""What the processes of a benchmark must agree on."""

from sqlalchemy import text

CONNECTIONS = 32
SECRET = "a-secret-for-the-benchmark-0123456789"

HELD = [f"held-{number:02}" for number in range(1, CONNECTIONS + 1)]
"""Tasks whose locks another process holds all the time."""
EMPTY = [f"done-{number:02}" for number in range(1, CONNECTIONS + 1)]
"""Tasks that do nothing."""
ONE_STATEMENT = [f"one-{number:02}" for number in range(1, CONNECTIONS + 1)]
"""Tasks that send STATEMENT through `run.connection`."""
GUARDED = [f"hold-{number:02}" for number in range(1, CONNECTIONS + 1)]
"""Tasks in guard mode that do nothing."""
GUARDED_STATEMENT = [f"task-{number:02}" for number in range(1, CONNECTIONS + 1)]
"""Tasks in guard mode that send STATEMENT on a connection of a pool of their own."""
STATEMENT = text("select 1")

FEW_EMPTY = EMPTY[:8]
FEW = [*HELD[:2], *FEW_EMPTY]
"""All tasks of the server that has ten of them, and those that are called of the one that has many."""

HOLDER = "holder"
"""The application name of the process that holds the locks."""
FIRST_RUN_ID = 1_000_000
"""Run ids begin here on every route, so that all of them have as many digits."""

HOLDER_PID = "BENCHMARK_HOLDER_PID"
REDIS_URL = "BENCHMARK_REDIS_URL"
SERVER_CORE = "BENCHMARK_SERVER_CORE"
TASKS = "BENCHMARK_TASKS"
"""How many tasks to register: those in `FEW` and others that nobody calls. Not set: the tasks of all arms."""
