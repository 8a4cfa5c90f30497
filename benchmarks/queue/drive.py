"""`python -m benchmarks.queue.drive <queue> <command> ..`: one queue of Python does one thing, and prints what it was.

`schema`; `work`; `many <seconds> <jobs>`, batches until one of both is reached; `one <callers> <seconds>` and
`inside <callers> <seconds>`, one by one; `latency <times> <seconds>`; `steadily <jobs a second> <seconds>`.
"""

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

import uvloop

from benchmarks.queue.drivers import Driver, Stamps

BATCH = 1000
WARM_UP = 0.5
PAUSE = (0.015, 0.035)
"""Seconds between two jobs whose start is waited for: the worker is idle by then."""
START_WITHIN = 15.0
LEAST = 20
"""Jobs whose start is waited for, however long that takes."""


async def many(driver: Driver, seconds: float, jobs: int) -> dict[str, Any]:
    """Batches, one after another."""
    if seconds:
        await driver.many(range(BATCH))
    made = 0
    started = time.perf_counter()
    while made < jobs and (not seconds or time.perf_counter() - started < seconds):
        size = min(BATCH, jobs - made)
        await driver.many(range(made, made + size))
        made += size
    return {"jobs": made, "seconds": time.perf_counter() - started, "before": BATCH if seconds else 0}


async def singly(once: Callable[[int], Awaitable[None]], callers: int, seconds: float) -> dict[str, Any]:
    """So many callers, each of which enqueues one job after another."""
    number = 0

    async def call(until: float) -> int:
        nonlocal number
        mine = 0
        while time.perf_counter() < until:
            number += 1
            mine += 1
            await once(number)
        return mine

    async def burst(seconds: float) -> tuple[int, float]:
        started = time.perf_counter()
        made = sum(await asyncio.gather(*(call(started + seconds) for _ in range(callers))))
        return made, time.perf_counter() - started

    before, _ = await burst(WARM_UP)
    made, elapsed = await burst(seconds)
    return {"jobs": made, "seconds": elapsed, "before": before}


async def steadily(driver: Driver, rate: float, seconds: float) -> dict[str, Any]:
    """So many jobs a second, each by itself."""
    began, made = time.monotonic(), 0
    while (elapsed := time.monotonic() - began) < seconds:
        while made < rate * elapsed:
            made += 1
            await driver.one(made)
        await asyncio.sleep(0.005)
    return {"jobs": made, "seconds": seconds}


async def latency(driver: Driver, times: int, seconds: float) -> list[float]:
    """The milliseconds from the beginning of each enqueue to the start of its job in the worker, which is idle."""
    stamps = Stamps()
    at = ("127.0.0.1", int(os.environ["BENCHMARK_STAMPS"]))
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: stamps, local_addr=at)
    n = 0

    async def once(within: float) -> float:
        nonlocal n
        n += 1
        stamps.expected, stamps.arrived = n, asyncio.get_running_loop().create_future()
        began = time.monotonic_ns()
        await driver.one(n)
        return (await asyncio.wait_for(stamps.arrived, within) - began) / 1e6

    until = time.monotonic() + START_WITHIN
    while True:  # the worker may not be there yet, and one that is told by NOTIFY only is not told later
        with suppress(TimeoutError):
            await once(1.0)
            break
        if time.monotonic() > until:
            raise TimeoutError("no job started")
    for _ in range(5):  # they find nothing warm
        await once(START_WITHIN)
    taken: list[float] = []
    until = time.monotonic() + seconds
    while len(taken) < times and (len(taken) < LEAST or time.monotonic() < until):
        await asyncio.sleep(random.uniform(*PAUSE))
        taken.append(await once(START_WITHIN))
    transport.close()
    return taken


async def main() -> None:
    """Do what the command line says."""
    name, command, *rest = sys.argv[1:]
    callers = int(rest[0]) if command in ("one", "inside") else 1
    task = os.environ.get("BENCHMARK_TASK", "noop")
    driver: Driver = import_module(f"benchmarks.queue.drivers.{name}").Driver(os.environ["DATABASE_URL"], callers, task)
    if command == "schema":
        await driver.schema()
        return
    if command == "work":
        await driver.work()
        return
    await driver.open()
    told: Any
    match command:
        case "many":
            told = await many(driver, float(rest[0]), int(rest[1]))
        case "one":
            told = await singly(driver.one, callers, float(rest[1]))
        case "inside":
            told = await singly(driver.inside, callers, float(rest[1]))
        case "steadily":
            told = await steadily(driver, float(rest[0]), float(rest[1]))
        case _:
            told = await latency(driver, int(rest[0]), float(rest[1]))
    await driver.close()
    print(json.dumps(told))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
