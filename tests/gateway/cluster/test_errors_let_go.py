"""A request that was refused, or moved, is gone when it is answered: errors whose tracebacks know
them would keep it, and its prompt, until the garbage collector comes by."""

import asyncio
import gc
import types
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gateway.cluster.client
from core.errors import EpserveError, InvalidRequest, Overloaded, Unavailable
from tests.gateway.conftest import Gateway
from tests.gateway.fake_cluster import FakeCluster, Plan

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_REQUESTS = 8
GATEWAY = Path(gateway.cluster.client.__file__).parents[1]


def refuse(make: Callable[[], EpserveError]) -> Callable[[FakeCluster], None]:
    """Both workers do, once for each choice."""

    def prepare(cluster: FakeCluster) -> None:
        for worker in (cluster.first, cluster.second):
            worker.plan.refusals = deque([make(), make()])

    return prepare


def fail_first(cluster: FakeCluster) -> None:
    cluster.first.plan = Plan(fail_after=2, error=Unavailable("gone"))


def fail_late(cluster: FakeCluster) -> None:
    for worker in (cluster.first, cluster.second):
        worker.plan = Plan(fail_after=2, error=InvalidRequest("late", param="grammar"))


def frames() -> Counter[str]:
    """Of the gateway's calls, those in progress and those that something still knows."""
    codes = [each.f_code for each in gc.get_objects() if type(each) is types.FrameType]
    return Counter(code.co_qualname for code in codes if GATEWAY in Path(code.co_filename).parents)


@pytest.mark.parametrize("body", [{}, {"n": 2}, {"stream": True}], ids=str)
@pytest.mark.parametrize(
    ("prepare", "status"),
    [
        (refuse(lambda: InvalidRequest("no grammar", param="grammar")), 400),
        (refuse(lambda: Overloaded("full")), 429),
        (fail_first, 200),
        (fail_late, 400),
        (lambda _cluster: None, 400),  # refused by the gateway itself
    ],
    ids=["refused", "full", "moved", "late", "regex"],
)
async def test_errors_keep_nothing(
    gateway: Gateway, prepare: Callable[[FakeCluster], None], status: int, body: dict[str, Any]
) -> None:
    async def ask(number: int) -> None:
        prepare(gateway.cluster)
        regex = {} if gateway.cluster.first.plan != Plan() else {"guided_regex": f"(a{number}"}
        reply = await gateway.complete("unicode", **body, **regex)
        assert reply.status_code == (200 if prepare is fail_late and "stream" in body else status)

    await ask(0)
    gc.collect()
    gc.disable()
    try:
        before = frames()
        for number in range(1, NUM_REQUESTS + 1):
            await ask(number)
        await asyncio.sleep(0.05)  # connections end
        surplus = frames() - before
    finally:
        gc.enable()
    assert max(surplus.values(), default=0) < NUM_REQUESTS, surplus
