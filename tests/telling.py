"""One scenario of invalidations in different surroundings: every kind of target is told of runs and jobs, in order."""

import asyncio
from typing import Any

import psycopg

from cronlock import Cronlock, Invalidation, Notify, Run, VersionTable, Webhook
from cronlock.targets import heard
from tests import Db, until, value
from tests.receiver import HOOK_SECRET, receiving
from tests.working import all_ended, working

TIMES = 12


async def tell_all(cron: Cronlock, db: Db, listener: "psycopg.AsyncConnection[Any]", word: str) -> None:
    """Run tasks of each kind, and look at what each kind of target was told; `word` is a part of every key.

    `listener` is a connection to the same database, past any pooler. One run is rolled back, of which nobody is told.
    """
    called: list[Invalidation] = []

    async def say(run: Run, payload: dict[str, Any]) -> dict[str, Any]:
        run.invalidate(f"{word}{payload['n']}", tags=[word])
        if run.task != "guarded":
            await run.driver.execute("SELECT 1")  # what was said before it is written now
        run.invalidate(paths=[f"/{word}"])
        if payload["n"] < 0:
            raise ValueError("on purpose")
        return {"cacheKeys": ["of the result"]}

    def say_in_a_thread(run: Run, payload: dict[str, Any]) -> None:
        run.invalidate(f"{word}{payload['n']}", tags=[word])
        run.driver.execute("SELECT 1")

    cron.task("saying", lock="one")(say)
    cron.task("in-a-thread", lock="one")(say_in_a_thread)
    cron.task("guarded", mode="guard")(say)
    cron.target("called", called.append)
    cron.target("versions", VersionTable())
    cron.target("caches", Notify("caches"))
    await listener.set_autocommit(True)
    await listener.execute("LISTEN caches")
    async with receiving() as hook:
        cron.target("hook", Webhook(hook.url, secret=HOOK_SECRET))
        async with cron, working(cron, concurrency=1, drain=5):
            expected = []
            for n in range(TIMES):
                name = ("saying", "in-a-thread", "guarded")[n % 3]
                if n < TIMES // 2:
                    assert (await cron.run(name, {"n": n})).status == "completed"
                else:
                    await cron.enqueue(None, name, {"n": n})
                    await all_ended(db, 20)
                expected.append(f"{word}{n}")
            assert (await cron.run("saying", {"n": -1})).status == "failed"
            undelivered = "SELECT count(*) FROM cronlock.invalidation WHERE delivered_at IS NULL"
            await until(lambda: value(db, undelivered) == 0, "all is delivered", 20)
    assert ours(key for change in called for key in change.keys) == expected
    assert ours(hook.told("keys")) == expected
    assert hook.forged == 0
    notified: list[str] = []
    async with asyncio.timeout(10):
        async for notice in listener.notifies(timeout=0.5):
            notified += heard(notice.payload).keys
    assert ours(notified) == expected
    versions: dict[str, int] = dict(db.execute("SELECT key, version FROM cronlock.cache_version").fetchall())
    assert versions[word] >= 1
    assert {key for key in versions if key.startswith(word) and key != word} >= set(expected)
    assert value(db, "SELECT count(*) FROM cronlock.invalidation WHERE array_to_string(keys, '') LIKE '%%-1'") == 0


def ours(keys: Any) -> list[str]:
    """The keys that have a number, in the order in which they came; what is told twice counts once."""
    return list(dict.fromkeys(key for key in keys if key[-1:].isdigit()))
