"""The embedded server: real processes, killed at bad moments, as root and as a normal user."""

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cronlock import binaries
from cronlock.binaries import Account, is_reachable, is_usable, reachable_binaries, server_account
from cronlock.embedded import Embedded, default_directory, find_binaries
from cronlock.errors import EmbeddedError
from cronlock.postmaster import read_status

QUICK = {"fsync": "off", "max_connections": "10", "shared_buffers": "8MB"}
IS_ROOT = os.geteuid() == 0
only_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux stops a child with its parent")
only_root = pytest.mark.skipif(not IS_ROOT, reason="needs root")


@pytest.fixture
def directory() -> Iterator[Path]:
    """A new directory; not pytest's, which is closed to the account that serves root."""
    path = Path(tempfile.mkdtemp(prefix="cronlock-test-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def made() -> Iterator[Path]:
    """A directory with data in it, for tests that need no new one."""
    path = Path(tempfile.mkdtemp(prefix="cronlock-test-"))
    with Embedded(path, settings=QUICK) as server:
        query(server.url, "create table kept as select 42 as answer")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def server(made: Path) -> Iterator[Embedded]:
    with Embedded(made, settings=QUICK) as server:
        yield server


def query(url: str, statement: str) -> object:
    with psycopg.connect(url, connect_timeout=5, autocommit=True) as connection:
        cursor = connection.execute(statement)
        row = cursor.fetchone() if cursor.description else None
    return row and row[0]


def answer(url: str) -> object:
    return query(url, "select answer from kept")


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def program(code: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """Another Python that has `Embedded`, its arguments in `arguments`."""
    prelude = "import json, os, sys; from pathlib import Path; import cronlock.embedded\n"
    prelude += "from cronlock.embedded import Embedded, default_directory; arguments = sys.argv[1:]\n"
    return subprocess.Popen(
        [sys.executable, "-c", prelude + textwrap.dedent(code), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
        env=os.environ | environment,
    )


def reported(process: subprocess.Popen[str]) -> dict[str, object]:
    assert process.stdout is not None
    report: dict[str, object] = json.loads(process.stdout.readline())
    return report


def finish(process: subprocess.Popen[str]) -> None:
    process.communicate()


def test_data_and_port_are_kept_between_starts(made: Path) -> None:
    with Embedded(made, settings=QUICK) as first:
        query(first.url, "create table written as select 'yes'::text as value")
    assert not is_listening(first.url)

    with Embedded(made, settings=QUICK) as second:
        assert second.url == first.url
        assert query(second.url, "select value from written") == "yes"


def is_listening(url: str) -> bool:
    port = int(url.rpartition(":")[2].partition("/")[0])
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_stop_and_start_may_be_said_twice(server: Embedded) -> None:
    pid = server.pid
    server.start()
    assert server.pid == pid
    server.stop()
    server.stop()
    with pytest.raises(EmbeddedError, match="does not run"):
        _ = server.pid


def test_url_before_the_first_start_is_refused(directory: Path) -> None:
    with pytest.raises(EmbeddedError, match="not started"):
        _ = Embedded(directory).url


def test_restart_after_the_postmaster_was_killed_is_immediate(server: Embedded) -> None:
    url, pid = server.url, server.pid
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("create table if not exists survived ()")
        server.kill()
        began = time.monotonic()
        server.restart()
    assert time.monotonic() - began < 5
    assert (server.url, server.pid != pid) == (url, True)
    assert query(url, "select count(*) from survived") == 0


@only_linux
def test_server_ends_when_the_process_that_started_it_is_killed(made: Path) -> None:
    owner = program(
        """
        server = Embedded(Path(arguments[0]))
        server.start()
        print(json.dumps({"pid": server.pid}), flush=True)
        sys.stdin.read()
        """,
        made,
    )
    pid = reported(owner)["pid"]
    assert isinstance(pid, int)
    owner.kill()
    wait_until(lambda: not is_alive(pid))
    finish(owner)
    assert (made / "server.log").read_text().rstrip().endswith("database system is shut down")
    with Embedded(made, settings=QUICK) as server:
        assert answer(server.url) == 42


@only_linux
def test_start_right_after_the_owner_was_killed_waits_for_its_server_to_stop(made: Path) -> None:
    owner = program(
        """
        server = Embedded(Path(arguments[0]))
        server.start()
        print(json.dumps({"pid": server.pid}), flush=True)
        sys.stdin.read()
        """,
        made,
    )
    pid = reported(owner)["pid"]
    assert isinstance(pid, int)
    owner.kill()
    owner.wait()
    with Embedded(made, settings=QUICK) as server:
        assert not is_alive(pid)
        assert not server.is_shared
        assert answer(server.url) == 42
    finish(owner)


def test_server_that_nobody_owns_is_ended_and_started_anew(made: Path) -> None:
    # Started by another thread the kernel does not stop it with us, as on systems that cannot.
    owner = program(
        """
        import threading
        server = Embedded(Path(arguments[0]))
        thread = threading.Thread(target=server.start)
        thread.start()
        thread.join()
        print(json.dumps({"pid": server.pid}), flush=True)
        sys.stdin.read()
        """,
        made,
    )
    pid = reported(owner)["pid"]
    assert isinstance(pid, int)
    owner.kill()
    finish(owner)
    assert is_alive(pid)

    with Embedded(made, settings=QUICK) as server:
        assert not is_alive(pid)
        assert answer(server.url) == 42


def test_process_that_has_the_old_process_id_is_left_alone(made: Path) -> None:
    with Embedded(made, settings=QUICK) as server:
        line = (made / "data" / "postmaster.pid").read_text()
        server.kill()
    # As the same user, or PostgreSQL itself sees that it is not a server.
    user = server_account().uid if IS_ROOT else None
    bystander = subprocess.Popen(["cat"], stdin=subprocess.PIPE, user=user, cwd="/")
    pid_file = made / "data" / "postmaster.pid"
    pid_file.write_text(line.replace(line.splitlines()[0], str(bystander.pid), 1))

    with Embedded(made, settings=QUICK) as server:
        assert answer(server.url) == 42
    assert bystander.poll() is None
    bystander.communicate()
    assert bystander.returncode == 0


@only_linux
def test_kill_in_the_middle_of_initdb_leaves_nothing_that_looks_done(directory: Path) -> None:
    owner = program("Embedded(Path(arguments[0])).start()", directory)
    wait_until(lambda: any(directory.glob("new-*/data/PG_VERSION")))
    owner.kill()
    finish(owner)
    assert not (directory / "data").exists()

    with Embedded(directory, settings=QUICK) as server:
        assert query(server.url, "select 1") == 1
        assert not list(directory.glob("new-*"))


def test_data_of_another_major_version_is_refused(directory: Path) -> None:
    (directory / "data").mkdir()
    (directory / "data" / "PG_VERSION").write_text("9\n")
    if IS_ROOT:
        directory.chmod(0o711)
    for _ in range(2):  # a refusal gives the directory back
        with pytest.raises(EmbeddedError, match=r"holds the data of PostgreSQL 9.*CRONLOCK_PG_BIN"):
            Embedded(directory).start()


def test_directory_with_other_things_in_data_is_refused(directory: Path) -> None:
    (directory / "data").mkdir()
    if IS_ROOT:
        directory.chmod(0o711)
    with pytest.raises(EmbeddedError, match="is not the data of a PostgreSQL"):
        Embedded(directory).start()


def test_directory_that_everybody_may_write_is_refused(directory: Path) -> None:
    directory.chmod(0o777)
    (directory / "something").touch()
    with pytest.raises(EmbeddedError, match="writable for all"):
        Embedded(directory).start()


def test_only_the_right_password_opens_tcp_and_nothing_listens_beyond_loopback(server: Embedded) -> None:
    password = (server.directory / "password").read_text()
    assert password in server.url
    for wrong in (server.url.replace(password, "wrong"), server.url.replace(f":{password}", "")):
        with pytest.raises(psycopg.OperationalError, match="password"):
            query(wrong, "select 1")
    assert query(server.url, "show listen_addresses") == "127.0.0.1"
    assert query(server.url, "select rolpassword like 'SCRAM-SHA-256%' from pg_authid where oid = 10") is True
    for secret in ("password", "server.log"):
        assert (server.directory / secret).stat().st_mode & 0o777 == 0o600
    assert server.socket_directory.stat().st_mode & 0o777 == 0o700


def test_socket_needs_no_password(server: Embedded) -> None:
    port = query(server.url, "show port")
    assert query(f"host={server.socket_directory} port={port} user=postgres dbname=postgres", "select 1") == 1


def test_second_start_of_a_directory_shares_the_server(server: Embedded) -> None:
    other = Embedded(server.directory)
    other.start()
    assert (other.is_shared, other.url, other.pid) == (True, server.url, server.pid)
    assert other.socket_directory == server.socket_directory
    for refused in (other.kill, other.restart):
        with pytest.raises(EmbeddedError, match="another process"):
            refused()
    other.stop()
    assert answer(server.url) == 42

    other.start()
    server.stop()
    other.start()
    assert (other.is_shared, other.url) == (False, server.url)
    assert answer(other.url) == 42
    other.stop()


def test_of_two_first_starts_at_once_one_makes_it_and_the_other_shares(directory: Path) -> None:
    other = program(
        """
        with Embedded(Path(arguments[0]), settings={"fsync": "off"}) as server:
            print(json.dumps({"url": server.url, "is_shared": server.is_shared}), flush=True)
            sys.stdin.read()
        """,
        directory,
    )
    with Embedded(directory, settings=QUICK) as server:
        report = reported(other)
        assert report["url"] == server.url
        assert {report["is_shared"], server.is_shared} == {True, False}
        assert query(server.url, "select 1") == 1
        finish(other)
    assert other.returncode == 0


def test_interrupt_from_the_terminal_does_not_reach_the_server(server: Embedded) -> None:
    assert os.getpgid(server.pid) == server.pid != os.getpgid(0)


def test_server_started_by_another_thread_survives_that_thread(made: Path) -> None:
    server = Embedded(made, settings=QUICK)
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    assert answer(server.url) == 42
    server.stop()


def test_port_of_another_is_refused_if_asked_for_and_avoided_if_not(made: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EmbeddedError, match=f"(?s)did not start.*{port}"):
            Embedded(made, port=port, settings=QUICK).start()
        (made / "port").write_text(str(port))
        with Embedded(made, settings=QUICK) as server:
            assert answer(server.url) == 42
            assert f":{port}/" not in server.url


def test_what_the_server_says_is_in_the_error(made: Path) -> None:
    with pytest.raises(EmbeddedError, match=r"(?s)did not start.*shared_bufers"):
        Embedded(made, settings={"shared_bufers": "8MB"}).start()


def test_directory_may_have_a_long_name_with_spaces_commas_and_quotes(directory: Path) -> None:
    if IS_ROOT:
        directory.chmod(0o711)
    for number, name in enumerate(["""a, b "c" 'd' $e""", "long " * 20]):
        place = directory / name
        if number:
            (directory / """a, b "c" 'd' $e""").rename(place)
        with Embedded(place, settings=QUICK) as server:
            assert query(server.url, "show data_directory") == str(place.resolve() / "data")
            assert any(server.socket_directory.glob(".s.PGSQL.*"))
        assert not server.socket_directory.exists()


def test_normal_user_with_an_empty_home_can_start_it(directory: Path) -> None:
    user = pwd.getpwnam("nobody") if IS_ROOT else pwd.getpwuid(os.geteuid())
    account = Account(user.pw_name, user.pw_uid, user.pw_gid)
    os.chown(directory, user.pw_uid, user.pw_gid)
    pythons = [sys.executable, os.path.realpath(sys.executable), "/usr/bin/python3"]
    python = next((path for path in pythons if is_reachable(Path(path).resolve(), account)), None)
    if python is None:
        pytest.skip(f"no Python that {user.pw_name} can run")
    child = program(
        """
        uid, gid, sys.executable = int(arguments[0]), int(arguments[1]), arguments[2]
        if os.geteuid() == 0:
            os.setgroups([]); os.setgid(gid); os.setuid(uid)
        os.chdir("/")
        with Embedded(default_directory()) as server:
            print(json.dumps({"url": server.url, "directory": str(server.directory)}), flush=True)
            sys.stdin.read()
        """,
        user.pw_uid,
        user.pw_gid,
        python,
        HOME=str(directory),
        XDG_DATA_HOME="",
        CRONLOCK_PG_BIN=str(reachable_binaries(account)),
    )
    report = reported(child)
    assert Path(str(report["directory"])).is_relative_to(directory / ".local/share/cronlock")
    assert query(str(report["url"]), "show fsync") == "on"
    finish(child)
    assert child.returncode == 0
    assert not is_listening(str(report["url"]))


@only_root
def test_root_starts_it_as_another_user_and_keeps_the_rest(server: Embedded) -> None:
    account = server_account()
    assert account.uid != 0
    owner = {path.name: path.stat().st_uid for path in server.directory.iterdir()}
    assert Path(f"/proc/{server.pid}").stat().st_uid == account.uid
    assert {owner["data"], owner["socket"]} == {account.uid}
    assert {owner["lock"], owner["port"], server.directory.stat().st_uid} == {0}


@only_root
def test_root_is_told_when_the_server_cannot_enter_the_directory(directory: Path) -> None:
    (directory / "closed").mkdir(mode=0o700)
    with pytest.raises(EmbeddedError, match="cannot enter"):
        Embedded(directory / "closed" / "server").start()
    assert (directory / "closed").stat().st_mode & 0o777 == 0o700


@only_root
def test_programs_out_of_reach_are_copied_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    account = server_account()
    directory.chmod(0o711)
    prefix = reachable_binaries(account).parent
    closed = directory / "closed"
    closed.mkdir(mode=0o700)
    package = prefix.parent
    for part in (prefix, package.with_name(f"{package.name}.libs")):
        if part.is_dir():
            target = closed / part.relative_to(package.parent)
            shutil.copytree(part, target, symlinks=True, copy_function=os.link)
    monkeypatch.setenv("CRONLOCK_PG_BIN", str(closed / package.name / prefix.name / "bin"))
    monkeypatch.setenv("XDG_DATA_HOME", str(directory / "data home"))

    copied = reachable_binaries(account)
    assert copied.is_relative_to(directory / "data home" / "cronlock")
    monkeypatch.setattr(shutil, "copytree", None)
    assert reachable_binaries(account) == copied
    assert closed.stat().st_mode & 0o777 == 0o700
    done = subprocess.run([copied / "initdb", "--version"], user=account.uid, group=account.gid, cwd="/")
    assert done.returncode == 0


def test_only_a_directory_of_ours_is_usable(directory: Path) -> None:
    account = server_account()
    directory.chmod(0o711)
    assert is_usable(directory / "new", account)
    assert is_usable(directory / "new", account)
    (directory / "link").symlink_to(directory / "new")
    assert not is_usable(directory / "link", account)
    (directory / "file").touch()
    assert not is_usable(directory / "file", account)
    (directory / "open").mkdir()
    (directory / "open").chmod(0o777)
    assert not is_usable(directory / "open", account)
    if IS_ROOT:
        os.chown(directory / "new", account.uid, account.gid)
        assert not is_usable(directory / "new", account)


def test_default_directory_is_named_after_the_major_version(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.chmod(0o711)
    monkeypatch.setenv("XDG_DATA_HOME", str(directory))
    assert default_directory().parent == directory.resolve() / "cronlock"
    assert default_directory().name.removeprefix("postgres-").isdigit()


def test_wrong_binaries_and_none_at_all_are_explained(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRONLOCK_PG_BIN", str(directory))
    with pytest.raises(EmbeddedError, match=r"CRONLOCK_PG_BIN=.*no programs"):
        find_binaries()
    monkeypatch.delenv("CRONLOCK_PG_BIN")
    monkeypatch.setattr(binaries, "_candidates", lambda: iter(()))
    with pytest.raises(EmbeddedError, match=r"pip install 'cronlock\[embedded\]'.*DATABASE_URL"):
        find_binaries()


def test_interrupt_during_start_leaves_no_process(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Embedded(made, settings=QUICK)
    began: list[int] = []

    def interrupt(*arguments: Any) -> Any:
        if server._process is not None:
            began.append(server._process.pid)
            monkeypatch.undo()
            signal.raise_signal(signal.SIGINT)
        return read_status(*arguments)

    monkeypatch.setattr("cronlock.embedded.read_status", interrupt)
    # A shell that starts us in the background has SIGINT ignored, and Python then leaves it so.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            server.start()
    finally:
        signal.signal(signal.SIGINT, before)
    assert began
    assert not is_alive(began[0])
