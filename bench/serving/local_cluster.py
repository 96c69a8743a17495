"""A cluster on this machine for the time of a benchmark: `ctl up` in a process of its own."""

import itertools
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from core.log import STACKS_SIGNAL

_READY_SECONDS = 120.0
_STOP_SECONDS = 10.0
_WRITE_SECONDS = 0.05  # between two that may share a log
_STACKS_SECONDS = 1.0  # until all have written where they are
_ASK_AGAIN_SECONDS = 0.1
_LOG_LINES = 12
_FIRST_PORT, _LAST_PORT = 21000, 31000
_PORTS_A_CLUSTER = 20
# Several clusters of a process may start at once: none gets what another was just given.
_given_ports = itertools.cycle(range(_FIRST_PORT, _LAST_PORT, _PORTS_A_CLUSTER))


class ClusterError(Exception):
    """The cluster could not be started, or has not come to an end in time; the message has what it
    said."""


@contextmanager
def local_cluster(
    options: Sequence[str] = (),
    ready_seconds: float = _READY_SECONDS,
    most_seconds: float | None = None,
) -> Iterator[str]:
    """Base URL of a cluster that takes requests; `options` are those of `ctl up`.

    Raises ClusterError when it does not come up, or is not left within `most_seconds` of its start:
    it is killed then, and where its threads were is in the message.
    """
    port = _free_port_pair()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="epserve-bench-") as folder:
        output = Path(folder) / "terminal.txt"
        command = [sys.executable, "-m", "ctl", "up", "--port", str(port), "--log-dir", folder]
        with output.open("wb") as stream:
            process = subprocess.Popen([*command, *options], stdout=stream, stderr=stream)
        try:
            with _killed_after(most_seconds, process, output):
                _wait_until_ready(url, process, output, ready_seconds)
                yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def router_of(url: str) -> str:
    """host:port of the router of a `local_cluster` at `url`."""
    host, _, port = url.removeprefix("http://").partition(":")
    return f"{host}:{int(port) + 1}"


@contextmanager
def _killed_after(
    seconds: float | None, process: "subprocess.Popen[bytes]", output: Path
) -> Iterator[None]:
    """Whatever the block was waiting for fails then, and becomes a ClusterError."""
    said = []

    def give_up() -> None:
        import psutil

        before = {log: log.stat().st_size for log in _logs(output)}
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.send_signal(STACKS_SIGNAL)
            time.sleep(_WRITE_SECONDS)
        time.sleep(_STACKS_SECONDS)
        said.append(f"not over after {seconds:g} s: {_said(output, before)}")
        process.kill()

    watch = threading.Timer(seconds, give_up) if seconds is not None else None
    if watch is not None:
        watch.start()
    try:
        yield
    except Exception as error:
        if watch is not None and said:
            raise ClusterError(said[0]) from error
        raise
    finally:
        if watch is not None:
            watch.cancel()
            watch.join()


def _wait_until_ready(
    url: str, process: "subprocess.Popen[bytes]", output: Path, ready_seconds: float
) -> None:
    deadline = time.monotonic() + ready_seconds
    while not _is_healthy(url):
        if process.poll() is not None or time.monotonic() > deadline:
            raise ClusterError(f"ctl up failed: {_said(output, {})}")
        time.sleep(_ASK_AGAIN_SECONDS)


def _said(output: Path, sizes: Mapping[Path, int]) -> str:
    """What a cluster printed, and beside it the end of its processes' logs: the last lines, and
    all after so many bytes of one."""
    parts = [output.read_text(errors="replace")]
    for log in _logs(output):
        text = log.read_bytes()
        known = sizes.get(log, len(text))
        tail = text[:known].decode(errors="replace").splitlines()[-_LOG_LINES:]
        rest = text[known:].decode(errors="replace").splitlines()
        parts.append("\n".join([f"--- {log.name}", *tail, *rest]))
    return "\n".join(parts)


def _logs(output: Path) -> list[Path]:
    return sorted(output.parent.rglob("*.log"))


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
