"""The commands as real processes, and an app for them to run."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests import SECRET

PROJECT = Path(__file__).parent.parent
COMMAND = (sys.executable, "-m", "cronlock")

APP = """
import asyncio, threading, time
from pydantic import BaseModel
from cronlock import Cronlock, Run

cron = Cronlock()
also = cron

class Span(BaseModel):
    lasts: float = 0

class Tasks:
    cron = cron

def make() -> Cronlock:
    return cron

@cron.task("sleep", schedule="*/5 * * * *")
async def sleep(run: Run, span: Span) -> dict:
    await asyncio.sleep(span.lasts)
    return {"slept": span.lasts}

@cron.task("fail")
async def fail(run: Run) -> None:
    raise ValueError("the supplier is down")

@cron.task("stuck")
def stuck(run: Run) -> None:
    time.sleep(3600)

@cron.task("stuck-in-asyncio")
async def stuck_in_asyncio(run: Run) -> None:
    await asyncio.to_thread(time.sleep, 3600)
"""


def environment(**settings: str | None) -> dict[str, str]:
    """An environment with these settings of cronlock and no others; None leaves one out."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("CRON", "DATABASE_URL")) or name == "CRONLOCK_PG_BIN"
    }
    given = {name: value for name, value in settings.items() if value is not None}
    return {**kept, "PYTHONPATH": str(PROJECT), "PYTHONDONTWRITEBYTECODE": "1", "CRON_SECRET": SECRET, **given}


def cronlock(
    *arguments: str, cwd: Path, text: str | None = None, **settings: str
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end; its output is text."""
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=cwd,
        env=environment(**settings),
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


class Running:
    """A command that goes on; killed at the end if it has not ended by then."""

    def __init__(
        self,
        *arguments: str,
        cwd: Path,
        env: dict[str, str],
        user: int | None = None,
        command: tuple[str, ...] = COMMAND,
    ) -> None:
        self._output = cwd / f"output-{time.monotonic_ns()}.txt"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *arguments],
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                user=user,
                group=user,
                extra_groups=None if user is None else [],
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    @property
    def said(self) -> str:
        """What it has written so far."""
        return self._output.read_text()

    def until_says(self, text: str, seconds: float = 30.0) -> str:
        """Wait until it has written `text`; gives all it has written."""
        self._until(lambda: text in self.said, f"did not say {text!r}", seconds)
        return self.said

    def ends(self, seconds: float = 30.0) -> int:
        """Wait for its end; its exit code, negative if a signal ended it."""
        self._until(lambda: self.process.poll() is not None, "did not end", seconds)
        code = self.process.poll()
        assert code is not None
        return code

    def send(self, sig: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(sig)

    def send_all(self, sig: signal.Signals) -> None:
        """Send it and its children a signal, as a terminal does."""
        os.killpg(self.process.pid, sig)

    def _until(self, is_so: Callable[[], bool], fault: str, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < until, f"it {fault} within {seconds:g} s; it said:\n{self.said}"
            assert self.process.poll() is None or is_so(), f"it ended; it said:\n{self.said}"
            time.sleep(0.02)


@contextmanager
def served(cwd: Path, app: str = "shop:cron", **settings: str) -> Iterator[tuple[Running, str]]:
    """`cronlock serve` on a free port; the process and its URL."""
    env = environment(**{"CRONLOCK_LOG_FORMAT": "text", **settings})
    with Running("serve", app, "--port", "0", cwd=cwd, env=env) as server:
        yield server, address(server)


def address(server: Running) -> str:
    """The URL that `cronlock serve` says it serves on."""
    found = re.search(r"serving .* on (http://[0-9.:]+)", server.until_says("serving "))
    assert found is not None
    return found[1]


def descendants(pid: int) -> set[int]:
    """The processes below this one (Linux)."""
    below: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        below.setdefault(parent, []).append(int(stat.parent.name))
    found, waiting = set(), [pid]
    while waiting:
        more = below.get(waiting.pop(), [])
        found.update(more)
        waiting += more
    return found


def is_alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def json_lines(text: str) -> list[Any]:
    """The JSON documents of a text, one a line."""
    return [json.loads(line) for line in text.splitlines()]
