"""The machine: what it is, what is installed on it, and which of its cores does what."""

import os
import platform
import shutil
import subprocess
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import cronlock

PACKAGES = (
    "psycopg",
    "psycopg-binary",
    "psycopg-pool",
    "sqlalchemy",
    "starlette",
    "uvicorn",
    "uvloop",
    "httptools",
    "redis",
    "hiredis",
    "sqlalchemy-dlock",
)


def install(program: str) -> str | None:
    """Get a program from the system's package of the same name if it is missing; why it cannot be had, if so."""
    if shutil.which(program):
        return None
    if not shutil.which("apt-get"):
        return f"{program} is not installed, and there is no apt-get to install it with"
    if os.geteuid() != 0:
        return f"{program} is not installed, and only root can: apt-get install {program}"
    # RUNLEVEL: invoke-rc.d then starts no service.
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    command = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", program]
    for before in ([], ["apt-get", "update", "--quiet"]):
        if before:
            subprocess.run(before, env=environment, capture_output=True, check=False)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode == 0 and shutil.which(program):
            return None
    last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
    return f"apt-get could not install {program}: {' '.join(last)}"


def missing_module(name: str) -> str | None:
    """Why a Python package of the extra `bench` cannot be used, if so."""
    try:
        version(name)
    except PackageNotFoundError:
        return f"the Python package {name} is not installed: pip install 'cronlock[bench]'"
    return None


def split_cores() -> tuple[int | None, set[int]]:
    """The core of the server under test, and those of everything else; (None, all) where there is only one."""
    if not hasattr(os, "sched_getaffinity"):
        return None, set()
    cores = sorted(os.sched_getaffinity(0))
    return (cores[0], set(cores[1:])) if len(cores) > 1 else (None, set(cores))


def cpu_seconds(pid: int) -> float:
    """The CPU time of a process's threads so far (Linux; 0 elsewhere)."""
    # schedstat counts nanoseconds; stat counts ticks of 10 ms, too coarse for 32 backends in two seconds.
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int((read(file) or "0").split()[0]) for file in files) / 1e9


def family_cpu_seconds(pid: int) -> float:
    """The same for a process and its children."""
    family = [pid]
    for file in Path("/proc").glob("[0-9]*/stat"):
        if (fields := read(file).rpartition(")")[2].split()) and fields[1] == str(pid):
            family.append(int(file.parent.name))
    return sum(map(cpu_seconds, family))


def resident_mib(pid: int) -> float:
    """The resident memory of a process (Linux; raises `RuntimeError` elsewhere)."""
    for line in read(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("the kernel does not say how much memory a process has")


def missing_proc() -> str | None:
    """Why the memory of a process cannot be measured, if so."""
    return None if read(Path("/proc/self/status")) else "there is no /proc, which says how much memory a process has"


def read(file: Path) -> str:
    """What the kernel says in a file of a process; nothing if the process is gone."""
    try:
        return file.read_text()
    except OSError:
        return ""


def sync_ms(directory: Path, times: int = 100) -> float:
    """How long it takes to make 8 KiB durable in `directory`: the median in milliseconds."""
    taken = []
    with tempfile.TemporaryFile(dir=directory) as file:
        for _ in range(times):
            started = time.perf_counter()
            os.pwrite(file.fileno(), b"\1" * 8192, 0)
            (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(file.fileno())
            taken.append((time.perf_counter() - started) * 1000)
    return sorted(taken)[times // 2]


def describe() -> str:
    """Processor, cores, memory, system."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{_processor()}, {os.cpu_count()} cores, {pages / 2**30:.0f} GiB, {_system()}, kernel {platform.release()}"


def revision() -> str:
    """The version of cronlock, and the commit where it is a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    if not shutil.which("git"):
        return f"cronlock {cronlock.__version__}"
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return f"cronlock {cronlock.__version__}{f' (commit {said})' if said else ''}"


def versions() -> list[str]:
    """What Python packages and programs are measured."""
    found = [revision(), f"Python {platform.python_version()}"]
    for name in PACKAGES:
        if missing_module(name) is None:
            found.append(f"{name} {version(name)}")
    for command in (["wrk", "-v"], ["redis-server", "--version"]):
        if shutil.which(command[0]):
            said = subprocess.run(command, capture_output=True, text=True, check=False)
            found.append(_version((said.stdout + said.stderr).splitlines()[0], command[0]))
    return found


def _version(line: str, name: str) -> str:
    words = line.split()
    marked = [word.removeprefix("v=") for word in words if word.startswith("v=")]
    return f"{name} {(marked or words[1:2] or ['?'])[0]}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()
