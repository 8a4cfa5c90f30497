"""The tasks of the process: no request's end cancels them, and their statements are cronlock's own."""

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any

from cronlock.lending import CONTEXT, OWN


class Background:
    """Starts coroutines as tasks of the process and keeps them from being collected."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._context = contextvars.copy_context()
        self._context.run(CONTEXT.set, OWN)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Start a task of the process."""
        task = asyncio.get_running_loop().create_task(coroutine, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
