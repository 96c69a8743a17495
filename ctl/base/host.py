"""What a machine is asked: commands, files, installed distributions."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from ctl.base.python_process import package_environment

_RUN_SECONDS = 60.0


class Host:
    """This machine. Tests have others."""

    def run(self, *command: str) -> str:
        """Standard output of a command that ends well; "" otherwise."""
        try:
            return subprocess.check_output(
                command, stderr=subprocess.DEVNULL, text=True, timeout=_RUN_SECONDS
            )
        except (OSError, subprocess.SubprocessError):
            return ""

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

    def read(self, path: str) -> str:
        """Text of a file; "" where it cannot be read."""
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

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

    def requirements(self, distribution: str) -> list[str]:
        """What an installed distribution asks for; nothing for one that is not installed."""
        try:
            return requires(distribution) or []
        except PackageNotFoundError:
            return []

    def which(self, program: str) -> str:
        """Where a program is; "" where it is not."""
        return shutil.which(program) or ""
