"""`cronlock dev`: a server with everything it needs, and lines to paste.

What it starts ends with it: the embedded PostgreSQL and the reloaded server are its children. SIGINT, SIGTERM and
SIGHUP end them in order; after a SIGKILL the kernel ends the one, and the other sees its parent gone.
"""

import asyncio
import logging
import multiprocessing
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.synchronize import Event
from pathlib import Path
from types import FrameType
from typing import NoReturn
from urllib.parse import quote

import uvicorn
from psycopg import sql
from uvicorn.supervisors import ChangeReload

from cronlock import logs, serving
from cronlock.app import Cronlock
from cronlock.config import Settings
from cronlock.embedded import Embedded, default_directory, find_binaries
from cronlock.errors import CronlockError
from cronlock.loading import load
from cronlock.migrate import migrate
from cronlock.tasks import Task
from cronlock.working import Crew

HOST = "127.0.0.1"
PORTS = range(8000, 8100)
DEFAULTS = {"CRONLOCK_DRAIN_TIMEOUT": "3s", "CRONLOCK_LOG_FORMAT": "text"}
DATABASE_NAMES = ("DATABASE_URL", "CRONLOCK_DATABASE_URL")
ELSEWHERE = ("CRONLOCK_DIRECT_URL", "CRONLOCK_POOLER")
"""Settings of another database than the embedded one."""
MIGRATION_WAIT = timedelta(seconds=30)
SHOWN_TASKS = 8

log = logging.getLogger("cronlock.dev")


def develop(app: str | None, port: int | None) -> None:
    """Serve `app` ("module:attribute"), restarted when code changes, or the example, until a signal.

    `port` on 127.0.0.1: that or an error; without it 8000 or the next free one. Raises `CronlockError`.
    """
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    logs.configure("text", str)
    listener = listen(port)
    with surroundings() as origin:
        start = Start(app or example(), origin)
        if app is None:
            start([listener])
        else:
            reload(start, listener)


def leave(number: int, _: FrameType | None) -> NoReturn:
    """SIGTERM before or after the server: unwind, so that all that was started is ended."""
    sys.exit(128 + number)


def listen(port: int | None) -> socket.socket:
    """A listening socket on the given port, or on the first that is free; raises `CannotListen`."""
    if port is not None:
        return serving.listen(HOST, port)
    for candidate in PORTS[:-1]:
        try:
            return serving.listen(HOST, candidate)
        except serving.CannotListen:
            continue
    return serving.listen(HOST, PORTS[-1])


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the database and the secret of this start come from."""

    database: str
    is_embedded: bool
    is_secret_made: bool


@contextmanager
def surroundings() -> Iterator[Origin]:
    """See to it that DATABASE_URL and CRON_SECRET are set, and that the database runs."""
    settings = Settings.load()
    is_secret_made = not os.environ.get("CRON_SECRET", "").strip()
    if is_secret_made:
        os.environ["CRON_SECRET"] = secrets.token_urlsafe(24)
    if settings.database is not None:
        yield Origin(f"PostgreSQL at {settings.database_label}", False, is_secret_made)
        return
    for name in ELSEWHERE:
        os.environ.pop(name, None)
    directory = default_directory()
    print(f"cronlock: starting a PostgreSQL of its own in {directory}", file=sys.stderr, flush=True)
    with Embedded(directory) as server:
        os.environ["DATABASE_URL"] = server.url
        shared = "; another cronlock dev started it, and will end it" if server.is_shared else ""
        yield Origin(f"PostgreSQL of its own in {directory}{shared}", True, is_secret_made)


def example() -> str:
    """The example, from the installed package or from the checkout."""
    package = Path(__file__).parent
    if (package / "_examples").is_dir():
        return "cronlock._examples.inventory:cron"
    if str(package.parent) not in sys.path:
        sys.path.insert(0, str(package.parent))
    return "examples.inventory:cron"


def reload(start: "Start", listener: socket.socket) -> None:
    """Serve in a child process, a new one whenever a Python file below the current directory changes."""
    start.told = multiprocessing.get_context("spawn").Event()
    config = uvicorn.Config("cronlock", log_config=None, reload=True, reload_dirs=[os.getcwd()])
    ChangeReload(config, target=start, sockets=[listener]).run()


class Start:
    """One start of the server, in this process or in a child: migrate, say what to try, serve."""

    def __init__(self, app: str, origin: Origin) -> None:
        self.app = app
        self.origin = origin
        self.told: Event | None = None
        """Whether an earlier child has said what to try."""

    def __call__(self, sockets: list[socket.socket] | None) -> None:
        assert sockets is not None
        if is_child := multiprocessing.parent_process() is not None:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the parent gets it too
            logs.configure("text", str)
        try:
            cron = load(self.app)
            settings = cron.settings
            logs.configure(settings.log_format, settings.scrub)
            settings.require_secrets()
            migrate(settings.direct_url or settings.database_url, settings.schema_name, wait=MIGRATION_WAIT)
            ended = serving.end_process if is_child else lambda: None
            crew = Crew(cron, sorted({task.queue for task in cron.tasks}), settings.worker_concurrency)
            serving.run(cron, sockets[0], lambda: self.started(cron, serving.url(sockets[0])), ended, crew=crew)
        except CronlockError as error:
            if not is_child:
                raise
            print(f"cronlock: {error}\ncronlock: waiting for a change of the code", file=sys.stderr, flush=True)
            return

    def started(self, cron: Cronlock, url: str) -> None:
        """The server answers: say what to try, once, and see to it that a child ends with its parent."""
        if multiprocessing.parent_process() is not None:
            end_with_parent()
        if self.told is None or not self.told.is_set():
            print(banner(self.app, cron, url, self.origin), flush=True)
        else:
            log.info("reloaded %s: %s", self.app, ", ".join(task.name for task in cron.tasks) or "no tasks")
        if self.told is not None:
            self.told.set()


def end_with_parent() -> None:
    """End this child's server in order when its parent is gone, however that ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    sentinel, loop = parent.sentinel, asyncio.get_running_loop()

    def end() -> None:
        loop.remove_reader(sentinel)
        signal.raise_signal(signal.SIGTERM)

    loop.add_reader(sentinel, end)


