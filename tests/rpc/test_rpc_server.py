"""The common server, seen from outside through a real socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from core.errors import (
    Cancelled,
    ContextLengthExceeded,
    EpserveError,
    InternalError,
    InvalidRequest,
    Mismatch,
    ModelNotFound,
    Overloaded,
    TransferError,
    Unavailable,
)
from core.log import REQUEST_ID
from proto import generate_pb2, generate_pb2_grpc
from rpc import server
from rpc.client import Disconnected, channel, remaining_seconds, request_metadata, to_error
from rpc.server import LIVENESS, RpcServer
from tests.eventually import eventually

Context = grpc.aio.ServicerContext[Any, Any]


class ScriptedDecode(generate_pb2_grpc.DecodeServicer):
    """Yields one message, then does what the test put into `then`."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.block = asyncio.Event()
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.request_id = ""
        self.seconds: float | None = None

    async def Generate(
        self, request: generate_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generate_pb2.GenerateResponse]:
        self.request_id = REQUEST_ID.get()
        self.seconds = remaining_seconds(context)
        yield generate_pb2.GenerateResponse(rank=7)
        if self.error is not None:
            raise self.error
        self.entered.set()
        try:
            await self.block.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        yield generate_pb2.GenerateResponse(rank=8)


class ScriptedPrefill(generate_pb2_grpc.PrefillServicer):
    """`Prefill` calls on to another server; `Abort` answers."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    async def Prefill(
        self, request: generate_pb2.PrefillRequest, context: Context
    ) -> generate_pb2.PrefillResponse:
        if self.error is not None:
            raise self.error
        await context.abort(grpc.StatusCode.DATA_LOSS, "said by the servicer itself")

    async def Abort(
        self, request: generate_pb2.AbortRequest, context: Context
    ) -> generate_pb2.AbortResponse:
        return generate_pb2.AbortResponse(was_known=True)


class Served:
    def __init__(self) -> None:
        self.decode = ScriptedDecode()
        self.prefill = ScriptedPrefill()
        self.server = RpcServer("127.0.0.1:0")
        self.server.add(
            generate_pb2_grpc.add_DecodeServicer_to_server, self.decode, generate_pb2, "Decode"
        )
        self.server.add(
            generate_pb2_grpc.add_PrefillServicer_to_server, self.prefill, generate_pb2, "Prefill"
        )
        self.channel = channel(self.server.address)
        self.decode_stub = generate_pb2_grpc.DecodeStub(self.channel)
        self.prefill_stub = generate_pb2_grpc.PrefillStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    async def failure(self) -> grpc.aio.AioRpcError:
        """The error that ends a Generate call after its first message."""
        call = self.decode_stub.Generate(generate_pb2.GenerateRequest(), timeout=30)
        assert (await call.read()).rank == 7
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        return caught.value


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = Served()
    await served.server.start()
    yield served
    served.decode.block.set()
    await served.channel.close(None)
    await served.server.stop(0)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("bad\ttemperature: \u00e9", param="temperature"), "INVALID_ARGUMENT"),
        (ContextLengthExceeded("limit is 4096", param="prompt"), "INVALID_ARGUMENT"),
        (ModelNotFound("no model 'x'"), "NOT_FOUND"),
        (Overloaded("full", retry_after_seconds=2.5), "RESOURCE_EXHAUSTED"),
        (Unavailable("peer died", failed_epoch="abc123"), "UNAVAILABLE"),
        (TransferError("no pages", failed_epoch="abc123"), "UNAVAILABLE"),
        (Mismatch("other epoch"), "FAILED_PRECONDITION"),
        (Cancelled("gone"), "CANCELLED"),
        (InternalError("sorry"), "INTERNAL"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
async def test_errors_survive_the_way(served: Served, error: EpserveError, code: str) -> None:
    served.decode.error = error
    failure = await served.failure()
    assert failure.code().name == code
    back = to_error(failure)
    assert type(back) is type(error)
    assert back.message == error.message
    assert back.param == error.param
    assert back.failed_epoch == error.failed_epoch
    assert back.retry_after_seconds == error.retry_after_seconds


async def test_retry_delay_is_readable_by_standard_clients(served: Served) -> None:
    served.prefill.error = Overloaded("full", retry_after_seconds=2.5)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.prefill_stub.Prefill(generate_pb2.PrefillRequest())
    trailers = dict(caught.value.trailing_metadata())
    assert trailers["retry-after"] == "3"  # whole seconds, never less than asked for
    status = rpc_status.from_call(_Ended(caught.value))
    assert status.details[0].type_url == "type.googleapis.com/google.rpc.RetryInfo"


class _Ended:
    """What `rpc_status` asks of a finished call, answered from its error."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code, self.details = error.code, error.details
        self.trailing_metadata = error.trailing_metadata


