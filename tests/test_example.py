"""The example: what it takes over, what it refuses, and what it leaves behind."""

import asyncio
import importlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

import pytest

from cronlock import Cronlock, Outcome
from tests import SECRET, Db, rows, until, value

pytestmark = pytest.mark.anyio

FIRST = "sku,name,quantity,price\nA-1,Tent,3,89.90\nA-2,Stove,0,19.00\nA-3,Rope,7,45.5\n"
SECOND = "sku,name,quantity,price\nA-1,Tent,2,89.90\nA-3,Rope,7,45.50\nA-4,Map,1,8\n"

Sync = Callable[..., Any]


@pytest.fixture
def inventory(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example's module, on the test's database."""
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("CRON_SECRET", SECRET)
    monkeypatch.delenv("INVENTORY_FEED", raising=False)
    sys.modules.pop("examples.inventory", None)
    yield importlib.import_module("examples.inventory")
    sys.modules.pop("examples.inventory", None)


@pytest.fixture
async def cron(inventory: ModuleType) -> AsyncIterator[Cronlock]:
    """Its Cronlock, open."""
    opened: Cronlock = inventory.cron
    async with opened:
        yield opened


@pytest.fixture
def sync(cron: Cronlock, tmp_path: Path) -> Sync:
    """Sync a feed of this text at full speed."""

    async def sync(text: str, name: str = "feed.csv") -> Outcome:
        feed = tmp_path / name
        feed.write_text(text)
        return await cron.run("sync-inventory", {"source": str(feed), "pace": 0})

    return sync


def counts(outcome: Outcome) -> dict[str, int]:
    assert outcome.status == "completed", outcome.failure
    assert outcome.result is not None
    found: dict[str, int] = json.loads(outcome.result)
    return found


def stock(db: Db) -> list[tuple[Any, ...]]:
    return db.execute(
        "SELECT sku, quantity, price::text, vanished_at IS NOT NULL FROM inventory ORDER BY sku"
    ).fetchall()


def is_made(db: Db) -> bool:
    return value(db, "SELECT to_regclass('inventory')") is not None


async def test_the_bundled_feed_is_taken_over_whole_and_then_unchanged(cron: Cronlock) -> None:
    first = await cron.run("sync-inventory", {"pace": 0})
    assert counts(first) == {"rows": 4000, "inserted": 4000, "updated": 0, "unchanged": 0, "vanished": 0}
    again = await cron.run("sync-inventory", {"pace": "0"})  # a query's values are text
    assert counts(again) == {"rows": 4000, "inserted": 0, "updated": 0, "unchanged": 4000, "vanished": 0}


async def test_what_changed_is_updated_and_what_is_gone_is_marked_and_may_come_back(sync: Sync, db: Db) -> None:
    assert counts(await sync(FIRST))["inserted"] == 3
    assert counts(await sync(SECOND)) == {"rows": 3, "inserted": 1, "updated": 1, "unchanged": 1, "vanished": 1}
    assert stock(db) == [
        ("A-1", 2, "89.90", False),
        ("A-2", 0, "19.00", True),
        ("A-3", 7, "45.50", False),
        ("A-4", 1, "8.00", False),
    ]
    assert counts(await sync(FIRST)) == {"rows": 3, "inserted": 0, "updated": 2, "unchanged": 1, "vanished": 1}


async def test_json_says_the_same_as_csv(sync: Sync) -> None:
    items = [
        {"sku": "A-1", "name": "Tent", "quantity": 3, "price": 89.90},
        {"sku": "A-2", "name": "Stove", "quantity": 0, "price": "19.00"},
        {"sku": "A-3", "name": "Rope", "quantity": 7, "price": 45.5},
    ]
    assert counts(await sync(f"\ufeff {json.dumps(items)}", "feed.txt"))["inserted"] == 3
    assert counts(await sync(f"\ufeff{FIRST}"))["unchanged"] == 3


async def test_a_feed_may_be_a_url(cron: Cronlock, tmp_path: Path, db: Db) -> None:
    (tmp_path / "stock.csv").write_text(FIRST)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        found = await cron.run("sync-inventory", {"source": f"{url}/stock.csv", "pace": 0})
        missing = await cron.run("sync-inventory", {"source": f"{url}/nothing.csv", "pace": 0})
        server.shutdown()
    assert counts(found)["inserted"] == 3
    assert missing.status == "failed"
    assert len(stock(db)) == 3


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("feed", "told"),
    [
        (
            "sku,name,quantity,price\nA-1,Tent,3,1\nA-2,Stove,-1,1\nA-3,Rope,x,1\n",
            ["2 bad rows", "line 3: ", "line 4: "],
        ),
        ("sku,name,quantity,price\nA-1,Tent,3,1\nA-1,Tent,4,1\n", ["line 3: A-1 was there already, line 2"]),
        ("sku,name,quantity,price\nA-1,Tent, 2 persons,3,1\n", ["line 2: "]),
        ("sku,name,quantity,price\nA-1,Tent,3\n", ["line 2: ", "price"]),
        ("sku,name,quantity,price\n", ["empty"]),
        ('[{"sku": "A-1", "name": "Tent", "quantity": 1.5, "price": 1}, 7]', ["item 1: ", "item 2: "]),
    ],
)
async def test_a_feed_with_bad_rows_changes_nothing_and_says_which(
    sync: Sync, db: Db, feed: str, told: list[str]
) -> None:
    await sync(FIRST)
    before = stock(db)
    outcome = await sync(feed)
    assert outcome.status == "failed"
    assert outcome.failure is not None
    assert outcome.failure.type == "BadFeed"
    assert [text for text in told if text not in outcome.failure.message] == []
    assert stock(db) == before


async def test_a_run_that_fails_half_way_leaves_nothing_behind(
    inventory: ModuleType, sync: Sync, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "VANISH", "SELECT 1 / 0")
    assert (await sync(FIRST)).status == "failed"
    assert not is_made(db)
    monkeypatch.undo()
    await sync(FIRST)
    before = stock(db)
    monkeypatch.setattr(inventory, "VANISH", "SELECT 1 / 0")
    assert (await sync(SECOND)).status == "failed"
    assert stock(db) == before


async def test_an_overlapping_call_is_skipped_while_a_slow_feed_is_read(cron: Cronlock, db: Db) -> None:
    slow = asyncio.create_task(cron.run("sync-inventory", {"pace": 4000}))
    await until(lambda: rows(db, "sync-inventory") == [("running", None)], "the first call runs")
    skipped = await cron.run("sync-inventory")
    assert (skipped.status, skipped.reason) == ("skipped", "already_running")
    assert counts(await slow)["rows"] == 4000
    assert value(db, "SELECT progress_done FROM cronlock.run WHERE status = 'completed'") == 4000


async def test_a_cancelled_run_leaves_nothing_behind(cron: Cronlock, db: Db) -> None:
    slow = asyncio.create_task(cron.run("sync-inventory", {"pace": 500}))
    await until(lambda: value(db, "SELECT max(progress_done) FROM cronlock.run"), "the first rows are read")
    db.execute("UPDATE cronlock.run SET cancel_requested_at = now(), cancel_requested_by = 'a test'")
    assert (await slow).status == "cancelled"
    assert not is_made(db)


async def test_the_report_sums_up_what_is_there(cron: Cronlock, sync: Sync) -> None:
    early = await cron.run("inventory-report")
    assert (early.status, early.failure and early.failure.type) == ("cancelled", "Cancel")
    await sync(FIRST)
    await sync(SECOND)
    assert counts(await cron.run("inventory-report", {"low": 2})) == {
        "items": 3,
        "pieces": 10,
        "value": "506.30",
        "low": 2,
    }
