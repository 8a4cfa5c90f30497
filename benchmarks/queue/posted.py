"""Jobs that are enqueued over HTTP with an idempotency key, and what PostgreSQL alone could do of that."""

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import names
from benchmarks.arms import Reading, Wrong
from benchmarks.load import burst
from benchmarks.queue.systems import GUARD
from benchmarks.queue.workers import Place, pinned, place
from benchmarks.rig import Rig
from benchmarks.server import Server, environment
from cronlock.binaries import find_binaries
from cronlock.errors import EmbeddedError

BODY = '{"n":1}'
BARE = """
CREATE TABLE bare.job (LIKE cronlock.job INCLUDING ALL);
CREATE TABLE bare.idempotency_key (LIKE cronlock.idempotency_key INCLUDING ALL);
"""
KEYED = r"""
\set n random(1, 1000000000000000)
WITH claimed AS (
    INSERT INTO bare.idempotency_key (task, key, fingerprint, job_id, expires_at)
    VALUES ('noop', :client_id::text || '-' || :n::text, repeat('0', 64), nextval('cronlock.job_id'),
            clock_timestamp() + interval '1 hour')
        ON CONFLICT (task, key) DO NOTHING RETURNING job_id, key)
INSERT INTO bare.job (id, task, queue, payload, trigger, idempotency_key, max_attempts)
SELECT job_id, 'noop', 'default', '{"n": 1}', 'http', key, 5 FROM claimed;
"""


@contextmanager
def served(rig: Rig) -> Iterator[dict[str, Place]]:
    """One server on a database of its own."""
    with place(rig, GUARD, "http") as found:
        found.connection.execute(BARE)
        told = environment(found.url, rig.server_core)
        with Server(found.url, told, rig.directory / "http.log", "benchmarks.queue.app") as server:
            server.start()
            found.server = server
            yield {"http": found}


@dataclass(frozen=True, slots=True)
class Posted:
    """32 connections post jobs, each with a key that is new; rows are counted afterwards."""

    route: str
    has_rows: bool

    def read(self, places: dict[str, Place], seconds: float) -> dict[str, Reading]:
        """One burst; raises `Wrong`."""
        place = places["http"]
        server = place.server
        assert server is not None
        place.clear()
        before = server.answers()
        spent = server.cpu_seconds(), place.rig.postgres_cpu_seconds()
        load = burst(
            server.port,
            self.route,
            ["noop"],
            max(1, round(seconds)),
            key=f"bench-{time.time_ns()}*",
            body=BODY,
        )
        answers = server.answers() - before
        if load.refused or load.broken or not answers:
            raise Wrong(f"/{self.route}: {load.refused} answers were no success, {load.broken} connections broke")
        rows = place.count(GUARD.left), place.count("SELECT count(*) FROM cronlock.idempotency_key")
        if rows != ((answers, answers) if self.has_rows else (0, 0)):
            raise Wrong(f"/{self.route}: {answers} answers, but {rows[0]} jobs and {rows[1]} keys")
        server_us = (server.cpu_seconds() - spent[0]) / answers * 1e6
        now = place.rig.postgres_cpu_seconds()
        postgres_us = None if now is None or spent[1] is None else (now - spent[1]) / answers * 1e6
        return {"": Reading(load.per_second, "/s", load, server_us, postgres_us, rows=rows[0])}


@dataclass(frozen=True, slots=True)
class Keyed:
    """pgbench: 32 clients, each of which inserts one key and one job in one statement."""

    def read(self, places: dict[str, Place], seconds: float) -> dict[str, Reading]:
        """One run; raises `Wrong`."""
        place = places["http"]
        place.connection.execute("TRUNCATE bare.job, bare.idempotency_key")
        if (program := pgbench()) is None:
            raise Wrong("there is no pgbench: install PostgreSQL's client programs")
        script = place.rig.directory / "keyed.sql"
        script.write_text(KEYED)
        clients = str(names.CONNECTIONS)
        command = [str(program), "-n", "-f", str(script), "-M", "prepared", "-c", clients, "-j", "1"]
        with pinned(place.core):
            done = subprocess.run(
                [*command, "-T", str(max(1, round(seconds))), place.url], capture_output=True, text=True, check=False
            )
        found = re.search(r"tps = ([\d.]+)", done.stdout)
        if done.returncode or found is None:
            raise Wrong(f"pgbench failed: {done.stderr[-2000:]}")
        rows = place.count("SELECT count(*) FROM bare.job")
        if not rows:
            raise Wrong("pgbench wrote no row")
        return {"": Reading(float(found[1]), "/s", rows=rows)}


def pgbench() -> Path | None:
    """The program, from the server that is started here or from elsewhere."""
    try:
        beside = find_binaries() / "pgbench"
    except EmbeddedError:
        beside = None
    if beside is not None and beside.is_file():
        return beside
    elsewhere = shutil.which("pgbench")
    return Path(elsewhere) if elsewhere else None