async def test_unexpected_exceptions_tell_the_peer_nothing(served: Served) -> None:
    served.decode.error = KeyError("secret of ours")
    failure = await served.failure()
    assert failure.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(failure)
    served.prefill.error = ZeroDivisionError("secret of ours")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.prefill_stub.Prefill(generate_pb2.PrefillRequest())
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(caught.value)


async def test_a_long_message_still_arrives_as_its_status(served: Served) -> None:
    served.decode.error = InvalidRequest("\u00e9" * 100_000, param="p\u00e9" * 1000)
    failure = await served.failure()
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.details().endswith("...")


async def test_an_abort_of_the_servicer_itself_passes(served: Served) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.prefill_stub.Prefill(generate_pb2.PrefillRequest())
    assert caught.value.code() is grpc.StatusCode.DATA_LOSS


async def test_a_failed_call_beneath_keeps_its_meaning(served: Served) -> None:
    served.prefill.error = Unavailable("peer died", failed_epoch="e1")
    with pytest.raises(grpc.aio.AioRpcError) as beneath:
        await served.prefill_stub.Prefill(generate_pb2.PrefillRequest())
    served.decode.error = beneath.value
    back = to_error(await served.failure())
    assert type(back) is Unavailable
    assert back.failed_epoch == "e1"


async def test_request_id_and_deadline_travel(served: Served) -> None:
    call = served.decode_stub.Generate(
        generate_pb2.GenerateRequest(), timeout=30, metadata=request_metadata("req-\u00e9-1")
    )
    await call.read()
    call.cancel()
    assert served.decode.request_id == "req-?-1"
    assert served.decode.seconds is not None
    assert 25 < served.decode.seconds < 31  # gRPC rounds a little


async def test_no_deadline_is_none_and_no_id_no_metadata(served: Served) -> None:
    call = served.decode_stub.Generate(generate_pb2.GenerateRequest())
    await call.read()
    call.cancel()
    assert served.decode.seconds is None
    assert served.decode.request_id == ""
    assert request_metadata() == ()


