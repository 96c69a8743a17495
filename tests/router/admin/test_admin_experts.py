"""Operators' calls about experts find node 0 of the group they mean, or are refused."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import grpc
import pytest

from core.errors import EpserveError, InvalidRequest, Mismatch, NotFound, Overloaded
from proto import experts_pb2, router_pb2
from router.workers.table import StreamBroken
from rpc.client import to_error
from tests.eventually import eventually
from tests.router.fake_node import LOAD, PLAN, FakeNode
from tests.router.fake_worker import FakeWorker
from tests.router.running_router import PATIENCE_SECONDS, RunningRouter

Start = Callable[..., RunningRouter]


@pytest.fixture
async def begin(start: Start) -> AsyncIterator[Callable[..., object]]:
    async with AsyncExitStack() as stack:

        async def up(*workers: FakeWorker) -> RunningRouter:
            for worker in workers:
                await stack.enter_async_context(worker)
            router = start(prefill=[], decode=[worker.address for worker in workers])
            await router.until_ready(*workers)
            return router

        yield up


async def plan(router: RunningRouter, group: str = "") -> experts_pb2.RebalancePlan:
    request = router_pb2.GroupPlanRequest(
        group=group, plan=experts_pb2.PlanRequest(max_moves=5, layers=[1])
    )
    return await router.admin.PlanRebalance(request, timeout=PATIENCE_SECONDS)


async def refusal(router: RunningRouter, group: str = "") -> EpserveError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await plan(router, group)
    return to_error(caught.value)


async def test_calls_are_passed_on(begin: Callable[..., RunningRouter]) -> None:
    node = FakeNode("d-1")
    router = await begin(node)
    assert await plan(router) == PLAN
    load = await router.admin.GetExpertLoad(router_pb2.GroupExpertLoadRequest(group="pool"))
    assert load == LOAD
    applied = router.admin.ApplyRebalance(
        router_pb2.GroupApplyRequest(apply=experts_pb2.ApplyRequest(plan=PLAN))
    )
    assert [progress.placement_version async for progress in applied] == [0, 4]
    rolled = router.admin.RollBackRebalance(router_pb2.GroupRollBackRequest())
    assert [progress.num_layers async for progress in rolled] == [1, 1]
    assert node.asked == [
        experts_pb2.PlanRequest(max_moves=5, layers=[1]),
        experts_pb2.GetLoadRequest(),
        experts_pb2.ApplyRequest(plan=PLAN),
        experts_pb2.RollBackRequest(),
    ]


async def test_a_node_that_hangs_is_named(
    begin: Callable[..., RunningRouter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.admin.experts.ANSWER_SECONDS", 0.1)
    node = FakeNode("d-1")
    router = await begin(node)
    node.hangs = True
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.admin.GetExpertLoad(router_pb2.GroupExpertLoadRequest(), timeout=30)
    assert f"at {node.address} does not answer" in to_error(caught.value).message


@pytest.mark.parametrize("method", ["PlanRebalance", "ApplyRebalance", "RollBackRebalance"])
async def test_what_may_take_long_ends_with_a_node_that_is_lost(
    begin: Callable[..., RunningRouter], method: str
) -> None:
    node = FakeNode("d-1")
    router = await begin(node)
    node.hangs = True
    requests = {
        "PlanRebalance": router_pb2.GroupPlanRequest(),
        "ApplyRebalance": router_pb2.GroupApplyRequest(),
        "RollBackRebalance": router_pb2.GroupRollBackRequest(),
    }
    call = getattr(router.admin, method)(requests[method], timeout=PATIENCE_SECONDS)
    asking = asyncio.ensure_future(call if method == "PlanRebalance" else call.read())
    await eventually(lambda: bool(node.asked))
    # Its connection stays: it is silence that tells.
    router.cluster.apply(StreamBroken(node.address, "it was silent for 3 s"))
    node.silent = True
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asking
    assert to_error(caught.value).message.endswith(f"at {node.address} does not answer any more")


async def test_node_0_is_asked(begin: Callable[..., RunningRouter]) -> None:
    nodes = [FakeNode(f"d-{rank}", node_rank=rank, num_nodes=3) for rank in (2, 0, 1)]
    router = await begin(*nodes)
    await plan(router, "pool")
    assert [len(node.asked) for node in nodes] == [0, 1, 0]


async def test_unknown_group(begin: Callable[..., RunningRouter]) -> None:
    router = await begin(FakeNode("d-1"), FakeNode("d-2", "other"))
    error = await refusal(router, "none-such")
    assert isinstance(error, NotFound)
    assert error.message == "there is no expert group 'none-such' here, but other, pool"


async def test_no_group_at_all(begin: Callable[..., RunningRouter]) -> None:
    router = await begin(FakeWorker("decode", "d-1"))
    assert isinstance(await refusal(router), NotFound)


async def test_a_group_must_be_named_where_there_are_several(
    begin: Callable[..., RunningRouter],
) -> None:
    spread = FakeNode("d-1"), FakeNode("d-2", "other"), FakeNode("d-3", "alone", num_ranks=1)
    router = await begin(*spread)
    error = await refusal(router)
    assert isinstance(error, InvalidRequest)
    assert "other, pool" in error.message


async def test_groups_of_one_rank_do_not_count_beside_others(
    begin: Callable[..., RunningRouter],
) -> None:
    router = await begin(FakeNode("d-1", "alone", num_ranks=1), FakeNode("d-2"))
    assert await plan(router) == PLAN


async def test_a_group_that_is_not_whole(begin: Callable[..., RunningRouter]) -> None:
    nodes = FakeNode("d-0", num_nodes=2), FakeNode("d-1", num_nodes=2, node_rank=1)
    router = await begin(*nodes)
    await nodes[1].say(ready=False)
    await router.until(lambda: not router.seen(nodes[1]).status.ready)
    error = await refusal(router)
    assert isinstance(error, Mismatch)
    assert "is loading" in error.message
    await nodes[1].kill()
    await router.until(lambda: router.seen(nodes[1]).lost)
    assert "node 1 is missing" in (await refusal(router)).message


async def test_two_groups_of_one_name(begin: Callable[..., RunningRouter]) -> None:
    router = await begin(FakeNode("d-0"), FakeNode("d-1"))
    assert isinstance(await refusal(router, "pool"), InvalidRequest)


async def test_the_groups_own_refusal_comes_through(begin: Callable[..., RunningRouter]) -> None:
    node = FakeNode("d-1")
    router = await begin(node)
    node.refusal = Overloaded("experts are being moved already", retry_after_seconds=7)
    error = await refusal(router)
    assert isinstance(error, Overloaded)
    assert (error.message, error.retry_after_seconds) == ("experts are being moved already", 7)
