"""A PgBouncer for the tests of a file."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pooler.bouncer import Bouncer


@pytest.fixture(scope="module")
def bouncer(server_url: str) -> Iterator[Bouncer]:
    """One with at most six connections to the server."""
    with tempfile.TemporaryDirectory(prefix="cronlock-pgbouncer-") as directory:
        made = Bouncer(Path(directory), server_url, pool_size=6)
        try:
            made.start()
            yield made
        finally:
            made.stop()
