"""Whether a process serves: standard gRPC health, or GET /health of the gateway."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from core.address import parse_address
from ctl.process_spec import ProcessSpec
from rpc.client import channel

_ASK_AGAIN_SECONDS = 0.2
_ANSWER_SECONDS = 2.0


async def wait_until_ready(spec: ProcessSpec) -> None:
    """Returns once the process serves; asks for as long as it is not cancelled."""
    if spec.probe == "grpc":
        await _wait_for_grpc(spec.address)
        return
    while not await _http_is_healthy(spec.address):
        await asyncio.sleep(_ASK_AGAIN_SECONDS)


async def _wait_for_grpc(address: str) -> None:
    request = health_pb2.HealthCheckRequest(service="")
    async with channel(address) as peer:
        stub = health_pb2_grpc.HealthStub(peer)
        while True:
            try:
                reply = await stub.Check(request, timeout=_ANSWER_SECONDS)
            except grpc.aio.AioRpcError:
                pass  # not listening yet
            else:
                if reply.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            await asyncio.sleep(_ASK_AGAIN_SECONDS)


async def _http_is_healthy(address: str) -> bool:
    try:
        return await asyncio.wait_for(_http_status(address), _ANSWER_SECONDS) == 200
    except (OSError, ValueError, TimeoutError):
        return False


async def _http_status(address: str) -> int:
    """Status of GET /health. Raises OSError or ValueError without an HTTP answer."""
    target = parse_address(address)
    reader, writer = await asyncio.open_connection(target.host, target.port)
    try:
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        _version, status, *_reason = (await reader.readline()).split(maxsplit=2)
        return int(status)
    finally:
        writer.close()
