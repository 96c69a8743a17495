"""A peer that stopped to exist without closing its connection, as when its machine vanishes.

A stopped process (SIGSTOP) is just that: its kernel still acknowledges TCP, nobody answers.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from core.errors import DeadlineExceeded, Unavailable
from proto import generate_pb2, generate_pb2_grpc
from rpc.client import channel
from rpc.multiplex_client import MultiplexClient
from rpc.options import KEEPALIVE_MILLISECONDS, KEEPALIVE_TIMEOUT_MILLISECONDS
from rpc.server import RpcServer

ROOT = Path(__file__).resolve().parents[2]
NOTICED_SECONDS = (KEEPALIVE_MILLISECONDS + KEEPALIVE_TIMEOUT_MILLISECONDS) / 1000 + 20

SERVER = """
import asyncio
from rpc.server import RpcServer
async def main():
    server = RpcServer("127.0.0.1:0")
    await server.start()
    print(server.address, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
STUCK = """
import asyncio, time
from proto import generate_pb2, generate_pb2_grpc
from rpc.server import RpcServer
class Stuck(generate_pb2_grpc.DecodeServicer):
    async def Generate(self, request, context):
        yield generate_pb2.GenerateResponse(tokens=[generate_pb2.Token(token_id=7)])
        await asyncio.sleep(1.5)
        time.sleep(60)
async def main():
    server = RpcServer("127.0.0.1:0")
    register = generate_pb2_grpc.add_DecodeServicer_to_server
    server.add(register, Stuck(), generate_pb2, "Decode")
    await server.start()
    print(server.address, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
CLIENT = """
import asyncio, sys
from proto import generate_pb2, generate_pb2_grpc
from rpc.client import channel
async def main():
    async with channel(sys.argv[1]) as peer:
        await generate_pb2_grpc.PrefillStub(peer).Abort(generate_pb2.AbortRequest(), timeout=60)
asyncio.run(main())
"""


@contextmanager
def process(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


class Endless(generate_pb2_grpc.PrefillServicer):
    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def Abort(
        self, request: generate_pb2.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> generate_pb2.AbortResponse:
        self.entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
        raise AssertionError


async def test_a_client_notices_its_server() -> None:
    with process(SERVER) as server:
        assert server.stdout is not None
        async with channel(server.stdout.readline().strip()) as peer:
            watch = health_pb2_grpc.HealthStub(peer).Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            server.send_signal(signal.SIGSTOP)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(watch.read(), NOTICED_SECONDS)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_server_whose_loop_is_stuck_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its library answers pings all the same."""
    monkeypatch.setattr("rpc.multiplex_client.SILENCE_SECONDS", 2.0)
    with process(STUCK) as server:
        assert server.stdout is not None
        address = await asyncio.to_thread(server.stdout.readline)
        client = MultiplexClient(address.strip(), peer_epoch="epoch-0")
        request = generate_pb2.GenerateRequest().SerializeToString()
        method = "/epserve.generate.v1.Decode/Generate"
        with client.call(method, request, timeout_seconds=50) as call:
            assert await call.take()
            with pytest.raises(Unavailable, match="said nothing for 2 s") as caught:
                await call.take()
        assert caught.value.failed_epoch == "epoch-0"
        await client.close()


async def test_beats_keep_a_quiet_call_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpc.multiplex_client.SILENCE_SECONDS", 1.0)
    monkeypatch.setattr("rpc.multiplex_server.BEAT_SECONDS", 0.1)
    servicer = Endless()
    server = RpcServer("127.0.0.1:0")
    register = generate_pb2_grpc.add_PrefillServicer_to_server
    server.add(register, servicer, generate_pb2, "Prefill", multiplexed=("Abort",))
    await server.start()
    client = MultiplexClient(server.address)
    calling = client.call("/epserve.generate.v1.Prefill/Abort", b"", timeout_seconds=2.5)
    with calling as call, pytest.raises(DeadlineExceeded):
        await call.take()
    await client.close()
    await server.stop(0)


async def test_a_server_notices_its_client() -> None:
    servicer = Endless()
    server = RpcServer("127.0.0.1:0")
    server.add(generate_pb2_grpc.add_PrefillServicer_to_server, servicer, generate_pb2, "Prefill")
    await server.start()
    with process(CLIENT, server.address) as client:
        await asyncio.wait_for(servicer.entered.wait(), 20)
        client.send_signal(signal.SIGSTOP)
        await asyncio.wait_for(servicer.cancelled.wait(), NOTICED_SECONDS)
    await server.stop(0)
