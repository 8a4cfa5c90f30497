"""The lines that a task logs with `run.log`: they go to `logging`, and are kept with the run, bounded."""

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from datetime import UTC, datetime
from typing import Any

from cronlock.jsontext import clip

LINE_LIMIT = 2000
FIRST, LAST = 100, 400
"""How many lines of a run are kept from its beginning and from its end, where there are more."""
HEAD, TAIL = 16_000, 48_000
"""The same for characters."""


class Lines:
    """What one run has logged; any thread may add to it."""

    def __init__(self, scrub: Callable[[str], str]) -> None:
        self._scrub = scrub
        self._first: list[str] = []
        self._last: deque[str] = deque(maxlen=LAST)
        self._left_out = 0
        self._adding = threading.Lock()

    def add(self, level: int, message: str) -> None:
        """Keep one line, without secrets, cut at 2,000 characters."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")[:-6]
        line = f"{now}Z {logging.getLevelName(level)} {clip(self._scrub(message), LINE_LIMIT)}"
        with self._adding:
            if len(self._first) < FIRST:
                self._first.append(line)
                return
            self._left_out += len(self._last) == LAST
            self._last.append(line)

    def text(self) -> str | None:
        """The lines kept, with a mark where some were left out; None if there are none."""
        with self._adding:
            mark = [f"... {self._left_out} lines left out ..."] if self._left_out else []
            lines = [*self._first, *mark, *self._last]
        text = "\n".join(lines)
        if len(text) > HEAD + TAIL:
            text = f"{text[:HEAD]}\n... {len(text) - HEAD - TAIL} characters left out ...\n{text[-TAIL:]}"
        return text or None


class TaskLog(logging.LoggerAdapter[logging.Logger]):
    """A logger for one run: its lines carry the run's facts, and from INFO on they are kept with it."""

    def __init__(self, facts: dict[str, Any], lines: Lines, added: Callable[[], None]) -> None:
        super().__init__(logging.getLogger("cronlock.task"), facts)
        self._lines = lines
        self._added = added

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """As `logging.Logger.log`; a message that does not fit its arguments is kept as it is."""
        if level >= logging.INFO or self.isEnabledFor(level):
            self._lines.add(level, told(msg, args, kwargs.get("exc_info")))
            self._added()
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        super().log(level, msg, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Add the run's facts to those of the line."""
        return msg, {**kwargs, "extra": {**(kwargs.get("extra") or {}), **(self.extra or {})}}


def told(msg: object, args: tuple[object, ...], exc_info: Any) -> str:
    """A line as its record would say it, on one line, with the error that it was given; never raises."""
    try:
        text = str(msg) % (args[0] if len(args) == 1 and isinstance(args[0], Mapping) else args) if args else str(msg)
    except Exception:
        text = f"{shown(msg)} {' '.join(map(shown, args))}"
    error = exc_info[1] if isinstance(exc_info, tuple) else exc_info
    if error and not isinstance(error, BaseException):
        error = sys.exception()
    if error:
        text = f"{text}: {type(error).__name__}: {shown(error, str)}"
    return " ".join(text.splitlines())


def shown(value: object, form: Callable[[object], str] = repr) -> str:
    """Any value as text, the class alone of one that cannot be shown."""
    try:
        return form(value)
    except Exception:
        return f"<{type(value).__name__}>"
