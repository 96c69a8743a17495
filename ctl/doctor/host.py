"""What `ctl doctor` asks the machine: commands, files, installed distributions."""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ctl.base.python_process import package_environment

_RUN_SECONDS = 60.0


class Host:
    """This machine. Tests have others."""

    def run(self, *command: str) -> str | None:
        """Standard output of a command that ends well; None otherwise."""
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_RUN_SECONDS, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout

    def run_python(self, program: str) -> tuple[bool, str]:
        """Whether the program ends well in a Python of its own, with our packages; its last line
        of output, or of its error."""
        try:
            done = subprocess.run(
                [sys.executable, "-c", program],
                capture_output=True,
                text=True,
                timeout=_RUN_SECONDS,
                env=package_environment(),
            )
        except subprocess.TimeoutExpired:
            return False, f"no end within {_RUN_SECONDS:g} s"
        lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
        return done.returncode == 0, lines[-1] if lines else f"exit status {done.returncode}"

    def read(self, path: str) -> str | None:
        """Text of a file without white space around; None where it cannot be read."""
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def names(self, folder: str) -> list[str]:
        """What a folder holds, sorted; nothing where there is none."""
        try:
            return sorted(os.listdir(folder))
        except OSError:
            return []

    def version(self, distribution: str) -> str:
        """Of an installed distribution; "" for one that is not."""
        try:
            return version(distribution)
        except PackageNotFoundError:
            return ""
