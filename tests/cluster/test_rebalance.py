"""Experts move between four ranks while they answer: nobody notices. A rank killed meanwhile takes
the group with it, which starts again whole."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from proto import experts_pb2, router_pb2, worker_pb2
from tests.cluster.harness import REPOSITORY, Cluster, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

NUM_RANKS, NUM_REDUNDANT, NUM_EXPERTS = 4, 8, 16
NUM_CLIENTS, NUM_TOKENS = 4, 50
# So slow that a rebalance takes several steps, and one can be killed in the middle of it.
BYTES_PER_SECOND = 10_000_000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = [
        f"decode.num-redundant-experts={NUM_REDUNDANT}",
        f"decode.rebalance-bytes-per-second={BYTES_PER_SECOND}",
        "decode.expert-load-window-seconds=3600",
    ]
    options = [part for setting in settings for part in ("--set", setting)]
    folder = Path(tmp_path_factory.mktemp("rebalance"))
    with Cluster(folder, "--decode-ranks", str(NUM_RANKS), *options) as cluster:
        yield cluster


class Clients:
    """Each asks the same thing again and again, and knows the answer."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._stop = threading.Event()
        self._prompts = [
            [7 + (client * 31 + place * 17) % 700 for place in range(20)]
            for client in range(NUM_CLIENTS)
        ]
        self.num_answers = 0
        self.refusals: list[httpx.Response] = []
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            self._answers = list(pool.map(self._ask, self._prompts))
        assert all(answer.status_code == 200 for answer in self._answers)

    def _ask(self, prompt: list[int]) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
        body |= {"model": self._cluster.model}
        return self._cluster.client.post("/v1/completions", json=body)

    def _keep_asking(self, client: int) -> None:
        while not self._stop.is_set():
            reply = self._ask(self._prompts[client])
            if reply.status_code == 503:
                self.refusals.append(reply)
                self._stop.wait(0.2)
                continue
            assert reply.status_code == 200, reply.text
            assert reply.json()["choices"] == self._answers[client].json()["choices"]
            self.num_answers += 1

    def __enter__(self) -> "Clients":
        self._pool = ThreadPoolExecutor(NUM_CLIENTS)
        self._running = [
            self._pool.submit(self._keep_asking, client) for client in range(NUM_CLIENTS)
        ]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for running in self._running:
            running.result(240)
        self._pool.shutdown()


class Operator:
    """The router's admin service."""

    def __init__(self, cluster: Cluster) -> None:
        self._admin = cluster._admin

    def load(self) -> experts_pb2.ExpertLoad:
        return self._admin.GetExpertLoad(router_pb2.GroupExpertLoadRequest(), timeout=60)

    def shuffled(self, rng: random.Random) -> experts_pb2.RebalancePlan:
        """A placement that has nothing to do with the present one."""
        load = self.load()
        plan = experts_pb2.RebalancePlan(placement_version=load.placement_version)
        for layer in load.layers:
            slots = list(layer.physical_to_logical)
            rng.shuffle(slots)
            plan.layers.add(layer=layer.layer, physical_to_logical=slots)
        return plan

    def apply(self, plan: experts_pb2.RebalancePlan) -> Any:
        request = router_pb2.GroupApplyRequest(apply=experts_pb2.ApplyRequest(plan=plan))
        return self._admin.ApplyRebalance(request, timeout=120)

    def roll_back(self) -> Any:
        return self._admin.RollBackRebalance(router_pb2.GroupRollBackRequest(), timeout=120)


def placement_of(load: Any) -> list[list[int]]:
    """Of a load or a plan."""
    placement = [list(layer.physical_to_logical) for layer in load.layers]
    for slots in placement:
        assert len(slots) == NUM_EXPERTS + NUM_REDUNDANT
        assert set(range(NUM_EXPERTS)) <= set(slots)
    return placement


def by_rank(placed: Any) -> list[list[list[int]]]:
    """What each rank holds in each layer, in whichever order."""
    size = (NUM_EXPERTS + NUM_REDUNDANT) // NUM_RANKS
    return [
        [sorted(slots[first : first + size]) for first in range(0, len(slots), size)]
        for slots in placement_of(placed)
    ]


def ctl(cluster: Cluster, *arguments: str) -> Any:
    command = [sys.executable, "-m", "ctl", *arguments, "--router", f"127.0.0.1:{cluster.port + 1}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("num_rebalances", [4, pytest.param(10, marks=pytest.mark.slow)])
def test_rebalances_in_a_row(cluster: Cluster, num_rebalances: int) -> None:
    operator, rng = Operator(cluster), random.Random(num_rebalances)
    before = operator.load()
    with Clients(cluster) as clients:
        for _ in range(num_rebalances):
            plan = operator.shuffled(rng)
            last = list(operator.apply(plan))[-1]
            assert last.num_layers_done == last.num_layers == len(before.layers)
            assert by_rank(operator.load()) == by_rank(plan)
        earlier = placement_of(operator.load())
        report = ctl(cluster, "rebalance-experts", "--apply", "--output", "json")
        assert report["num_layers"], "shuffled experts can be placed better"
        assert list(operator.roll_back())[-1].num_layers_done == report["num_layers"]
        assert placement_of(operator.load()) == earlier
    assert not clients.refusals
    assert clients.num_answers >= NUM_CLIENTS
    report = ctl(cluster, "expert-load", "--output", "json")
    assert report["placement_version"] == before.placement_version + num_rebalances + 2
    assert report["num_tokens"] > before.num_tokens
    cluster.assert_nothing_held()


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rank_killed_while_experts_move(cluster: Cluster, victim: int) -> None:
    operator = Operator(cluster)
    (worker,) = cluster.workers(worker_pb2.ROLE_DECODE)
    with Clients(cluster) as clients:
        progress = operator.apply(operator.shuffled(random.Random(victim)))
        assert next(progress).phase == experts_pb2.RebalanceProgress.PHASE_MOVING
        os.kill(worker.ranks[victim].pid, signal.SIGKILL)
        with pytest.raises(grpc.RpcError) as caught:
            list(progress)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

        def is_back() -> bool:
            (now,) = cluster.workers(worker_pb2.ROLE_DECODE) or (worker,)
            return now.identity.epoch != worker.identity.epoch and now.ready

        wait_until(is_back, 240, "the group started again")
        answered = clients.num_answers
        wait_until(lambda: clients.num_answers > answered, 120, "it answers")
    for refusal in clients.refusals:
        assert int(refusal.headers["retry-after"]) >= 1
    load = operator.load()
    assert load.placement_version == 0
    in_turn = [*range(NUM_EXPERTS), *range(NUM_REDUNDANT)]
    assert placement_of(load) == [in_turn] * len(load.layers)
    list(operator.apply(operator.shuffled(random.Random(7))))
    cluster.assert_nothing_held()
