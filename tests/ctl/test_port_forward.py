"""Commands that go through the Kubernetes API to a router pod: a server that lists pods and
speaks the port-forward protocol (channel.k8s.io over WebSocket), and a real admin service behind
it."""

import http
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

from ctl.main import app
from proto import router_pb2
from proto.worker_pb2 import ROLE_ROUTER, ProcessIdentity
from tests.ctl.admin_server import ScriptedAdmin, admin_server

RUNNER = CliRunner(env={"COLUMNS": "300", "TERM": "dumb", "NO_COLOR": "1"})
TOKEN = "login-of-the-operator"
STATUS = router_pb2.GetStatusResponse(
    processes=[ProcessIdentity(role=ROLE_ROUTER, name="router-in-pod", address="10.0.0.1:8001")]
)


def pod(name: str, port: int, *, ready: bool = True, release: str = "prod") -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"app.kubernetes.io/instance": release}},
        "spec": {"containers": [{"name": "c", "ports": [{"name": "grpc", "containerPort": port}]}]},
        "status": {"conditions": [{"type": "Ready", "status": str(ready)}]},
    }


class FakeApi:
    """One API server; `pods` are those of its only namespace, "inference"."""

    def __init__(self) -> None:
        self.pods: list[dict[str, Any]] = []
        self.selectors: list[str] = []
        self.forwarded: list[str] = []

    def answer(self, _connection: ServerConnection, request: Request) -> Response | None:
        url = urlsplit(request.path)
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return self._json(http.HTTPStatus.UNAUTHORIZED, {"message": "who are you"})
        if url.path == "/api/v1/namespaces/inference/pods":
            self.selectors += parse_qs(url.query)["labelSelector"]
            listed = {"kind": "PodList", "apiVersion": "v1", "items": self.pods, "metadata": {}}
            return self._json(http.HTTPStatus.OK, listed)
        if url.path.endswith("/portforward"):
            return None  # goes on as a WebSocket
        return self._json(http.HTTPStatus.NOT_FOUND, {"message": url.path})

    def forward(self, peer: ServerConnection) -> None:
        """Channel 0 carries the port's data, channel 1 its errors; each begins with the port."""
        assert peer.request is not None
        url = urlsplit(peer.request.path)
        self.forwarded.append(url.path)
        port = int(parse_qs(url.query)["ports"][0])
        for channel in (0, 1):
            peer.send(bytes([channel]) + port.to_bytes(2, "little"))
        try:
            near = socket.create_connection(("127.0.0.1", port))
        except OSError as error:
            peer.send(b"\x01" + str(error).encode())
            return
        back = threading.Thread(target=self._back, args=(peer, near))
        back.start()
        with suppress(ConnectionClosed, OSError):
            for frame in peer:
                assert isinstance(frame, bytes)
                assert frame[0] == 0
                near.sendall(frame[1:])
        with suppress(OSError):
            near.shutdown(socket.SHUT_RDWR)
        back.join()
        near.close()

    @staticmethod
    def _back(peer: ServerConnection, near: socket.socket) -> None:
        with suppress(ConnectionClosed, OSError):
            while data := near.recv(65536):
                peer.send(b"\x00" + data)
        peer.close()

    @staticmethod
    def _json(status: http.HTTPStatus, body: dict[str, Any]) -> Response:
        headers = Headers([("Content-Type", "application/json"), ("Connection", "close")])
        data = json.dumps(body).encode()
        headers["Content-Length"] = str(len(data))
        return Response(status, status.phrase, headers, data)


