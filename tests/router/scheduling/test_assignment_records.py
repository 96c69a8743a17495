"""What is kept of assignments, and what it costs."""

import asyncio
import time

import pytest
from prometheus_client import CollectorRegistry

from core.clock import ManualClock
from core.errors import ContextLengthExceeded, ModelNotFound, Overloaded
from proto.router_pb2 import AssignmentRecord
from proto.worker_pb2 import ROLE_DECODE
from router.cluster import Cluster
from router.metrics import RouterMetrics
from router.scheduling.assignment_records import MAX_CANDIDATES, NUM_KEPT
from router.scheduling.choose import Considered, choose
from router.scheduling.demand import Demand
from router.settings import RouterSettings
from router.workers.table import StatusArrived
from tests.router.statuses import ROLES, make_status

DECODE_WEIGHTS = {"free_pages": 1, "free_slots": 1}


def make_cluster(**settings: float) -> Cluster:
    metrics = RouterMetrics(CollectorRegistry())
    return Cluster(RouterSettings.model_validate(settings), ManualClock(), metrics)


def say(cluster: Cluster, role: str, epoch: str, **facts: int | str) -> None:
    cluster.apply(StatusArrived(epoch, ROLES[role], make_status(role, epoch, **facts)))


def demand(request_id: str, **fields: object) -> Demand:
    values = {"model": "demo", "num_prompt_tokens": 128, "prefix_hashes": (1, 2)} | fields
    return Demand(request_id=request_id, **values)  # type: ignore[arg-type]


def only(cluster: Cluster, request_id: str) -> AssignmentRecord:
    (record,) = cluster.records.find(request_id)
    return record


async def test_the_scores_that_chose_are_told() -> None:
    cluster = make_cluster()
    say(cluster, "prefill", "p-0")
    say(cluster, "prefill", "p-1", waiting_tokens=128)
    say(cluster, "decode", "d-0", pages_free=50, num_running=1)
    say(cluster, "decode", "d-1", draining=True)
    say(cluster, "decode", "d-2", num_running=4)
    say(cluster, "decode", "d-3", fingerprint="other")
    await cluster.assigner.assign(demand("r-0"))
    record = only(cluster, "r")
    assert (record.outcome, record.num_prompt_tokens) == ("ok", 128)
    by_epoch = {each.worker.epoch: each for each in record.candidates}
    assert {e: each.rejected_by for e, each in by_epoch.items() if each.rejected_by} == {
        "d-1": "ready",
        "d-2": "has_room",
        "d-3": "paired",
    }
    assert [each.worker.epoch for each in record.candidates if each.chosen] == ["p-0", "d-0"]
    load = {part.scorer: (part.score, part.weight) for part in by_epoch["p-1"].parts}
    assert load == {"prefix_affinity": (0.0, 0.5), "load": (0.5, 1.0)}
    assert by_epoch["p-1"].total == pytest.approx(1 / 3)
    decode = {part.scorer: part.score for part in by_epoch["d-0"].parts}
    assert decode == {"free_pages": 0.5, "free_slots": 0.75}


async def test_the_match_of_a_prefix_is_told() -> None:
    cluster = make_cluster()
    say(cluster, "prefill", "p-0")
    say(cluster, "decode", "d-0")
    await cluster.assigner.assign(demand("r1-0"))
    await cluster.assigner.assign(demand("r2-0"))
    assert only(cluster, "r1").num_matched_pages == 0
    assert only(cluster, "r2").num_matched_pages == 2


async def test_failures_are_told_with_whom_they_left_out() -> None:
    cluster = make_cluster(max_waiting=1)
    say(cluster, "prefill", "p-0")
    say(cluster, "decode", "d-0", num_running=4)
    with pytest.raises(ModelNotFound):
        await cluster.assigner.assign(demand("a-0", model="other"))
    with pytest.raises(ContextLengthExceeded):
        await cluster.assigner.assign(demand("b-0", num_prompt_tokens=99999))
    waiting = asyncio.create_task(cluster.assigner.assign(demand("c-0")))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await cluster.assigner.assign(demand("d-0"))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    told = {
        name: (
            only(cluster, name).outcome,
            sorted(each.rejected_by for each in only(cluster, name).candidates),
        )
        for name in "abcd"
    }
    assert told == {
        "a": ("NOT_FOUND", ["serves_model", "serves_model"]),
        "b": ("INVALID_ARGUMENT", ["fits", "fits"]),
        "c": ("CANCELLED", ["has_room", "paired"]),
        "d": ("RESOURCE_EXHAUSTED", ["has_room", "paired"]),
    }


async def test_ids_find_what_belongs_to_them() -> None:
    cluster = make_cluster()
    say(cluster, "prefill", "p-0")
    say(cluster, "decode", "d-0", max_running=99)
    for request_id in ("r-0", "r-1", "r-0", "r-10"):
        await cluster.assigner.assign(demand(request_id, traced_id=f"x-{request_id}"))
    found = {
        asked: [record.leg_id for record in cluster.records.find(asked)]
        for asked in ("r", "r-0", "r-1", "r-0.1", "x-r-10", "x")
    }
    assert found == {
        "r": ["r-0", "r-1", "r-0", "r-10"],
        "r-0": ["r-0", "r-0"],
        "r-1": ["r-1"],
        "r-0.1": ["r-0", "r-0"],  # a call by its own id: all assignments of its choice
        "x-r-10": ["r-10"],
        "x": [],
    }


async def test_records_are_bounded() -> None:
    cluster = make_cluster()
    say(cluster, "prefill", "p-0")
    for number in range(MAX_CANDIDATES + 9):
        say(cluster, "decode", f"d-{number}", max_running=99, num_running=number)
    chosen = await cluster.assigner.assign(demand("r-0"))
    record = only(cluster, "r")
    assert len(record.candidates) == MAX_CANDIDATES
    decode = [each for each in record.candidates if each.role == ROLE_DECODE]
    assert decode[0].chosen
    assert decode[0].worker.epoch == chosen.pair.decode.epoch == "d-0"
    assert decode[-1].total > 0.3  # the best are kept
    for number in range(NUM_KEPT):
        cluster.records.add(demand(f"s{number}-0"), "ok", 0.0, None, Considered())
    assert cluster.records.find("r") == []
    assert len(cluster.records.find("s0")) == 1


def test_recording_costs_little() -> None:
    """Of processor time, with the 13 workers of a large cluster; measured: 10 us."""
    cluster = make_cluster()
    for role, count in (("prefill", 4), ("decode", 9)):
        for number in range(count):
            say(cluster, role, f"{role}-{number}")
    considered = Considered()
    weights = {"prefill": {"prefix_affinity": 1, "load": 1}, "decode": DECODE_WEIGHTS}
    pair = choose(demand("r"), cluster.table.workers, cluster.index, weights, considered)
    assert len(considered.scored) == 13

    def seconds_of_one() -> float:
        began = time.process_time()
        for _ in range(500):
            cluster.records.add(demand("r"), "ok", 0.0, pair, considered)
        return (time.process_time() - began) / 500

    assert min(seconds_of_one() for _ in range(5)) < 50e-6
