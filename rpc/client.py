"""Calling another process: channels, request ids, traces, deadlines, errors.

async with channel(address) as peer:
    stub = RouterStub(peer)
    try:
        reply = await stub.Assign(request, timeout=seconds, metadata=request_metadata())
    except grpc.aio.AioRpcError as error:
        raise to_error(error, peer_epoch=epoch) from error
"""

from typing import Any

import grpc

from core.address import parse_address
from core.log import REQUEST_ID
from core.trace_context import TRACE, TRACEPARENT_KEY, TRACESTATE_KEY, TraceContext
from rpc.cluster_channel import ClusterChannel
from rpc.cluster_credentials import ClusterCredentials, used
from rpc.interceptor import REQUEST_ID_KEY
from rpc.options import CHANNEL_OPTIONS
from rpc.status import Disconnected, header_text, to_error

__all__ = ["Disconnected", "channel", "remaining_seconds", "request_metadata", "to_error"]


def channel(address: str, credentials: ClusterCredentials | None = None) -> grpc.aio.Channel:
    """A lazily connecting channel to `host:port` that finds a restarted peer again; `credentials`
    are by default those of this process.

    Raises ValueError when `address` is not host:port.
    """
    target = str(parse_address(address))
    credentials = credentials or used()
    if credentials.token is None and credentials.tls is None:
        return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
    return ClusterChannel(target, credentials)


def request_metadata(
    request_id: str | None = None, trace: TraceContext | None = None
) -> tuple[tuple[str, str], ...]:
    """Metadata that carries request id and trace, by default those of the current context."""
    metadata = []
    text = header_text(REQUEST_ID.get() if request_id is None else request_id)
    if text:
        metadata.append((REQUEST_ID_KEY, text))
    trace = trace or TRACE.get()
    if trace is not None:
        metadata.append((TRACEPARENT_KEY, trace.traceparent))
        if trace.tracestate:
            metadata.append((TRACESTATE_KEY, trace.tracestate))
    return tuple(metadata)


def remaining_seconds(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    """Seconds until the caller's deadline, at least 0; None when it set none.

    Pass it on as the `timeout` of calls made on the caller's behalf.
    """
    seconds: float | None = context.time_remaining()
    return None if seconds is None else max(0.0, seconds)
