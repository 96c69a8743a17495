"""A way to a router pod through `kubectl port-forward`.

with port_forward(kubeconfig=None, context="", namespace="inference", release="") as address:
    ...                               # connections to `address` end in the pod
"""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from core.errors import Unavailable
from ctl.base.die_with_parent import dying_with_us

# As the chart labels its pods and names their ports.
SELECTOR = "app.kubernetes.io/name=epserve,app.kubernetes.io/component=router"
INSTANCE_LABEL = "app.kubernetes.io/instance"
PORT_NAME = "grpc"

_LIST_SECONDS = 10
_CONTEXT_NAMESPACE = "jsonpath={.contexts[0].context.namespace}"


@contextmanager
def port_forward(
    *, kubeconfig: Path | None, context: str, namespace: str, release: str
) -> Iterator[str]:
    """Raises ValueError when nothing tells where the API server is or which release is meant,
    Unavailable when there is no router pod."""
    kubectl = [_find_kubectl()]
    if kubeconfig is not None:
        kubectl.append(f"--kubeconfig={kubeconfig}")
    if context:
        kubectl.append(f"--context={context}")
    try:
        found = _run(kubectl, "config", "view", "--minify", "--output", _CONTEXT_NAMESPACE)
    except subprocess.CalledProcessError as error:
        raise ValueError(f"the kubeconfig names no cluster: {_reason(error)}") from error
    namespace = namespace or found or "default"
    pod = _find_pod(kubectl, namespace, release)
    command = [*kubectl, f"--namespace={namespace}", "port-forward", "--address=127.0.0.1"]
    command += [f"pod/{pod}", f":{PORT_NAME}"]
    # What goes wrong while it runs, it says itself on stderr.
    with subprocess.Popen(dying_with_us(command), stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            address = re.search(r"127\.0\.0\.1:\d+", child.stdout.readline())
            if address is None:
                raise Unavailable(f"kubectl port-forward does not reach the pod {pod}")
            yield address[0]
        finally:
            child.terminate()


def _find_kubectl() -> str:
    path = shutil.which("kubectl")
    if path is None:
        raise ValueError("a way through Kubernetes needs kubectl on the PATH")
    return path


def _find_pod(kubectl: list[str], namespace: str, release: str) -> str:
    """Name of a router pod that takes calls."""
    selector = f"{SELECTOR},{INSTANCE_LABEL}={release}" if release else SELECTOR
    # A raw path is one request: by name kubectl would ask what kinds of things there are first.
    path = f"/api/v1/namespaces/{quote(namespace)}/pods?labelSelector={quote(selector)}"
    try:
        listed = _run(kubectl, "get", f"--raw={path}", f"--request-timeout={_LIST_SECONDS}s")
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"the Kubernetes API lists no pods: {_reason(error)}") from error
    pods = [pod["metadata"] for pod in json.loads(listed)["items"] if _takes_calls(pod)]
    if not pods:
        raise Unavailable(f"no router pod is ready in namespace {namespace} (labels {selector})")
    releases = sorted({pod.get("labels", {}).get(INSTANCE_LABEL, "") for pod in pods})
    if len(releases) > 1:
        raise ValueError(f"there are several releases: use --release, one of {releases}")
    return min(str(pod["name"]) for pod in pods)


def _takes_calls(pod: dict[str, Any]) -> bool:
    ready = any(
        condition["type"] == "Ready" and condition["status"] == "True"
        for condition in pod["status"].get("conditions", ())
    )
    return ready and "deletionTimestamp" not in pod["metadata"]


def _run(kubectl: list[str], *arguments: str) -> str:
    done = subprocess.run([*kubectl, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def _reason(error: subprocess.CalledProcessError) -> str:
    lines = str(error.stderr).strip().splitlines()
    return lines[-1] if lines else f"exit status {error.returncode}"
