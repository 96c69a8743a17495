"""Claims that only one node can mount are refused, where an API server tells of them."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import helm_python
import pytest

from tests.deploy.chart import CHART, EXAMPLES, load, overlaid

CLAIMS = "/api/v1/namespaces/serving/persistentvolumeclaims"
KIND = {"name": "persistentvolumeclaims", "kind": "PersistentVolumeClaim", "namespaced": True}
ANSWERS: dict[str, Any] = {
    "/version": {"major": "1", "minor": "32", "gitVersion": "v1.32.0"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
    "/api/v1": {
        "kind": "APIResourceList", "groupVersion": "v1",
        "resources": [KIND | {"singularName": "", "verbs": ["get", "list"]}],
    },
}  # fmt: skip


@contextmanager
def api_server(claims: dict[str, list[str]]) -> Iterator[str]:
    """One that knows claims and their access modes; its URL."""
    answers = ANSWERS | {
        f"{CLAIMS}/{name}": {
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name},
            "spec": {"accessModes": modes},
        }
        for name, modes in claims.items()
    }  # fmt: skip

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path.partition("?")[0])
            body = json.dumps(answer or {"kind": "Status", "reason": "NotFound", "code": 404})
            self.send_response(200 if answer else 404)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("modes", "claim", "is_refused"),
    [
        (["ReadWriteOnce"], "models", True),
        (["ReadWriteOncePod"], "models", True),
        (["ReadOnlyMany"], "models", False),
        (["ReadWriteOnce", "ReadWriteMany"], "models", False),
        (["ReadWriteOnce"], "caches", True),
        (["ReadWriteMany"], "caches", False),
    ],
)
def test_claims_of_several_pods(modes: list[str], claim: str, is_refused: bool) -> None:
    values = load(EXAMPLES / "values-two-nodes-16-gpu.yaml")
    if claim == "caches":
        values = overlaid(values, "workers", "common", "cache", value={"claim": "caches"})
    with api_server({"models": ["ReadOnlyMany"], claim: modes}) as url:
        cluster = helm_python.Config(
            kube_apiserver=url, namespace="serving", storage_driver="memory"
        )
        # This API server knows too little to install anything: what it lacks is told after that.
        with pytest.raises(helm_python.HelmError) as caught:
            cluster.install(str(CHART), "epserve", values, namespace="serving", dry_run="server")
    told = f"the claim {claim} is {modes[0]}, but several pods mount it: it must be ReadWriteMany"
    assert (told in str(caught.value)) == is_refused
    assert is_refused or "openapi" in str(caught.value)
