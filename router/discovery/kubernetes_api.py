"""Listing and watching pods through the official client, with every wait bounded.

The only module that imports `kubernetes` (an extra of the distribution). Calls block: they belong
in a thread.
"""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import urllib3
from kubernetes import client, watch
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
    """Pods of one namespace that match `selector`. `server` overrides where the API is and how to
    log in there.

    `stop` may be called from any thread: it ends the call that waits, and all later ones.
    Raises DiscoveryError when nothing tells how to reach an API server.
    """

    def __init__(self, *, server: str, namespace: str, selector: str) -> None:
        configuration = _configuration(server)
        # The caller has a back-off of its own.
        configuration.retries = False
        self.server = str(configuration.host)
        self.namespace = namespace or _default_namespace(server)
        self.selector = selector
        self._pods = client.CoreV1Api(client.ApiClient(configuration))
        # "object": as dictionaries, like those of a list.
        self._watch = watch.Watch(return_type="object")
        self._stopped = threading.Event()

    def list(self) -> list[dict[str, Any]]:
        """All pods that match; the next watch begins here. Raises PodApiError."""
        deadline = time.monotonic() + LIST_SECONDS
        with self._errors_of_calls():
            # No resource version: what is true now, not what some cache remembers.
            response = self._pods.list_namespaced_pod(
                self.namespace,
                label_selector=self.selector,
                _preload_content=False,
                _request_timeout=(CONNECT_SECONDS, LIST_SECONDS),
            )
            with closing(response):
                content = json.loads(_body(response, deadline))
            self._watch.resource_version = str(content["metadata"]["resourceVersion"])
            items: list[dict[str, Any]] = content["items"] or []
            return items

    def watch(self, seconds: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """(type, object) of each event since the last list or event; ends when the server ends
        it, after `seconds` at the latest. Raises PodApiError, also for an ERROR event."""
        deadline = time.monotonic() + seconds + OVERTIME_SECONDS
        with self._errors_of_calls():
            for event in self._watch.stream(
                self._pods.list_namespaced_pod,
                self.namespace,
                label_selector=self.selector,
                resource_version=self._watch.resource_version,
                allow_watch_bookmarks=True,
                timeout_seconds=seconds,
                _request_timeout=(CONNECT_SECONDS, seconds + OVERTIME_SECONDS),
            ):
                kind, item = event["type"], event["object"]
                if not isinstance(item, dict):
                    raise TypeError("no event")
                if time.monotonic() > deadline:
                    raise TimeoutError("the answer does not end")
                yield kind, item

    def stop(self) -> None:
        self._stopped.set()
        self._watch.stop()

    @contextmanager
    def _errors_of_calls(self) -> Iterator[None]:
        if self._stopped.is_set():
            raise PodApiError(0, "stopped")
        try:
            yield
        except client.ApiException as error:
            raise _refused(error) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise PodApiError(0, f"no answer: {error}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise PodApiError(0, f"no answer of a Kubernetes API server: {error!r}") from error


def _body(response: urllib3.BaseHTTPResponse, deadline: float) -> bytes:
    """Raises TimeoutError for a body that takes too long or is too large."""
    body = bytearray()
    for chunk in response.stream(None, decode_content=True):
        body += chunk
        if time.monotonic() > deadline or len(body) > MAX_BYTES:
            raise TimeoutError("the answer does not end")
    return bytes(body)


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
