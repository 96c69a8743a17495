"""Races of the waiting queue, and many calls at once."""

import asyncio
import dataclasses
import random
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry

from core.clock import ManualClock
from core.errors import Overloaded
from router.cluster import Cluster
from router.metrics import RouterMetrics
from router.scheduling.demand import Demand
from router.settings import RouterSettings
from router.workers.table import StatusArrived, StreamBroken
from router.workers.worker import Worker
from tests.router.statuses import ROLES, make_status

if TYPE_CHECKING:
    from router.scheduling.assign import Assignment


def make_cluster(**settings: float) -> Cluster:
    clock = ManualClock()
    metrics = RouterMetrics(CollectorRegistry())
    cluster = Cluster(RouterSettings.model_validate(settings), clock, metrics)
    say(cluster, "prefill", "p")
    return cluster


def say(cluster: Cluster, role: str, epoch: str, **facts: int) -> None:
    cluster.apply(StatusArrived(epoch, ROLES[role], make_status(role, epoch, **facts)))


def demand(number: int, excluded: frozenset[str] = frozenset()) -> Demand:
    return Demand(request_id=str(number), model="demo", num_prompt_tokens=100, excluded=excluded)


def decode_worker(cluster: Cluster) -> Worker:
    (worker,) = [w for w in cluster.table.workers if w.role_name == "decode"]
    return worker


async def test_a_call_cancelled_in_the_moment_it_is_placed_gives_the_room_back() -> None:
    cluster = make_cluster()
    say(cluster, "decode", "d", max_running=1, num_running=1)
    first = asyncio.create_task(cluster.assigner.assign(demand(1)))
    second = asyncio.create_task(cluster.assigner.assign(demand(2)))
    await asyncio.sleep(0)
    say(cluster, "decode", "d", max_running=1, num_running=0)  # places the first ...
    assert len(decode_worker(cluster).pending) == 1
    first.cancel()  # ... which never learns of it
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (await second).pair.decode.epoch == "d"
    assert len(decode_worker(cluster).pending) == 1


async def test_a_call_refused_in_the_moment_it_is_cancelled_leaves_nothing() -> None:
    cluster = make_cluster()
    say(cluster, "decode", "d", max_running=1, num_running=1)
    call = asyncio.create_task(cluster.assigner.assign(demand(1)))
    await asyncio.sleep(0)
    cluster.apply(StreamBroken("d", "gone"))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert cluster.assigner.num_waiting == 0


async def test_no_waiting_at_all_can_be_configured() -> None:
    cluster = make_cluster(max_waiting=0)
    say(cluster, "decode", "d", max_running=1)
    await cluster.assigner.assign(demand(1))
    with pytest.raises(Overloaded, match="full"):
        await cluster.assigner.assign(demand(2))


@pytest.mark.parametrize("seed", range(5))
async def test_any_mix_of_events_keeps_order_and_room(seed: int) -> None:
    """Random arrivals, cancellations, completions: never more than max_running on a worker,
    first come first served, and everybody is served in the end."""
    chance = random.Random(seed)
    limit, total = 3, 60
    cluster = make_cluster(max_waiting=total)
    accepted = {"d0": 0, "d1": 0}
    running: dict[str, list[int]] = {"d0": [], "d1": []}
    tasks: dict[int, asyncio.Task[str]] = {}
    served: list[int] = []
    cancelled: set[int] = set()

    def report(epoch: str) -> None:
        say(
            cluster, "decode", epoch, max_running=limit,
            num_running=len(running[epoch]), accepted=accepted[epoch],
        )  # fmt: skip

    async def request(number: int) -> str:
        assignment = await cluster.assigner.assign(demand(number))
        epoch = assignment.pair.decode.epoch
        served.append(number)
        running[epoch].append(number)
        accepted[epoch] += 1
        assert len(running[epoch]) <= limit
        return epoch

    for epoch in running:
        report(epoch)
    while len(served) + len(cancelled) < total:
        match chance.randrange(4):
            case 0 if len(tasks) < total:
                tasks[len(tasks)] = asyncio.create_task(request(len(tasks)))
            case 1 if tasks and len(cancelled) < total // 4:
                number = chance.choice(list(tasks))
                if tasks[number].cancel():
                    cancelled.add(number)
            case 2:
                epoch = chance.choice(list(running))
                if running[epoch]:
                    running[epoch].pop(chance.randrange(len(running[epoch])))
            case 3:
                report(chance.choice(list(running)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert served == sorted(served)
    assert set(served) | cancelled == set(range(total))
    assert cluster.assigner.num_waiting == 0


async def test_who_asks_again_stands_where_it_stood() -> None:
    """It has waited for longer than all that are here by now."""
    cluster = make_cluster()
    say(cluster, "decode", "d", max_running=1, num_running=1)
    calls = [
        asyncio.create_task(
            cluster.assigner.assign(dataclasses.replace(demand(number), waited_seconds=seconds))
        )
        for number, seconds in enumerate((0.0, 0.0, 9.0, 30.0))
    ]
    await asyncio.sleep(0)
    for count, number in enumerate((3, 2, 0, 1)):
        facts = {"max_running": 1, "num_running": 0, "accepted": count}
        say(cluster, "decode", "d", **facts)
        assert (await asyncio.wait_for(calls[number], 20)).queue_seconds == 0.0  # of this wait
        say(cluster, "decode", "d", **(facts | {"num_running": 1, "accepted": count + 1}))


async def test_a_full_queue_refuses_the_last_in_line_whoever_comes() -> None:
    cluster = make_cluster(max_waiting=2)
    say(cluster, "decode", "d", max_running=1, num_running=1)

    def call(number: int, seconds: float, priority: int = 0) -> "asyncio.Task[Assignment]":
        wanted = dataclasses.replace(demand(number), waited_seconds=seconds, priority=priority)
        return asyncio.create_task(cluster.assigner.assign(wanted))

    first, second = call(0, 5.0), call(1, 0.0)
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await asyncio.wait_for(call(2, 0.0), 20)
    moved = call(3, 60.0)
    with pytest.raises(Overloaded, match="2 requests wait"):
        await asyncio.wait_for(second, 20)
    urgent = call(4, 0.0, priority=1)
    with pytest.raises(Overloaded):
        await asyncio.wait_for(first, 20)
    assert cluster.assigner.num_waiting == 2
    for count, task in enumerate((urgent, moved)):
        facts = {"max_running": 1, "num_running": 0, "accepted": count}
        say(cluster, "decode", "d", **facts)
        await asyncio.wait_for(task, 20)
        say(cluster, "decode", "d", **(facts | {"num_running": 1, "accepted": count + 1}))


async def test_higher_priorities_are_placed_first_and_equal_ones_in_order() -> None:
    cluster = make_cluster()
    say(cluster, "decode", "d", max_running=1, num_running=1)
    placed: list[int] = []

    async def call(number: int, priority: int) -> None:
        wanted = dataclasses.replace(demand(number), priority=priority)
        await cluster.assigner.assign(wanted)
        placed.append(number)

    async with asyncio.TaskGroup() as group:
        for number, priority in enumerate((0, 0, 7, -2, 7, 0)):
            group.create_task(call(number, priority))
            await asyncio.sleep(0)
        for count in range(1, 7):
            facts = {"max_running": 1, "num_running": 0, "accepted": count - 1}
            say(cluster, "decode", "d", **facts)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert len(placed) == count
            say(cluster, "decode", "d", **(facts | {"num_running": 1, "accepted": count}))
    assert placed == [2, 4, 0, 1, 5, 3]
