"""Finds Prometheus and promtool, or gets them: Debian's package, unpacked and not installed."""

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "epserve-tests"
APT_SECONDS = 60
BOUNDS = ("-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20")


def tool(name: str) -> Path:
    """`prometheus` or `promtool`: from PATH, else out of Debian's package. Without either the
    test is skipped: a machine without a network has nothing to do with what is tested."""
    found = shutil.which(name)
    if found is not None:
        return Path(found)
    problem = _unpack()
    unpacked = CACHE / "usr" / "bin" / name
    if unpacked.exists():
        return unpacked
    pytest.skip(f"there is no {name}, and Debian's package prometheus cannot be had: {problem}")


@cache
def _unpack() -> str:
    """What went wrong, "" if nothing. Leaves the system's packages as they are."""
    if (CACHE / "usr" / "bin" / "prometheus").exists():
        return ""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        return "this is no Debian"
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return str(error)
    said = _run("apt-get", *BOUNDS, "download", "prometheus")
    if said and os.geteuid() == 0:  # most likely nobody has ever fetched the lists
        # Other repositories of the machine may be out of order.
        told = _run("apt-get", *BOUNDS, "update", "-q")
        said = _run("apt-get", *BOUNDS, "download", "prometheus") and f"{told} {said}"
    packages = sorted(CACHE.glob("prometheus_*.deb"))
    if not packages:
        return said or "apt-get download left nothing"
    said = _run("dpkg", "-x", packages[-1].name, ".")
    for package in packages:
        package.unlink()
    return said


def _run(*command: str) -> str:
    """What it said if it failed, else ""."""
    try:
        done = subprocess.run(
            command, cwd=CACHE, capture_output=True, text=True, timeout=APT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{' '.join(command)} took longer than {APT_SECONDS} s"
    return "" if done.returncode == 0 else f"{' '.join(command)}: {done.stderr.strip()[-500:]}"
