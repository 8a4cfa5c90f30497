"""The pages say what is so: their code runs, their links lead somewhere, their lists are those of the code."""

import ast
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.error import HTTPError, URLError

import psycopg
import pytest
import yaml  # type: ignore[import-untyped]  # comes with uvicorn[standard]
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from typer.testing import CliRunner

from benchmarks.queue import command as queue
from benchmarks.queue.systems import PEERS
from benchmarks.table import BEGIN, END
from cronlock import Cronlock, Outcome, Run, models, steering
from cronlock.cli import app as commands
from cronlock.config import READ_ELSEWHERE, Settings, env_names, key
from cronlock.migrate import migrate
from cronlock.process import Process
from cronlock.recovery import prune
from cronlock.working import Crew
from tests import SECRET, Db, serving, until, value
from tests.commands import PROJECT, environment, served

pytestmark = pytest.mark.anyio

PAGES = sorted([*PROJECT.glob("*.md"), *PROJECT.glob("docs/*.md"), PROJECT / "examples/README.md"])
FENCE = re.compile(r"((?:^<!--[^\n]*-->\n)*)^```([a-z]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RUNS = re.compile(r"<!-- runs: (\S+)(?: (\{.*\}))? -> (\w+) -->")
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
ROW = re.compile(r"^\| (`.+?) \|", re.MULTILINE)
numbers = count(1)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `marks` are the comments right above it."""

    page: Path
    number: int
    marks: str
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.stem}-{self.number}"


def blocks(*languages: str) -> list[Block]:
    """Every fenced block of every page that is in one of these languages."""
    return [
        Block(page, number, found[1], found[2], found[3])
        for page in PAGES
        for number, found in enumerate(FENCE.finditer(page.read_text()), 1)
        if found[2] in languages
    ]


def marked(mark: str) -> list[Block]:
    """The Python blocks with this mark."""
    return [block for block in blocks("python") if mark in block.marks]


def page(name: str) -> str:
    """The text of a page in docs/."""
    return (PROJECT / "docs" / f"{name}.md").read_text()


def section(text: str, heading: str) -> str:
    """What stands below a heading, up to the next one of its level."""
    level = heading.split()[0]
    assert f"{heading}\n" in text
    return re.split(rf"^{level} ", text.split(f"{heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def names_of_rows(text: str) -> set[str]:
    """The names in backquotes in the first cells of a table."""
    return {name for cell in ROW.findall(text) for name in re.findall(r"`([\w.]+)[^`]*`", cell)}


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()) for heading in HEADING.findall(FENCE.sub("", text)))
    return {heading.strip().replace(" ", "-") for heading in plain}


@pytest.fixture
def as_user(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of a user's, which is the current one; the environment names the test's database."""
    for name, text in environment(DATABASE_URL=database_url).items():
        monkeypatch.setenv(name, text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def execute(block: Block) -> dict[str, Any]:
    """Run a block as a module of its own; its names."""
    module = ModuleType(f"page_{next(numbers)}")
    sys.modules[module.__name__] = module  # where annotations and mapped classes are looked up
    exec(compile(block.text, f"{block.page.name}, block {block.number}", "exec"), module.__dict__)
    return module.__dict__


# -- code ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_compiles(block: Block) -> None:
    compile(block.text, str(block), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("block", marked("<!-- runs:"), ids=str)
async def test_tasks_of_the_pages_end_as_the_page_says(block: Block, as_user: Path) -> None:
    cron: Cronlock = execute(block)["cron"]
    async with cron:
        for task, payload, status in RUNS.findall(block.marks):
            outcome = await cron.run(task, json.loads(payload or "{}"))
            assert (task, outcome.status) == (task, status), outcome


@pytest.mark.parametrize("block", marked("<!-- runs -->"), ids=str)
def test_programs_of_the_pages_run(block: Block, as_user: Path) -> None:
    done = subprocess.run([sys.executable, "-c", block.text], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == re.findall(r"print\(.*#  ?(.+)", block.text)


async def test_applications_of_the_deploy_page_answer(as_user: Path) -> None:
    found = [block for block in blocks("python") if block.page.stem == "deploy" and "app = " in block.text]
    assert len(found) == 4
    for block in found:
        names = execute(block)
        cron: Cronlock = names["cron"]

        @cron.task("nightly")
        async def nightly(run: Run) -> str:
            return "done"

        async with serving(names["app"]) as client:
            answers = [await client.get(f"{prefix}/cron/nightly") for prefix in ("", "/internal")]
        assert [answer.json()["result"] for answer in answers if answer.status_code == 200] == ["done"], block


# -- the README ------------------------------------------------------------------------------------------------


def readme_app() -> str:
    """The app in the README."""
    block, *_ = [block for block in blocks("python") if block.page.name == "README.md" and block.page.parent == PROJECT]
    return block.text


def call(url: str, task: str) -> dict[str, Any]:
    """What a call is answered."""
    request = urllib.request.Request(f"{url}/cron/{task}", headers={"authorization": f"Bearer {SECRET}"})
    until = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return dict(json.load(answer))
        except HTTPError:
            raise
        except URLError:
            assert time.monotonic() < until
            time.sleep(0.1)


def test_the_readmes_app_is_served_by_uvicorn_as_it_stands_there(as_user: Path) -> None:
    (as_user / "main.py").write_text(readme_app())
    assert len(readme_app().splitlines()) <= 25
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as probe:
        port = probe.server_port
    command = [sys.executable, "-m", "uvicorn", "main:app", "--port", str(port), "--log-level", "warning"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            answer = call(f"http://127.0.0.1:{port}", "expire-carts?days=7")
        finally:
            server.terminate()
            _, errors = server.communicate(timeout=30)
    assert (answer["status"], answer["result"]) == ("completed", {"deleted": 0})
    assert errors == ""


def test_the_readmes_app_is_served_by_cronlock_serve(as_user: Path, database_url: str) -> None:
    (as_user / "main.py").write_text(readme_app())
    with served(as_user, "main:cron", DATABASE_URL=database_url) as (_, url):
        assert call(url, "expire-carts")["status"] == "completed"


def test_the_readme_fits_the_first_look(project: Path) -> None:
    text = (project / "README.md").read_text()
    assert len(text.splitlines()) < 120
    assert "./run dev" in text
    assert "./run test" in text


# -- links and lists -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(path: Path) -> None:
    for link in LINK.findall(FENCE.sub("", path.read_text())):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        found = (path.parent / target).resolve() if target else path
        assert found.exists(), link
        if anchor:
            assert anchor in anchors(found.read_text()), link


def test_every_page_of_docs_is_linked_from_the_readme(project: Path) -> None:
    links = LINK.findall((project / "README.md").read_text())
    assert {f"docs/{path.name}" for path in project.glob("docs/*.md")} <= set(links)


@pytest.mark.parametrize("path", sorted(PROJECT.glob("docs/*.md")), ids=lambda path: path.stem)
def test_a_page_begins_with_its_promise(path: Path) -> None:
    title, empty, promise, *_ = path.read_text().splitlines()
    assert title.startswith("# ")
    assert empty == ""
    assert promise[:1].isalpha()
    assert len(promise.split()) < 40


def settings_table() -> str:
    """The table of docs/settings.md."""
    lines = ["| keyword | environment | default | example | |", "|---|---|---|---|---|"]
    defaults = Settings.model_construct().describe()
    for name, field in Settings.model_fields.items():
        names = " or ".join(f"`{one}`" for one in reversed(env_names(field)))
        default = defaults[key(name, field)]
        shown = default if default == "not set" else f"`{default}`"
        (example,) = field.examples or [""]
        lines.append(f"| `{key(name, field)}` | {names} | {shown} | `{example}` | {field.description} |")
    return "\n".join(lines)


def test_the_settings_page_is_what_the_code_says() -> None:
    text = page("settings")
    assert settings_table() in text, f"docs/settings.md must have this table:\n\n{settings_table()}"
    assert {name for name in READ_ELSEWHERE if f"`{name}`" not in text} == set()


def test_the_sql_page_names_every_column() -> None:
    for table in models.Base.metadata.tables.values():
        told = names_of_rows(section(page("sql"), f"## The table `{table.name}`"))
        assert told == {column.name for column in table.columns}


def test_the_http_page_names_every_reason_of_503() -> None:
    code = "\n".join(path.read_text() for path in (PROJECT / "cronlock").rglob("*.py") if path.parent.name != "cli")
    raised = set(re.findall(r'Unavailable\(\s*"(\w+)"', code)) | set(re.findall(r'503, .*reason="(\w+)"', code))
    assert len(raised) > 8
    assert names_of_rows(section(page("http"), "## Reasons of 503")) == raised


def test_every_status_and_reason_that_can_be_written_is_on_the_sql_page() -> None:
    told = section(page("sql"), "## The table `run`")
    assert {status for status in models.RUN_STATUSES if f"`{status}`" not in told} == set()


def test_commands_and_options_in_the_pages_exist() -> None:
    runner = CliRunner()
    helps: dict[tuple[str, ...], str] = {}

    def help_of(*words: str) -> str:
        if words not in helps:
            done = runner.invoke(commands, [*words, "--help"], prog_name="cronlock", terminal_width=200)
            assert done.exit_code == 0, words
            helps[words] = done.output
        return helps[words]

    line = re.compile(r"(?:^|[\s`(;|])cronlock ((?:[a-z]+ ?)+)(.*)", re.MULTILINE)
    known = set(re.findall(r"^[│|\s]*([a-z]+) ", help_of(), re.MULTILINE))
    assert {"dev", "serve", "migrate", "runs"} <= known
    seen = set()
    for path in PAGES:
        text = path.read_text()
        pieces = [found[3] for found in FENCE.finditer(text) if found[2] in ("sh", "console", "yaml")]
        pieces += re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
        for words, rest in (found.groups() for piece in pieces for found in line.finditer(piece)):
            name, *others = words.split()
            assert name in known, f"{path.name}: cronlock {words}"
            group = [name, *others[:1]] if name in ("runs", "jobs") and others else [name]
            told = help_of(*group)
            for option in re.findall(r"(?<!\S)--[a-z-]+", rest.split("#")[0].split(";")[0]):
                assert option in told, f"{path.name}: cronlock {words} {option}"
            seen.add(name)
    assert {"dev", "serve", "migrate", "secret", "run", "runs"} <= seen


def test_commands_of_run_in_the_pages_exist(project: Path) -> None:
    script = (project / "run").read_text()
    told = {name for path in PAGES for name in re.findall(r"\./run ([a-z]+)", path.read_text())}
    assert {"dev", "test", "check", "bench"} <= told
    cases = set(re.findall(r"^    ([a-z]+)\)", script, re.MULTILINE))
    assert told - cases - {"python", "alembic", "cronlock"} == set()


def test_the_performance_page_has_its_place_for_the_table() -> None:
    text = page("performance")
    assert text.count(BEGIN) == text.count(END) <= 1


def test_the_queue_s_performance_page_has_a_place_for_each_of_its_tables() -> None:
    text = page("performance-queue")
    for what in (queue.TABLE, queue.CHURN, queue.FAULTS):
        assert text.count(queue.BEGIN.format(what)) == text.count(queue.END.format(what)) == 1
    for peer in PEERS:
        assert peer.name.partition(",")[0] in text


# -- SQL -------------------------------------------------------------------------------------------------------


@pytest.fixture
async def example_run(as_user: Path) -> Outcome:
    """One completed run of a task that the SQL page's queries find."""
    cron = Cronlock()

    @cron.task("sync-inventory")
    async def sync_inventory(run: Run) -> dict[str, int]:
        return {"rows": 4000}

    async with cron:
        return await cron.run("sync-inventory")


@pytest.mark.parametrize("block", [block for block in blocks("sql") if block.page.stem != "roles"], ids=str)
async def test_sql_of_the_pages_runs(block: Block, example_run: Outcome, db: Db) -> None:
    assert example_run.status == "completed"
    for statement in block.text.split(";\n"):
        if statement.strip():
            db.execute(sql.SQL(statement))


async def test_the_queries_of_the_sql_page_show_what_they_say(example_run: Outcome, db: Db) -> None:
    rates, happened, *_, results = (
        db.execute(block.text).fetchall()
        for block in blocks("sql")
        if block.page.stem == "sql" and ("task_health" in block.text or "FROM cronlock.run" in block.text)
    )
    assert rates[0][:4] == ("sync-inventory", "completed", 1, 1)
    assert happened[0][:3] == (example_run.run_id, "sync-inventory", "completed")
    assert results == [(example_run.run_id, "4000")]


async def test_a_page_of_sql_pauses_and_a_run_is_skipped(example_run: Outcome, db: Db, as_user: Path) -> None:
    (block,) = [block for block in blocks("sql") if "SET paused_at = now()" in block.text]
    pause, resume, _ = block.text.split(";\n\n")
    cron = Cronlock()

    @cron.task("sync-inventory")
    async def sync_inventory(run: Run) -> None: ...

    async with cron:
        db.execute(pause)
        assert (await cron.run("sync-inventory")).reason == "paused"
        db.execute(resume)
        assert (await cron.run("sync-inventory")).status == "completed"


@contextmanager
def roles_of_the_page(server_url: str, database: str) -> Iterator[dict[str, str]]:
    """The roles of docs/roles.md under names of the test's own; URLs by the page's names."""
    names = {name: f"{name}_{os.getpid()}_{next(numbers)}" for name in ("shop_owner", "shop_runtime", "shop_reader")}
    roles, grants, reader = (block.text for block in blocks("sql") if block.page.stem == "roles")

    def run(connection: "psycopg.Connection[Any]", text: str) -> None:
        for name, ours in names.items():
            text = text.replace(name, ours)
        connection.execute(text.replace("DATABASE shop ", f"DATABASE {database} "))

    server = conninfo_to_dict(server_url)
    passwords = {"shop_owner": "change-me-1", "shop_runtime": "change-me-2", "shop_reader": "change-me-3"}
    urls = {
        name: f"postgresql://{names[name]}:{passwords[name]}@{server['host']}:{server['port']}/{database}"
        for name in names
    }
    with psycopg.connect(server_url, dbname=database, autocommit=True) as admin:
        run(admin, roles)
        try:
            migrate(urls["shop_owner"], "cronlock")
            with psycopg.connect(urls["shop_owner"], autocommit=True) as owner:
                run(owner, grants)
            run(admin, reader)
            yield urls
        finally:
            for ours in names.values():
                admin.execute(sql.SQL("DROP OWNED BY {} CASCADE").format(sql.Identifier(ours)))
                admin.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(ours)))


@asynccontextmanager
async def worked(cron: Cronlock) -> AsyncIterator[None]:
    """A worker beside what else an open Cronlock does."""
    crew = Crew(cron, ["default"], 2)
    await crew.start()
    try:
        yield
    finally:
        crew.drain(0)
        await crew.work()


async def test_the_runtime_role_of_the_page_serves_steers_and_prunes_but_creates_nothing(
    server_url: str, empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = str(conninfo_to_dict(empty_url)["dbname"])
    with roles_of_the_page(server_url, database) as urls:
        cron = Cronlock(
            database_url=urls["shop_runtime"], secrets=SECRET, retention_completed="1ms", drain_timeout="1s"
        )

        @cron.task("nightly")
        async def nightly(run: Run, payload: dict[str, Any]) -> None:
            await run.connection.exec_driver_sql("SELECT 1")
            if payload:
                raise ValueError("on purpose")

        @cron.task("plain")
        def plain(run: Run) -> None:
            run.driver.execute("SELECT 1")

        @cron.task("long")
        async def long(run: Run) -> None:
            await asyncio.sleep(30)

        async with serving(cron.app()) as client:
            statuses = [
                (await client.get(f"/cron/{call}")).json()["status"]
                for call in ("nightly", "nightly?fail=1", "plain", "nightly", "plain")
            ]
            assert statuses == ["completed", "failed", "completed", "completed", "completed"]
            with psycopg.connect(urls["shop_runtime"], autocommit=True) as runtime:
                assert steering.pause(runtime, "cronlock", "nightly", by="a test", reason=None) is not None
                assert (await client.get("/cron/nightly")).json()["reason"] == "paused"
                assert steering.resume(runtime, "cronlock", "nightly") is not None
                assert steering.recover(runtime, "cronlock") == []
                calling = asyncio.ensure_future(client.get("/cron/long"))
                seen = "SELECT run_id FROM cronlock.lock_holder WHERE run_id IS NOT NULL"
                while not (found := runtime.execute(seen).fetchone()):
                    await asyncio.sleep(0.02)
                assert steering.terminate(runtime, "cronlock", found[0])
                assert (await calling).json()["status"] == "lost"
                async with worked(cron):
                    jobs = [await cron.enqueue(None, "plain"), await cron.enqueue(None, "nightly", {"fail": 1})]
                    again = await cron.enqueue(None, "plain", delay=0.1, idempotency_key="later")
                    assert (await cron.enqueue(None, "plain", delay=0.1, idempotency_key="later")).is_duplicate
                    ended = "SELECT array_agg(status ORDER BY id) FROM cronlock.job_history"
                    await until(lambda: len(value(runtime, ended) or ()) == 3, "they end")
                    assert value(runtime, ended) == ["completed", "failed", "completed"]
                    assert [job.job_id for job in jobs] < [again.job_id]
                process: Process = await cron.open()
                assert (await prune(process.database, process.runner.statements))[0] >= 2
                for statement in ("CREATE TABLE cronlock.x ()", "CREATE SCHEMA x", "DROP VIEW cronlock.lock_holder"):
                    with pytest.raises(psycopg.errors.InsufficientPrivilege):
                        runtime.execute(statement)
            with psycopg.connect(urls["shop_reader"], autocommit=True) as reader:
                assert value(reader, "SELECT count(*) FROM cronlock.task_health") == 3
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    reader.execute("DELETE FROM cronlock.run")


async def test_a_role_without_the_grants_is_told_so(server_url: str, empty_url: str) -> None:
    database = str(conninfo_to_dict(empty_url)["dbname"])
    with roles_of_the_page(server_url, database) as urls:
        cron = Cronlock(database_url=urls["shop_reader"], secrets=SECRET)

        @cron.task("nightly")
        async def nightly(run: Run) -> None: ...

        async with serving(cron.app()) as client:
            answer = await client.get("/cron/nightly")
        assert (answer.status_code, answer.json()["reason"]) == (503, "not_permitted")


# -- YAML, JSON and shell --------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_yaml_of_the_pages_can_be_read(block: Block) -> None:
    assert isinstance(yaml.safe_load(block.text), dict)


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_json_of_the_pages_can_be_read(block: Block) -> None:
    assert isinstance(json.loads(block.text), dict)


@pytest.mark.parametrize("block", blocks("sh"), ids=str)
def test_shell_of_the_pages_can_be_read(block: Block) -> None:
    done = subprocess.run(["/bin/sh", "-n"], input=block.text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_compose_has_its_secrets_from_the_environment_and_waits_for_what_it_needs(project: Path) -> None:
    compose = yaml.safe_load((project / "compose.yaml").read_text())
    postgres, migrating, cron = (compose["services"][name] for name in ("postgres", "migrate", "cron"))
    assert postgres["image"] == "postgres:18"
    assert "pg_isready" in postgres["healthcheck"]["test"]
    assert migrating["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    assert cron["depends_on"] == {"migrate": {"condition": "service_completed_successfully"}}
    assert migrating["command"] == ["cronlock", "migrate"]
    assert all(port.startswith("127.0.0.1:") for port in cron["ports"])
    for service in (postgres, migrating, cron):
        for name, text in service["environment"].items():
            assert name == "POSTGRES_DB" or re.search(r"\$\{[A-Z_]+:\?", text), name
    copied = re.findall(r"^COPY (.+) \S+$", cron["build"]["dockerfile_inline"], re.MULTILINE)
    assert all((project / name).exists() for line in copied for name in line.split())
    needed = {"pyproject.toml", "README.md", "LICENSE", "cronlock", "migrations", "examples"}
    assert needed <= {name for line in copied for name in line.split()}


class Codes(BaseHTTPRequestHandler):
    """Answers with the status that the path ends in."""

    seen: list[str | None]

    def do_GET(self) -> None:
        code = int(self.path.rpartition("/")[2])
        self.seen.append(self.headers["authorization"])
        body = b'{"status":"told"}'
        self.send_response(code)
        if code // 100 == 3:
            self.send_header("location", "/cron/200")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def codes() -> Iterator[tuple[str, list[str | None]]]:
    """A server that answers what it is asked for; its URL, and the Authorization headers that came."""
    seen: list[str | None] = []
    with HTTPServer(("127.0.0.1", 0), type("Codes", (Codes,), {"seen": seen})) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/cron", seen
        server.shutdown()
        thread.join()


needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="runs curl lines")
ANSWERS = {200: 0, 302: 1, 307: 1, 401: 1, 409: 1, 500: 1, 503: 1}


def shell(script: str, *arguments: str, program: str = "/bin/sh", **env: str) -> "subprocess.CompletedProcess[str]":
    """Run a script as it is."""
    return subprocess.run(
        [program, "-e", "-c", script, "script", *arguments],
        env={"PATH": os.environ["PATH"], **env},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@needs_curl
def test_the_workflow_fails_on_everything_but_2xx(
    codes: tuple[str, list[str | None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, seen = codes
    monkeypatch.chdir(tmp_path)
    (block,) = [block for block in blocks("yaml") if block.page.stem == "github-actions"]
    (step,) = yaml.safe_load(block.text)["jobs"]["call"]["steps"]
    program = shutil.which("bash") or "/bin/sh"
    for code, expected in ANSWERS.items():
        done = shell(step["run"], program=program, CRON_SECRET=SECRET, CRON_URL=f"{url}/{code}")
        assert (code, done.returncode) == (code, expected), done.stderr
        assert '{"status":"told"}' in done.stdout
    assert seen == [f"Bearer {SECRET}"] * len(ANSWERS)
    assert SECRET not in step["run"]
    assert shell(step["run"], program=program, CRON_SECRET=SECRET, CRON_URL="http://127.0.0.1:1").returncode == 1


@pytest.fixture
def header_file(tmp_path: Path) -> Path:
    """The file that docs/crontab.md tells to make, made as it says."""
    path = tmp_path / "header"
    make = next(block.text for block in blocks("sh") if block.page.stem == "crontab" and "install -m" in block.text)
    done = shell(make.replace("/etc/cronlock-header", str(path)), CRON_SECRET=SECRET)
    assert done.returncode == 0, done.stderr
    assert path.stat().st_mode & 0o077 == 0
    return path


@needs_curl
def test_the_line_of_the_crontab_fails_on_everything_but_2xx_and_is_silent_else(
    codes: tuple[str, list[str | None]], header_file: Path
) -> None:
    url, seen = codes
    (block,) = blocks("cron")
    line = block.text.strip().removeprefix("*/5 * * * * ").replace("/etc/cronlock-header", str(header_file))
    assert line.startswith("curl ")
    for code, expected in ANSWERS.items():
        done = shell(re.sub(r"https://\S+", f"{url}/{code}", line))
        assert (code, done.returncode != 0) == (code, bool(expected)), done.stderr
        assert (done.stdout + done.stderr == "") == (code == 200)
        told = re.search(rf"^\| (?:\d+, )*{code}(?:, \d+)* \|.*\| (\d+) \|$", page("crontab"), re.MULTILINE)
        assert told is not None
        assert int(told[1]) == done.returncode
    assert seen == [f"Bearer {SECRET}"] * len(ANSWERS)


@needs_curl
def test_the_script_of_the_crontab_page_says_what_failed(
    codes: tuple[str, list[str | None]], header_file: Path
) -> None:
    url, _ = codes
    (block,) = [block for block in blocks("sh") if "usage: cronlock-call TASK" in block.text]
    script = block.text.replace("/etc/cronlock-header", str(header_file)).replace("https://cron.example.com/cron", url)
    for code, expected in ANSWERS.items():
        done = shell(script, str(code))
        assert (code, done.returncode) == (code, expected), done.stderr
        assert done.stdout == ("" if code == 200 else f'{code}: HTTP {code}\n{{"status":"told"}}')


def test_the_workload_of_the_crontab_page_calls_as_its_line_does() -> None:
    (block,) = [block for block in blocks("yaml") if block.page.stem == "crontab"]
    job = yaml.safe_load(block.text)["spec"]["jobTemplate"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert job["backoffLimit"] == 0
    assert container["command"][:4] == ["curl", "-fsSL", "--max-redirs", "0"]
    assert "@/etc/cronlock/header" in container["command"]


async def test_a_report_that_is_ordered_twice_as_the_page_shows_has_one_job(
    database_url: str, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = [each for each in blocks("python") if "async def order_report" in each.text]
    for name, text in environment(DATABASE_URL=database_url).items():
        monkeypatch.setenv(name, text)
    db.execute("CREATE TABLE report (id bigint PRIMARY KEY)")
    names: dict[str, Any] = {}
    url = database_url.replace("postgresql://", "postgresql+psycopg://")
    exec(block.text.replace("postgresql+psycopg://app@db/shop", url), names)
    async with serving(names["app"]) as client:
        answers = [await client.post("/reports/7") for _ in range(2)]
    await names["engine"].dispose()
    assert [answer.status_code for answer in answers] == [200, 200]
    first, second = (answer.json() for answer in answers)
    assert (first["duplicate"], second) == (False, {"jobId": first["jobId"], "duplicate": True})
