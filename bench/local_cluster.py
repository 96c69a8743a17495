"""A cluster on this machine for the time of a benchmark: `ctl up` in a process of its own."""

import itertools
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_READY_SECONDS = 120.0
_STOP_SECONDS = 10.0
_ASK_AGAIN_SECONDS = 0.1
_LOG_LINES = 12
_FIRST_PORT, _LAST_PORT = 21000, 31000
_PORTS_A_CLUSTER = 20
# Several clusters of a process may start at once: nobody gets what another was just given.
_given_ports = itertools.cycle(range(_FIRST_PORT, _LAST_PORT, _PORTS_A_CLUSTER))


class ClusterError(Exception):
    """The cluster could not be started; the message has what it said."""


@contextmanager
def local_cluster(
    options: Sequence[str] = (), ready_seconds: float = _READY_SECONDS
) -> Iterator[str]:
    """Base URL of a cluster that takes requests; `options` are those of `ctl up`.

    Raises ClusterError when it does not come up.
    """
    port = _free_port_pair()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="epserve-bench-") as folder:
        output = Path(folder) / "terminal.txt"
        command = [sys.executable, "-m", "ctl", "up", "--port", str(port), "--log-dir", folder]
        with output.open("wb") as stream:
            process = subprocess.Popen([*command, *options], stdout=stream, stderr=stream)
        try:
            _wait_until_ready(url, process, output, ready_seconds)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(
    url: str, process: "subprocess.Popen[bytes]", output: Path, ready_seconds: float
) -> None:
    deadline = time.monotonic() + ready_seconds
    while not _is_healthy(url):
        if process.poll() is not None or time.monotonic() > deadline:
            raise ClusterError(f"ctl up failed: {_said(output)}")
        time.sleep(_ASK_AGAIN_SECONDS)


def _said(output: Path) -> str:
    """What a cluster printed, and the end of its processes' logs beside it."""
    parts = [output.read_text(errors="replace")]
    for log in sorted(output.parent.rglob("*.log")):
        lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        parts.append("\n".join([f"--- {log.name}", *lines]))
    return "\n".join(parts)


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _free_port_pair() -> int:
    """A port that is free, like the one above it: the router's."""
    for port in itertools.islice(_given_ports, (_LAST_PORT - _FIRST_PORT) // _PORTS_A_CLUSTER):
        if _is_free(port) and _is_free(port + 1):
            return port
    raise ClusterError(f"no two free ports between {_FIRST_PORT} and {_LAST_PORT}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError:
            return False
        return True
