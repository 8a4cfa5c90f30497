"""Sending: what is stale leaves the process, to a webhook or into a callable, within its time.

A redirect is a failure and is not followed: what is signed goes where the user said, and nowhere else.
"""

import asyncio
import contextvars
import threading
import time
from typing import TYPE_CHECKING, Any

from cronlock import __version__
from cronlock.config import Settings
from cronlock.errors import CronlockError
from cronlock.targets import SIGNATURE, Call, Invalidation, Target, Webhook, signature

if TYPE_CHECKING:
    import httpx2

STOP_WAIT = 1.0
"""Seconds that a callable has to end after it was cancelled."""


class NotDelivered(CronlockError):
    """A target did not take what it was sent; `str()` is why."""


class Sender:
    """Sends for one process, in one event loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client: httpx2.AsyncClient | None = None
        self._left: dict[str, asyncio.Future[Any]] = {}
        """Calls that have not returned in their time, by the names of their targets."""

    def is_left(self, name: str) -> bool:
        """Whether an earlier call of this target has still not returned."""
        left = self._left.get(name)
        if left is not None and left.done():
            del self._left[name]
            return False
        return left is not None

    async def send(self, target: Target, change: Invalidation, delivery: int) -> None:
        """Send it; `delivery` is the id of its last row. Raises whatever says that it has not arrived."""
        if isinstance(target.to, Webhook):
            await self._post(target.to, change, delivery)
        elif isinstance(target.to, Call):
            await self._call(target.name, target.to, change)

    async def _post(self, webhook: Webhook, change: Invalidation, delivery: int) -> None:
        import httpx2

        if self._client is None:
            self._client = httpx2.AsyncClient(
                follow_redirects=False, timeout=None, headers={"user-agent": f"cronlock/{__version__}"}
            )
        body = change.as_json().encode()
        headers = {
            "content-type": "application/json",
            "cronlock-delivery": str(delivery),
            SIGNATURE: signature(webhook.secrets(self._settings), int(time.time()), body),
        }
        seconds = webhook.timeout.total_seconds()
        try:
            # The client's own limits hold for each packet; one that trickles would have no end.
            async with (
                asyncio.timeout(seconds),
                self._client.stream("POST", webhook.url, content=body, headers=headers) as response,
            ):
                status = response.status_code
        except TimeoutError:
            raise NotDelivered(f"no answer within {seconds:g} s") from None
        except httpx2.HTTPError as error:
            raise NotDelivered(f"{type(error).__name__}: {error}".rstrip(": ")) from None
        if 300 <= status <= 399:
            raise NotDelivered(f"answered {status}, a redirect, which is not followed; set the URL it leads to")
        if not 200 <= status <= 299:
            raise NotDelivered(f"answered {status}")

    async def _call(self, name: str, to: Call, change: Invalidation) -> None:
        calling = self._start(name, to, change)
        seconds = to.timeout.total_seconds()
        try:
            done, _ = await asyncio.wait((calling,), timeout=seconds)
        except asyncio.CancelledError:
            calling.cancel()
            raise
        if done:
            await calling
            return
        if to.is_async:
            calling.cancel()
            await asyncio.wait((calling,), timeout=STOP_WAIT)
        if not calling.done():
            self._left[name] = calling
        raise NotDelivered(f"it has not returned within {seconds:g} s")

    def _start(self, name: str, to: Call, change: Invalidation) -> "asyncio.Future[Any]":
        """Call it, in a context of nobody's: a task of the loop, or a daemon thread, which keeps no process alive."""
        loop, context = asyncio.get_running_loop(), contextvars.Context()
        if to.is_async:
            return loop.create_task(contained(to, change), context=context)
        returned: asyncio.Future[None] = loop.create_future()

        def tell(error: BaseException | None) -> None:
            if returned.done():
                return
            if error is None:
                returned.set_result(None)
            else:
                returned.set_exception(raised(error))
                returned.exception()  # nobody may wait for it any more

        def body() -> None:
            error: BaseException | None = None
            try:
                to.function(change)
            except BaseException as caught:
                error = caught
            try:
                loop.call_soon_threadsafe(tell, error)
            except RuntimeError:
                pass  # the loop is closed: the process is ending

        threading.Thread(target=context.run, args=(body,), name=f"cronlock-target-{name}", daemon=True).start()
        return returned

    async def close(self) -> None:
        """Close the connections of webhooks."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()


async def contained(to: Call, change: Invalidation) -> None:
    """Call an `async def`; SystemExit and the like must not end the process."""
    try:
        await to.function(change)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        raise raised(error) from error


def raised(error: BaseException) -> NotDelivered:
    """The failure that an exception of a callable is."""
    try:
        message = str(error)
    except BaseException:
        message = "(its message cannot be read)"
    return NotDelivered(f"{type(error).__name__}: {message}".rstrip(": "))
