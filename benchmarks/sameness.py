"""Proof that routes which are compared answer the same: headers, their order, and the body, but for the numbers."""

import re

from benchmarks import names
from benchmarks.arms import Wrong
from benchmarks.rig import Rig
from benchmarks.server import Server

PEERS = {
    "auth": names.HELD[0],
    "redis": names.HELD[0],
    "redis-shared": names.HELD[0],
    "article": names.EMPTY[0],
    "article-one": names.ONE_STATEMENT[0],
}
NUMBER = re.compile(rb"\d+")


def check(rig: Rig, server: Server) -> None:
    """Compare every peer's answer with cronlock's; raises `Wrong`."""
    for peer, task in PEERS.items():
        if peer.startswith("redis") and not rig.has_redis:
            continue
        mine, theirs = shape(server.get(f"/cron/{task}")), shape(server.get(f"/{peer}/{task}"))
        if mine != theirs:
            raise Wrong(f"/cron/{task} and /{peer}/{task} answer differently:\n{mine!r}\n{theirs!r}")


def shape(answer: tuple[bytes, bytes]) -> bytes:
    """An answer whose numbers (the run's id, its milliseconds, and so the length) and date are masked."""
    head, body = answer
    lines = [b"date" if line.startswith(b"date:") else line for line in head.split(b"\r\n")]
    return NUMBER.sub(b"0", b"\n".join([*lines, body]))
