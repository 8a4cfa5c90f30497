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


def curl_lines(lines: list[str]) -> list[str]:
    """The calls that are printed for the reader to try."""
    return [line for line in lines if line.startswith("curl ")]


def main() -> None:
    dev = subprocess.Popen(
        ["./run", "dev"], cwd=HERE, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
    )
    lines = lines_of(dev)
    until = time.monotonic() + LIMIT
    while not any(line.startswith("Ctrl-C ends") for line in lines):
        assert dev.poll() is None and time.monotonic() < until, "it did not start"
        time.sleep(0.2)
    pair = next(line for line in curl_lines(lines) if line.endswith("; wait"))
    said = subprocess.run(["sh", "-c", pair], text=True, stdout=subprocess.PIPE, timeout=120, check=True).stdout
    answers = {answer["status"]: answer for answer in map(json.loads, said.splitlines())}
    assert set(answers) == {"completed", "skipped"}, answers
    assert answers["skipped"]["holder"]["runId"] == answers["completed"]["runId"]
    dev.send_signal(signal.SIGINT)
    assert dev.wait(timeout=30) in (0, 130), dev.returncode
    servers = subprocess.run(["ps", "-eo", "pid,args"], text=True, stdout=subprocess.PIPE).stdout
    left = [line for line in servers.splitlines() if "postgres -D" in line and "cronlock/postgres" in line]
    assert not left, left


main()
