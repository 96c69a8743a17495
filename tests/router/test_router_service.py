"""The router's services behind real sockets: assignment, waiting, announcements."""

import asyncio
from collections.abc import Callable

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from core.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    Unavailable,
)
from proto.router_pb2 import AnnounceRequest, AnnounceResponse, AssignRequest
from proto.worker_pb2 import ROLE_GATEWAY, ROLE_ROUTER, ProcessIdentity
from router.workers.worker import WorkerState
from tests.eventually import eventually
from tests.router.fake_worker import FakeWorker
from tests.router.running_router import RunningRouter


async def test_a_pair_is_named_by_where_the_router_reaches_it(
    router: RunningRouter, prefill: FakeWorker, decode: FakeWorker
) -> None:
    response = await router.assign()
    assert (response.prefill.address, response.prefill.epoch) == (prefill.address, "p-1")
    assert (response.decode.address, response.decode.epoch) == (decode.address, "d-1")
    assert response.queue_seconds < 1


async def test_without_workers_it_starts_and_says_unavailable(
    start: Callable[..., RunningRouter],
) -> None:
    error = await start(prefill=[], decode=[]).refusal()
    assert type(error) is Unavailable
    assert error.retry_after_seconds == 1


async def test_a_missing_role_is_named(
    prefill: FakeWorker, start: Callable[..., RunningRouter]
) -> None:
    router = start(prefill=[prefill.address], decode=["127.0.0.1:9"])
    await router.until_ready(prefill)
    error = await router.refusal()
    assert type(error) is Unavailable
    assert "no decode worker is ready" in error.message


async def test_bad_requests(router: RunningRouter) -> None:
    assert type(await router.refusal(model="other")) is ModelNotFound
    assert type(await router.refusal(num_prompt_tokens=0)) is InvalidRequest
    assert type(await router.refusal(prefix_hashes=bytes(8 * 101))) is InvalidRequest
    assert type(await router.refusal(prefix_hashes=b"half a hash")) is InvalidRequest
    assert type(await router.refusal(exclude_epochs=["x"] * 1000)) is InvalidRequest
    for seconds in (-1.0, float("nan"), float("inf")):
        for name in ("waited_seconds", "searched_seconds"):
            assert type(await router.refusal(**{name: seconds})) is InvalidRequest
    too_long = await router.refusal(num_prompt_tokens=4096)
    assert type(too_long) is ContextLengthExceeded
    assert "4095" in too_long.message
    await router.assign(num_prompt_tokens=4095)


async def test_a_full_cluster_makes_wait_until_a_worker_has_room(
    router: RunningRouter, decode: FakeWorker
) -> None:
    await decode.say(num_running=4, accepted=4)
    await router.until(lambda: router.seen(decode).num_requests == 4)
    calls = []
    for number in range(2):
        calls.append(router.call(request_id=str(number)))
        await router.until_waiting(number + 1)
    status = await router.status()
    assert status.num_waiting == 2
    assert 0 < status.longest_wait_seconds < 20
    await decode.say(num_running=3)
    first = await calls[0]
    assert first.queue_seconds > 0
    assert not calls[1].done()  # one place, one request; in order of arrival
    await decode.say(num_running=2)
    await calls[1]


async def test_own_assignments_count_until_the_worker_shows_them(
    router: RunningRouter, decode: FakeWorker
) -> None:
    for _ in range(4):
        await router.assign()
    fifth = router.call()
    await router.until_waiting(1)
    await decode.say(num_running=1, accepted=1)  # one arrived, three are on their way
    await router.until(lambda: len(router.seen(decode).pending) == 3)
    assert not fifth.done()
    await decode.say(num_running=3, accepted=4)
    await fifth


async def test_a_full_queue_refuses_at_once_with_a_delay(
    router: RunningRouter, decode: FakeWorker
) -> None:
    await decode.say(num_running=4)
    await router.until(lambda: router.seen(decode).num_requests == 4)
    calls = [router.call() for _ in range(2)]
    await router.until_waiting(2)
    error = await router.refusal()
    assert type(error) is Overloaded
    assert error.retry_after_seconds is not None
    assert error.retry_after_seconds >= 1
    # A caller that goes away frees its place.
    calls[0].cancel()
    await router.until_waiting(1)
    third = router.call()
    await router.until_waiting(2)
    await decode.say(num_running=0)
    await asyncio.gather(calls[1], third)


async def test_the_wait_is_bounded(
    prefill: FakeWorker, start: Callable[..., RunningRouter]
) -> None:
    async with FakeWorker("decode", "d-1", num_running=4) as decode:
        router = start(prefill=[prefill.address], decode=[decode.address], max_wait_seconds=0.05)
        await router.until_ready(prefill, decode)
        error = await router.refusal()
        assert type(error) is Overloaded
        assert "0.05 s" in error.message
        assert router.cluster.assigner.num_waiting == 0


