"""The admin service behind real sockets: configs, log levels, drains, explanations, the token."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from core.errors import (
    DeadlineExceeded,
    EpserveError,
    InvalidRequest,
    NotFound,
    Unauthenticated,
    Unavailable,
)
from core.log import current_level, set_level
from proto import router_pb2, worker_pb2
from proto.router_pb2 import (
    AdminExplainRequest,
    AnnounceRequest,
    DrainWorkerRequest,
    GetProcessConfigRequest,
    SetProcessLogLevelRequest,
)
from proto.worker_pb2 import ROLE_GATEWAY, ProcessIdentity, RequestLeg
from rpc.admin_token import bearer_metadata
from rpc.client import request_metadata, to_error
from tests.router.fake_worker import FakeWorker
from tests.router.running_router import RunningRouter

GATEWAY = ProcessIdentity(role=ROLE_GATEWAY, name="gw", address="127.0.0.1:8000", epoch="g-1")


class OperatedWorker(FakeWorker):
    """Also answers what operators ask, and keeps what it was told."""

    def __init__(self, role: str, epoch: str, **facts: Any) -> None:
        super().__init__(role, epoch, **facts)
        self.drains: list[worker_pb2.DrainRequest] = []
        self.tokens: list[str] = []
        self.level = "info"
        self.legs: list[RequestLeg] = []
        self.asked_for: list[str] = []
        self.refusal: EpserveError | None = None
        self.hangs = False

    async def Drain(self, request: worker_pb2.DrainRequest, context: Any) -> Any:
        if self.hangs:
            await asyncio.Event().wait()
        if self.refusal is not None:
            raise self.refusal
        self.drains.append(request)
        metadata = dict(context.invocation_metadata())
        self.tokens.append(metadata.get("authorization", ""))
        return worker_pb2.DrainResponse()

    async def GetConfig(self, request: worker_pb2.GetConfigRequest, context: Any) -> Any:
        return worker_pb2.GetConfigResponse(config_json='{"ranks": 2}', version="7.0")

    async def SetLogLevel(self, request: worker_pb2.SetLogLevelRequest, context: Any) -> Any:
        previous, self.level = self.level, request.level
        return worker_pb2.SetLogLevelResponse(previous=previous)

    async def ExplainRequest(
        self, request: worker_pb2.ExplainRequestRequest, context: Any
    ) -> worker_pb2.ExplainRequestResponse:
        self.asked_for.append(request.request_id)
        if not self.legs:
            raise NotFound("no such request")
        return worker_pb2.ExplainRequestResponse(legs=self.legs)


@pytest.fixture
async def prefill() -> AsyncIterator[OperatedWorker]:
    async with OperatedWorker("prefill", "p-1", name="prefill-0") as worker:
        yield worker


@pytest.fixture
async def decode() -> AsyncIterator[OperatedWorker]:
    async with OperatedWorker("decode", "d-1", name="decode-0") as worker:
        yield worker


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    before = current_level()
    yield
    set_level(before)


async def refusal(call: Any) -> EpserveError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return to_error(caught.value)


async def test_configs_of_all_processes_or_of_one(
    router: RunningRouter, decode: OperatedWorker
) -> None:
    announcement = AnnounceRequest(identity=GATEWAY, config_json='{"workers": 1}', version="6.5")
    await router.router.Announce(announcement)
    reply = await router.admin.GetConfig(GetProcessConfigRequest(), timeout=30)
    told = {
        each.identity.name: (json.loads(each.config_json), each.version) for each in reply.processes
    }
    assert set(told) == {"router", "gw", "prefill-0", "decode-0"}
    assert told["gw"] == ({"workers": 1}, "6.5")
    assert told["decode-0"] == ({"ranks": 2}, "7.0")
    assert told["router"][0]["max_waiting"] == 2  # as the fixture has it
    for name in ("decode-0", decode.address, "d-1"):
        reply = await router.admin.GetConfig(GetProcessConfigRequest(process=name), timeout=30)
        assert [each.identity.epoch for each in reply.processes] == ["d-1"]
    error = await refusal(router.admin.GetConfig(GetProcessConfigRequest(process="x"), timeout=30))
    assert type(error) is NotFound
    assert "decode-0, gw, prefill-0, router" in error.message


async def test_a_worker_that_knows_no_such_call_is_told_apart(
    start: Callable[..., RunningRouter], prefill: OperatedWorker
) -> None:
    async with FakeWorker("decode", "d-9", name="old") as old:
        router = start(prefill=[prefill.address], decode=[old.address])
        await router.until_ready(prefill, old)
        reply = await router.admin.GetConfig(GetProcessConfigRequest(), timeout=30)
        errors = {each.identity.name: bool(each.error) for each in reply.processes}
        assert errors == {"router": False, "prefill-0": False, "old": True}


async def test_log_levels(
    router: RunningRouter, prefill: OperatedWorker, decode: OperatedWorker
) -> None:
    announcement = AnnounceRequest(identity=GATEWAY, log_level="info")
    await router.router.Announce(announcement)
    set_level("info")
    request = SetProcessLogLevelRequest(level="Error")
    reply = await router.admin.SetLogLevel(request, timeout=30)
    assert {each.previous for each in reply.processes} == {"info"}
    assert not any(each.error for each in reply.processes)
    assert current_level() == prefill.level == decode.level == "error"
    assert (await router.router.Announce(announcement)).log_level == "error"
    announcement.log_level = "error"
    assert (await router.router.Announce(announcement)).log_level == ""
    request = SetProcessLogLevelRequest(level="warning", process="decode-0")
    await router.admin.SetLogLevel(request, timeout=30)
    assert (prefill.level, decode.level) == ("error", "warning")
    request = SetProcessLogLevelRequest(level="loud")
    assert type(await refusal(router.admin.SetLogLevel(request, timeout=30))) is InvalidRequest


async def test_draining_reaches_the_worker_that_is_meant(
    router: RunningRouter, prefill: OperatedWorker, decode: OperatedWorker
) -> None:
    request = DrainWorkerRequest(worker="decode-0", grace_seconds=0)
    reply = await router.admin.DrainWorker(request, timeout=30)
    assert reply.worker.epoch == "d-1"
    await router.admin.DrainWorker(DrainWorkerRequest(worker="decode-0", undo=True), timeout=30)
    first, second = decode.drains
    assert (first.undo, first.HasField("grace_seconds"), first.grace_seconds) == (False, True, 0)
    assert (second.undo, second.HasField("grace_seconds")) == (True, False)
    assert prefill.drains == []
    for name, kind in (("router", NotFound), ("nobody", NotFound)):
        error = await refusal(router.admin.DrainWorker(DrainWorkerRequest(worker=name), timeout=30))
        assert type(error) is kind
    await decode.kill()
    await router.until(lambda: router.seen(decode).lost)
    request = DrainWorkerRequest(worker="decode-0")
    error = await refusal(router.admin.DrainWorker(request, timeout=30))
    assert type(error) is Unavailable
    assert "decode-0" in error.message


def node(role: str, group: str, number: int, num_nodes: int = 2) -> OperatedWorker:
    told = worker_pb2.ExpertGroup(name=group, node_rank=number, num_nodes=num_nodes)
    name = f"{role}-{group}-{number}-of-{num_nodes}"
    return OperatedWorker(role, f"e-{name}", name=name, expert_group=told)


async def test_nodes_of_an_expert_group_are_drained_together(
    start: Callable[..., RunningRouter],
) -> None:
    async with AsyncExitStack() as stack:
        group = [node("decode", "a", 0), node("decode", "a", 1)]
        # Another group, another role, and one that has only the name in common.
        strangers = [node("decode", "b", 0), node("decode", "a", 0, 1), node("prefill", "a", 0)]
        for one in (*group, *strangers):
            await stack.enter_async_context(one)
        decodes = [one.address for one in (*group, *strangers[:2])]
        router = start(prefill=[strangers[2].address], decode=decodes)
        await router.until_ready(*group, *strangers)
        for number, undo in ((0, False), (1, True)):
            request = DrainWorkerRequest(worker=group[number].address, undo=undo)
            reply = await router.admin.DrainWorker(request, timeout=30)
            assert reply.worker.address == group[number].address
            assert [one.address for one in reply.others] == [group[1 - number].address]
            assert [one.drains.pop().undo for one in group] == [undo, undo]
        request = DrainWorkerRequest(worker=strangers[1].address)
        assert not (await router.admin.DrainWorker(request, timeout=30)).others
        assert [len(one.drains) for one in (*group, *strangers)] == [0, 0, 0, 1, 0]
        # The rest is told although one cannot be.
        group[0].refusal = Unavailable("not now")
        request = DrainWorkerRequest(worker=group[0].address)
        error = await refusal(router.admin.DrainWorker(request, timeout=30))
        assert "not now" in error.message
        assert len(group[1].drains) == 1


async def test_a_name_that_several_have_is_refused(
    start: Callable[..., RunningRouter], prefill: OperatedWorker
) -> None:
    async with (
        OperatedWorker("decode", "d-1", name="decode") as one,
        OperatedWorker("decode", "d-2", name="decode") as other,
    ):
        router = start(prefill=[prefill.address], decode=[one.address, other.address])
        await router.until_ready(prefill, one, other)
        request = DrainWorkerRequest(worker="decode")
        error = await refusal(router.admin.DrainWorker(request, timeout=30))
        assert type(error) is InvalidRequest
        assert one.address in error.message
        assert other.address in error.message
        request = DrainWorkerRequest(worker=other.address)
        await router.admin.DrainWorker(request, timeout=30)
        assert (len(one.drains), len(other.drains)) == (0, 1)


async def test_a_name_is_that_of_the_worker_which_is_there(
    start: Callable[..., RunningRouter], prefill: OperatedWorker
) -> None:
    async with (
        OperatedWorker("decode", "d-1", name="decode") as old,
        OperatedWorker("decode", "d-2", name="decode") as new,
    ):
        router = start(prefill=[prefill.address], decode=[old.address, new.address])
        await router.until_ready(prefill, old, new)
        await old.kill()
        await router.until(lambda: router.seen(old).lost)
        reply = await router.admin.DrainWorker(DrainWorkerRequest(worker="decode"), timeout=30)
        assert reply.worker.epoch == "d-2"
        # The worker's own word is no silence.
        new.refusal = Unavailable("worker is shutting down")
        request = DrainWorkerRequest(worker="decode", undo=True)
        error = await refusal(router.admin.DrainWorker(request, timeout=30))
        assert error.message == f"worker decode at {new.address} says: worker is shutting down"
        error = await refusal(router.admin.DrainWorker(DrainWorkerRequest(), timeout=30))
        assert type(error) is InvalidRequest


async def test_a_worker_that_hangs_is_named(
    router: RunningRouter, decode: OperatedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.admin.service.ANSWER_SECONDS", 0.2)
    decode.hangs = True
    request = DrainWorkerRequest(worker="decode-0")
    error = await refusal(router.admin.DrainWorker(request, timeout=30))
    assert type(error) is DeadlineExceeded
    assert f"decode-0 at {decode.address} does not answer" in error.message


async def test_a_request_is_explained_by_the_router_and_all_workers(
    router: RunningRouter, prefill: OperatedWorker, decode: OperatedWorker
) -> None:
    assigned = router_pb2.AssignRequest(
        model="demo", num_prompt_tokens=100, request_id="chatcmpl-1-0"
    )
    await router.router.Assign(assigned, metadata=request_metadata("mine"))
    prefill.legs = [RequestLeg(leg_id="chatcmpl-1-0", accepted_at=2.0)]
    decode.legs = [RequestLeg(leg_id="chatcmpl-1-0", accepted_at=1.0)]
    for name in ("chatcmpl-1", "mine"):
        request = AdminExplainRequest(request_id=name)
        reply = await router.admin.ExplainRequest(request, timeout=30)
        (assignment,) = reply.assignments
        assert (assignment.leg_id, assignment.outcome) == ("chatcmpl-1-0", "ok")
        chosen = [each.worker.name for each in assignment.candidates if each.chosen]
        assert chosen == ["prefill-0", "decode-0"]
        assert [leg.accepted_at for leg in reply.legs] == [1.0, 2.0]
        assert list(reply.unreachable) == []
    assert decode.asked_for == ["chatcmpl-1", "mine"]
    await decode.kill()
    await router.until(lambda: router.seen(decode).lost)
    request = AdminExplainRequest(request_id="chatcmpl-1")
    reply = await router.admin.ExplainRequest(request, timeout=30)
    assert list(reply.unreachable) == ["decode-0"]
    assert len(reply.legs) == 1


async def test_requests_that_nobody_remembers(router: RunningRouter) -> None:
    for request_id, kind in (("chatcmpl-1", NotFound), ("", InvalidRequest)):
        request = AdminExplainRequest(request_id=request_id)
        assert type(await refusal(router.admin.ExplainRequest(request, timeout=30))) is kind


async def test_every_call_needs_the_token_where_there_is_one(
    start: Callable[..., RunningRouter],
    prefill: OperatedWorker,
    decode: OperatedWorker,
    tmp_path: Path,
) -> None:
    file = tmp_path / "token"
    file.write_text("sesame")
    router = start(prefill=[prefill.address], decode=[decode.address], admin_token_file=str(file))
    await router.until_ready(prefill, decode)
    methods = router_pb2.DESCRIPTOR.services_by_name["Admin"].methods
    for described in methods:
        method = getattr(router.admin, described.name)
        request = getattr(router_pb2, described.input_type.name)()
        for metadata in ((), bearer_metadata("Sesame"), bearer_metadata("sesame ")):
            call = method(request, timeout=30, metadata=metadata)
            error = await refusal(call.read() if described.server_streaming else call)
            assert type(error) is Unauthenticated, described.name
    assert len(methods) >= 9
    # Gateways need none.
    await router.router.Announce(AnnounceRequest(identity=GATEWAY))
    await router.assign()
    drain = DrainWorkerRequest(worker="decode-0")
    await router.admin.DrainWorker(drain, timeout=30, metadata=bearer_metadata("sesame"))
    assert decode.tokens == ["Bearer sesame"]  # it travels on
    file.write_text("another-one")
    await refusal(router.admin.DrainWorker(drain, timeout=30, metadata=bearer_metadata("sesame")))
    file.unlink()  # the last one stays in force
    await refusal(router.admin.DrainWorker(drain, timeout=30))
    await router.admin.DrainWorker(drain, timeout=30, metadata=bearer_metadata("another-one"))
