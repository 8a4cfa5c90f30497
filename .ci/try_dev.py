"""Start `./run dev`, do what it prints, and end it with Ctrl-C. Needs nothing but Python."""

import json
import re
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
            lines.append(line.rstrip())

    threading.Thread(target=read, daemon=True).start()
    return lines


def curl_lines(lines: list[str]) -> list[str]:
    """The calls that are printed for the reader to try."""
    return [line.strip().removeprefix("$ ") for line in lines if re.match(r"\s*(\$ )?curl\b", line)]


def main() -> None:
    dev = subprocess.Popen(
        ["./run", "dev"], cwd=HERE, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
    )
    lines = lines_of(dev)
    until = time.monotonic() + LIMIT
    while not any("/cron/" in line for line in curl_lines(lines)) and dev.poll() is None and time.monotonic() < until:
        time.sleep(0.2)
    time.sleep(2)
    calls = curl_lines(lines)
    assert len(calls) >= 2, "no curl lines were printed"
    first = subprocess.Popen(["sh", "-c", calls[0].rstrip("& ")], text=True, stdout=subprocess.PIPE)
    time.sleep(1)
    second = subprocess.run(["sh", "-c", calls[1].rstrip("& ")], text=True, stdout=subprocess.PIPE, timeout=60)
    answers = [json.loads(first.communicate(timeout=120)[0]), json.loads(second.stdout)]
    print(json.dumps(answers))
    assert [answer["status"] for answer in answers] == ["completed", "skipped"], answers
    assert answers[1]["holder"]["runId"] == answers[0]["runId"]
    dev.send_signal(signal.SIGINT)
    assert dev.wait(timeout=30) in (0, 130), dev.returncode
    servers = subprocess.run(["ps", "-eo", "pid,args"], text=True, stdout=subprocess.PIPE).stdout
    left = [line for line in servers.splitlines() if "postgres -D" in line and "cronlock/postgres" in line]
    assert not left, left


main()
