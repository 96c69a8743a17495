"""An EP group of two workers: node 0 speaks for both, and experts travel between them."""

import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from proto import experts_pb2, experts_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.cluster.harness import REPOSITORY, wait_until
from tests.free_ports import free_port
from tests.tiny_checkpoint import make_tiny_checkpoint

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[grpc.Channel]]:
    folder = make_tiny_checkpoint(tmp_path / "model")
    rendezvous, ports = free_port(), [free_port() for _ in range(2)]
    with ExitStack() as stack:
        channels, processes = [], []
        for node, port in enumerate(ports):
            command = [sys.executable, "-m", "prefill_worker", "--model", str(folder)]
            command += ["--listen", f"127.0.0.1:{port}", "--nodes", "2", "--node-rank", str(node)]
            command += ["--rendezvous", f"127.0.0.1:{rendezvous}", "--expert-group", "pool"]
            command += ["--num-redundant-experts", "4", "--stop-grace-seconds", "0"]
            process = stack.enter_context(subprocess.Popen(command, cwd=REPOSITORY))
            stack.callback(process.wait, 60)
            processes.append(process)
            channels.append(stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}")))
        for process in processes:  # first of all: they leave together
            stack.callback(process.terminate)
        for channel in channels:
            wait_until(lambda channel=channel: status(channel).ready, 240, "the node is ready")
        yield channels


def status(channel: grpc.Channel) -> worker_pb2.WorkerStatus:
    stream = worker_pb2_grpc.WorkerStub(channel).WatchStatus(
        worker_pb2.WatchStatusRequest(), wait_for_ready=True, timeout=60
    )
    told: worker_pb2.WorkerStatus = next(stream)
    stream.cancel()
    return told


def test_experts_travel_between_nodes(nodes: list[grpc.Channel]) -> None:
    first, second = (experts_pb2_grpc.ExpertsStub(channel) for channel in nodes)
    load = first.GetLoad(experts_pb2.GetLoadRequest(), timeout=60)
    assert (load.group, load.num_ranks, load.slots_per_rank) == ("pool", 2, 6)
    plan = experts_pb2.RebalancePlan(group="pool", placement_version=0)
    for layer in load.layers:
        slots = list(layer.physical_to_logical)
        random.Random(layer.layer).shuffle(slots)
        plan.layers.add(layer=layer.layer, physical_to_logical=slots)
    # Nobody has any request: the ranks of both nodes sleep, and are woken for this.
    (*_, last) = first.Apply(experts_pb2.ApplyRequest(plan=plan), timeout=60)
    assert (last.num_layers_done, last.placement_version) == (len(load.layers), 1)
    assert last.num_bytes_done == last.num_bytes > 0
    (*_, last) = first.RollBack(experts_pb2.RollBackRequest(), timeout=60)
    assert last.placement_version == 2
    again = first.GetLoad(experts_pb2.GetLoadRequest(), timeout=60)
    for before, after in zip(load.layers, again.layers, strict=True):
        for part in (slice(0, 6), slice(6, 12)):
            held = (sorted(layer.physical_to_logical[part]) for layer in (before, after))
            assert next(held) == next(held)
    with pytest.raises(grpc.RpcError) as caught:
        second.GetLoad(experts_pb2.GetLoadRequest(), timeout=60)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "node 0" in caught.value.details()
    for node, channel in enumerate(nodes):
        group = status(channel).expert_group
        assert (group.name, group.node_rank, group.num_nodes) == ("pool", node, 2)
