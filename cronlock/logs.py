"""Log lines on stderr: one JSON object each, or text for people. For the commands: the library configures nothing."""

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from pythonjsonlogger.json import JsonFormatter

from cronlock import reporting

FACTS = ("runId", "jobId", "reason", "durationMs", "client", "error")
"""What a line for people shows after its message, where the record has it."""

ABOVE = (logging.getLogger("cronlock"), logging.getLogger())
"""The loggers above those of runs and of jobs."""

COLOURS = {logging.WARNING: 33, logging.ERROR: 31, logging.CRITICAL: 31}


def configure(form: Literal["json", "text"], scrub: Callable[[str], str]) -> None:
    """Write what cronlock logs from INFO on, and everybody else from WARNING on, to stderr, without secrets."""
    handler = Gathered()
    # Nobody's format here shows them, and they are a third of what a line costs.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler.setFormatter(Json(scrub) if form == "json" else Text(scrub, is_coloured(sys.stderr)))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("cronlock").setLevel(logging.INFO)
    logging.captureWarnings(True)
    reporting.straight = handler.straight if form == "json" else None


class Gathered(logging.StreamHandler[TextIO]):
    """Writes the lines of one turn of the event loop together; outside a loop each at once."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []
        self._second, self._shown_second = 0, ""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
        else:
            self._add(line)

    def straight(self, logger: logging.Logger, level: int, message: str, facts: str) -> bool:
        """Write a line of `reporting` as `Json` would, if nobody else has a handler for its record; else False."""
        ours, root = ABOVE
        if root.handlers != [self] or ours.handlers or logger.handlers or logger.filters:
            return False
        now = time.time()
        if (second := int(now)) != self._second:
            self._second, self._shown_second = second, datetime.fromtimestamp(second, UTC).isoformat()[:-6]
        self._add(
            f'{{"level":"{logging.getLevelName(level)}","logger":"{logger.name}","message":"{message}",{facts},'
            f'"timestamp":"{self._shown_second}.{int((now - second) * 1e6):06}+00:00"}}'
        )
        return True

    def _add(self, line: str) -> None:
        self._lines.append(line + self.terminator)
        if len(self._lines) > 1:
            return  # whoever added the first has seen to it
        try:
            asyncio.get_running_loop().call_soon(self.flush)
        except RuntimeError:
            self.flush()

    def flush(self) -> None:
        """Write what was gathered."""
        with self.lock or nullcontext():
            lines, self._lines = self._lines, []
            if lines:
                self.stream.write("".join(lines))
            super().flush()


def is_coloured(stream: TextIO) -> bool:
    """Whether colours are wanted there (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def is_scrubbed(record: logging.LogRecord) -> bool:
    """Whether a record is cronlock's own, whose texts are scrubbed already; tasks and libraries log anything."""
    return record.name.startswith("cronlock") and record.name != "cronlock.task"


def readable(value: object) -> str:
    """What JSON has no form for: a time as ISO 8601, all else as text."""
    return value.isoformat() if isinstance(value, datetime) else str(value)


class Json(JsonFormatter):
    """One JSON object a line: timestamp, level, logger, message, and the event's facts by their names."""

    def __init__(self, scrub: Callable[[str], str]) -> None:
        super().__init__(
            "{levelname}{name}{message}",
            style="{",
            rename_fields={"levelname": "level", "name": "logger"},
            timestamp=True,
            json_serializer=self._encode,
        )
        self._scrub = scrub
        # Made once: json.dumps makes an encoder for every call that is not plain, and every skip writes a line.
        self._encoder = json.JSONEncoder(ensure_ascii=False, default=readable, separators=(",", ":"))

    def _encode(self, facts: dict[str, Any], **_: object) -> str:
        return self._encoder.encode(facts)

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        return line if is_scrubbed(record) else self._scrub(line)


class Text(logging.Formatter):
    """Time, level, message, and the few facts that people look for."""

    def __init__(self, scrub: Callable[[str], str], is_coloured: bool) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")
        self._scrub = scrub
        self._is_coloured = is_coloured

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        return line if is_scrubbed(record) else self._scrub(line)

    def formatMessage(self, record: logging.LogRecord) -> str:
        facts = ((name, getattr(record, name, None)) for name in FACTS)
        shown = [f"{name}={' '.join(str(value).split())}" for name, value in facts if value is not None]
        line = "  ".join((super().formatMessage(record), *shown))
        colour = COLOURS.get(record.levelno)
        return f"\033[{colour}m{line}\033[0m" if self._is_coloured and colour else line
