"""What any machine needs: ports, shared memory, files, time, room for logs."""

import ctypes
import os
import resource
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ctl.finding import Finding, State
from ctl.ports import is_free

_GIB = 2**30
_LEAST_FILES = 1024
_GOOD_FILES = 8192
_GOOD_SHARED_BYTES = 1 * _GIB
_GOOD_LOG_BYTES = 1 * _GIB
# Sockets lie in a folder below the temporary one; a path may have 107 bytes.
_LONGEST_TEMPORARY = 60
_TIME_ERROR = 5  # adjtimex: the clock is not synchronised


def check_ports(ports: Sequence[int], host: str = "127.0.0.1") -> list[Finding]:
    """Whether `ctl up` could take them."""
    taken = [port for port in ports if not is_free(port, host)]
    wanted = f"{ports[0]} to {ports[-1]}"
    if not taken:
        return [Finding(check="ports", state="ok", detail=f"{wanted} are free")]
    advice = "Stop what listens there (ss -ltnp), or take others with --port."
    detail = f"in use: {', '.join(map(str, taken))}"
    return [Finding(check="ports", state="warning", detail=detail, advice=advice)]


def check_shared_memory(folder: str = "/dev/shm") -> list[Finding]:
    """NCCL, gloo and UCX pass data between processes of a machine there."""
    try:
        size = shutil.disk_usage(folder).total
    except OSError:
        advice = "Mount a tmpfs there (Kubernetes: an emptyDir with medium Memory)."
        detail = f"there is no {folder}"
        return [Finding(check="shared memory", state="warning", detail=detail, advice=advice)]
    detail = f"{folder} has {size / _GIB:.2f} GiB"
    if size >= _GOOD_SHARED_BYTES:
        return [Finding(check="shared memory", state="ok", detail=detail)]
    advice = "Give containers more: --shm-size=8g, or an emptyDir with medium Memory."
    return [Finding(check="shared memory", state="warning", detail=detail, advice=advice)]


def check_open_files(limit: int | None = None) -> list[Finding]:
    """A gateway holds a connection for each client and each stream."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    unlimited = soft == resource.RLIM_INFINITY
    detail = "no limit" if unlimited else f"at most {soft} (ulimit -n)"
    if unlimited or soft >= _GOOD_FILES:
        return [Finding(check="open files", state="ok", detail=detail)]
    advice = f"Raise it: ulimit -n {_GOOD_FILES}, LimitNOFILE= of systemd, or limits.conf."
    state: State = "missing" if soft < _LEAST_FILES else "warning"
    return [Finding(check="open files", state=state, detail=detail, advice=advice)]


def check_locked_memory(*, wanted: bool, limit: int | None = None) -> list[Finding]:
    """RDMA pins the pages it writes to."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if soft == resource.RLIM_INFINITY:
        return [Finding(check="locked memory", state="ok", detail="no limit")]
    detail = f"at most {soft // 1024} KiB (ulimit -l)"
    if not wanted:
        return [Finding(check="locked memory", state="note", detail=detail)]
    advice = "RDMA needs it unlimited: ulimit -l unlimited, or the capability IPC_LOCK."
    return [Finding(check="locked memory", state="warning", detail=detail, advice=advice)]


def check_clock(state: int | None = None) -> list[Finding]:
    """Times of several machines are compared in logs and traces."""
    found = _clock_state() if state is None else state
    if found not in (-1, _TIME_ERROR):
        return [Finding(check="clock", state="ok", detail="synchronised")]
    detail = "not synchronised" if found == _TIME_ERROR else "the kernel does not tell"
    advice = "Run chrony or systemd-timesyncd on the host, or logs of two machines disagree."
    return [Finding(check="clock", state="warning", detail=detail, advice=advice)]


def check_log_room(folder: Path) -> list[Finding]:
    """Whether logs can be written, and for how long."""
    there, problem = folder, ""
    try:
        while not there.exists():
            there = there.parent
        if not (there.is_dir() and os.access(there, os.W_OK)):
            problem = "cannot be written to"
    except OSError as error:  # a folder that cannot be looked into, a name that cannot be
        problem = f"cannot be looked at: {error.strerror}"
    if problem:
        advice = "Choose another folder with --log-dir."
        detail = f"{there} {problem}"
        return [Finding(check="logs", state="missing", detail=detail, advice=advice)]
    free = shutil.disk_usage(there).free
    detail = f"{free / _GIB:.1f} GiB free for {folder}"
    if free >= _GOOD_LOG_BYTES:
        return [Finding(check="logs", state="ok", detail=detail)]
    advice = "Make room, or choose another folder with --log-dir."
    return [Finding(check="logs", state="warning", detail=detail, advice=advice)]


def check_temporary_folder(folder: str | None = None) -> list[Finding]:
    """Fronts and ranks meet at sockets in it."""
    path = tempfile.gettempdir() if folder is None else folder
    if len(path) <= _LONGEST_TEMPORARY:
        return [Finding(check="temporary folder", state="ok", detail=path)]
    advice = "Paths of sockets are short: set TMPDIR to a folder near the root."
    return [Finding(check="temporary folder", state="missing", detail=path, advice=advice)]


def _clock_state() -> int:
    """What adjtimex returns; -1 where it fails."""
    # struct timex with modes = 0: only reads. Larger than any kernel's.
    buffer = ctypes.create_string_buffer(1024)
    try:
        return int(ctypes.CDLL(None, use_errno=True).adjtimex(buffer))
    except (OSError, AttributeError):
        return -1
