"""The files of one embedded PostgreSQL, what PostgreSQL calls a database cluster, and who owns them.

    <directory>/data        the data directory; complete, or not there at all
    <directory>/socket      the socket (in /tmp where this path is too long for one)
    <directory>/password    of the user `postgres`
    <directory>/port        the last port; used again if it is free
    <directory>/server.log  what the server says
    <directory>/lock        held by the process whose child the server is

For root, `data` and `socket` belong to the account that the server runs as, all else to root.
"""

import fcntl
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from cronlock.binaries import Account, is_reachable, major_version, make_directory, server_account
from cronlock.errors import EmbeddedError
from cronlock.postmaster import end, launch

_INITDB_SECONDS = 120.0
_SOCKET_PATH_BYTES = 103  # macOS; Linux has 107
_LOG_BYTES = 10_000_000


class Cluster:
    """The directory of an embedded server. `take` it before changing anything in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self.data = self.directory / "data"
        self.sockets = self.directory / "socket"
        self.account = Account("", os.geteuid(), os.getegid())
        self._log = self.directory / "server.log"
        self._log_begin = 0
        self._lock: int | None = None

    def open(self) -> None:
        """Make the directory if it is missing, find the account that will serve it.

        An empty one of root is opened so far that the account can pass through it (0711).
        Raises `EmbeddedError` if it is not for us alone, or that account cannot enter it.
        """
        self.account = server_account()
        is_root = os.geteuid() == 0
        try:
            make_directory(self.directory)
            if is_root and not any(self.directory.iterdir()):
                self.directory.chmod(0o711)
            found = self.directory.stat()
        except OSError as error:
            raise EmbeddedError(f"{self.directory} cannot be used for PostgreSQL: {error}") from None
        if found.st_uid != os.geteuid() or found.st_mode & 0o002:
            raise EmbeddedError(f"{self.directory} is another user's or writable for all: use another one")
        if is_root and self.data.exists():
            owner = self.data.stat()  # it may be of `nobody` although there is a `postgres` now
            self.account = Account(f"user id {owner.st_uid}", owner.st_uid, owner.st_gid)
        if not is_reachable(self.directory, self.account):
            raise EmbeddedError(
                f"PostgreSQL does not run as root, and {self.account.name} cannot enter {self.directory}:"
                " use a directory whose parents are open to others, such as one in /var/lib"
            )

    def take(self) -> bool:
        """Become the owner until `release`; False if another process is."""
        if self._lock is not None:
            return True
        lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._lock = lock
        return True

    def release(self) -> None:
        """Give up what `take` took."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def check(self, binaries: Path) -> None:
        """Raise `EmbeddedError` if there is data that these programs cannot serve."""
        if not self.data.exists():
            return
        major = str(major_version(binaries))
        try:
            found = (self.data / "PG_VERSION").read_text().strip()
        except OSError as error:
            raise EmbeddedError(f"{self.data} is not the data of a PostgreSQL: {error}") from None
        if found != major:
            raise EmbeddedError(
                f"{self.data} holds the data of PostgreSQL {found}, but {binaries} is PostgreSQL {major}."
                f" Use another directory, or set CRONLOCK_PG_BIN to the programs of PostgreSQL {found},"
                f" or delete {self.directory}."
            )
        if not (self.directory / "password").exists():
            raise EmbeddedError(f"{self.directory}/password is missing: put it back, or delete {self.directory}")

    def make(self, binaries: Path, *, is_synced: bool) -> None:
        """Fill `data` with `initdb`, under another name until it is complete.

        Raises `EmbeddedError` with what `initdb` said.
        """
        new = Path(tempfile.mkdtemp(prefix="new-", dir=self.directory))
        try:
            self._initdb(binaries, new, is_synced)
            (new / "password").rename(self.directory / "password")
            (new / "data").rename(self.data)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EmbeddedError(f"no PostgreSQL could be made in {self.directory}: {error}") from error
        finally:
            for new in self.directory.glob("new-*"):  # those of killed processes too
                shutil.rmtree(new, ignore_errors=True)

    def _initdb(self, binaries: Path, new: Path, is_synced: bool) -> None:
        password = new / "password"
        password.touch(0o600)
        password.write_text(secrets.token_urlsafe(24))
        self._give(password)
        self._give(new)
        options = ["-D", str(new / "data"), "-U", "postgres", "--encoding=UTF8", "--locale=C"]
        options += ["--auth-local=trust", "--auth-host=scram-sha-256", f"--pwfile={password}"]
        if not is_synced:
            options.append("--no-sync")
        elif sys.platform == "linux" and major_version(binaries) >= 17:
            options.append("--sync-method=syncfs")  # one call, not one for each of a thousand files
        process = self.begin(binaries / "initdb", *options)
        try:
            if process.wait(_INITDB_SECONDS) != 0:
                raise EmbeddedError(f"no PostgreSQL could be made in {self.directory}:\n{self.said()}")
        finally:
            end(process.pid, lambda: process.poll() is not None)

    def begin(self, program: Path, *options: str) -> subprocess.Popen[bytes]:
        """Begin a program of the server; what it says goes to `server.log`."""
        self._log.touch(0o600)
        is_long = self._log.stat().st_size > _LOG_BYTES
        with self._log.open("wb" if is_long else "ab") as output:
            self._log_begin = output.tell()
            return launch(self.account, [str(program), *options], output)

    def said(self) -> str:
        """The last lines of the program that was begun last."""
        said = self._log.read_bytes()[self._log_begin :]
        return "\n".join(said.decode(errors="replace").splitlines()[-15:])

    def make_sockets(self) -> None:
        """An empty directory for the socket, beside the data: pg_rewind stumbles over a socket inside it."""
        self.sockets = self.directory / "socket"
        shutil.rmtree(self.sockets, ignore_errors=True)
        if len(os.fsencode(self.sockets / ".s.PGSQL.65535")) > _SOCKET_PATH_BYTES:
            self.sockets = Path(tempfile.mkdtemp(prefix="cronlock-", dir="/tmp"))
        else:
            self.sockets.mkdir(mode=0o700)
        self._give(self.sockets)

    def remove_sockets(self) -> None:
        """Remove the directory of the socket."""
        shutil.rmtree(self.sockets, ignore_errors=True)

    def _give(self, path: Path) -> None:
        if self.account.uid != os.geteuid():
            os.chown(path, self.account.uid, self.account.gid)

    def free_port(self) -> int:
        """The port that was used last, if nobody else has it now, else any free one on 127.0.0.1."""
        file = self.directory / "port"
        last = file.read_text() if file.exists() else "0"
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as PostgreSQL does
            try:
                probe.bind(("127.0.0.1", int(last)))
            except (OSError, ValueError, OverflowError):
                probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    def remember(self, port: int) -> None:
        """Prefer this port the next time."""
        (self.directory / "port").write_text(str(port))

    def url(self, port: int) -> str:
        """The server on this port, with the password."""
        password = (self.directory / "password").read_text()
        return f"postgresql://postgres:{password}@127.0.0.1:{port}/postgres"