def banner(app: str, cron: Cronlock, url: str, origin: Origin) -> str:
    """What is served, and what to try."""
    secret = os.environ["CRON_SECRET"].split(",")[0].strip()
    header = f"'Authorization: Bearer {secret}'" if origin.is_secret_made else '"Authorization: Bearer $CRON_SECRET"'
    tasks = list(cron.tasks)
    calls = [f"curl -sS -w '\\n' -H {header} {shlex.quote(address(url, task))}" for task in tasks]
    lines = [f"cronlock dev serves {app} at {url}", f"  {origin.database}"]
    if origin.is_secret_made:
        lines.append(f"  CRON_SECRET was not set; for this start it is {secret}")
    if not calls:
        lines += ["", f"{app} has no tasks yet: put @cron.task('my-task') over a function that takes (run)"]
        return "\n".join(["", *lines, ""])
    lines += ["", "Call a task:", *(f"  {call}" for call in calls[:SHOWN_TASKS])]
    if twice := next((call for task, call in zip(tasks, calls, strict=True) if task.max_concurrent == 1), None):
        lines += ["", "Call it twice at once; the second is skipped, and told which run holds the lock:"]
        lines += [f"  {twice} & sleep 1; {twice}; wait"]
    lines += ["", "See who holds the lock meanwhile, and afterwards what happened:"]
    lines += [f"  {line}" for line in looks(cron.settings, origin)]
    lines += ["", "Ctrl-C ends everything. Your own tasks: cronlock dev main:cron"]
    return "\n".join(["", *lines, ""])


def address(url: str, task: Task) -> str:
    """Where a task is called, with something for each field that its payload must have."""
    query = "&".join(f"{quote(field)}=1" for field in task.required_fields)
    return f"{url}/cron/{task.name}" + (f"?{query}" if query else "")


def looks(settings: Settings, origin: Origin) -> list[str]:
    """The commands that look into the database."""
    name = settings.schema_name
    schema = name if re.fullmatch("[a-z_][a-z0-9_]*", name) else sql.Identifier(name).as_string(None)
    query = f"select * from {schema}.lock_holder"
    command = own_command()
    if not origin.is_embedded:
        name = next((name for name in DATABASE_NAMES if os.environ.get(name, "").strip()), "DATABASE_URL")
        return [f'psql "${name}" -c {shlex.quote(query)}', f"{command} runs list"]
    psql = shutil.which("psql") or str(find_binaries() / "psql")
    address = shlex.quote(settings.database_url)
    return [f"{psql} {address} -c {shlex.quote(query)}", f"DATABASE_URL={address} {command} runs list"]


def own_command() -> str:
    """How this program was called, for another terminal, in which no virtual environment may be active."""
    if os.path.basename(sys.argv[0]) == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m cronlock"
    return shlex.quote(os.path.abspath(sys.argv[0])) if os.sep in sys.argv[0] else "cronlock"
