"""Two tasks over one table: `sync-inventory` loads a feed into `inventory`, `inventory-report` sums it up.

Try it with `cronlock dev`; on your own DATABASE_URL it is `cronlock serve examples.inventory:cron`.
"""

import asyncio
import csv
import io
import json
import os
from collections.abc import Iterator
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from sqlalchemy import text

from cronlock import Cancel, Cronlock, Run

BUNDLED = str(Path(__file__).parent / "feeds" / "inventory.csv")
BATCH = 500

CREATE = """
CREATE TABLE IF NOT EXISTS inventory (
    sku text PRIMARY KEY,
    name text NOT NULL,
    quantity integer NOT NULL,
    price numeric(10, 2) NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now(),
    vanished_at timestamptz)
"""
INCOMING = "CREATE TEMPORARY TABLE incoming (LIKE inventory INCLUDING ALL) ON COMMIT DROP"
COPY = "COPY incoming (sku, name, quantity, price) FROM STDIN"
UPDATE = """
UPDATE inventory i
   SET name = n.name, quantity = n.quantity, price = n.price, updated_at = now(), vanished_at = NULL
  FROM incoming n
 WHERE n.sku = i.sku
   AND (i.name, i.quantity, i.price, i.vanished_at) IS DISTINCT FROM (n.name, n.quantity, n.price, NULL)
"""
INSERT = """
INSERT INTO inventory (sku, name, quantity, price)
SELECT sku, name, quantity, price FROM incoming
    ON CONFLICT (sku) DO NOTHING
"""
VANISH = """
UPDATE inventory i SET vanished_at = now()
 WHERE vanished_at IS NULL AND NOT EXISTS (SELECT FROM incoming n WHERE n.sku = i.sku)
"""

cron = Cronlock()


class Feed(BaseModel):
    """The payload of `sync-inventory`, as JSON or in the query: ?source=https://example.com/stock.json&pace=0"""

    source: str = Field(os.environ.get("INVENTORY_FEED", BUNDLED), description="a file, or an http(s) URL")
    pace: int = Field(1000, ge=0, description="rows a second, as from a slow supplier; 0: as fast as it goes")


class Item(BaseModel):
    """A row of a feed."""

    model_config = ConfigDict(str_strip_whitespace=True)

    sku: str = Field(pattern=r"^[A-Za-z0-9._-]{1,40}$")
    name: str = Field(min_length=1, max_length=200)
    quantity: int = Field(ge=0, lt=2**31)
    price: Decimal = Field(ge=0, max_digits=10, decimal_places=2)


class BadFeed(Exception):
    """The feed cannot be trusted; nothing of it was taken over."""


@cron.task("sync-inventory", schedule="*/5 * * * *", timeout="120s")
async def sync_inventory(run: Run, feed: Feed) -> dict[str, int]:
    """Make `inventory` what the feed says, all of it or nothing; mark what is not in it as vanished."""
    await run.driver.execute(CREATE)
    await run.driver.execute(INCOMING)
    rows = await load(run, feed)
    updated = (await run.driver.execute(UPDATE)).rowcount
    inserted = (await run.driver.execute(INSERT)).rowcount
    vanished = (await run.driver.execute(VANISH)).rowcount
    return {
        "rows": rows,
        "inserted": inserted,
        "updated": updated,
        "unchanged": rows - inserted - updated,
        "vanished": vanished,
    }


async def load(run: Run, feed: Feed) -> int:
    """COPY the feed into `incoming` and count its rows; raises `BadFeed` naming those that are wrong."""
    places: dict[str, str] = {}
    problems: list[str] = []
    rows = read(feed.source)  # which blocks, hence the thread
    while batch := await asyncio.to_thread(list, islice(rows, BATCH)):
        async with run.driver.cursor() as cursor, cursor.copy(COPY) as copy:
            for place, row in batch:
                try:
                    item = Item.model_validate(row)
                except ValidationError as error:
                    first = error.errors()[0]
                    problems.append(f"{place}: {first['msg']} {first['loc']}")
                    continue
                if (earlier := places.setdefault(item.sku, place)) != place:
                    problems.append(f"{place}: {item.sku} was there already, {earlier}")
                    continue
                await copy.write_row((item.sku, item.name, item.quantity, item.price))
        run.progress(len(places))
        if feed.pace:
            await asyncio.sleep(len(batch) / feed.pace)
    if problems:
        raise BadFeed(f"{len(problems)} bad rows, the first: " + "; ".join(problems[:5]))
    if not places:
        raise BadFeed("the feed is empty, which would mark everything as vanished")
    return len(places)


def read(source: str) -> Iterator[tuple[str, Any]]:
    """The rows of a feed, each with its place ("line 17"): CSV with a header, or a JSON array of objects."""
    is_url = source.startswith(("http://", "https://"))
    with urlopen(source, timeout=30) if is_url else open(source, "rb") as stream:
        if stream.peek(16).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            for number, row in enumerate(json.load(stream), 1):
                yield f"item {number}", row
            return
        table = csv.DictReader(io.TextIOWrapper(stream, "utf-8-sig", newline=""))
        for row in table:
            yield f"line {table.line_num}", row if None not in row else "more fields than the header"


class ReportRequest(BaseModel):
    """The payload of `inventory-report`."""

    low: int = Field(5, ge=0, description="how many pieces are few")


@cron.task("inventory-report")
def inventory_report(run: Run, request: ReportRequest) -> dict[str, Any]:
    """Sum the inventory up; a plain function, which runs in a thread under the very same rules."""
    if run.connection.scalar(text("SELECT to_regclass('inventory')")) is None:
        raise Cancel("there is no inventory yet: call sync-inventory first")
    totals = run.connection.execute(
        text(
            "SELECT count(*) AS items, sum(quantity) AS pieces, sum(quantity * price)::text AS value,"
            " count(*) FILTER (WHERE quantity <= :low) AS low FROM inventory WHERE vanished_at IS NULL"
        ),
        {"low": request.low},
    )
    return dict(totals.mappings().one())
