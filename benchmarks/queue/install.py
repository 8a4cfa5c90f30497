"""The peers: installed into `.peers` of this checkout, in the versions that are written down here, and kept there.

The Python ones have a virtual environment of their own, so that they cannot disturb cronlock's; the Node ones a
directory. The package indexes are those that pip, uv and npm know.
"""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.server import ROOT

HERE = Path(__file__).parent
PEERS = ROOT / ".peers"
PYTHON = PEERS / "python"
NODE = PEERS / "node"
REQUIREMENTS = HERE / "requirements.txt"
PACKAGE = HERE / "node" / "package.json"
DRIVE = HERE / "node" / "drive.mjs"


def python(within: float) -> str | None:
    """Install the Python peers if they are not there, in `within` seconds; why they cannot be had, if so."""
    stamp = _stamp(REQUIREMENTS)
    if _is_made(PYTHON, stamp):
        return None
    shutil.rmtree(PYTHON, ignore_errors=True)
    program = str(PYTHON / "bin" / "python")
    if shutil.which("uv"):
        commands = [
            ["uv", "venv", "-q", "-p", sys.executable, str(PYTHON)],
            ["uv", "pip", "install", "-q", "-p", program, "-r", str(REQUIREMENTS)],
        ]
    else:
        commands = [
            [sys.executable, "-m", "venv", str(PYTHON)],
            [program, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-r", str(REQUIREMENTS)],
        ]
    return _make(PYTHON, stamp, commands, within)


def node(within: float) -> str | None:
    """The same for Node's."""
    if not (shutil.which("node") and shutil.which("npm")):
        return "node and npm are not installed"
    stamp = _stamp(PACKAGE)
    if not _is_made(NODE, stamp):
        shutil.rmtree(NODE, ignore_errors=True)
        NODE.mkdir(parents=True)
        shutil.copy(PACKAGE, NODE)
        command = ["npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(NODE)]
        if why := _make(NODE, stamp, [command], within):
            return why
    shutil.copy(DRIVE, NODE)  # Node looks for packages beside the file that imports them
    return None


def versions() -> list[str]:
    """What is installed."""
    found = []
    if _is_made(PYTHON, _stamp(REQUIREMENTS)):
        found += [line.replace("[binary,pool]", "").replace("==", " ") for line in REQUIREMENTS.read_text().split()]
    if shutil.which("node") and _is_made(NODE, _stamp(PACKAGE)):
        said = subprocess.run(["node", "--version"], capture_output=True, text=True, check=False).stdout.strip()
        found.append(f"Node {said.removeprefix('v')}")
        for file in (NODE / "node_modules" / name / "package.json" for name in ("graphile-worker", "pg-boss", "pg")):
            told = json.loads(file.read_text())
            found.append(f"{told['name']} {told['version']}")
    return found


def _stamp(file: Path) -> str:
    return hashlib.sha256(f"{ROOT}\n{sys.version}\n{file.read_text()}".encode()).hexdigest()


def _is_made(directory: Path, stamp: str) -> bool:
    file = directory / "made-from"
    return file.exists() and file.read_text() == stamp


def _make(directory: Path, stamp: str, commands: list[list[str]], within: float) -> str | None:
    for command in commands:
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=within, check=False)
        except subprocess.TimeoutExpired:
            return f"{command[0]} did not install it within {within:g} s"
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip() or "no reason given").splitlines()[-1]
            return f"{Path(command[0]).name} could not install it: {last}"
    (directory / "made-from").write_text(stamp)
    return None
