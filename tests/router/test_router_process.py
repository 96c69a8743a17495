"""`python -m router` as a process."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from proto.router_pb2 import AssignRequest, GetStatusRequest
from proto.router_pb2_grpc import AdminStub, RouterStub

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def router(*flags: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "router", *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def first_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stderr is not None
    line: dict[str, Any] = json.loads(process.stderr.readline())
    return line


def test_it_serves_counts_and_stops_on_sigterm() -> None:
    flags = ("--metrics-port", "0", "--log-format", "json", "--prefill", "127.0.0.1:9")
    with router(*flags) as process:
        started = first_line(process)
        assert started["event"] == "router serves"
        with grpc.insecure_channel(started["address"]) as channel:
            status = AdminStub(channel).GetStatus(GetStatusRequest(), timeout=30)
            (own,) = status.processes
            assert (own.pid, own.address) == (process.pid, started["address"])
            with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
                RouterStub(channel).Assign(
                    AssignRequest(model="m", num_prompt_tokens=1), timeout=30
                )
        url = f"http://127.0.0.1:{started['metrics_port']}/metrics"
        with urllib.request.urlopen(url, timeout=30) as reply:
            text = reply.read().decode()
        samples = {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert samples["epserve_router_assign_total", "unavailable"] == 1
        assert samples["epserve_router_assign_total", "ok"] == 0
        assert samples["epserve_router_workers", "decode", "ready"] == 0
        assert samples["epserve_router_num_waiting_requests",] == 0
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=30)
        assert process.returncode == 0
        assert out == ""


def test_a_taken_port_and_wrong_flags_end_it_with_a_word() -> None:
    with router("--log-format", "json") as first:
        address = first_line(first)["address"]
        with router("--listen", address) as second:
            _, errors = second.communicate(timeout=30)
        assert second.returncode == 1
        assert errors.splitlines()[-1].startswith(f"error: cannot listen on {address}")
        assert "Traceback" not in errors
    with router("--decode", "nonsense") as third:
        _, errors = third.communicate(timeout=30)
    assert third.returncode == 2
    assert errors == "error: --decode: 'nonsense' is not host:port, got 'nonsense'\n"


def test_the_control_plane_knows_no_torch() -> None:
    code = "import router.__main__, rpc.server, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=30)
