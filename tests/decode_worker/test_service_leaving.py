"""The Decode service over gRPC: clients that leave, at each point, and come again."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from core.errors import DeadlineExceeded
from tests.decode_worker.scripted import (
    NUM_PAGES,
    Cluster,
    collect,
    failure,
    ids,
)
from tests.eventually import eventually

Reach = Callable[[Cluster, Any], Awaitable[object]]


async def _unheard(both: Cluster, call: Any) -> None:
    both.front.ranks[0].deaf = True
    await eventually(lambda: both.service.num_accepted_total)


async def _prefilling(both: Cluster, call: Any) -> None:
    await both.prefill.called.wait()


async def _awaiting_kv(both: Cluster, call: Any) -> None:
    await eventually(lambda: both.front.ranks[0].state.awaits_kv)


async def _streaming(both: Cluster, call: Any) -> None:
    await call.read()
    await call.read()


POINTS: dict[str, tuple[Reach, str, bool]] = {
    # how to get there, what prefill writes, whether its call hangs
    "unheard": (_unheard, "all", False),
    "prefilling, no KV": (_prefilling, "none", True),
    "prefilling, some KV": (_prefilling, "some", True),
    "prefilling, all KV": (_prefilling, "all", True),
    "prefilled, no KV": (_awaiting_kv, "none", False),
    "prefilled, some KV": (_awaiting_kv, "some", False),
    "streaming": (_streaming, "all", False),
}


@pytest.mark.parametrize("how", ["cancel", "deadline"])
@pytest.mark.parametrize("point", POINTS)
async def test_leaving_at_any_point_clears_both_legs(both: Cluster, point: str, how: str) -> None:
    reach, kv, hangs = POINTS[point]
    both.script.kv = kv
    both.script.hold = asyncio.Event() if hangs else None
    timeout = 0.3 if how == "deadline" else 9
    # The context is 64 tokens: streaming does not end by itself before the deadline.
    call = both.decode.Generate(both.request(sampling={"max_tokens": 58}), timeout=timeout)
    async with asyncio.timeout(30):  # a call whose deadline comes before gets nowhere
        await reach(both, call)
    if how == "cancel":
        call.cancel()
    elif point == "streaming":
        both.front.ranks[0].deaf = True  # or it would be done in time
    if how == "deadline":
        assert isinstance(await failure(call), DeadlineExceeded)
    await eventually(lambda: both.service._num_streams == 0)
    both.front.ranks[0].deaf = False
    await both.quiet()
    if hangs:
        await eventually(lambda: both.prefill.cancelled == [both.prefill.calls[0].attempt_id])
    outcome = "cancelled" if how == "cancel" else "deadline_exceeded"
    assert both.metric("epserve_worker_requests_total", outcome=outcome) == 1
    # The worker is as good as new.
    both.script.kv, both.script.hold = "all", None
    assert len(ids(await collect(both.decode.Generate(both.request(), timeout=60)))) == 5


async def test_the_deadline_is_handed_on(both: Cluster) -> None:
    await collect(both.decode.Generate(both.request(), timeout=50))
    (seconds,) = both.prefill.seconds_left
    assert seconds is not None
    assert 30 < seconds < 50.1


async def test_the_same_request_may_come_again_before_the_old_one_is_cleared(
    both: Cluster,
) -> None:
    both.front.ranks[0].deaf = True
    first = both.decode.Generate(both.request(), timeout=60)
    await eventually(lambda: both.service.num_accepted_total == 1)
    first.cancel()
    second = asyncio.create_task(collect(both.decode.Generate(both.request(), timeout=60)))
    await eventually(lambda: both.service.num_accepted_total == 2)
    both.front.ranks[0].deaf = False
    assert len(ids(await second)) == 5
    await both.quiet()


async def test_a_storm_of_requests_and_cancellations_leaves_nothing(both: Cluster) -> None:
    async def one(number: int) -> None:
        call = both.decode.Generate(
            both.request(f"r{number}", sampling={"max_tokens": 20}), timeout=60
        )
        try:
            for _ in range(number % 5):
                await call.read()
            if number % 3:
                await asyncio.sleep(0.002 * (number % 7))
                call.cancel()
            else:
                await collect(call)
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            return

    for begin in range(0, 120, 8):
        both.script.kv = ("all", "late", "some")[begin % 3] if begin % 2 else "late"
        await asyncio.gather(*(one(number) for number in range(begin, begin + 8)))
    await both.quiet()
    assert both.front.ranks[0].state.pool.num_free == NUM_PAGES
