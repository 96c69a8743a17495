"""Following the worker pods of a namespace through the Kubernetes API.

A thread for each selector, because the official client blocks; what it learns is handed to the
event loop. Whatever goes wrong, the last known members stay: the workers' own status streams
tell which of them live.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from proto.worker_pb2 import Role
from router.discovery.kubernetes_api import PodApi
from router.discovery.kubernetes_follower import PodFollower
from router.discovery.kubernetes_pods import PodSet
from router.discovery.members import Member, Report
from router.workers.worker import role_name

RECONCILE_SECONDS = 30.0
# A stop does not wait longer for a thread; it ends by itself when its call does.
STOP_SECONDS = 0.5


class KubernetesDiscovery:
    """`selectors` are label selectors by role; `server` and `namespace` "" for the pod's own, or
    those of kubeconfig. Raises DiscoveryError when nothing tells how to reach an API server."""

    def __init__(
        self,
        selectors: Mapping[Role.ValueType, str],
        *,
        server: str = "",
        namespace: str = "",
        worker_port: int = 0,
        reconcile_seconds: float = RECONCILE_SECONDS,
        on_failure: Callable[[], None],
    ) -> None:
        self._followers = {
            f"{role_name(role)} pods": PodFollower(
                PodApi(server=server, namespace=namespace, selector=selector),
                PodSet(role, worker_port),
                reconcile_seconds=reconcile_seconds,
                on_failure=on_failure,
            )
            for role, selector in selectors.items()
        }

    async def follow(self, report: Report) -> None:
        loop = asyncio.get_running_loop()
        failed: asyncio.Future[None] = loop.create_future()
        listening = True

        def deliver(source: str, members: list[Member]) -> None:
            if listening:
                report(source, members)

        def fail(error: BaseException) -> None:
            if listening and not failed.done():
                failed.set_exception(error)

        def post(callback: Callable[..., None], *told: object) -> None:
            # A call may come back when the loop is closed and nobody waits any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(callback, *told)

        def run(source: str, follower: PodFollower) -> None:
            try:
                follower.run(lambda members: post(deliver, source, members))
            except BaseException as error:
                post(fail, error)
                raise

        threads = [
            threading.Thread(target=run, args=(source, follower), name=source, daemon=True)
            for source, follower in self._followers.items()
        ]
        for thread in threads:
            thread.start()
        try:
            # They end on their own only by an error of ours: the router does not go on blind.
            await failed
        finally:
            listening = False
            for follower in self._followers.values():
                follower.stop()
            for thread in threads:
                await asyncio.to_thread(thread.join, STOP_SECONDS)
