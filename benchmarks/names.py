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
STATEMENT = text("select 1")

HOLDER = "holder"
"""The application name of the process that holds the locks."""
FIRST_RUN_ID = 1_000_000
"""Run ids begin here on every route, so that all of them have as many digits."""

HOLDER_PID = "BENCHMARK_HOLDER_PID"
REDIS_URL = "BENCHMARK_REDIS_URL"
SERVER_CORE = "BENCHMARK_SERVER_CORE"
