"""`EpserveError` as a gRPC status with trailers, and back.

trailer                  holds
error-code               OpenAI code of core.errors: tells apart errors of equal status
error-param              the offending request field
retry-after              whole seconds, rounded up, at least 1
failed-epoch             epoch of the worker to leave out next time
grpc-status-details-bin  google.rpc.Status with RetryInfo, where there is a retry-after
"""

import math
from typing import NamedTuple, cast

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from core.errors import EpserveError, InvalidRequest, Unavailable

# Trailers share 8 KiB by default; the message travels twice, once percent-encoded.
MAX_MESSAGE_CHARACTERS = 500


_ERROR_CODE_KEY = "error-code"


class Disconnected(Unavailable):
    """A peer is not reached, or no more. Its message is the network's, with addresses: for logs and
    operators, not for clients."""


class Status(NamedTuple):
    """The arguments of `ServicerContext.abort`, in its order."""

    code: grpc.StatusCode
    message: str
    trailers: tuple[tuple[str, str | bytes], ...]


def to_status(error: EpserveError) -> Status:
    """What a server aborts a call with because of `error`."""
    code = grpc.StatusCode[error.status.grpc]
    message = short_message(error)
    trailers: list[tuple[str, str | bytes]] = [(_ERROR_CODE_KEY, error.status.code)]
    if error.param is not None:
        trailers.append(("error-param", header_text(error.param)))
    if error.failed_epoch:
        trailers.append(("failed-epoch", header_text(error.failed_epoch)))
    if error.retry_after_seconds is not None:
        trailers.append(("retry-after", str(max(1, math.ceil(error.retry_after_seconds)))))
        details = _retry_details(code, message, error.retry_after_seconds)
        trailers.append(("grpc-status-details-bin", details))
    return Status(code, message, tuple(trailers))


def to_error(error: grpc.aio.AioRpcError, *, peer_epoch: str = "") -> EpserveError:
    """What the server of a failed call meant.

    `peer_epoch` is the epoch of the worker that was called: it becomes `failed_epoch` when
    the call broke without that worker having said so itself (connection lost, ...).
    """
    trailers = _trailers(error)
    code_name = error.code().name
    message = error.details() or code_name
    code = _text(trailers.get(_ERROR_CODE_KEY))
    if not code and code_name == "RESOURCE_EXHAUSTED" and "larger than max" in message:
        # gRPC's own refusal of a message: coming back later would not help.
        return InvalidRequest(f"request is too large: {message}")
    failed_epoch = _text(trailers.get("failed-epoch"))
    # UNAUTHENTICATED without a word of the server's own: it takes us for none of its cluster.
    if not code and code_name in ("UNAVAILABLE", "UNAUTHENTICATED"):
        return Disconnected(message, failed_epoch=failed_epoch or peer_epoch)
    return EpserveError.from_status(
        code_name,
        message,
        code=code,
        param=_text(trailers.get("error-param")) or None,
        retry_after_seconds=_retry_after(trailers),
        failed_epoch=failed_epoch,
    )


def is_servers_word(error: grpc.aio.AioRpcError) -> bool:
    """Whether the server of a failed call refused it itself; else the call broke."""
    return _ERROR_CODE_KEY in _trailers(error)


def short_message(error: EpserveError) -> str:
    """The error's message, cut where it is too long for trailers."""
    message = error.message
    if len(message) <= MAX_MESSAGE_CHARACTERS:
        return message
    return message[: MAX_MESSAGE_CHARACTERS - 3] + "..."


def header_text(text: str) -> str:
    """`text` as gRPC metadata allows it: printable ASCII, at most 128 characters."""
    text = text[:128]
    if not (text.isascii() and text.isprintable()):
        text = "".join(letter if " " <= letter <= "~" else "?" for letter in text)
    return text.strip()


def _trailers(error: grpc.aio.AioRpcError) -> dict[str, str | bytes]:
    return dict(cast("list[tuple[str, str | bytes]]", error.trailing_metadata() or []))


def _retry_details(code: grpc.StatusCode, message: str, seconds: float) -> bytes:
    delay = duration_pb2.Duration()
    delay.FromMilliseconds(math.ceil(seconds * 1000))
    packed = any_pb2.Any()
    packed.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    number: int = code.value[0]
    status = status_pb2.Status(code=number, message=message, details=[packed])
    data: bytes = status.SerializeToString()
    return data


def _retry_after(trailers: dict[str, str | bytes]) -> float | None:
    """Seconds of the exact RetryInfo, else of the rounded trailer; peers may send anything."""
    details = trailers.get("grpc-status-details-bin")
    if isinstance(details, bytes):
        exact = _retry_info_seconds(details)
        if exact is not None:
            return exact
    text = _text(trailers.get("retry-after"))
    return float(text) if text.isascii() and text.isdigit() else None


def _retry_info_seconds(details: bytes) -> float | None:
    try:
        status = status_pb2.Status.FromString(details)
    except DecodeError:
        return None
    retry_info = error_details_pb2.RetryInfo()
    for packed in status.details:
        if packed.Is(retry_info.DESCRIPTOR):
            packed.Unpack(retry_info)
            milliseconds: int = retry_info.retry_delay.ToMilliseconds()
            return milliseconds / 1000
    return None


def _text(value: str | bytes | None) -> str:
    return value if isinstance(value, str) else ""
