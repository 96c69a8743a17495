"""One selector's pods: list, watch from there, list again every half minute, for ever.

    what happens                                   what follows
    the watch ends by its own time limit           list
    connection lost, server restarts or hangs      watch again from the last version, after a pause
    410 Gone                                       list
    any other refusal (401, 403, 429, 5xx), or a
    list that fails                                list, after a pause

Pauses grow to `LONGEST_PAUSE_SECONDS`, or last as long as the server's Retry-After says.
"""

import math
import random
import threading
import time
from collections.abc import Callable

from core.log import get_logger
from router.discovery.kubernetes_api import PodApi, PodApiError
from router.discovery.kubernetes_pods import PodSet
from router.discovery.members import Member

log = get_logger("router.kubernetes_follower")

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
LONGEST_RETRY_AFTER_SECONDS = 60.0
UNAUTHORIZED, FORBIDDEN, GONE = 401, 403, 410
EVENT_KINDS = ("ADDED", "MODIFIED", "DELETED")

Tell = Callable[[list[Member]], None]


class PodFollower:
    """`run` in a thread of its own, `stop` from any other. Lists every `reconcile_seconds`,
    however well the watch seems to go: what it has missed is found by then."""

    def __init__(
        self,
        api: PodApi,
        pods: PodSet,
        *,
        reconcile_seconds: float,
        on_failure: Callable[[], None],
    ) -> None:
        self._api = api
        self._pods = pods
        self._reconcile_seconds = reconcile_seconds
        self._on_failure = on_failure
        self._stopping = threading.Event()
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._members: list[Member] | None = None
        self._without_port: list[str] = []
        self._problem = ""

    def run(self, tell: Tell) -> None:
        """Tells all members after each change, until stopped."""
        while not self._stopping.is_set():
            try:
                self._pods.replace(self._api.list())
                self._tell(tell)
                self._watch(tell)
            except PodApiError as error:
                self._note(error)
                if error.status == GONE and self._pause_seconds == FIRST_PAUSE_SECONDS:
                    self._pause_seconds *= 2  # should it be gone again right after the list
                else:
                    self._rest(error.retry_after_seconds)

    def stop(self) -> None:
        self._stopping.set()
        self._api.stop()

    def _watch(self, tell: Tell) -> None:
        """Until it is time for the next list. Raises PodApiError where that time is now."""
        # Routers that were started together need not ask together for ever.
        until = time.monotonic() + self._reconcile_seconds * random.uniform(0.9, 1.0)
        while not self._stopping.is_set():
            began = time.monotonic()
            if began >= until:
                return
            try:
                for kind, item in self._api.watch(math.ceil(until - began)):
                    self._pause_seconds = FIRST_PAUSE_SECONDS
                    self._recovered()
                    if kind in EVENT_KINDS:
                        self._pods.apply(kind, item)
                        self._tell(tell)
            except PodApiError as error:
                if error.status:
                    raise
                self._note(error)
            if time.monotonic() - began > LONGEST_PAUSE_SECONDS:
                self._pause_seconds = FIRST_PAUSE_SECONDS
            if time.monotonic() < until:
                self._rest(None)

    def _tell(self, tell: Tell) -> None:
        members = self._pods.members()
        if members != self._members:
            self._members = members
            tell(members)
        if self._pods.without_port != self._without_port:
            self._without_port = self._pods.without_port
            if self._without_port:
                log.warning(
                    "pods have no container port named grpc, and there is no --worker-port",
                    selector=self._api.selector,
                    pods=self._without_port,
                )

    def _rest(self, seconds: float | None) -> None:
        if seconds is None:
            seconds = self._pause_seconds * random.uniform(0.5, 1.0)
            self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)
        self._stopping.wait(min(seconds, LONGEST_RETRY_AFTER_SECONDS))

    def _note(self, error: PodApiError) -> None:
        """Logs a problem once, however often it comes back."""
        if self._stopping.is_set() or error.status == GONE:
            return
        self._on_failure()
        problem = f"{error.status}" if error.status else str(error)
        if problem == self._problem:
            return
        self._problem = problem
        advice = ""
        if error.status in (UNAUTHORIZED, FORBIDDEN):
            advice = (
                f"the service account needs get, list and watch on pods in namespace "
                f"{self._api.namespace}"
            )
        # A lost connection is an everyday thing; whoever lists in vain has a problem.
        write = log.error if error.status in (UNAUTHORIZED, FORBIDDEN) else log.warning
        write(
            "no news of pods from the Kubernetes API; the last known stay",
            server=self._api.server,
            namespace=self._api.namespace,
            selector=self._api.selector,
            status=error.status,
            reason=str(error),
            advice=advice,
        )

    def _recovered(self) -> None:
        if self._problem:
            self._problem = ""
            log.info("the Kubernetes API answers again", selector=self._api.selector)
