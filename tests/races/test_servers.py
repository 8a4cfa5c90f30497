"""Real server processes: what they count together, and a start of many at once."""

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest

from tests import AUTH, Db, advisory_locks, value
from tests.commands import PROJECT, environment, served

pytestmark = pytest.mark.anyio


@pytest.fixture
def servers(database_url: str, db: Db, tmp_path: Path) -> Iterator[list[str]]:
    """The URLs of four servers with one database."""
    db.execute("CREATE TABLE counter (n int); INSERT INTO counter VALUES (0)")
    with ExitStack() as stack:
        urls = []
        for number in range(4):
            directory = tmp_path / str(number)
            directory.mkdir()
            urls.append(
                stack.enter_context(served(directory, "tests.races.counting:cron", DATABASE_URL=database_url))[1]
            )
        yield urls


async def test_four_hundred_calls_on_four_servers_lose_no_count(servers: list[str], db: Db) -> None:
    statuses: Counter[str] = Counter()
    results: list[int] = []

    async def caller(client: httpx2.AsyncClient, number: int) -> None:
        for turn in range(10):
            name = ("awaiting", "plain")[(number + turn) % 2]
            body = (await client.post(f"{servers[(number + turn) % 4]}/cron/{name}", headers=AUTH)).json()
            statuses[body["status"]] += 1
            if body["status"] == "completed":
                results.append(body["result"])

    async with httpx2.AsyncClient(timeout=60) as client:
        await asyncio.gather(*(caller(client, number) for number in range(40)))
    assert statuses.total() == 400
    assert statuses.keys() <= {"completed", "skipped"}
    assert value(db, "SELECT n FROM counter") == statuses["completed"] == len(results) >= 20
    assert sorted(results) == list(range(1, len(results) + 1)), "each run saw what the one before it committed"
    recorded: dict[str, int] = dict(db.execute("SELECT status, count(*) FROM cronlock.run GROUP BY 1").fetchall())
    assert recorded == dict(statuses)
    by_id = "SELECT array_agg(result::int ORDER BY id) FROM cronlock.run WHERE status = 'completed'"
    assert value(db, by_id) == list(range(1, len(results) + 1)), "ids grow in the order of the lock"
    overlapping = """SELECT count(*) FROM cronlock.run a JOIN cronlock.run b
        ON a.id < b.id AND a.status = 'completed' AND b.status = 'completed' AND a.finished_at > b.started_at"""
    assert value(db, overlapping) == 0
    instances = value(db, "SELECT count(DISTINCT instance) FROM cronlock.run WHERE status = 'completed'")
    assert instances > 1
    assert advisory_locks(db) == 0


@pytest.mark.parametrize(("task", "slots"), [("slots", 3), ("slots-of-tenant", 2)])
async def test_four_servers_use_every_slot_and_never_one_more(
    servers: list[str], db: Db, task: str, slots: int
) -> None:
    db.execute("CREATE TABLE inside (id bigint, task text, key text)")
    statuses: Counter[str] = Counter()
    most: list[int] = []

    async def caller(client: httpx2.AsyncClient, number: int) -> None:
        for turn in range(8):
            url = f"{servers[(number + turn) % 4]}/cron/{task}?tenant={number % 2}"
            body = (await client.post(url, headers=AUTH)).json()
            statuses[body["status"]] += 1
            if body["status"] == "completed":
                most.append(body["result"])

    async with httpx2.AsyncClient(timeout=60) as client:
        await asyncio.gather(*(caller(client, number) for number in range(40)))
    assert statuses.total() == 320
    assert statuses.keys() <= {"completed", "skipped"}
    assert max(most) == slots
    overlapping = """SELECT max((SELECT count(*) FROM cronlock.run b WHERE b.status = 'completed'
            AND b.key IS NOT DISTINCT FROM a.key AND b.started_at <= a.started_at AND b.finished_at > a.started_at))
        FROM cronlock.run a WHERE a.status = 'completed'"""
    assert value(db, overlapping) == slots
    by_slot = db.execute("SELECT lock_key, count(*) FROM cronlock.run WHERE status = 'completed' GROUP BY 1").fetchall()
    assert len(by_slot) == (slots if task == "slots" else 2 * slots), "each slot of each lock was used"
    assert advisory_locks(db) == 0


STARTER = """
import asyncio, json, sys
from tests.races.counting import cron
async def main():
    print("ready", flush=True)
    sys.stdin.readline()
    async with cron:
        outcome = await cron.run("awaiting")
        print(json.dumps([outcome.status, outcome.reason]), flush=True)
asyncio.run(main())
"""


async def test_twelve_processes_that_start_together_all_start(db: Db, database_url: str) -> None:
    db.execute("CREATE TABLE counter (n int); INSERT INTO counter VALUES (0)")
    processes = []
    try:
        for _ in range(12):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", STARTER, cwd=PROJECT, env=environment(DATABASE_URL=database_url),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            processes.append(process)
        for process in processes:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"ready\n"
        answers = await asyncio.gather(*(process.communicate(b"\n") for process in processes))
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.wait()
    errors = [error.decode() for _, error in answers if b"Traceback" in error]
    assert errors == []
    told = Counter(output.decode().strip() for output, _ in answers)
    assert told.keys() <= {'["completed", null]', '["skipped", "already_running"]'}
    assert value(db, "SELECT n FROM counter") == told['["completed", null]'] >= 1
    assert db.execute("SELECT name FROM cronlock.task ORDER BY 1").fetchall() == [
        ("awaiting",),
        ("plain",),
        ("slots",),
        ("slots-of-tenant",),
    ]


def test_a_forked_process_gives_its_records_other_nonces() -> None:
    """Equal ones would make two runs share a row."""
    script = """
import os
from cronlock.gate import new_nonce
new_nonce()
child = os.fork()
os.write(1, f'{new_nonce()}\\n'.encode())
if child:
    os.waitpid(child, 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=PROJECT, env={**os.environ, "PYTHONPATH": str(PROJECT)},
        capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    nonces = done.stdout.split()
    assert len(nonces) == 2
    assert len({nonce[:18] for nonce in nonces}) == 2
