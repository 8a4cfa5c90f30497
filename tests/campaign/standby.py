"""A streaming, asynchronous replica of a server, which can be promoted."""

import asyncio
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cronlock.binaries import reachable_binaries, server_account
from cronlock.postmaster import end, launch
from tests.campaign.servers import free_port

STARTS_WITHIN = 60.0


class Standby:
    """Copies the server at `primary`, streams from it at `follows`; answers at `url` while its context is entered."""

    def __init__(self, directory: Path, primary: str, follows: str, settings: Mapping[str, str]) -> None:
        self._directory = directory
        self._primary = primary
        self._follows = follows
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self.url = make_conninfo("", **{**conninfo_to_dict(primary), "port": self.port})

    async def __aenter__(self) -> Self:
        account = server_account()
        binaries = reachable_binaries(account)
        self._directory.mkdir()
        shutil.chown(self._directory, account.uid, account.gid)
        data = self._directory / "data"
        try:
            with (self._directory / "server.log").open("ab") as log:
                copy = [str(binaries / "pg_basebackup"), "-d", self._primary, "-D", str(data), "-R", "-c", "fast"]
                copying = launch(account, copy, log)
                if await asyncio.to_thread(copying.wait, 120) != 0:
                    raise RuntimeError(f"pg_basebackup failed:\n{self._said()}")
                options = {
                    **self._settings,
                    "port": str(self.port),
                    "listen_addresses": "127.0.0.1",
                    "unix_socket_directories": str(self._directory),
                    "primary_conninfo": self._follows,
                }
                command = [str(binaries / "postgres"), "-D", str(data)]
                command += [f"--{name}={setting}" for name, setting in options.items()]
                self._process = launch(account, command, log)
            await self.wait_for("SELECT pg_is_in_recovery()")
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """End it."""
        process = self._process
        if process is not None:
            await asyncio.to_thread(end, process.pid, lambda: process.poll() is not None)
            self._process = None

    async def promote(self) -> None:
        """Make it a primary of its own timeline; returns when it can be written to."""
        async with await psycopg.AsyncConnection.connect(self.url, autocommit=True) as connection:
            await connection.execute("SELECT pg_promote(true, 60)")
        await self.wait_for("SELECT NOT pg_is_in_recovery()")

    async def wait_for(self, question: str) -> Any:
        """Ask until the answer is true."""
        limit = time.monotonic() + STARTS_WITHIN
        while True:
            try:
                async with await psycopg.AsyncConnection.connect(
                    self.url, connect_timeout=5, autocommit=True
                ) as connection:
                    row = await (await connection.execute(question.encode())).fetchone()
                if row and row[0]:
                    return row[0]
            except psycopg.OperationalError:
                pass
            if time.monotonic() > limit:
                raise RuntimeError(f"the replica does not come to it:\n{self._said()}")
            await asyncio.sleep(0.05)

    def _said(self) -> str:
        return "\n".join((self._directory / "server.log").read_text(errors="replace").splitlines()[-15:])
