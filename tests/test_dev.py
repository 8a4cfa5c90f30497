"""`cronlock dev` as a newcomer meets it: the printed lines are run as they are, and nothing stays behind."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from pydantic import BaseModel

from cronlock import Run, development
from cronlock.binaries import Account, is_reachable
from cronlock.development import Origin
from tests import SECRET, Make, serving
from tests.commands import APP, Running, cronlock, descendants, environment, is_alive

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="runs the printed curl lines")

NOBODY = Account("nobody", 65534, 65534)
CAN_BE_NOBODY = os.geteuid() == 0 and is_reachable(Path(sys.executable).resolve(), NOBODY)
USERS = [None, NOBODY.uid] if CAN_BE_NOBODY else [None]
PATH = "/usr/bin:/bin"


@pytest.fixture(params=USERS, ids=lambda user: "itself" if user is None else "nobody")
def user(request: pytest.FixtureRequest) -> int | None:
    """Who runs it: ourselves, and if that is root another one too."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def place() -> Iterator[Path]:
    """An empty directory that root's PostgreSQL can get through."""
    made = Path(tempfile.mkdtemp(prefix="cronlock-dev-", dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made, ignore_errors=True)  # a failed test may have left its server


def home(place: Path, user: int | None = None) -> dict[str, str]:
    """The environment of somebody who has nothing yet."""
    directory = place / "home"
    directory.mkdir(exist_ok=True)
    if user is not None:
        os.chown(directory, user, user)
    kept = environment(HOME=str(directory), PATH=PATH)
    return {name: text for name, text in kept.items() if name not in ("CRON_SECRET", "XDG_DATA_HOME")}


def dev(place: Path, env: dict[str, str], *arguments: str, user: int | None = None) -> Running:
    """`cronlock dev`."""
    return Running("dev", *arguments, cwd=place, env=env, user=user)


def lines(banner: str, begin: str) -> list[str]:
    """The printed lines that begin so, as they can be pasted."""
    return [line.strip() for line in banner.splitlines() if line.strip().startswith(begin)]


def paste(line: str) -> str:
    """Run a line in a shell; its output."""
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def gone(pids: set[int], seconds: float = 15.0) -> set[int]:
    """Those that are still there after a while."""
    until = time.monotonic() + seconds
    while (left := {pid for pid in pids if is_alive(pid)}) and time.monotonic() < until:
        time.sleep(0.02)
    return left


@needs_curl
def test_the_printed_lines_work_ctrl_c_leaves_nothing_and_the_data_stays(place: Path, user: int | None) -> None:
    env = home(place, user)
    with dev(place, env, user=user) as first:
        banner = first.until_says("Ctrl-C")
        (secret,) = re.findall(r"for this start it is (\S+)", banner)
        (pair,) = [line for line in lines(banner, "curl") if " & " in line]
        begun = time.monotonic()
        printed = paste(pair).splitlines()
        assert all(line.startswith("{") for line in printed), f"{printed}\n{first.said}"
        answers = [json.loads(line) for line in printed]
        assert time.monotonic() - begun > 2
        assert {answer["status"] for answer in answers} == {"completed", "skipped"}
        report = next(line for line in lines(banner, "curl") if line.endswith("inventory-report"))
        assert json.loads(paste(report))["result"]["items"] == 4000
        started = descendants(first.process.pid)
        assert started
        first.send_all(signal.SIGINT)
        assert first.ends() == 0
        assert gone(started) == set()
    assert "Traceback" not in first.said
    with dev(place, env, user=user) as second:
        banner = second.until_says("Ctrl-C")
        assert secret not in banner
        report = next(line for line in lines(banner, "curl") if line.endswith("inventory-report"))
        answer = json.loads(paste(report))
        assert answer["result"]["items"] == 4000
        assert answer["runId"] > 3
        started = descendants(second.process.pid)
        second.send(signal.SIGTERM)
        assert second.ends() == 0
        assert gone(started) == set()


def test_the_psql_line_shows_who_holds_the_lock(place: Path) -> None:
    with dev(place, home(place)) as running:
        banner = running.until_says("Ctrl-C")
        (look,) = [line for line in lines(banner, "") if "lock_holder" in line]
        (address,) = re.findall(r"postgresql://\S+", look)
        with psycopg.connect(address.strip("'")) as other:
            other.execute("SELECT pg_advisory_xact_lock(hashtext('sync-inventory')::bigint)")
            assert "sync-inventory" in paste(look)
        running.send(signal.SIGHUP)
        assert running.ends() == 0


@pytest.mark.parametrize("app", [[], ["shop:cron"]], ids=["example", "app"])
def test_what_it_started_ends_when_it_is_killed(place: Path, app: list[str]) -> None:
    (place / "shop.py").write_text(APP)
    with dev(place, home(place), *app) as running:
        running.until_says("Ctrl-C")
        started = descendants(running.process.pid)
        assert any("postgres" in Path(f"/proc/{pid}/cmdline").read_text() for pid in started)
        running.send(signal.SIGKILL)
        running.process.wait()
        assert gone(started) == set()


def test_an_app_is_reloaded_when_its_code_changes_and_ends_with_the_terminal(place: Path, database_url: str) -> None:
    shop = place / "shop.py"
    shop.write_text("def (")
    env = environment(DATABASE_URL=database_url, PATH=PATH)
    with dev(place, env, "shop:cron") as running:
        running.until_says("waiting for a change of the code")
        shop.write_text(APP)
        banner = running.until_says("Ctrl-C")
        assert "shop:cron" in banner
        assert SECRET not in banner
        assert "Bearer $CRON_SECRET" in banner
        assert "postgresql://" not in banner
        shop.write_text(APP.replace('"fail"', '"succeed"'))
        running.until_says("reloaded shop:cron: sleep, succeed")
        started = descendants(running.process.pid)
        assert not any("postgres" in Path(f"/proc/{pid}/cmdline").read_text() for pid in started)
        running.send_all(signal.SIGHUP)
        assert running.ends() == 0
        assert gone(started) == set()
    assert running.said.count("Ctrl-C") == 1


def test_a_port_that_is_given_must_be_free_and_one_that_is_not_given_is_found(place: Path, database_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = cronlock("dev", "--port", port, cwd=place, DATABASE_URL=database_url)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in done.stderr
    env = environment(DATABASE_URL=database_url)
    with dev(place, env) as first, dev(place, env) as second:
        addresses = {re.findall(r"at (http://\S+)", each.until_says("Ctrl-C"))[0] for each in (first, second)}
        assert len(addresses) == 2
        for each in (first, second):
            each.send(signal.SIGINT)
            assert each.ends() == 0


def test_what_runs_has_three_seconds_when_it_ends(place: Path, database_url: str) -> None:
    (place / "shop.py").write_text(APP)
    with dev(place, environment(DATABASE_URL=database_url), "shop:cron") as running:
        banner = running.until_says("Ctrl-C")
        (url,) = re.findall(r"at (http://\S+)", banner)
        call = subprocess.Popen(
            ["curl", "-sS", "-H", f"Authorization: Bearer {SECRET}", f"{url}/cron/sleep?lasts=1.5"],
            stdout=subprocess.PIPE,
        )
        running.until_says("sleep started")
        running.send_all(signal.SIGINT)
        assert running.ends() == 0
        assert json.loads(call.communicate()[0])["status"] == "completed"


class Refresh(BaseModel):
    tenant: str
    days: int
    region: str = "eu"


@pytest.mark.anyio
async def test_the_printed_calls_carry_what_each_task_must_be_sent_and_the_pair_is_of_one_that_skips(
    make_cron: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRON_SECRET", SECRET)
    cron = make_cron()

    @cron.task("slots", max_concurrent=3)
    async def slots(run: Run) -> None: ...

    @cron.task("refresh", key="{region}/{tenant}")
    async def refresh(run: Run, refresh: Refresh) -> None: ...

    @cron.task("plain", key="{tenant}")
    async def plain(run: Run, payload: dict[str, str]) -> None: ...

    said = development.banner("main:cron", cron, "http://test", Origin("a database", False, False))
    printed = [shlex.split(line)[-1] for line in lines(said, "curl") if " & " not in line]
    assert [url.partition("/cron/")[2] for url in printed] == ["slots", "refresh?tenant=1&days=1", "plain?tenant=1"]
    async with serving(cron.app()) as client:
        assert [(await client.get(url)).json()["status"] for url in printed] == ["completed"] * 3
    (pair,) = [line for line in lines(said, "curl") if " sleep 1; " in line]
    assert "/cron/refresh" in pair
