"""Listing and watching pods through the official client, with every wait bounded.

The only module that imports `kubernetes` (an extra of the distribution). Calls block: they belong
in a thread.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import urllib3
from kubernetes import client
from kubernetes.config import ConfigException, list_kube_config_contexts, load_kube_config
from kubernetes.config.incluster_config import load_incluster_config

from router.discovery.members import DiscoveryError

CONNECT_SECONDS = 3.0
# For a whole list; a server that is slower than this has a problem of its own.
LIST_SECONDS = 15.0
# How long after its own time limit a watch may still be silent.
OVERTIME_SECONDS = 5.0
MAX_BYTES = 256 * 2**20
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class PodApiError(Exception):
    """`status` is that of HTTP, 0 when there was no answer; `retry_after_seconds` None when the
    server did not say."""

    def __init__(self, status: int, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_seconds = retry_after_seconds


class PodApi:
    """Pods of one namespace. `server` overrides where the API is and how to log in there.

    `stop` may be called from any thread: it ends the call that waits, and all later ones.
    Raises DiscoveryError when nothing tells how to reach an API server.
    """

    def __init__(self, *, server: str, namespace: str) -> None:
        configuration = _configuration(server)
        # The caller has a back-off of its own.
        configuration.retries = False
        self.namespace = namespace or _default_namespace(server)
        self._client = client.ApiClient(configuration)
        self._pods = client.CoreV1Api(self._client)
        self._response: urllib3.BaseHTTPResponse | None = None
        self._stopped = threading.Event()

    @property
    def server(self) -> str:
        return str(self._client.configuration.host)

    def list(self, selector: str) -> tuple[list[dict[str, Any]], str]:
        """All pods that match, and the resource version of the list."""
        deadline = time.monotonic() + LIST_SECONDS
        # No resource version: what is true now, not what some cache remembers.
        response = self._call(selector, LIST_SECONDS)
        with closing(response):
            body = b"".join(_chunks(response, deadline))
        try:
            content = json.loads(body)
            items, version = content["items"] or [], content["metadata"]["resourceVersion"]
        except (ValueError, KeyError, TypeError) as error:
            raise PodApiError(0, f"no list of pods: {error!r}") from error
        return items, str(version)

    def watch(
        self, selector: str, resource_version: str, seconds: int
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """(type, object) of each event since `resource_version`; ends when the server ends it,
        after `seconds` at the latest. An ERROR event becomes PodApiError."""
        deadline = time.monotonic() + seconds + OVERTIME_SECONDS
        response = self._call(
            selector,
            seconds + OVERTIME_SECONDS,
            watch=True,
            resource_version=resource_version,
            allow_watch_bookmarks=True,
            timeout_seconds=seconds,
        )
        with closing(response):
            rest = b""
            for chunk in _chunks(response, deadline):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.strip():
                        yield _event(line)

    def stop(self) -> None:
        self._stopped.set()
        connection = getattr(self._response, "connection", None)
        waiting = getattr(connection, "sock", None)
        if waiting is not None:
            with suppress(OSError):
                waiting.shutdown(socket.SHUT_RDWR)

    def _call(self, selector: str, read_seconds: float, **how: Any) -> urllib3.BaseHTTPResponse:
        if self._stopped.is_set():
            raise PodApiError(0, "stopped")
        try:
            response: urllib3.BaseHTTPResponse = self._pods.list_namespaced_pod(
                self.namespace,
                label_selector=selector,
                _preload_content=False,
                _request_timeout=(CONNECT_SECONDS, read_seconds),
                **how,
            )
        except client.ApiException as error:
            raise _refused(error) from error
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise PodApiError(0, f"no answer: {error}") from error
        self._response = response
        if self._stopped.is_set():  # meanwhile
            response.close()
            raise PodApiError(0, "stopped")
        return response


def _chunks(response: urllib3.BaseHTTPResponse, deadline: float) -> Iterator[bytes]:
    """The body as it arrives, until its end. Raises PodApiError when that takes too long."""
    num_bytes = 0
    try:
        for chunk in response.stream(None, decode_content=True):
            num_bytes += len(chunk)
            if time.monotonic() > deadline or num_bytes > MAX_BYTES:
                raise PodApiError(0, "the answer does not end")
            yield chunk
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise PodApiError(0, f"connection lost: {error}") from error


def _event(line: bytes) -> tuple[str, dict[str, Any]]:
    try:
        event = json.loads(line)
        kind, item = event["type"], event["object"]
        if not isinstance(kind, str) or not isinstance(item, dict):
            raise TypeError("no event")
    except (ValueError, KeyError, TypeError) as error:
        raise PodApiError(0, f"no watch event: {error!r}") from error
    if kind == "ERROR":
        code = item.get("code")
        message = str(item.get("message") or item.get("reason") or "no reason given")
        raise PodApiError(code if isinstance(code, int) else 500, message)
    return kind, item


def _refused(error: client.ApiException) -> PodApiError:
    message = f"{error.status} {error.reason}"
    with suppress(ValueError, TypeError, AttributeError):
        message = str(json.loads(error.body)["message"])
    delay: float | None = None
    with suppress(ValueError, TypeError, KeyError):
        delay = float(error.headers["Retry-After"])
    return PodApiError(error.status or 0, message, delay)


def _configuration(server: str) -> client.Configuration:
    configuration = client.Configuration()
    if server:
        configuration.host = server.rstrip("/")
        return configuration
    try:
        if os.environ.get("KUBERNETES_SERVICE_HOST"):
            load_incluster_config(client_configuration=configuration)
        else:
            load_kube_config(client_configuration=configuration)
    except (ConfigException, OSError) as error:
        raise DiscoveryError(f"no way to a Kubernetes API server: {error}") from error
    return configuration


def _default_namespace(server: str) -> str:
    """The pod's own; outside a cluster that of the current context."""
    with suppress(OSError):
        return NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    if not server:
        with suppress(ConfigException, OSError, KeyError, TypeError):
            _all, active = list_kube_config_contexts()
            return str(active["context"]["namespace"])
    return "default"