async def test_a_passed_deadline_is_one_and_stops_the_server(served: Served) -> None:
    call = served.decode_stub.Generate(generate_pb2.GenerateRequest(), timeout=1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _response in call:
            pass
    assert to_error(caught.value).status.http == 504
    await asyncio.wait_for(served.decode.cancelled.wait(), 20)
    await eventually(lambda: not served.server.num_running_calls)


async def test_a_cancelled_call_ends_at_the_server(served: Served) -> None:
    call = served.decode_stub.Generate(generate_pb2.GenerateRequest())
    await call.read()
    await asyncio.wait_for(served.decode.entered.wait(), 20)
    assert served.server.num_running_calls == 1
    call.cancel()
    await asyncio.wait_for(served.decode.cancelled.wait(), 20)


async def test_nobody_there_blames_the_called_worker() -> None:
    server = RpcServer("127.0.0.1:0")  # bound, never started: then gone
    address = server.address
    await server.stop(0)
    async with channel(address) as peer:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate_pb2_grpc.PrefillStub(peer).Abort(generate_pb2.AbortRequest(), timeout=30)
    back = to_error(caught.value, peer_epoch="e9")
    assert type(back) is Disconnected
    assert back.failed_epoch == "e9"


async def test_messages_up_to_64_mib_pass_and_larger_are_the_callers_fault(
    served: Served,
) -> None:
    large = generate_pb2.AbortRequest(attempt_id="x" * 20_000_000)
    assert (await served.prefill_stub.Abort(large, timeout=30)).was_known
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.prefill_stub.Abort(generate_pb2.AbortRequest(attempt_id="x" * 70_000_000))
    assert type(to_error(caught.value)) is InvalidRequest


async def test_reflection_lists_the_services(served: Served) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
    requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
    (answer,) = [reply async for reply in stub.ServerReflectionInfo(iter(requests))]
    names = {service.name for service in answer.list_services_response.service}
    assert names == {
        "epserve.generate.v1.Decode",
        "epserve.generate.v1.Prefill",
        "epserve.rpc.v1.Multiplex",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


async def test_health_of_the_server_and_of_each_service(served: Served) -> None:
    for name in ("", "epserve.generate.v1.Decode", "epserve.generate.v1.Prefill"):
        reply = await served.health.Check(health_pb2.HealthCheckRequest(service=name))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.health.Check(health_pb2.HealthCheckRequest(service="no.such"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_stop_says_not_serving_then_lets_running_calls_finish(served: Served) -> None:
    watch = served.health.Watch(health_pb2.HealthCheckRequest(service=""))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    call = served.decode_stub.Generate(generate_pb2.GenerateRequest())
    await call.read()
    stop = asyncio.create_task(served.server.stop(grace_seconds=30))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    async with channel(served.server.address) as late:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate_pb2_grpc.PrefillStub(late).Abort(generate_pb2.AbortRequest(), timeout=30)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert not stop.done()
    served.decode.block.set()
    assert (await call.read()).rank == 8
    assert await call.code() is grpc.StatusCode.OK
    # The endless health watch does not hold it up for the thirty seconds.
    await asyncio.wait_for(stop, 20)


async def test_stop_is_bounded(served: Served) -> None:
    call = served.decode_stub.Generate(generate_pb2.GenerateRequest())
    await call.read()
    await asyncio.wait_for(served.server.stop(grace_seconds=0.2), 20)
    await asyncio.wait_for(served.decode.cancelled.wait(), 20)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_starting_without_serving() -> None:
    server = RpcServer("127.0.0.1:0")
    await server.start(serving=False)
    async with channel(server.address) as peer:
        health = health_pb2_grpc.HealthStub(peer)
        reply = await health.Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING
        # Nobody is to restart a process because it loads.
        reply = await health.Check(health_pb2.HealthCheckRequest(service=LIVENESS))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        await server.set_serving(True)
        reply = await health.Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    await server.stop(0)


async def test_a_taken_port_is_an_error(served: Served) -> None:
    with pytest.raises(OSError, match="cannot listen"):
        RpcServer(served.server.address)


async def test_too_many_calls_are_refused() -> None:
    served = Served()
    served.server = RpcServer("127.0.0.1:0", max_concurrent_calls=1)
    served.server.add(
        generate_pb2_grpc.add_DecodeServicer_to_server, served.decode, generate_pb2, "Decode"
    )
    await served.server.start()
    async with channel(served.server.address) as peer:
        stub = generate_pb2_grpc.DecodeStub(peer)
        first = stub.Generate(generate_pb2.GenerateRequest())
        await first.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(generate_pb2.GenerateRequest()).read()
        assert type(to_error(caught.value)) is Overloaded
        first.cancel()
    await served.server.stop(0)


NO_MESSAGE = b"\xff\xff\xff\xff nothing"


async def test_bytes_that_are_no_message(
    served: Served, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """To a method of each kind: one response, a stream, a watch, a stream both ways."""
    raw: Any = served.channel
    calls = [
        raw.unary_unary("/epserve.generate.v1.Prefill/Abort")(NO_MESSAGE, timeout=30),
        raw.unary_unary("/grpc.health.v1.Health/Check")(NO_MESSAGE, timeout=30),
        *(
            raw.unary_stream(method)(NO_MESSAGE, timeout=30).read()
            for method in ("/epserve.generate.v1.Decode/Generate", "/grpc.health.v1.Health/Watch")
        ),
        *(
            raw.stream_stream(method)(iter([NO_MESSAGE]), timeout=30).read()
            for method in (
                "/epserve.rpc.v1.Multiplex/Session",
                "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            )
        ),
    ]
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err + caplog.text
    assert not served.server.num_running_calls


async def test_connections_that_do_not_come_to_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    short = [(key, 300 if "timeout" in key else value) for key, value in server.SERVER_OPTIONS]
    monkeypatch.setattr(server, "SERVER_OPTIONS", short)
    served = RpcServer("127.0.0.1:0")
    await served.start()
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for start in (b"", preface[:9], preface, b"GET / HTTP/1.1\r\nhost: " + b"x" * 2**20):
        reader, writer = await asyncio.open_connection("127.0.0.1", served.bound_port)
        writer.write(start)
        with suppress(ConnectionError):
            while await asyncio.wait_for(reader.read(2**16), 20):
                pass
        writer.close()
    await served.stop(0)
