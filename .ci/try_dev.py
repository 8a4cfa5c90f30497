"""Start `./run dev`, do what it prints, and end it with Ctrl-C. Needs nothing but Python."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).parent.parent
LIMIT = 180


def lines_of(process: subprocess.Popen[str]) -> list[str]:
    """What it prints, as it comes."""
    lines: list[str] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stderr.write(f"  | {line}")
            lines.append(line.strip())

    threading.Thread(target=read, daemon=True).start()
    return lines


def main() -> None:
    dev = subprocess.Popen(
        ["./run", "dev"], cwd=HERE, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
    )
    try:
        try_it(dev, lines_of(dev))
    finally:
        dev.terminate()
        dev.wait(30)


def try_it(dev: subprocess.Popen[str], lines: list[str]) -> None:
    until = time.monotonic() + LIMIT
    while not any(line.startswith("Ctrl-C ends") for line in lines):
        assert dev.poll() is None, "it ended"
        assert time.monotonic() < until, "it did not start"
        time.sleep(0.2)
    pair = next(line for line in lines if line.startswith("curl ") and line.endswith("; wait"))
    said = subprocess.run(["sh", "-c", pair], text=True, stdout=subprocess.PIPE, timeout=120, check=True).stdout
    answers = {answer["status"]: answer for answer in map(json.loads, said.splitlines())}
    assert set(answers) == {"completed", "skipped"}, answers
    assert answers["skipped"]["holder"]["runId"] == answers["completed"]["runId"]
    directory = next(line for line in lines if line.startswith("PostgreSQL of its own in ")).split(" in ", 1)[1]
    assert servers(directory), "its server is not seen"
    dev.send_signal(signal.SIGINT)
    assert dev.wait(timeout=30) in (0, 130), dev.returncode
    assert not servers(directory), servers(directory)


def servers(directory: str) -> list[str]:
    """The PostgreSQL servers that run in a directory."""
    seen = subprocess.run(["ps", "-eo", "pid,args"], text=True, stdout=subprocess.PIPE, check=True).stdout
    return [line for line in seen.splitlines() if f"postgres -D {directory}" in line]


main()
