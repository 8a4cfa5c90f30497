"""An app whose process can be killed right after a COMMIT, before anybody is told: CASES_KILL=1."""

import asyncio
import os
import signal
import time
from typing import Any

from cronlock import Cronlock, Run, Webhook
from cronlock.invalidation import Said

cron = Cronlock()
if url := os.environ.get("CASES_WEBHOOK"):
    cron.target("next", Webhook(url, timeout="30s"))


if os.environ.get("CASES_KILL"):

    def kill(self: Said) -> None:
        """The answer to COMMIT has come, and nothing else has happened."""
        os.kill(os.getpid(), signal.SIGKILL)

    Said.committed = kill  # type: ignore[method-assign]


@cron.task("tagging", lock="tagging")
async def tagging(run: Run, payload: dict[str, Any]) -> None:
    """Registers three tags, one after the other."""
    for tag in ("a", "b", "c"):
        run.invalidate(tags=[f"{tag}{payload.get('number', 0)}"])
        await run.driver.execute("SELECT 1")


@cron.task("tagging-in-a-thread", lock="tagging")
def tagging_in_a_thread(run: Run, payload: dict[str, Any]) -> None:
    """As `tagging`, as a plain function."""
    for tag in ("a", "b", "c"):
        run.invalidate(tags=[f"{tag}{payload.get('number', 0)}"])
        run.driver.execute("SELECT 1")


@cron.task("quick")
async def quick(run: Run) -> None:
    """Writes, and says it."""
    await run.driver.execute("SELECT 1")
    run.invalidate("quick", tags=["quick"])


@cron.task("guarded", mode="guard")
async def guarded(run: Run, payload: dict[str, Any]) -> None:
    """Has no transaction."""
    run.invalidate(tags=[f"{tag}{payload.get('number', 0)}" for tag in ("a", "b", "c")])
    await asyncio.sleep(0)


started = time.monotonic()
