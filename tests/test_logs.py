"""Log lines of the commands: the short way and the long way of a run's line say the same."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any, TextIO

import pytest

from cronlock import logs, reporting
from cronlock.metrics import Metrics
from cronlock.outcome import Failure, Outcome
from cronlock.reporting import Report
from cronlock.tasks import Registry

SKIPPED = Outcome(status="skipped", task="once", run_id=7, duration_ms=3, reason="already_running")
FAILED = Outcome(
    status="failed",
    task="once",
    run_id=8,
    duration_ms=4,
    failure=Failure("ValueError", 'no "such"\n\\ thing é \x00 \ud800'),
)


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("cronlock.run", "cronlock", "")]
    before = [(logger.handlers[:], logger.filters[:], logger.level) for logger in loggers]
    switches = logging.logThreads, logging.logProcesses, logging.logMultiprocessing
    yield
    for logger, (handlers, filters, level) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.filters[:] = handlers, filters
        logger.setLevel(level)
    logging.logThreads, logging.logProcesses, logging.logMultiprocessing = switches
    logging.captureWarnings(False)
    reporting.straight = None


def report() -> Report:
    return Report("me", Metrics(Registry()))


class Kept(logging.Handler):
    """A handler of somebody's own."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(record)


def configured(form: Any = "json") -> TextIO:
    """cronlock's own logging, into memory."""
    logs.configure(form, str)
    stream = io.StringIO()
    (handler,) = logging.getLogger().handlers
    assert isinstance(handler, logs.Gathered)
    handler.setStream(stream)
    return stream


def lines(stream: TextIO) -> list[dict[str, Any]]:
    assert isinstance(stream, io.StringIO)
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def records_made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The messages of the records that are made from here on."""
    made: list[str] = []
    factory = logging.getLogRecordFactory()

    def make(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = factory(*args, **kwargs)
        made.append(record.getMessage())
        return record

    monkeypatch.setattr(logging, "_logRecordFactory", make)
    return made


@pytest.mark.parametrize(("event", "outcome"), [("skipped", SKIPPED), ("failed", FAILED)])
def test_a_line_is_the_same_with_and_without_a_record(event: str, outcome: Outcome) -> None:
    stream = configured()
    report().line(logging.ERROR, event, outcome, -5)
    logging.getLogger("cronlock").addHandler(logging.NullHandler())
    report().line(logging.ERROR, event, outcome, -5)
    short, long = lines(stream)
    assert list(short) == list(long)
    assert short.pop("timestamp")[:17] == long.pop("timestamp")[:17]
    assert short == long
    assert (short["event"], short["lockKey"], short["level"]) == (f"run.{event}", -5, "ERROR")


def test_a_line_needs_no_record_where_nobody_else_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = configured()
    made = records_made(monkeypatch)
    report().line(logging.INFO, "skipped", SKIPPED, 1)
    assert made == []
    assert len(lines(stream)) == 1


@pytest.mark.parametrize("name", ["cronlock.run", "cronlock", ""])
def test_another_handler_gets_its_record(name: str) -> None:
    stream = configured()
    handler = Kept()
    logging.getLogger(name).addHandler(handler)
    report().line(logging.INFO, "skipped", SKIPPED, 1)
    assert [(record.getMessage(), record.__dict__["runId"]) for record in handler.kept] == [("once skipped", 7)]
    assert len(lines(stream)) == 1


def test_a_filter_of_the_logger_is_asked() -> None:
    stream = configured()
    logging.getLogger("cronlock.run").addFilter(lambda record: record.__dict__["status"] != "skipped")
    report().line(logging.INFO, "skipped", SKIPPED, 1)
    report().line(logging.ERROR, "failed", FAILED, 1)
    assert [line["status"] for line in lines(stream)] == ["failed"]


def test_a_level_is_kept() -> None:
    stream = configured()
    logging.getLogger("cronlock").setLevel(logging.ERROR)
    report().line(logging.INFO, "skipped", SKIPPED, 1)
    assert lines(stream) == []


def test_lines_for_people_are_no_json() -> None:
    configured()
    stream = configured("text")
    report().line(logging.INFO, "skipped", SKIPPED, 1)
    assert isinstance(stream, io.StringIO)
    assert "once skipped  runId=7  reason=already_running" in stream.getvalue()
