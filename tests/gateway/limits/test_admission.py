"""The gateway's own queue: its bounds, its order, and that no place in it is ever lost."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from core.clock import ManualClock
from core.errors import EpserveError, Overloaded, Unavailable
from gateway.base.metrics import GatewayMetrics
from gateway.limits.admission import Admission


class Request:
    def __init__(self) -> None:
        self.error: EpserveError | None = None

    def stop(self, error: EpserveError) -> None:
        self.error = error


def admission(
    *, inflight: int = 1, queued: int = 8, seconds: float = 5.0, clock: ManualClock | None = None
) -> Admission:
    return Admission(
        max_inflight=inflight,
        max_queued=queued,
        max_queue_seconds=seconds,
        metrics=GatewayMetrics(),
        clock=clock or ManualClock(),
    )


@asynccontextmanager
async def full(queue: Admission) -> AsyncIterator[None]:
    async with queue.slot(Request()):
        yield


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_higher_priorities_first_then_in_order() -> None:
    queue = admission()
    order: list[str] = []

    async def one(name: str, priority: int) -> None:
        async with queue.slot(Request(), priority):
            order.append(name)
            await turns(1)

    async with full(queue):
        names = [("a", 0), ("b", 5), ("c", -100), ("d", 5), ("e", 0), ("f", 100)]
        tasks = []
        for name, priority in names:
            tasks.append(asyncio.create_task(one(name, priority)))
            await turns(1)
        assert queue.num_queued == len(names)
        assert order == []
    await asyncio.gather(*tasks)
    assert order == ["f", "b", "d", "a", "e", "c"]
    assert (queue.num_inflight, queue.num_queued) == (0, 0)


async def test_the_queue_is_bounded() -> None:
    queue = admission(queued=2)
    async with full(queue):
        tasks = [asyncio.create_task(full(queue).__aenter__()) for _ in range(2)]
        await turns()
        with pytest.raises(Overloaded) as raised:
            queue.check()
        assert raised.value.retry_after_seconds is not None
        with pytest.raises(Overloaded):
            await full(queue).__aenter__()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert queue.num_queued == 0
        queue.check()


async def test_the_wait_is_bounded() -> None:
    queue = admission(seconds=0.05)
    async with full(queue):
        with pytest.raises(Overloaded, match="within"):
            await full(queue).__aenter__()
        assert queue.num_queued == 0
    async with full(queue):
        pass


async def test_refusals_tell_the_pace_of_a_full_gateway() -> None:
    clock = ManualClock()
    queue = admission(queued=3, clock=clock)

    def told() -> float | None:
        with pytest.raises(Overloaded) as raised:
            queue.check()
        return raised.value.retry_after_seconds

    async with full(queue):
        pass
    clock.advance(3600)  # in which nobody asks: no pace
    ends = [asyncio.Event() for _ in range(6)]

    async def one(end: asyncio.Event) -> None:
        async with queue.slot(Request()):
            await end.wait()

    tasks = []
    for end in ends[:4]:
        tasks.append(asyncio.create_task(one(end)))
        await turns()
    assert told() == 1.0
    for number, retry_seconds in ((0, 1.0), (1, 5.0 * 4)):
        clock.advance(5)
        ends[number].set()
        tasks.append(asyncio.create_task(one(ends[4 + number])))
        await turns()
        assert told() == retry_seconds
    for end in ends:
        end.set()
    await asyncio.gather(*tasks)


async def test_nobody_overtakes_those_who_wait() -> None:
    queue = admission(queued=1)
    second, third = queue.slot(Request()), queue.slot(Request())
    async with full(queue):
        waiting = asyncio.create_task(second.__aenter__())
        await turns()
    # The place is promised, its owner has not woken up yet.
    assert not waiting.done()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(third.__aenter__(), 0.01)
    await waiting
    assert queue.num_inflight == 1


async def test_a_drain_refuses_those_who_wait_and_tells_those_who_run() -> None:
    queue = admission()
    running = Request()
    async with queue.slot(running):
        waiting = asyncio.create_task(full(queue).__aenter__())
        await turns()
        draining = asyncio.create_task(queue.drain(0.05))
        with pytest.raises(Unavailable):
            await waiting
        with pytest.raises(Unavailable):
            queue.check()
        await draining
        assert isinstance(running.error, Unavailable)


@pytest.mark.parametrize("gives_up", [False, True])
async def test_a_drain_waits_for_who_has_been_given_a_place(gives_up: bool) -> None:
    queue = admission()
    promised = Request()
    order: list[str] = []

    async def one() -> None:
        async with queue.slot(promised):
            order.append("begins")
            await asyncio.sleep(0.02)
            order.append("ends")

    async with full(queue):
        task = asyncio.create_task(one())
        await turns()
    # Its place is promised, it has not woken up yet.
    if gives_up:
        task.cancel()
    async with asyncio.timeout(1):
        await queue.drain(5.0)
    order.append("drained")
    await asyncio.gather(task, return_exceptions=True)
    assert order == (["drained"] if gives_up else ["begins", "ends", "drained"])
    assert promised.error is None


@pytest.mark.parametrize("seed", range(8))
async def test_no_place_is_lost_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    queue = admission(inflight=3, queued=10, seconds=0.01)
    most = 0

    async def one() -> None:
        nonlocal most
        async with queue.slot(Request(), rng.randint(-3, 3)):
            most = max(most, queue.num_inflight)
            await asyncio.sleep(rng.choice([0, 0, 0.001, 0.004]))
            if rng.random() < 0.2:
                raise ValueError

    tasks = []
    for _ in range(300):
        tasks.append(asyncio.create_task(one()))
        if rng.random() < 0.5:
            await asyncio.sleep(rng.choice([0, 0.001]))
        if rng.random() < 0.4:
            rng.choice(tasks).cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await turns()
    assert most == 3
    assert (queue.num_inflight, queue.num_queued) == (0, 0)
    async with full(queue), full(queue), full(queue):
        assert queue.num_inflight == 3
