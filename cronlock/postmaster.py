"""The processes of an embedded PostgreSQL: how they begin under another user, what they say, how they end."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from cronlock.binaries import Account
from cronlock.errors import EmbeddedError

_STOP = ((signal.SIGINT, 20.0), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 10.0))

# Run by a fresh interpreter: code between fork and exec is not safe in a process with threads.
# A change of user clears the death signal (prctl(2); PR_SET_PDEATHSIG is 1), hence the order.
_LAUNCH = """
import ctypes, os, signal, sys
uid, gid, parent = map(int, sys.argv[1:4])
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(gid); os.setuid(uid)
if parent and sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGINT)
    if os.getppid() != parent:
        sys.exit("the parent is gone")
os.execv(sys.argv[4], sys.argv[4:])
"""


class Status(NamedTuple):
    """What a postmaster says of itself in `postmaster.pid`."""

    pid: int
    port: int
    socket_directory: str
    is_ready: bool


def read_status(data: Path) -> Status | None:
    """The status of the server of this data directory; none if it has none, or a half-written one.

    The lines are those of PostgreSQL's `src/include/utils/pidfile.h`.
    """
    try:
        lines = (data / "postmaster.pid").read_text().splitlines() + [""] * 8
        pid, port = int(lines[0]), int(lines[3] or 0)
    except (OSError, ValueError):
        return None
    return Status(pid, port, lines[4], lines[7].strip() == "ready") if pid > 0 else None


def launch(account: Account, command: list[str], output: BinaryIO) -> subprocess.Popen[bytes]:
    """Begin `command` as `account`, in a session of its own; the kernel interrupts it when we die (Linux).

    The kernel means the thread that called, so for any other than the main thread this is left out.
    """
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (account.uid, account.gid, os.getpid() if is_main else 0)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return subprocess.Popen(  # noqa: S603 - a list of our own, no shell
        [sys.executable, "-I", "-S", "-c", _LAUNCH, *map(str, numbers), *command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd="/",  # ours may be closed to the account
        env=kept | {"LC_ALL": "C", "TZ": "UTC"},
        start_new_session=True,
    )


def works_in(pid: int, data: Path) -> bool:
    """Whether `pid` is a live server of this data directory: every postmaster works in its own."""
    if sys.platform == "linux":
        try:
            return os.path.samefile(f"/proc/{pid}/cwd", data)
        except PermissionError:  # root without CAP_SYS_PTRACE, as in many containers
            return os.fsencode(data) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
    command = ["/bin/ps", "-o", "stat=,command=", "-p", str(pid)]
    shown = subprocess.run(command, capture_output=True, text=True).stdout.strip()  # noqa: S603 - a list of our own
    return str(data) in shown and not shown.startswith("Z")


def end(pid: int, is_gone: Callable[[], bool]) -> None:
    """Fast shutdown, after 20 s immediate shutdown, after 10 s more SIGKILL; return when `is_gone`.

    Raises `EmbeddedError` if it is still there 10 s later.
    """
    for kind, seconds in _STOP:
        if is_gone():
            return
        with suppress(ProcessLookupError):
            os.kill(pid, kind)
        deadline = time.monotonic() + seconds
        while not is_gone() and time.monotonic() < deadline:
            time.sleep(0.005)
    if not is_gone():
        raise EmbeddedError(f"the PostgreSQL process {pid} cannot be stopped")
