"""The tests in every combination of Python and PostgreSQL, one after the other: ./run matrix [arguments of pytest].

A Python that this machine does not have is named and left out, unless it was asked for. Exits with 1 if one failed.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
HERE = ROOT / ".matrix"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
SERVERS = ("15", "16", "17", "18")


class Result(NamedTuple):
    """What became of one combination."""

    python: str
    postgresql: str
    said: str
    is_good: bool


def found(script: str, version: str) -> str | None:
    """What one of the scripts beside this one prints for a version; None if it has none."""
    done = subprocess.run([str(ROOT / ".ci" / script), version], stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def environment(version: str, python: str) -> Path:
    """The directory of programs of a virtual environment that is made anew when what it is made from changed."""
    place = HERE / version
    made_from = [python, *((ROOT / name).read_text() for name in ("pyproject.toml", "constraints.txt"))]
    mark = hashlib.sha256("\0".join(made_from).encode()).hexdigest()
    if not (place / "made-from").exists() or (place / "made-from").read_text() != mark:
        print(f"Python {version}: installing", file=sys.stderr, flush=True)
        shutil.rmtree(place, ignore_errors=True)
        subprocess.run([python, "-m", "venv", "--without-pip", str(place)], check=True)
        inside = str(place / "bin" / "python")
        installing = (
            ["uv", "pip", "install", "-q", "-p", inside]
            if shutil.which("uv")
            else [sys.executable, "-m", "pip", "--python", inside, "install", "-q", "--disable-pip-version-check"]
        )
        subprocess.run([*installing, "-c", "constraints.txt", "-e", ".[dev]"], cwd=ROOT, check=True)
        (place / "made-from").write_text(mark)
    return place / "bin"


def tested(version: str, programs: Path, server: str, arguments: list[str]) -> Result:
    """Run pytest in one combination."""
    postgresql = found("postgresql", server)
    if postgresql is None:
        return Result(version, server, "PostgreSQL could not be had", False)
    print(f"\n== Python {version}, PostgreSQL {server}", file=sys.stderr, flush=True)
    settings = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "CRONLOCK_PG_BIN": postgresql,
        "VIRTUAL_ENV": str(programs.parent),
    }
    began = time.monotonic()
    cache = f"cache_dir={programs.parent / 'pytest'}"
    command = [str(programs / "python"), "-m", "pytest", "-o", cache, *arguments]
    code = subprocess.run(command, cwd=ROOT, env=os.environ | settings, check=False).returncode
    said = f"passed in {time.monotonic() - began:.0f} s" if code == 0 else f"failed (pytest's exit code {code})"
    return Result(version, server, said, code == 0)


def listed(text: str) -> list[str]:
    """The parts of a list with commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def main() -> int:
    """Run what was asked for, and show a table of it."""
    parser = argparse.ArgumentParser(
        prog="./run matrix", description=__doc__, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--python", type=listed, default=[], metavar="LIST", help=f"of {', '.join(PYTHONS)}; else all")
    parser.add_argument("--postgresql", type=listed, default=[], metavar="LIST", help=f"of {', '.join(SERVERS)}")
    asked, arguments = parser.parse_known_args()
    for given, known in ((asked.python, PYTHONS), (asked.postgresql, SERVERS)):
        if unknown := [version for version in given if version not in known]:
            parser.error(f"{', '.join(unknown)}: choose from {', '.join(known)}")
    results = []
    for version in asked.python or PYTHONS:
        python = found("python", version)
        if python is None:
            advice = f"not available; install python{version} or: uv python install {version}"
            results.append(Result(version, "", advice, not asked.python))
            continue
        try:
            programs = environment(version, python)
        except subprocess.CalledProcessError as error:
            results.append(Result(version, "", f"not installed: {error}", False))
            continue
        results += [tested(version, programs, server, arguments) for server in asked.postgresql or SERVERS]
    print("\nPython  PostgreSQL")
    for result in results:
        print(f"{result.python:<7} {result.postgresql:<10} {result.said}")
    return 0 if all(result.is_good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
