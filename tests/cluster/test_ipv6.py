"""Processes that listen on [::] are reached by IPv6 alone, by which a decode group of two nodes
meets, and by IPv4 as well."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import httpx
import pytest

from ctl.local.readiness import NotHealthy, check_grpc, check_http
from proto import router_pb2, router_pb2_grpc
from rpc.cluster_token import TOKEN_KEY
from tests.cluster.harness import DEMO_MODEL, REPOSITORY, wait_until
from tests.free_ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


TOKEN = "sesame"


def has_ipv6() -> bool:
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@pytest.fixture
def ports(tmp_path: Path) -> Iterator[dict[str, int]]:
    """Of every process, by its name; that of its metrics is the next one."""
    if not has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    names = ("router", "prefill", "decode-0", "decode-1", "gateway", "rendezvous")
    first = free_port(2 * len(names))
    found = {name: first + 2 * index for index, name in enumerate(names)}
    at = {name: f"[::1]:{port}" for name, port in found.items()}
    node = [
        "decode_worker", "--nodes=2", f"--rendezvous={at['rendezvous']}", "--expert-group=pair",
        "--ep-backend=gloo",
    ]  # fmt: skip
    commands = {
        "router": [f"--prefill={at['prefill']}", f"--decode={at['decode-0']},{at['decode-1']}"],
        "prefill": ["prefill_worker"],
        "decode-0": [*node, "--node-rank=0"],
        "decode-1": [*node, "--node-rank=1"],
        "gateway": ["gateway", f"--router={at['router']}"],
    }
    commands["router"].insert(0, "router")
    # KV, too, where it could take a shorter way.
    environment = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", "UCX_TCP_AF_PRIO": "inet6"}
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    environment |= os.environ | {
        "OMP_NUM_THREADS": "1",
        "EPSERVE_CLUSTER_TOKEN_FILE": str(token_file),
    }
    with ExitStack() as stack:
        for name, (module, *flags) in commands.items():
            flags += [f"--name={name}", f"--listen=[::]:{found[name]}", "--advertise=::1"]
            flags += [f"--metrics-port={found[name] + 1}"]
            if name != "router":
                flags += [f"--model={DEMO_MODEL}", "--served-model-name=demo"]
            if module.endswith("worker"):
                flags += ["--threads=1", "--kv-pages=64", "--stop-grace-seconds=0"]
            log = stack.enter_context((tmp_path / name).open("wb"))
            process = subprocess.Popen(
                [sys.executable, "-m", module, *flags],
                cwd=REPOSITORY, stdout=log, stderr=log, env=environment,
            )  # fmt: skip
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
        yield found


def is_ready(port: int) -> bool:
    with suppress(NotHealthy):
        asyncio.run(check_http(f"[::1]:{port}", "/ready"))
        return True
    return False


def test_a_cluster_over_ipv6(ports: dict[str, int]) -> None:
    wait_until(lambda: is_ready(ports["gateway"]), 240, "the gateway is ready")
    body = {"model": "demo", "prompt": "Hello", "max_tokens": 4, "temperature": 0}
    texts = set()
    for host in ("[::1]", "127.0.0.1"):
        url = f"http://{host}:{ports['gateway']}/v1/completions"
        reply = httpx.post(url, json=body, timeout=120)
        assert reply.status_code == 200, reply.text
        texts.add(reply.json()["choices"][0]["text"])
        asyncio.run(check_grpc(f"{host}:{ports['router']}"))
        for port in ports.values():
            if port != ports["rendezvous"]:
                metrics = httpx.get(f"http://{host}:{port + 1}/metrics", timeout=30)
                assert "epserve_" in metrics.text
    assert len(texts) == 1
    with grpc.insecure_channel(f"[::1]:{ports['router']}") as channel:
        told = router_pb2_grpc.AdminStub(channel).GetStatus(
            router_pb2.GetStatusRequest(), timeout=30, metadata=[(TOKEN_KEY, TOKEN)]
        )
    addresses = {worker.identity.address for worker in told.workers}
    assert addresses == {f"[::1]:{ports[name]}" for name in ("prefill", "decode-0", "decode-1")}
