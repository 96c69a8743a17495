"""What a process knows of itself, and dying with the process that started it."""

import ctypes
import os
import secrets
import signal
import sys
import time
from dataclasses import dataclass, field

_PR_SET_PDEATHSIG = 1


def new_epoch() -> str:
    """An identity that no other start of any process has: 16 hexadecimal digits."""
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One process of the cluster. `role` is prefill, decode, router or gateway; `started_at`
    is in unix seconds."""

    role: str
    name: str
    address: str
    epoch: str = field(default_factory=new_epoch)
    pid: int = field(default_factory=os.getpid)
    started_at: float = field(default_factory=time.time)


def die_with_parent(parent_pid: int | None = None) -> None:
    """Has the kernel SIGKILL this process when the thread that started it ends: start children from
    the main thread. Call it first in a child; one whose parent is not `parent_pid` (as the
    parent told it) any more leaves at once."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if parent_pid is not None and os.getppid() != parent_pid:
        raise SystemExit(f"parent process {parent_pid} is gone")
