"""Following pods: what is asked of the API server, and what each kind of trouble leads to."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, watch
from structlog.testing import capture_logs

from proto.worker_pb2 import ROLE_DECODE
from router.discovery import kubernetes, kubernetes_api
from router.discovery.kubernetes import KubernetesDiscovery
from router.discovery.kubernetes_api import PodApi
from router.discovery.members import DiscoveryError, Join, Leave, Member, Roster
from router.workers.worker import Standing
from tests.eventually import eventually
from tests.router.fake_kubernetes import FakeKubernetes, Refusal

SELECTOR = "epserve.io/role=decode"
PATIENCE_SECONDS = 30.0


class View:
    """What one discovery has told so far."""

    def __init__(self, discovery: KubernetesDiscovery) -> None:
        self.roster = Roster()
        self.events: list[Join | Leave] = []
        self.num_failures = 0
        self._told = asyncio.Event()
        self.task = asyncio.create_task(discovery.follow(self._report))

    def _report(self, source: str, members: object) -> None:
        self.events += self.roster.update(source, members)  # type: ignore[arg-type]
        self._told.set()

    @property
    def addresses(self) -> dict[str, Standing]:
        return {member.address: member.standing for member in self.roster.members}

    def member(self, address: str) -> Member:
        (found,) = [member for member in self.roster.members if member.address == address]
        return found

    async def until(self, holds: Callable[[], bool]) -> None:
        await eventually(holds)

    async def until_addresses(self, **standings: Standing) -> None:
        """10_0_0_1=Standing.OPEN: exactly these, at the usual port."""
        wanted = {
            f"{name.removeprefix('ip_').replace('_', '.')}:7000": standing
            for name, standing in standings.items()
        }
        await self.until(lambda: self.addresses == wanted)

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@asynccontextmanager
async def following(api: FakeKubernetes, *, reconcile_seconds: float = 300) -> AsyncIterator[View]:
    def count() -> None:
        view.num_failures += 1

    discovery = KubernetesDiscovery(
        {ROLE_DECODE: SELECTOR}, server=api.url, worker_port=7000,
        reconcile_seconds=reconcile_seconds, on_failure=count,
    )  # fmt: skip
    view = View(discovery)
    try:
        yield view
    finally:
        await view.close()


@pytest.fixture
async def api() -> AsyncIterator[FakeKubernetes]:
    async with FakeKubernetes() as server:
        yield server


async def test_a_pod_is_followed_from_its_ip_to_its_end(api: FakeKubernetes) -> None:
    async with following(api) as view:
        await view.until(lambda: api.num_watches == 1)
        assert view.addresses == {}
        api.create("w")
        api.create("other", ip="10.0.0.9", role="prefill")
        api.modify("w", ip="10.0.0.1")
        await view.until_addresses(ip_10_0_0_1=Standing.HELD)
        api.modify("w", ready=True)
        await view.until_addresses(ip_10_0_0_1=Standing.OPEN)
        api.terminate("w")
        await view.until_addresses(ip_10_0_0_1=Standing.CLOSING)
        api.delete("w")
        await view.until_addresses()
        kinds = [type(event) for event in view.events]
        assert kinds == [Join, Join, Join, Leave]


async def test_what_is_asked_is_what_the_protocol_says(api: FakeKubernetes) -> None:
    api.create("w", ip="10.0.0.1", ready=True)
    async with following(api, reconcile_seconds=40) as view:
        await view.until(lambda: api.num_watches == 1)
    first, second = api.requests
    assert first == {"labelSelector": SELECTOR}  # no version: what is true now
    assert second["labelSelector"] == SELECTOR
    assert second["allowWatchBookmarks"].lower() == "true"
    assert 36 <= int(second["timeoutSeconds"]) <= 40
    assert second["resourceVersion"]


async def test_a_pod_at_the_same_ip_and_name_is_another_worker(api: FakeKubernetes) -> None:
    api.create("w", ip="10.0.0.1", ready=True)
    async with following(api) as view:
        await view.until_addresses(ip_10_0_0_1=Standing.OPEN)
        old = view.member("10.0.0.1:7000")
        api.delete("w")
        api.create("w", ip="10.0.0.1", ready=True)
        await view.until(lambda: len(view.events) == 3)
        assert view.events[1] == Leave(old)
        assert view.member("10.0.0.1:7000").id == api.pods["w"]["metadata"]["uid"] != old.id


async def test_the_port_named_grpc_is_dialled(api: FakeKubernetes) -> None:
    api.create("named", ip="fd00::1", port=4242)
    api.create("unnamed", ip="10.0.0.1")
    async with following(api) as view:
        await view.until(lambda: set(view.addresses) == {"[fd00::1]:4242", "10.0.0.1:7000"})


async def test_a_pod_without_a_port_is_left_out_with_a_word(api: FakeKubernetes) -> None:
    api.create("unnamed", ip="10.0.0.1")
    discovery = KubernetesDiscovery(
        {ROLE_DECODE: SELECTOR}, server=api.url, on_failure=lambda: None
    )
    with capture_logs() as logs:
        view = View(discovery)
        await eventually(lambda: api.num_watches == 1)
        await view.close()
    assert view.addresses == {}
    assert [entry["pods"] for entry in logs if "--worker-port" in entry["event"]] == [["unnamed"]]


async def test_gone_leads_to_a_list_at_once(api: FakeKubernetes) -> None:
    api.create("w1", ip="10.0.0.1", ready=True)
    async with following(api) as view:
        await view.until_addresses(ip_10_0_0_1=Standing.OPEN)
        await view.until(lambda: api.num_watches == 1)
        await api.stop()
        api.delete("w1")
        api.create("w2", ip="10.0.0.2", ready=True)
        api.compact()
        await api.start()
        await view.until_addresses(ip_10_0_0_2=Standing.OPEN)
        assert api.num_lists == 2


async def test_a_dropped_connection_goes_on_where_it_was(
    api: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, heard = kubernetes_api.PodApi.watch, []

    def watch(self: PodApi, seconds: int) -> Iterator[tuple[str, dict[str, Any]]]:
        for kind, item in real(self, seconds):
            heard.append(item["metadata"]["resourceVersion"])
            yield kind, item

    monkeypatch.setattr(kubernetes_api.PodApi, "watch", watch)
    async with following(api) as view:
        await view.until(lambda: api.num_watches == 1)
        # Of another role: only bookmarks tell how far this watch is.
        api.create("other", ip="10.0.0.9", role="prefill")
        newest = api.pods["other"]["metadata"]["resourceVersion"]
        await view.until(lambda: newest in heard)
        api.drop_connections()
        await view.until(lambda: api.num_watches == 2)
        api.create("w", ip="10.0.0.1", ready=True)
        await view.until_addresses(ip_10_0_0_1=Standing.OPEN)
        assert api.num_lists == 1
        versions = [asked["resourceVersion"] for asked in api.requests if "watch" in asked]
        assert versions[1] == newest != versions[0]


async def test_a_restart_of_the_server_loses_nobody(api: FakeKubernetes) -> None:
    api.create("w1", ip="10.0.0.1", ready=True)
    async with following(api) as view:
        await view.until_addresses(ip_10_0_0_1=Standing.OPEN)
        await api.stop()
        await view.until(lambda: view.num_failures > 1)
        await view.until_addresses(ip_10_0_0_1=Standing.OPEN)
        await api.start()
        api.create("w2", ip="10.0.0.2", ready=True)
        await view.until_addresses(ip_10_0_0_1=Standing.OPEN, ip_10_0_0_2=Standing.OPEN)
        assert [type(event) for event in view.events] == [Join, Join]


async def test_a_list_finds_what_the_watch_has_missed(api: FakeKubernetes) -> None:
    api.create("w1", ip="10.0.0.1", ready=True)
    api.create("w2", ip="10.0.0.2", ready=True)
    async with following(api, reconcile_seconds=1) as view:
        await view.until(lambda: len(view.addresses) == 2 and api.num_watches > 0)
        api.forget("w1")
        await view.until_addresses(ip_10_0_0_2=Standing.OPEN)


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refusal_is_told_once_and_with_advice(api: FakeKubernetes, status: int) -> None:
    api.create("w", ip="10.0.0.1", ready=True)
    api.refusal = Refusal(status, 'pods is forbidden: "x" cannot list resource "pods"')
    with capture_logs() as logs:
        async with following(api) as view:
            await view.until(lambda: view.num_failures >= 3)
            api.refusal = None
            await view.until_addresses(ip_10_0_0_1=Standing.OPEN)
            await view.until(lambda: any("again" in entry["event"] for entry in logs))
    (told,) = [entry for entry in logs if entry["log_level"] == "error"]
    assert told["status"] == status
    assert "cannot list" in told["reason"]
    assert "get, list and watch on pods in namespace default" in told["advice"]


async def test_retry_after_is_obeyed(api: FakeKubernetes) -> None:
    api.refusal = Refusal(429, "too many requests", {"Retry-After": "1"})
    began = time.monotonic()
    async with following(api) as view:
        await view.until(lambda: view.num_failures >= 2)
        assert time.monotonic() - began > 0.95


async def test_a_server_that_hangs_is_left_and_asked_again(
    api: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_api, "LIST_SECONDS", 0.2)
    monkeypatch.setattr(kubernetes_api, "OVERTIME_SECONDS", 0.2)
    api.create("w", ip="10.0.0.1", ready=True)
    api.hangs = True
    async with following(api, reconcile_seconds=1) as view:
        await view.until(lambda: view.num_failures >= 2)
        api.hangs = False
        await view.until_addresses(ip_10_0_0_1=Standing.OPEN)
        await view.until(lambda: api.num_watches >= 1)
        api.hangs, num_failures = True, view.num_failures
        await view.until(lambda: view.num_failures > num_failures)
        api.create("w2", ip="10.0.0.2", ready=True)
        api.hangs = False
        await view.until(lambda: len(view.addresses) == 2)


@pytest.mark.parametrize("hangs", [False, True])
async def test_it_stops_without_waiting_for_the_server(api: FakeKubernetes, hangs: bool) -> None:
    api.hangs = hangs
    async with following(api) as view:
        await view.until(lambda: len(api.requests) == (1 if hangs else 2))
        began = time.monotonic()
        await view.close()
        assert time.monotonic() - began < kubernetes_api.LIST_SECONDS / 2
        api.hangs = False


async def test_an_error_of_ours_is_not_swallowed(
    api: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(kubernetes.PodFollower, "run", fail)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    async with following(api) as view:
        with pytest.raises(ZeroDivisionError):
            await view.task
    # It raises the error behind telling it, and must find the hook of this test then.
    for thread in threading.enumerate():
        if thread.name == "decode pods":
            await asyncio.to_thread(thread.join, PATIENCE_SECONDS)


async def test_kubeconfig_says_where_and_as_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeKubernetes(namespace="serving") as api:
        api.create("w", ip="10.0.0.1", ready=True, port=7000)
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "here",
            "contexts": [
                {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "serving"}}
            ],
            "clusters": [{"name": "c", "cluster": {"server": api.url}}],
            "users": [{"name": "u", "user": {"token": "sesame"}}],
        }  # fmt: skip
        path = tmp_path / "config"
        path.write_text(json.dumps(config))
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))
        view = View(KubernetesDiscovery({ROLE_DECODE: SELECTOR}, on_failure=lambda: None))
        await view.until_addresses(ip_10_0_0_1=Standing.OPEN)
        await view.close()
        assert api.authorizations == {"Bearer sesame"}


def test_without_any_server_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    nowhere = str(tmp_path / "nowhere")
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", nowhere)
    with pytest.raises(DiscoveryError, match="no way to a Kubernetes API server"):
        KubernetesDiscovery({ROLE_DECODE: SELECTOR}, on_failure=lambda: None)


async def test_the_official_watch_understands_the_server_of_these_tests(
    api: FakeKubernetes,
) -> None:
    """The server is ours; this is what keeps it honest."""
    api.create("w1", ip="10.0.0.1", ready=True)
    pods = client.CoreV1Api(client.ApiClient(client.Configuration(host=api.url)))

    def observe() -> list[tuple[str, str, str]]:
        listed = pods.list_namespaced_pod("default", label_selector=SELECTOR)
        assert [pod.status.pod_ip for pod in listed.items] == ["10.0.0.1"]
        api_loop.call_soon_threadsafe(change)
        official = watch.Watch()
        stream = official.stream(
            pods.list_namespaced_pod, "default", label_selector=SELECTOR,
            resource_version=listed.metadata.resource_version, timeout_seconds=60,
        )  # fmt: skip
        seen = []
        for event in stream:
            pod = event["object"].metadata
            seen.append((event["type"], pod.name, pod.uid))
            if len(seen) == 3:
                official.stop()
        return seen

    def change() -> None:
        uids.append(api.create("w2")["metadata"]["uid"])
        api.terminate("w1")
        api.delete("w1")

    uids = [api.pods["w1"]["metadata"]["uid"]]
    api_loop = asyncio.get_running_loop()
    assert await asyncio.to_thread(observe) == [
        ("ADDED", "w2", uids[1]),
        ("MODIFIED", "w1", uids[0]),
        ("DELETED", "w1", uids[0]),
    ]
