"""Calls with one response over `Multiplex`: only those that the server chose."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from core.errors import DeadlineExceeded, InvalidRequest, Unavailable
from core.token_ids import num_ids, pack_ids
from proto import generate_pb2, generate_pb2_grpc
from proto.generate_pb2 import AbortRequest, AbortResponse, PrefillRequest, PrefillResponse
from rpc.multiplex_client import MultiplexClient
from rpc.server import RpcServer

PREFILL = "/epserve.generate.v1.Prefill/Prefill"
ABORT = "/epserve.generate.v1.Prefill/Abort"

Context = grpc.aio.ServicerContext[Any, Any]


class Prefiller(generate_pb2_grpc.PrefillServicer):
    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    async def Prefill(self, request: PrefillRequest, context: Context) -> PrefillResponse:
        if request.model == "full":
            raise Unavailable("no", failed_epoch="epoch-7")
        if request.model == "hang":
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        return PrefillResponse(num_computed_tokens=num_ids(request.token_ids))

    async def Abort(self, request: AbortRequest, context: Context) -> AbortResponse:
        return AbortResponse(was_known=True)


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[MultiplexClient, Prefiller]]:
    server, servicer = RpcServer("127.0.0.1:0"), Prefiller()
    server.add(
        generate_pb2_grpc.add_PrefillServicer_to_server,
        servicer,
        generate_pb2,
        "Prefill",
        multiplexed=("Prefill",),
    )
    await server.start()
    client = MultiplexClient(server.address)
    try:
        yield client, servicer
    finally:
        await client.close()
        await server.stop(0)


async def asked(client: MultiplexClient, num_tokens: int, model: str = "", **options: Any) -> int:
    request = PrefillRequest(model=model, token_ids=pack_ids(range(num_tokens)))
    options.setdefault("timeout_seconds", 20)
    with client.call(PREFILL, request.SerializeToString(), **options) as call:
        response = PrefillResponse.FromString(await call.take())
        assert await call.take() == b""
    return response.num_computed_tokens


async def test_each_call_gets_its_own_response() -> None:
    async with serving() as (client, _):
        lengths = [1, 500, 2, 7] * 25
        assert await asyncio.gather(*(asked(client, length) for length in lengths)) == lengths


async def test_errors_and_deadlines() -> None:
    async with serving() as (client, servicer):
        with pytest.raises(Unavailable) as raised:
            await asked(client, 1, "full")
        assert raised.value.failed_epoch == "epoch-7"
        with pytest.raises(DeadlineExceeded):
            await asked(client, 1, "hang", timeout_seconds=0.5)
        await asyncio.wait_for(servicer.cancelled.wait(), 20)


async def test_who_leaves_cancels() -> None:
    async with serving() as (client, servicer):
        waiting = asyncio.create_task(asked(client, 1, "hang"))
        await asked(client, 1)  # behind it
        waiting.cancel()
        await asyncio.wait_for(servicer.cancelled.wait(), 20)


async def test_other_methods_are_not_carried() -> None:
    async with serving() as (client, _):
        call = client.call(ABORT, AbortRequest().SerializeToString(), timeout_seconds=30)
        with call, pytest.raises(InvalidRequest, match="multiplexed"):
            await call.take()
