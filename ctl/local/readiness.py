"""Whether a process serves: standard gRPC health, or an HTTP path of the gateway."""

import asyncio
import ssl
from http import HTTPStatus

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from core.address import Address, parse_address
from core.printable import printable
from ctl.local.process_spec import ProcessSpec
from rpc.client import channel
from rpc.cluster_credentials import ClusterCredentials
from rpc.server import LIVENESS

_ASK_AGAIN_SECONDS = 0.2
_ANSWER_SECONDS = 2.0
# A process that answers none of so many questions is frozen, or stuck for good.
_NUM_UNANSWERED = 10
_LOOK_SECONDS = 2.0


class NotHealthy(Exception):
    """The process does not serve; the message says how it looks instead."""


class NoAnswer(NotHealthy):
    """Nor does it say so."""


async def wait_until_ready(
    spec: ProcessSpec, credentials: ClusterCredentials | None = None
) -> None:
    """Returns once the process serves; asks for as long as it is not cancelled."""
    while True:
        try:
            if spec.role == "gateway":
                await check_http(spec.address, tls=spec.speaks_tls)
            else:
                await check_grpc(spec.address, credentials=credentials)
        except NotHealthy:
            await asyncio.sleep(_ASK_AGAIN_SECONDS)
        else:
            return


async def until_silent(spec: ProcessSpec, credentials: ClusterCredentials | None = None) -> None:
    """Returns once the process has answered nothing for half a minute."""
    num_unanswered = 0
    while num_unanswered < _NUM_UNANSWERED:
        await asyncio.sleep(_LOOK_SECONDS)
        try:
            if spec.role == "gateway":
                await check_http(spec.address, "/version", tls=spec.speaks_tls)
            else:
                await check_grpc(spec.address, LIVENESS, credentials=credentials)
        except NoAnswer:
            num_unanswered += 1
        except NotHealthy:
            num_unanswered = 0
        else:
            num_unanswered = 0


async def check_grpc(
    address: str,
    service: str = "",
    timeout_seconds: float = _ANSWER_SECONDS,
    credentials: ClusterCredentials | None = None,
) -> None:
    """Raises NotHealthy, or ValueError for an address that is none."""
    request = health_pb2.HealthCheckRequest(service=service)
    async with channel(address, credentials) as peer:
        try:
            reply = await health_pb2_grpc.HealthStub(peer).Check(request, timeout=timeout_seconds)
        except grpc.aio.AioRpcError as error:
            raise NoAnswer(f"{error.code().name}: {printable(error.details() or '')}") from error
    status: int = reply.status
    if status != health_pb2.HealthCheckResponse.SERVING:
        raise NotHealthy(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


async def check_http(
    address: str,
    path: str = "/health",
    timeout_seconds: float = _ANSWER_SECONDS,
    *,
    tls: bool = False,
    alive: bool = False,
) -> None:
    """Raises NotHealthy unless the answer is 200, or ValueError for an address that is none.
    `tls` does not look at the certificate: it is made for another name than this machine's.
    `alive`: who asks for a key lives, too."""
    target = parse_address(address)
    try:
        async with asyncio.timeout(timeout_seconds):
            status = await _http_status(target, path, tls=tls)
    except TimeoutError as error:
        raise NoAnswer(f"no answer within {timeout_seconds:g} s") from error
    except (OSError, ValueError) as error:
        raise NotHealthy(f"no HTTP answer: {error}") from error
    if status != HTTPStatus.OK and not (alive and status == HTTPStatus.UNAUTHORIZED):
        raise NotHealthy(f"GET {path} says {status}")


async def _http_status(target: Address, path: str, *, tls: bool) -> int:
    """Raises OSError or ValueError without an HTTP answer."""
    context = None
    if tls:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(*target, ssl=context)
    try:
        request = f"GET {path} HTTP/1.1\r\nhost: {target}\r\nconnection: close\r\n\r\n"
        writer.write(request.encode())
        _version, status, *_reason = (await reader.readline()).split(maxsplit=2)
        return int(status)
    finally:
        writer.close()
