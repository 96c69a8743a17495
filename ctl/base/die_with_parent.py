"""Runs a command that is killed when the process that asked for it ends.

By a small program that then becomes the command: forking a process that has gRPC's threads
(`preexec_fn`) is not safe, and the wish survives `execv`.
"""

import os
import sys

from ctl.base.python_process import PACKAGES

_PROGRAM = f"""
import os, sys
sys.path.insert(0, {str(PACKAGES)!r})
from core.process import die_with_parent
parent_pid, *command = sys.argv[1:]
die_with_parent(int(parent_pid))
try:
    os.execv(command[0], command)
except OSError as error:
    raise SystemExit(f"cannot start {{command[0]}}: {{error.strerror}}") from None
"""


def dying_with_us(command: list[str]) -> list[str]:
    """The command line to start from the main thread: the end of another one would count."""
    return [sys.executable, "-I", "-S", "-c", _PROGRAM, str(os.getpid()), *command]
