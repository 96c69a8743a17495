"""`ctl up` for real: every process, real sockets, a tiny random model."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from ctl.base.ports import free_ports, is_free
from tests.tiny_checkpoint import make_tiny_checkpoint

pytestmark = pytest.mark.cluster

REPOSITORY = Path(__file__).parents[3]
LONG = 2000  # tokens: seconds more than what an idle cluster needs to end
PROCESSES = {"router", "gateway", "prefill-0", "decode-0"}


class Up:
    """A running `ctl up`."""

    def __init__(self, model: Path, folder: Path, port: int, *options: str) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.logs = folder / "logs"
        self._output_path = folder / "terminal.txt"
        command = [sys.executable, "-m", "ctl", "up", "--model", str(model), "--port", str(port)]
        with self._output_path.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "--log-dir", str(self.logs), *options],
                stdout=output,
                stderr=output,
                cwd=REPOSITORY,
            )

    def output(self) -> str:
        text = self._output_path.read_text(errors="replace")
        if self.logs.is_dir():
            self.tails = {log.name: log.read_text()[-2000:] for log in self.logs.iterdir()}
        return text

    def wait_for(self, pattern: str, seconds: float) -> None:
        def said() -> bool:
            ended = self.process.poll() is not None
            assert not ended or re.search(pattern, self.output()), self.output()
            return re.search(pattern, self.output()) is not None

        wait_until(said, seconds, f"{pattern} in: {self.output()}")

    def tree(self) -> list[psutil.Process]:
        """Every process below ctl."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def status(self) -> dict[str, Any]:
        answer = subprocess.run(
            [
                sys.executable,
                "-m",
                "ctl",
                "status",
                "--output=json",
                "--router",
                f"127.0.0.1:{self.port + 1}",
            ],
            capture_output=True,
            text=True,
            check=True,
            cwd=REPOSITORY,
        )
        report: dict[str, Any] = json.loads(answer.stdout)
        return report

    def complete(self) -> httpx.Response:
        body = {"model": "tiny", "prompt": list(range(20, 50)), "max_tokens": 8, "temperature": 0}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def assert_all_gone(processes: list[psutil.Process], seconds: float) -> None:
    def alive(process: psutil.Process) -> bool:
        try:
            return bool(process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    wait_until(
        lambda: not any(map(alive, processes)),
        seconds,
        f"gone: {[process for process in processes if alive(process)]}",
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_checkpoint(folder)
    return folder


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Callable[..., Up]]:
    running: list[Up] = []

    def begin(*options: str) -> Up:
        port = next(port for port in free_ports(24000) if is_free(port + 1))
        running.append(Up(model, tmp_path, port, *options))
        return running[-1]

    yield begin
    for up in running:
        up.process.kill()
        up.process.wait()


def test_the_life_of_a_cluster(start: Callable[..., Up]) -> None:
    up = start("--set", "gateway.grace-seconds=300")
    up.wait_for(r"ready in [\d.]+ s", 240)
    up.wait_for("Ctrl-C stops everything", 60)
    assert f"curl {up.url}/v1/chat/completions" in up.output()

    assert up.complete().json()["usage"]["completion_tokens"] == 8
    report = up.status()
    epochs = {each["name"]: each["epoch"] for each in report["processes"]}
    assert set(epochs) == PROCESSES
    pids = {process.pid for process in up.tree()}
    assert {each["pid"] for each in report["processes"]} < pids
    ranks = {worker["name"]: len(worker["ranks"]) for worker in report["workers"]}
    assert ranks == {"prefill-0": 1, "decode-0": 2}
    assert {log.stem for log in up.logs.iterdir()} == PROCESSES

    (decode_pid,) = (each["pid"] for each in report["processes"] if each["name"] == "decode-0")
    os.kill(decode_pid, signal.SIGKILL)
    up.wait_for(r"decode-0 died: signal 9 \(SIGKILL\); starting it again in 0.5 s", 60)
    up.wait_for("decode-0 ready again", 240)
    wait_until(lambda: up.complete().status_code == 200, 120, "an answer after the restart")
    renewed = {each["name"]: each["epoch"] for each in up.status()["processes"]}
    assert set(renewed) == PROCESSES
    assert {name for name in PROCESSES if renewed[name] != epochs[name]} == {"decode-0"}

    tree = up.tree()
    body = {"model": "tiny", "prompt": [20], "max_tokens": LONG, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{up.url}/v1/completions", json=body, timeout=120) as reply:
        events = reply.iter_lines()
        next(events)
        up.process.send_signal(signal.SIGINT)
        last = [line for line in events if line][-2:]
    assert '"finish_reason":"length"' in last[0]  # it has come to its end
    assert last[1] == "data: [DONE]"
    assert up.process.wait(60) == 0
    assert_all_gone(tree, 20)
    assert "all stopped after" in up.output()


def test_nothing_outlives_a_killed_launcher(start: Callable[..., Up]) -> None:
    up = start("--decode-ranks", "1")
    up.wait_for(r"ready in [\d.]+ s", 240)
    tree = up.tree()
    assert len(tree) == 6
    up.process.kill()
    assert_all_gone(tree, 60)


def test_settings_that_a_process_refuses_end_the_cluster(
    start: Callable[..., Up], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPSERVE_PENDING_SECONDS", "never")  # flags are looked at before
    up = start()
    assert up.process.wait(120) == 1
    output = up.output()
    assert "router cannot be started: exit status 2" in output
    assert "--pending-seconds" in output
    assert_all_gone([], 1)
