"""Commands that go to a router pod through `kubectl`: one that lists pods and forwards as the test
says, and a real admin service at its end. The real kubectl reads kubeconfig files, if installed."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import psutil
import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from ctl.main import app
from proto import router_pb2
from proto.worker_pb2 import ROLE_ROUTER, ProcessIdentity
from tests.ctl.admin.admin_server import ScriptedAdmin, admin_server

RUNNER = CliRunner(env={"COLUMNS": "300", "TERM": "dumb", "NO_COLOR": "1"})
STATUS = router_pb2.GetStatusResponse(
    processes=[ProcessIdentity(role=ROLE_ROUTER, name="router-in-pod", address="10.0.0.1:8001")]
)
REAL_KUBECTL = shutil.which("kubectl")
KUBECTL = """#!{python} -IS
import json, os, pathlib, signal, sys
folder = pathlib.Path(__file__).parent
with open(folder / "calls", "a") as calls:
    calls.write(json.dumps([os.getpid(), *sys.argv[1:]]) + "\\n")
if "config" in sys.argv and {real!r}:
    os.execv({real!r}, sys.argv)
if "config" in sys.argv:
    print("inference", end="")
elif "--context=wrong" in sys.argv:
    sys.exit("E1127 something\\nerror: You must be logged in to the server (Unauthorized)")
elif "get" in sys.argv:
    print((folder / "pods").read_text())
elif (folder / "port").exists():
    print("Forwarding from 127.0.0.1:" + (folder / "port").read_text(), "-> 8001", flush=True)
    signal.pause()
else:
    sys.exit("error: unable to forward port because pod is not running. Current status=Pending")
"""


def pod(name: str, *, ready: bool = True, release: str = "prod") -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"app.kubernetes.io/instance": release}},
        "status": {"conditions": [{"type": "Ready", "status": str(ready)}]},
    }


class Kubernetes:
    """`ctl` with a kubeconfig of two contexts, of which the first one is right, and pods that are
    all at `port`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kubeconfig = folder / "kubeconfig"
        contexts = [
            {"name": "right", "context": {"cluster": "c", "user": "me", "namespace": "inference"}},
            {"name": "wrong", "context": {"cluster": "c", "user": "other"}},
        ]
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
            "users": [{"name": name, "user": {"token": name}} for name in ("me", "other")],
            "contexts": contexts,
        }
        self.kubeconfig.write_text(yaml.safe_dump(config | {"current-context": "right"}))
        kubectl = folder / "kubectl"
        kubectl.write_text(KUBECTL.format(python=sys.executable, real=REAL_KUBECTL))
        kubectl.chmod(0o755)

    def holds(self, *pods: dict[str, Any], port: int = 1) -> None:
        (self.folder / "pods").write_text(json.dumps({"kind": "PodList", "items": pods}))
        (self.folder / "port").write_text(str(port))

    def calls(self, verb: str) -> list[list[Any]]:
        lines = (self.folder / "calls").read_text().splitlines()
        return [call for call in map(json.loads, lines) if verb in call]

    def ctl(self, line: str) -> Result:
        return RUNNER.invoke(app, [*line.split(), "--kubeconfig", str(self.kubeconfig)])


@pytest.fixture
def kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubernetes:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return Kubernetes(tmp_path)


@pytest.fixture
def router_port() -> Iterator[int]:
    with admin_server(ScriptedAdmin(GetStatus=STATUS)) as address:
        yield int(address.rpartition(":")[2])


def test_a_ready_router_pod_is_found_and_reached(kubernetes: Kubernetes, router_port: int) -> None:
    leaving = pod("router-b")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    kubernetes.holds(pod("router-a", ready=False), leaving, pod("router-c"), port=router_port)
    result = kubernetes.ctl("status --output json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["processes"][0]["name"] == "router-in-pod"
    ((*_, listed, timeout),) = kubernetes.calls("get")
    assert timeout == "--request-timeout=10s"
    assert unquote(listed) == (
        "--raw=/api/v1/namespaces/inference/pods?labelSelector="
        "app.kubernetes.io/name=epserve,app.kubernetes.io/component=router"
    )
    ((pid, *arguments),) = kubernetes.calls("port-forward")
    assert arguments == [
        f"--kubeconfig={kubernetes.kubeconfig}",
        "--namespace=inference",
        "port-forward",
        "--address=127.0.0.1",
        "pod/router-c",
        ":grpc",
    ]
    assert not psutil.pid_exists(pid)


def test_one_release_of_several(kubernetes: Kubernetes, router_port: int) -> None:
    kubernetes.holds(pod("a"), pod("b", release="test"), port=router_port)
    result = kubernetes.ctl("status")
    assert result.exit_code == 2
    assert "--release" in result.stderr
    kubernetes.holds(pod("a"), port=router_port)
    assert kubernetes.ctl("status --release prod").exit_code == 0
    assert "app.kubernetes.io/instance=prod" in unquote(str(kubernetes.calls("get")[-1]))


def test_no_router_pod(kubernetes: Kubernetes) -> None:
    kubernetes.holds(pod("a", ready=False))
    result = kubernetes.ctl("status")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no router pod is ready in namespace inference" in result.stderr


def test_a_pod_where_nothing_listens(kubernetes: Kubernetes) -> None:
    kubernetes.holds(pod("a"))
    result = kubernetes.ctl("status")
    assert result.exit_code == 1
    assert "no answer from the router at a router pod" in result.stderr


def test_a_pod_that_kubectl_does_not_reach(kubernetes: Kubernetes) -> None:
    kubernetes.holds(pod("a"))
    (kubernetes.folder / "port").unlink()
    result = kubernetes.ctl("status")
    assert result.exit_code == 1
    assert "kubectl port-forward does not reach the pod a" in result.stderr


def test_a_login_that_is_refused(kubernetes: Kubernetes) -> None:
    result = kubernetes.ctl("status --context wrong --namespace inference")
    assert result.exit_code == 1
    assert "lists no pods: error: You must be logged in" in result.stderr


def test_no_kubectl(kubernetes: Kubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    result = kubernetes.ctl("status")
    assert result.exit_code == 2
    assert "kubectl" in result.stderr


def test_usage(kubernetes: Kubernetes, tmp_path: Path) -> None:
    result = kubernetes.ctl("status --router 127.0.0.1:1")
    assert result.exit_code == 2
    assert "both a router" in result.stderr
    missing = RUNNER.invoke(app, ["status", "--kubeconfig", str(tmp_path / "none")])
    assert missing.exit_code == 2


@pytest.mark.skipif(REAL_KUBECTL is None, reason="kubectl reads these files")
def test_unusable_kubeconfig_files(kubernetes: Kubernetes) -> None:
    result = kubernetes.ctl("status --context nowhere")
    assert result.exit_code == 2, result.output
    assert "nowhere" in result.stderr
    for nonsense in ("nonsense", "a: [", "clusters: 7\ncontexts: 8\nusers: 9", ""):
        kubernetes.kubeconfig.write_text(nonsense)
        assert kubernetes.ctl("status").exit_code == 2, nonsense