async def test_a_passed_deadline_frees_the_place(router: RunningRouter, decode: FakeWorker) -> None:
    await decode.say(num_running=4)
    await router.until(lambda: router.seen(decode).num_requests == 4)
    request = AssignRequest(model="demo", num_prompt_tokens=1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.router.Assign(request, timeout=0.05)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await router.until_waiting(0)


async def test_stopping_ends_waiting_calls_at_once(
    router: RunningRouter, decode: FakeWorker
) -> None:
    await decode.say(num_running=4)
    await router.until(lambda: router.seen(decode).num_requests == 4)
    waiting = router.call()
    await router.until_waiting(1)
    router.stop.set()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await waiting
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await asyncio.wait_for(router.task, 20)


async def test_gateways_announce_themselves_and_learn_of_the_model(
    router: RunningRouter, prefill: FakeWorker, decode: FakeWorker
) -> None:
    gateway = ProcessIdentity(
        role=ROLE_GATEWAY, name="gateway-0", address="127.0.0.1:8000", epoch="g-1", pid=7
    )
    response = await router.router.Announce(AnnounceRequest(identity=gateway))
    assert response.ready
    assert (response.model, response.page_tokens) == ("demo", 64)
    assert response.max_model_len == 4096
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.router.Announce(AnnounceRequest())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    status = await router.status()
    assert [process.role for process in status.processes] == [ROLE_ROUTER, ROLE_GATEWAY]
    assert status.processes[0].address == router.process.address
    assert status.processes[1] == gateway
    assert {worker.identity.address for worker in status.workers} == {
        prefill.address,
        decode.address,
    }
    await decode.say(ready=False)
    await router.until(lambda: router.in_state(WorkerState.LOADING) == {decode.address})
    response = await router.router.Announce(AnnounceRequest(identity=gateway))
    assert (response.ready, response.model) == (False, "demo")


async def test_nobody_to_announce_about(start: Callable[..., RunningRouter]) -> None:
    router = start(prefill=[], decode=[])
    gateway = ProcessIdentity(role=ROLE_GATEWAY, address="127.0.0.1:8000", epoch="g-1")
    response = await router.router.Announce(AnnounceRequest(identity=gateway))
    assert (response.ready, response.model, response.page_tokens) == (False, "", 0)


UNPLACED = {
    "draining": ({"draining": True}, "demo", "no decode worker is ready"),
    "another model's name": ({}, "other", "model 'other' does not exist; served here: 'demo'"),
    "a model of one role": ({"model": "other"}, "demo", "no decode worker is ready"),
    "another fingerprint": ({"fingerprint": "f2"}, "demo", "no prefill and decode worker"),
    "another version": ({"pairing_version": "2"}, "demo", "no prefill and decode worker"),
    "another page": ({"page_tokens": 32}, "demo", "no prefill and decode worker"),
    "hung": ({}, "demo", "no decode worker is ready"),
}


@pytest.mark.parametrize("case", UNPLACED)
async def test_a_gateway_is_ready_when_its_requests_would_be_placed(
    prefill: FakeWorker, decode: FakeWorker, start: Callable[..., RunningRouter], case: str
) -> None:
    """Announce and Assign say the same, for the same reason."""
    facts, model, problem = UNPLACED[case]
    router = start(prefill=[prefill.address], decode=[decode.address], silence_seconds=1.5)
    await router.until_ready(prefill, decode)
    assert (await announce(router, "demo")).ready
    decode.silent = case == "hung"
    await decode.say(**facts)

    async def is_refused() -> bool:
        return not (await announce(router, model)).ready

    await eventually(is_refused)
    answer = await announce(router, model)
    error = await router.refusal(model=model)
    assert problem in answer.problem
    assert error.message.startswith(answer.problem)


async def test_a_full_cluster_is_ready(router: RunningRouter, decode: FakeWorker) -> None:
    """It takes calls, which wait; a gateway that is not ready would not even say when to return."""
    await decode.say(num_running=4)
    await router.until(lambda: router.seen(decode).num_requests == 4)
    answer = await announce(router, "demo")
    assert (answer.ready, answer.problem) == (True, "")


async def announce(router: RunningRouter, model: str) -> AnnounceResponse:
    gateway = ProcessIdentity(role=ROLE_GATEWAY, address="127.0.0.1:8000", epoch="g-1")
    return await router.router.Announce(AnnounceRequest(identity=gateway, model=model))


async def test_health_and_reflection(router: RunningRouter) -> None:
    for name in ("", "epserve.router.v1.Router", "epserve.router.v1.Admin"):
        reply = await router.health.Check(health_pb2.HealthCheckRequest(service=name))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
    (answer,) = [reply async for reply in router.reflection.ServerReflectionInfo(iter(requests))]
    names = {service.name for service in answer.list_services_response.service}
    assert {"epserve.router.v1.Router", "epserve.router.v1.Admin"} <= names
