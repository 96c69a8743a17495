"""What any machine needs: ports, shared memory, files, time, room for logs."""

import ctypes
import os
import resource
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ctl.base.ports import is_free
from ctl.doctor.finding import Finding, missing, note, ok, warning

_GIB = 2**30
_LEAST_FILES = 1024
_GOOD_FILES = 8192
_GOOD_SHARED_BYTES = 1 * _GIB
_GOOD_LOG_BYTES = 1 * _GIB
# Sockets lie in a folder below the temporary one; a path may have 107 bytes.
_LONGEST_TEMPORARY = 60
_TIME_ERROR = 5  # adjtimex: the clock is not synchronised


def check_ports(ports: Sequence[int]) -> Finding:
    """Whether `ctl up` could take them."""
    taken = [str(port) for port in ports if not is_free(port)]
    if not taken:
        return ok("ports", f"{ports[0]} to {ports[-1]} are free")
    advice = "Stop what listens there (ss -ltnp), or take others with --port."
    return warning("ports", f"in use: {', '.join(taken)}", advice)


def check_shared_memory(folder: str = "/dev/shm") -> Finding:
    """NCCL, gloo and UCX pass data between processes of a machine there."""
    try:
        size = shutil.disk_usage(folder).total
    except OSError:
        advice = "Mount a tmpfs there (Kubernetes: an emptyDir with medium Memory)."
        return warning("shared memory", f"there is no {folder}", advice)
    detail = f"{folder} has {size / _GIB:.2f} GiB"
    if size >= _GOOD_SHARED_BYTES:
        return ok("shared memory", detail)
    advice = "Give containers more: --shm-size=8g, or an emptyDir with medium Memory."
    return warning("shared memory", detail, advice)


def check_open_files(limit: int | None = None) -> Finding:
    """A gateway holds a connection for each client and each stream."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    if soft == resource.RLIM_INFINITY:
        return ok("open files", "no limit")
    detail = f"at most {soft} (ulimit -n)"
    if soft >= _GOOD_FILES:
        return ok("open files", detail)
    advice = f"Raise it: ulimit -n {_GOOD_FILES}, LimitNOFILE= of systemd, or limits.conf."
    found = missing if soft < _LEAST_FILES else warning
    return found("open files", detail, advice)


def check_locked_memory(*, wanted: bool, limit: int | None = None) -> Finding:
    """RDMA pins the pages it writes to."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if soft == resource.RLIM_INFINITY:
        return ok("locked memory", "no limit")
    detail = f"at most {soft // 1024} KiB (ulimit -l)"
    if not wanted:
        return note("locked memory", detail)
    advice = "RDMA needs it unlimited: ulimit -l, LimitMEMLOCK=infinity of the container runtime."
    return warning("locked memory", detail, advice)


def check_clock(state: int | None = None) -> Finding:
    """Times of several machines are compared in logs and traces."""
    found = _clock_state() if state is None else state
    if found not in (-1, _TIME_ERROR):
        return ok("clock", "synchronised")
    detail = "not synchronised" if found == _TIME_ERROR else "the kernel does not tell"
    advice = "Run chrony or systemd-timesyncd on the host, or logs of two machines disagree."
    return warning("clock", detail, advice)


def check_log_room(folder: Path) -> Finding:
    """Whether logs can be written, and for how long."""
    advice = "Choose another folder with --log-dir."
    there = folder
    try:
        while not there.exists():
            there = there.parent
        if not (there.is_dir() and os.access(there, os.W_OK)):
            return missing("logs", f"{there} cannot be written to", advice)
    except OSError as error:  # no permission to look into the folder, or an impossible name
        return missing("logs", f"{there} cannot be looked at: {error.strerror}", advice)
    free = shutil.disk_usage(there).free
    detail = f"{free / _GIB:.1f} GiB free for {folder}"
    if free >= _GOOD_LOG_BYTES:
        return ok("logs", detail)
    return warning("logs", detail, "Make room, or choose another folder with --log-dir.")


def check_temporary_folder(folder: str | None = None) -> Finding:
    """Fronts and ranks meet at sockets in it."""
    path = tempfile.gettempdir() if folder is None else folder
    if len(path) <= _LONGEST_TEMPORARY:
        return ok("temporary folder", path)
    advice = "Paths of sockets are short: set TMPDIR to a folder near the root."
    return missing("temporary folder", path, advice)


def _clock_state() -> int:
    """What adjtimex returns; -1 where it fails."""
    # struct timex with modes = 0: only reads. Larger than any kernel's.
    buffer = ctypes.create_string_buffer(1024)
    try:
        return int(ctypes.CDLL(None, use_errno=True).adjtimex(buffer))
    except (OSError, AttributeError):
        return -1
