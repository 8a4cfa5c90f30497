"""A table for what the tasks of `tests.cases.app` write, and servers of them in processes of their own."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest

from tests import Db
from tests.commands import Running, served

Start = Callable[..., tuple[Running, str]]
numbers = count(1)


@pytest.fixture
def effect(db: Db) -> None:
    """The table `effect`: the number of the run, once for each write."""
    db.execute("CREATE TABLE effect (run_id bigint)")


@pytest.fixture
def start(database_url: str, effect: None, tmp_path: Path) -> Iterator[Start]:
    """Starts `cronlock serve` with the tasks; keyword arguments are settings. Gives the process and its URL."""
    with ExitStack() as stack:

        def start(**settings: str) -> tuple[Running, str]:
            directory = tmp_path / str(next(numbers))
            directory.mkdir()
            given = {"DATABASE_URL": database_url, **settings}
            return stack.enter_context(served(directory, "tests.cases.app:cron", **given))

        yield start
