"""Whatever the API server does to the watchers, the worker table ends as the pods are.

Real HTTP, real client, real threads; only the workers' status streams are played: whoever has an
IP at that moment answers there, with its pod's uid as its epoch.
"""

import asyncio
import random
from collections.abc import Collection

import pytest
from prometheus_client import CollectorRegistry

from core.clock import SystemClock
from proto.worker_pb2 import ROLE_DECODE, ROLE_PREFILL, Role
from router.cluster import Cluster
from router.discovery import kubernetes_follower
from router.discovery.kubernetes import KubernetesDiscovery
from router.discovery.members import Member, Roster
from router.metrics import RouterMetrics
from router.settings import RouterSettings
from router.watch import Watchers
from router.workers.table import StatusArrived, StreamBroken
from router.workers.worker import role_name
from tests.eventually import eventually
from tests.router.fake_kubernetes import FakeKubernetes, Pod, Trouble
from tests.router.statuses import make_status

PORT = 7000
SELECTORS: dict[Role.ValueType, str] = {
    ROLE_PREFILL: "app=epserve,epserve.io/role=prefill",
    ROLE_DECODE: "app=epserve,epserve.io/role=decode",
}
PATIENCE_SECONDS = 60.0


class World:
    """One API server with pods that come and go, and one router's view of it."""

    def __init__(self, api: FakeKubernetes, seed: int) -> None:
        self.api = api
        self.chance = random.Random(seed)
        self.num_names = 0
        settings = RouterSettings()
        metrics = RouterMetrics(CollectorRegistry())
        self.cluster = Cluster(settings, SystemClock(), metrics)
        self.roster = Roster()

    async def stream(self, member: Member) -> None:
        address, role = member.address, member.role
        while True:
            pods = [pod for pod in self.api.pods.values() if _address(pod) == address]
            if pods:
                uid = pods[-1]["metadata"]["uid"]
                self.cluster.apply(StatusArrived(address, role, make_status(role_name(role), uid)))
            else:
                self.cluster.apply(StreamBroken(address, "nobody there"))
            await asyncio.sleep(0.03)

    async def live(self, num_changes: int) -> None:
        """Random changes under random trouble, then calm, until the table shows the truth."""
        discovery = KubernetesDiscovery(
            SELECTORS, server=self.api.url, namespace="default", reconcile_seconds=1.0,
            on_failure=lambda: None,
        )  # fmt: skip
        async with asyncio.TaskGroup() as group:
            streams = Watchers(self.cluster, self.stream, group)

            def report(source: str, members: Collection[Member]) -> None:
                for event in self.roster.update(source, members):
                    streams.apply(event)

            following = group.create_task(discovery.follow(report))
            for _ in range(num_changes):
                self.change()
                await asyncio.sleep(self.chance.choice((0, 0, 0.002, 0.02, 0.1)))
            self.api.trouble = Trouble()
            self.api.refusal = None
            try:
                await eventually(lambda: self.difference() is None, PATIENCE_SECONDS)
            except TimeoutError:
                pytest.fail(self.difference() or "it took too long")
            following.cancel()
            streams.close()

    def change(self) -> None:
        chance, api = self.chance, self.api
        name = chance.choice(list(api.pods)) if api.pods else ""
        ip = f"10.0.0.{chance.randrange(1, 250)}"
        match chance.choice(("create", "create", "run", "run", "end", "end", "odd", "trouble")):
            case "create":
                self.num_names += 1
                role = chance.choice(("prefill", "decode"))
                if _is_free(api, ip):
                    api.create(f"worker-{self.num_names}", ip=ip, role=role, port=PORT)
            case "run" if name:
                has_ip = "podIP" in api.pods[name]["status"]
                new_ip = None if has_ip or not _is_free(api, ip) else ip
                api.modify(name, ip=new_ip, ready=chance.random() < 0.7)
            case "end" if name:
                match chance.choice(("terminate", "delete", "lose", "finish", "replace")):
                    case "terminate":
                        api.terminate(name)
                    case "delete":
                        api.delete(name)
                    case "lose":
                        api.forget(name)
                    case "finish":
                        api.finish(name, chance.choice(("Succeeded", "Failed")))
                    case "replace":  # another pod by the same name, at the same IP
                        old = api.pods[name]
                        api.delete(name)
                        labels, status = old["metadata"]["labels"], old["status"]
                        api.create(
                            name, ip=status.get("podIP", ""), role=labels["epserve.io/role"],
                            port=PORT, ready=True,
                        )  # fmt: skip
            case "odd" if name:
                api.relabel(name, app=chance.choice(("epserve", "other")))
            case "trouble":
                match chance.choice(("cut", "compact", "chaos", "chaos", "calm")):
                    case "cut":
                        api.drop_connections()
                    case "compact":
                        api.compact()
                    case "chaos":
                        api.trouble = _trouble(chance)
                    case "calm":
                        api.trouble = Trouble()

    def difference(self) -> str | None:
        """None when the table holds exactly the workers that there are."""
        expected = {
            _address(pod): (
                pod["metadata"]["uid"],
                pod["metadata"]["labels"]["epserve.io/role"],
                "draining" if "deletionTimestamp" in pod["metadata"] else "ready",
            )
            for pod in self.api.pods.values()
            if _address(pod) and pod["metadata"]["labels"]["app"] == "epserve"
            and pod["status"]["phase"] not in ("Succeeded", "Failed")
        }  # fmt: skip
        table = {
            worker.address: (worker.epoch, worker.role_name, worker.state.value)
            for worker in self.cluster.table.workers
        }
        members = {member.address: member.id for member in self.roster.members}
        if table == expected and members == {a: uid for a, (uid, *_) in expected.items()}:
            return None
        return f"expected {expected}, the table holds {table}, discovered {members}"


def _address(pod: Pod) -> str:
    ip = pod["status"].get("podIP", "")
    return f"{ip}:{PORT}" if ip else ""


def _is_free(api: FakeKubernetes, ip: str) -> bool:
    return all(pod["status"].get("podIP") != ip for pod in api.pods.values())


def _trouble(chance: random.Random) -> Trouble:
    def some(most: float) -> float:
        return chance.choice((0.0, chance.uniform(0, most)))

    return Trouble(
        doubled=some(0.5), reordered=some(0.5), missed=some(0.5), cut=some(0.3),
        refused=some(0.5), gone=some(0.5), nonsense=some(0.2),
    )  # fmt: skip


async def converges(seed: int, num_changes: int) -> None:
    async with FakeKubernetes(seed=seed) as api:
        world = World(api, seed)
        await world.live(num_changes)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_follower, "LONGEST_PAUSE_SECONDS", 0.5)


async def many(seeds: range) -> None:
    async with asyncio.TaskGroup() as group:
        for seed in seeds:
            group.create_task(converges(seed, num_changes=60))


async def test_the_table_ends_as_the_pods_are() -> None:
    await many(range(30))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(1000, 1500, 50))
async def test_the_table_ends_as_the_pods_are_in_many_worlds(first: int) -> None:
    await many(range(first, first + 50))
