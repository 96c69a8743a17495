"""A way to a router pod through the Kubernetes API, as `kubectl port-forward` makes one.

    with PortForward(kubeconfig=None, context="", namespace="inference", release="") as address:
        ...                               # connections to `address` end in the pod

The only module of ctl that needs the `kubernetes` client (an extra of the distribution).
"""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml
from kubernetes import client
from kubernetes.config import ConfigException, list_kube_config_contexts, load_kube_config
from kubernetes.stream import portforward
from urllib3.exceptions import HTTPError

from core.errors import Unavailable
from core.log import get_logger

log = get_logger("ctl.port_forward")

# As the chart labels its pods.
SELECTOR = "app.kubernetes.io/name=epserve,app.kubernetes.io/component=router"
INSTANCE_LABEL = "app.kubernetes.io/instance"
PORT_NAME = "grpc"
DEFAULT_PORT = 8001

_LIST_SECONDS = 10.0
_CHUNK_BYTES = 65536
_JOIN_SECONDS = 1.0
# What the client says of files that are missing, unreadable, or of another form.
_BAD_CONFIG = (ConfigException, OSError, yaml.YAMLError, TypeError, KeyError, AttributeError)


class PortForward:
    """Each connection is carried by a stream of its own. Raises ValueError when nothing tells
    where the API server is or which release is meant, Unavailable when there is no router pod."""

    def __init__(
        self, *, kubeconfig: Path | None, context: str, namespace: str, release: str
    ) -> None:
        self._configuration = _configuration(kubeconfig, context)
        self._namespace = namespace or _namespace_of(kubeconfig, context)
        self._pod, self._port = self._find_pod(release)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[Any] = []
        self._lock = threading.Lock()
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> str:
        self._accepting.start()
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all connections; bounded."""
        with self._lock:
            self._closed = True
            open_sockets, self._sockets = self._sockets, []
        for each in (self._listener, *open_sockets):
            _end(each)
        self._accepting.join(_JOIN_SECONDS)

    def _find_pod(self, release: str) -> tuple[str, int]:
        selector = f"{SELECTOR},{INSTANCE_LABEL}={release}" if release else SELECTOR
        try:
            listed = client.CoreV1Api(client.ApiClient(self._configuration)).list_namespaced_pod(
                self._namespace, label_selector=selector, _request_timeout=_LIST_SECONDS
            )
        except (client.ApiException, HTTPError) as error:
            raise Unavailable(f"the Kubernetes API lists no pods: {_reason(error)}") from error
        pods = [pod for pod in listed.items if _takes_calls(pod)]
        if not pods:
            raise Unavailable(
                f"no router pod is ready in namespace {self._namespace} (labels {selector})"
            )
        releases = sorted({(pod.metadata.labels or {}).get(INSTANCE_LABEL, "") for pod in pods})
        if len(releases) > 1:
            raise ValueError(f"there are several releases: use --release, one of {releases}")
        pod = min(pods, key=lambda each: each.metadata.name)
        return pod.metadata.name, _port_of(pod)

    def _accept(self) -> None:
        while True:
            try:
                near, _address = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        # The client swaps a method of the object while it opens a stream: one for each.
        pods = client.CoreV1Api(client.ApiClient(self._configuration))
        try:
            stream = portforward(
                pods.connect_get_namespaced_pod_portforward,
                self._pod,
                self._namespace,
                ports=str(self._port),
            )
        except client.ApiException as error:
            log.warning("no way to the pod", pod=self._pod, reason=str(error.reason))
            near.close()
            return
        far = stream.socket(self._port)
        with self._lock:
            if not self._closed:
                self._sockets += [near, far]
        if self._closed:
            _end(near)
            _end(far)
            return
        back = threading.Thread(target=_pump, args=(far.recv, near), daemon=True)
        back.start()
        _pump(near.recv, far)
        back.join(_JOIN_SECONDS)
        if problem := stream.error(self._port):
            log.warning("the pod refused", pod=self._pod, reason=problem)


def _configuration(kubeconfig: Path | None, context: str) -> Any:  # noqa: ANN401 - untyped client
    configuration = client.Configuration()
    try:
        load_kube_config(
            config_file=str(kubeconfig) if kubeconfig else None,
            context=context or None,
            client_configuration=configuration,
        )
    except _BAD_CONFIG as error:
        raise ValueError(f"kubeconfig: {error}") from error
    return configuration


def _namespace_of(kubeconfig: Path | None, context: str) -> str:
    """Of the context, or default."""
    contexts, active = list_kube_config_contexts(str(kubeconfig) if kubeconfig else None)
    chosen = next((each for each in contexts if each["name"] == context), active)
    return str(chosen["context"].get("namespace") or "default")


def _reason(error: Exception) -> str:
    if isinstance(error, client.ApiException):
        return f"{error.status} {error.reason}"
    return str(error)


def _takes_calls(pod: Any) -> bool:  # noqa: ANN401 - as above
    ready = any(
        each.type == "Ready" and each.status == "True" for each in pod.status.conditions or ()
    )
    return ready and pod.metadata.deletion_timestamp is None


def _port_of(pod: Any) -> int:  # noqa: ANN401 - as above
    named = [
        port.container_port
        for container in pod.spec.containers
        for port in container.ports or ()
        if port.name == PORT_NAME
    ]
    return int(named[0]) if named else DEFAULT_PORT


def _pump(receive: Callable[[int], bytes], to: Any) -> None:  # noqa: ANN401 - two kinds of socket
    """Until either side ends; the other one then ends as well."""
    with suppress(OSError):
        while data := receive(_CHUNK_BYTES):
            to.sendall(data)
    _end(to)


def _end(one: Any) -> None:  # noqa: ANN401 - as above
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    with suppress(OSError):
        one.close()
