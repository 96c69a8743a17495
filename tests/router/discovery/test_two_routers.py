"""Two routers that know nothing of each other but what workers tell both."""

import asyncio
from collections import Counter
from collections.abc import Callable
from statistics import median

from proto.router_pb2 import AssignResponse
from tests.router.fake_worker import FakeWorker
from tests.router.running_router import RunningRouter

LIMIT = 8
NUM_CLIENTS = 32
NUM_REQUESTS = 10
# What both may place in the moment before either hears of the other's. A sudden burst may double
# the load for as long as it lasts; workers let the surplus wait.
SURPLUS = 4


class Accounts:
    """Keeps the figures of workers that take whatever comes."""

    def __init__(self, workers: dict[str, FakeWorker]) -> None:
        self._workers = workers
        self.running: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.seen: list[int] = []

    async def serve(self, pair: AssignResponse, seconds: float) -> None:
        epoch = pair.decode.epoch
        self.running[epoch] += 1
        self.accepted[epoch] += 1
        self.seen.append(self.running[epoch])
        await self._tell(epoch)
        await asyncio.sleep(seconds)
        self.running[epoch] -= 1
        await self._tell(epoch)

    async def _tell(self, epoch: str) -> None:
        await self._workers[epoch].say(
            num_running=self.running[epoch], accepted=self.accepted[epoch]
        )


async def test_both_see_the_load_that_the_other_makes(
    prefill: FakeWorker, start: Callable[..., RunningRouter]
) -> None:
    async with (
        FakeWorker("decode", "d-1", max_running=LIMIT) as first,
        FakeWorker("decode", "d-2", max_running=LIMIT) as second,
    ):
        workers = {"d-1": first, "d-2": second}
        addresses = [first.address, second.address]
        routers = [
            start(prefill=[prefill.address], decode=addresses, status_interval_ms=0)
            for _ in range(2)
        ]
        for router in routers:
            await router.until_ready(prefill, first, second)
        accounts = Accounts(workers)

        async def client(number: int) -> None:
            for _ in range(NUM_REQUESTS):
                pair = await routers[number % 2].assign()
                await accounts.serve(pair, 0.06)

        # Half of the clients would fill all workers: a router that only counted its own would
        # place as many again.
        await asyncio.gather(*(client(number) for number in range(NUM_CLIENTS)))
        assert sum(accounts.accepted.values()) == NUM_CLIENTS * NUM_REQUESTS
        assert median(accounts.seen) <= LIMIT + SURPLUS
        for epoch in workers:
            assert accounts.accepted[epoch] > NUM_CLIENTS * NUM_REQUESTS / 4
        for router in routers:
            for worker in (first, second):
                # What was confirmed is not counted twice, nor for ever.
                await router.until(lambda r=router, w=worker: r.seen(w).num_requests == 0)  # type: ignore[misc]


async def test_a_worker_that_one_router_fills_is_full_for_the_other(
    prefill: FakeWorker, decode: FakeWorker, start: Callable[..., RunningRouter]
) -> None:
    routers = [
        start(prefill=[prefill.address], decode=[decode.address], max_wait_seconds=20)
        for _ in range(2)
    ]
    for router in routers:
        await router.until_ready(prefill, decode)
    for accepted in range(1, 5):
        await routers[0].assign()
        await decode.say(num_running=accepted, accepted=accepted)
    await routers[1].until(lambda: routers[1].seen(decode).num_requests == 4)
    waiting = routers[1].call()
    await routers[1].until_waiting(1)
    await decode.say(num_running=3)
    assert (await waiting).decode.epoch == "d-1"
