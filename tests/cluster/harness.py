"""A real local cluster for tests: `ctl up` in a process of its own, real sockets, real NIXL."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from proto import router_pb2, router_pb2_grpc, worker_pb2
from tests.cluster.token_channel import token_channel
from tests.free_ports import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
# Prompts of the tests are computed in several pieces.
SMALL_CHUNKS = ("--chunk-tokens", "256")
DEMO_MODEL = REPOSITORY / "demo_model" / "checkpoint"


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Polls until `condition()` is true; AssertionError naming `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


class ClusterClient:
    """Who asks a gateway at `port`, and the router at the port after it."""

    model: str

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.router = f"127.0.0.1:{port + 1}"
        self.client = httpx.Client(base_url=self.url, timeout=120)
        self._channel = token_channel(self.router, self.router)
        self._admin = router_pb2_grpc.AdminStub(self._channel)

    def close(self) -> None:
        self.client.close()
        self._channel.close()

    def learn_model(self) -> None:
        self.model = self.client.get("/v1/models").json()["data"][0]["id"]

    def status(self) -> router_pb2.GetStatusResponse:
        return self._admin.GetStatus(router_pb2.GetStatusRequest(), timeout=30)

    def workers(self, role: "worker_pb2.Role.ValueType") -> list[worker_pb2.WorkerStatus]:
        return [w for w in self.status().workers if w.identity.role == role]

    def kill(self, worker: worker_pb2.WorkerStatus) -> None:
        os.kill(worker.identity.pid, signal.SIGKILL)

    def num_pages_not_free(self) -> int:
        """Pages that some request still holds, over all ranks of both sides; the prefix
        tree's own pages are free in this sense (they are evictable)."""
        return sum(
            rank.pages_total - rank.pages_free
            for worker in self.status().workers
            for rank in worker.ranks
        )

    def num_open_requests(self) -> int:
        return sum(
            rank.num_running + rank.num_waiting
            for worker in self.status().workers
            for rank in worker.ranks
        )

    def assert_nothing_held(self, seconds: float = 60.0) -> None:
        """All pages free and no request open, on every rank of every worker."""

        def nothing_held() -> bool:
            status = self.status()
            return bool(status.workers) and not (
                self.num_pages_not_free() or self.num_open_requests()
            )

        wait_until(nothing_held, seconds, f"every page free: {self.status()}")

    def complete(self, token_ids: list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
        """POST /v1/completions, greedy, end-of-sequence respected; the parsed reply."""
        body = {"model": self.model, "prompt": token_ids, "max_tokens": max_tokens}
        reply = self.client.post("/v1/completions", json=body | {"temperature": 0} | fields)
        assert reply.status_code == 200, reply.text
        return reply.json()


class Cluster(ClusterClient):
    """`ctl up` with the given options; leaves nothing behind."""

    def __init__(self, log_dir: Path, *options: str, model: Path = DEMO_MODEL) -> None:
        super().__init__(free_port(8))  # gateway, router, and workers behind them
        self.log_dir = log_dir
        command = [sys.executable, "-m", "ctl", "up", "--port", str(self.port)]
        # The machine that tests may keep a process from running, and from talking, for seconds.
        for flag in ("router.silence-seconds", "prefill.stall-seconds", "decode.stall-seconds"):
            command += ["--set", f"{flag}=20"]
        command += ["--model", str(model), "--log-dir", str(log_dir), *options]
        log_dir.mkdir(parents=True, exist_ok=True)
        self._output_path = log_dir / "terminal.txt"
        self._output = self._output_path.open("wb")
        self.started_at = time.monotonic()
        self.process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )

    def __enter__(self) -> Self:
        try:
            wait_until(self.is_ready, 240, f"cluster ready; it said: {self.output()}")
        except BaseException:
            self.close()
            raise
        self.learn_model()
        self.seconds_to_ready = time.monotonic() - self.started_at
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        super().close()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(120)
        finally:
            self.process.kill()
            self._output.close()

    def output(self) -> str:
        text = self._output_path.read_text(errors="replace")
        return re.sub(r"\x1b\[[0-9;]*m", "", text)

    def is_ready(self) -> bool:
        assert self.process.poll() is None, f"ctl up ended: {self.output()}"
        try:
            return httpx.get(f"{self.url}/health", timeout=2).status_code == 200
        except httpx.TransportError:
            return False
