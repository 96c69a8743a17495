"""The trace travels with every call, also where nobody records it."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from core.trace_context import TRACE, TraceContext
from proto import generate_pb2, generate_pb2_grpc
from proto.generate_pb2 import GenerateRequest, GenerateResponse, PrefillRequest, PrefillResponse
from rpc.client import channel, request_metadata
from rpc.multiplex_client import MultiplexClient
from rpc.server import RpcServer

GENERATE = "/epserve.generate.v1.Decode/Generate"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
OURS = TraceContext(f"00-{TRACE_ID}-00f067aa0ba902b7-01", "vendor=x,other=y")
OTHER = TraceContext(f"00-{TRACE_ID}-1111111111111111-00")

Context = grpc.aio.ServicerContext[Any, Any]


class Noting(generate_pb2_grpc.PrefillServicer, generate_pb2_grpc.DecodeServicer):
    def __init__(self) -> None:
        self.seen: list[TraceContext | None] = []

    async def Prefill(self, request: PrefillRequest, context: Context) -> PrefillResponse:
        self.seen.append(TRACE.get())
        return PrefillResponse()

    async def Generate(
        self, request: GenerateRequest, context: Context
    ) -> AsyncIterator[GenerateResponse]:
        self.seen.append(TRACE.get())
        yield GenerateResponse(rank=1)


async def ask(address: str, trace: TraceContext | None) -> None:
    """Both kinds of calls, each with the task's trace, or with `trace` instead."""
    async with channel(address) as peer:
        metadata = request_metadata(trace=trace)
        await generate_pb2_grpc.PrefillStub(peer).Prefill(PrefillRequest(), metadata=metadata)
        client = MultiplexClient(address)
        with client.call(GENERATE, b"", timeout_seconds=5, trace=trace) as call:
            assert await call.take()
            assert await call.take() == b""
        await client.close()


async def test_it_arrives() -> None:
    noting = Noting()
    server = RpcServer("127.0.0.1:0")
    for role in ("Prefill", "Decode"):
        register = getattr(generate_pb2_grpc, f"add_{role}Servicer_to_server")
        server.add(register, noting, generate_pb2, role)
    await server.start()
    try:
        await ask(server.address, None)
        token = TRACE.set(OURS)
        await ask(server.address, None)
        await ask(server.address, OTHER)
        TRACE.reset(token)
        await ask(server.address, None)
    finally:
        await server.stop(0)
    assert noting.seen == [None, None, OURS, OURS, OTHER, OTHER, None, None]


@pytest.mark.parametrize("traceparent", ["x", "00-0-0-0", "\t"])
async def test_nonsense_is_not_believed(traceparent: str) -> None:
    noting = Noting()
    server = RpcServer("127.0.0.1:0")
    server.add(generate_pb2_grpc.add_PrefillServicer_to_server, noting, generate_pb2, "Prefill")
    await server.start()
    try:
        async with channel(server.address) as peer:
            metadata = (("traceparent", traceparent.strip() or "-"),)
            await generate_pb2_grpc.PrefillStub(peer).Prefill(PrefillRequest(), metadata=metadata)
    finally:
        await server.stop(0)
    assert noting.seen == [None]
