"""Runs a command that is killed when the process that asked for it ends.

    python -I -S ctl/base/die_with_parent.py PARENT_PID COMMAND [ARGUMENT ...]

The wish survives `execv`, so nothing of this file is left in the running process. A separate
program, because forking a process that has gRPC's threads (`preexec_fn`) is not safe.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def dying_with_us(command: list[str]) -> list[str]:
    """The command line to start from the main thread: the end of another one would count."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main(argv: list[str]) -> None:
    parent_pid, command = int(argv[1]), argv[2:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
        if os.getppid() != parent_pid:
            raise SystemExit(f"parent process {parent_pid} is gone")
    try:
        os.execv(command[0], command)
    except OSError as error:
        raise SystemExit(f"cannot start {command[0]}: {error.strerror}") from None


if __name__ == "__main__":
    main(sys.argv)
