"""Whole clusters whose processes know each other: by the token of `ctl up`, and by certificates."""

import os
import re
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from proto import router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.certificates import Authority, needs_openssl
from tests.cluster.harness import REPOSITORY, Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
OPTIONS = ("--kv-pages", "64", "--decode-ranks", "1")
CHAT = {"messages": [{"role": "user", "content": "What is 37 + 48?"}], "temperature": 0}


def ctl(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ctl", *arguments],
        capture_output=True, text=True, cwd=REPOSITORY, timeout=120, env=os.environ | environment,
    )  # fmt: skip


def refusal(call: grpc.UnaryUnaryMultiCallable, request: object) -> grpc.StatusCode | None:  # type: ignore[type-arg]
    try:
        call(request, timeout=30)
    except grpc.RpcError as error:
        return error.code()
    return None


def chat(cluster: Cluster) -> str:
    reply = cluster.client.post("/v1/chat/completions", json=CHAT | {"model": cluster.model})
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["message"]["content"]
    return text


def test_a_stranger_on_this_machine_is_refused_everything(served: Cluster, tmp_path: Path) -> None:
    assert "85" in chat(served)
    workers = served.status().workers
    with grpc.insecure_channel(served.router) as peer:
        admin, router = router_pb2_grpc.AdminStub(peer), router_pb2_grpc.RouterStub(peer)
        gateway = worker_pb2.ProcessIdentity(role=worker_pb2.ROLE_GATEWAY, address="a:1", epoch="e")
        for call, request in (
            (admin.GetStatus, router_pb2.GetStatusRequest()),
            (admin.DrainWorker, router_pb2.DrainWorkerRequest(worker="decode-0")),
            (admin.SetLogLevel, router_pb2.SetProcessLogLevelRequest(level="debug")),
            (router.Assign, router_pb2.AssignRequest(num_prompt_tokens=1)),
            (router.Announce, router_pb2.AnnounceRequest(identity=gateway)),
        ):
            assert refusal(call, request) is grpc.StatusCode.UNAUTHENTICATED
    for worker in workers:
        with grpc.insecure_channel(worker.identity.address) as peer:
            drain = worker_pb2_grpc.WorkerStub(peer).Drain
            code = refusal(drain, worker_pb2.DrainRequest())
            assert code is grpc.StatusCode.UNAUTHENTICATED
    # This user's ctl finds the token; one of another temporary folder has none.
    (tmp_path / "elsewhere").mkdir()
    assert ctl("status", "--router", served.router).returncode == 0
    done = ctl("status", "--router", served.router, TMPDIR=str(tmp_path / "elsewhere"))
    assert done.returncode == 1
    assert "cluster's token" in done.stderr
    assert ctl("probe", "grpc", served.router).returncode == 0


def certificate_options(authority: Authority) -> list[str]:
    access = authority.access()
    return [
        f"--cluster-tls-{name}={getattr(access, f'cluster_tls_{name}')}"
        for name in ("cert", "key", "ca")
    ]


@needs_openssl
def test_a_cluster_of_certificates(tmp_path: Path) -> None:
    options = certificate_options(Authority(tmp_path / "ours"))
    with Cluster(tmp_path / "logs", *OPTIONS, *options) as cluster:
        assert "85" in chat(cluster)
        done = ctl("status", "--router", cluster.router, *options)
        assert done.returncode == 0, done.stderr
        assert len(re.findall("^(?:gateway|router|prefill|decode) ", done.stdout, re.M)) == 4
        # With the token, but without a certificate, or with another's.
        for stranger in ([], certificate_options(Authority(tmp_path / "other"))):
            done = ctl("status", "--router", cluster.router, *stranger)
            assert done.returncode == 1
            assert "no answer from the router" in done.stderr
        probed = ctl("probe", "grpc", cluster.router, *options)
        assert probed.returncode == 0, probed.stderr
        assert ctl("probe", "grpc", cluster.router).returncode == 1