class Kubernetes:
    """`ctl` with a kubeconfig of two contexts, of which the first one is right."""

    def __init__(self, api: FakeApi, url: str, folder: Path) -> None:
        self.api = api
        self.kubeconfig = folder / "kubeconfig"
        cluster = {"name": "c", "cluster": {"server": url}}
        users = [
            {"name": name, "user": {"token": token}}
            for name, token in (("me", TOKEN), ("other", "x"))
        ]
        contexts = [
            {"name": "right", "context": {"cluster": "c", "user": "me", "namespace": "inference"}},
            {"name": "wrong", "context": {"cluster": "c", "user": "other"}},
        ]
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [cluster],
            "users": users,
            "contexts": contexts,
            "current-context": "right",
        }
        self.kubeconfig.write_text(yaml.safe_dump(config))

    def ctl(self, line: str) -> Result:
        return RUNNER.invoke(app, [*line.split(), "--kubeconfig", str(self.kubeconfig)])


@pytest.fixture
def kubernetes(tmp_path: Path) -> Iterator[Kubernetes]:
    api = FakeApi()
    server = serve(
        api.forward,
        "127.0.0.1",
        0,
        process_request=api.answer,
        subprotocols=["v4.channel.k8s.io"],  # type: ignore[list-item]
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Kubernetes(api, f"http://127.0.0.1:{server.socket.getsockname()[1]}", tmp_path)
    server.shutdown()
    thread.join()


@pytest.fixture
def router_port() -> Iterator[int]:
    with admin_server(ScriptedAdmin(GetStatus=STATUS)) as address:
        yield int(address.rpartition(":")[2])


def test_a_ready_router_pod_is_found_and_reached(kubernetes: Kubernetes, router_port: int) -> None:
    leaving = pod("router-b", 2)
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    kubernetes.api.pods = [
        pod("router-a", 1, ready=False),
        leaving,
        pod("router-c", router_port),
    ]
    for _ in range(2):  # nothing is left over from the time before
        result = kubernetes.ctl("status --output json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["processes"][0]["name"] == "router-in-pod"
    assert set(kubernetes.api.forwarded) == {
        "/api/v1/namespaces/inference/pods/router-c/portforward"
    }
    assert set(kubernetes.api.selectors) == {
        "app.kubernetes.io/name=epserve,app.kubernetes.io/component=router"
    }


def test_one_release_of_several(kubernetes: Kubernetes, router_port: int) -> None:
    kubernetes.api.pods = [pod("a", router_port), pod("b", router_port, release="test")]
    result = kubernetes.ctl("status")
    assert result.exit_code == 2
    assert "--release" in result.stderr
    kubernetes.api.pods.pop()
    assert kubernetes.ctl("status --release prod").exit_code == 0
    assert kubernetes.api.selectors[-1].endswith(",app.kubernetes.io/instance=prod")


def test_no_router_pod(kubernetes: Kubernetes) -> None:
    kubernetes.api.pods = [pod("a", 1, ready=False)]
    result = kubernetes.ctl("status")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no router pod is ready in namespace inference" in result.stderr


def test_a_pod_where_nobody_listens(kubernetes: Kubernetes) -> None:
    kubernetes.api.pods = [pod("a", 1)]
    result = kubernetes.ctl("status")
    assert result.exit_code == 1
    assert "no answer from the router at a router pod" in result.stderr


def test_a_login_that_is_refused(kubernetes: Kubernetes) -> None:
    result = kubernetes.ctl("status --context wrong --namespace inference")
    assert result.exit_code == 1
    assert "401" in result.stderr


def test_usage(kubernetes: Kubernetes, tmp_path: Path) -> None:
    for line, reason in (
        ("status --router 127.0.0.1:1", "both a router"),
        ("status --context nowhere", "nowhere"),
    ):
        result = kubernetes.ctl(line)
        assert result.exit_code == 2, result.output
        assert reason in result.stderr
    for nonsense in ("nonsense", "a: [", "clusters: 7\ncontexts: 8\nusers: 9", ""):
        kubernetes.kubeconfig.write_text(nonsense)
        assert kubernetes.ctl("status").exit_code == 2, nonsense
    missing = RUNNER.invoke(app, ["status", "--kubeconfig", str(tmp_path / "none")])
    assert missing.exit_code == 2
