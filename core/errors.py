"""Errors that cross process borders; `STATUS` says what they look like on each side of one.

A message is meant for the peer (in the end, the user): no traces, no file contents.
"""

from dataclasses import dataclass


class EpserveError(Exception):
    """Base of the tree; every error has all four details, unset ones keep their default.

    `param` names the offending request field, `retry_after_seconds` tells when to come
    back, `failed_epoch` is the epoch of the worker to leave out next time ("" = unknown).
    """

    param: str | None = None
    retry_after_seconds: float | None = None
    failed_epoch: str = ""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    @property
    def status(self) -> "ErrorStatus":
        """This error's row of the table."""
        return STATUS[next(cls for cls in type(self).__mro__ if cls in STATUS)]

    @staticmethod
    def from_status(
        code_name: str,
        message: str,
        *,
        code: str = "",
        param: str | None = None,
        retry_after_seconds: float | None = None,
        failed_epoch: str = "",
    ) -> "EpserveError":
        """The error that a peer meant by a gRPC status name.

        `code` is the OpenAI code of the table; it tells apart classes that share a status
        and is ignored where it does not belong to `code_name`.
        """
        exact = _BY_CODE.get(code)
        if exact is None or STATUS[exact].grpc != code_name:
            exact = _BY_GRPC.get(code_name, InternalError)
        error = exact(message)
        if param is not None:
            error.param = param
        if retry_after_seconds is not None:
            error.retry_after_seconds = retry_after_seconds
        error.failed_epoch = failed_epoch
        return error


class InvalidRequest(EpserveError):
    """The request can never work as it is; `param` names the field to blame."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(InvalidRequest):
    """Prompt, or prompt and requested output, exceed the model's context."""


class PreviousNotFound(InvalidRequest):
    """The response that a request goes on from is not kept, or not any more."""


class ModelNotFound(EpserveError):
    """No such model is served here."""

    param = "model"


class NotFound(EpserveError):
    """What an operator asked about is not there: a process, a request, an expert group."""


class Unauthenticated(EpserveError):
    """An operator's call without the admin token, or with a wrong one."""


class Overloaded(EpserveError):
    """A bound is reached (queue, wait); nothing was started."""

    def __init__(self, message: str, *, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class RateLimited(Overloaded):
    """The caller has used up what it may for now; others have not."""


class _PeerError(EpserveError):
    """About one worker, which `failed_epoch` names; the request may be tried again."""

    def __init__(
        self, message: str, *, failed_epoch: str = "", retry_after_seconds: float = 1.0
    ) -> None:
        super().__init__(message)
        self.failed_epoch = failed_epoch
        self.retry_after_seconds = retry_after_seconds


class Unavailable(_PeerError):
    """A needed peer is not there, or died; the request may be tried elsewhere."""


class Draining(Unavailable):
    """A process leaves as it was told to, and has let go of the request: it writes nothing for
    it any more. Another one is there, or about to come."""


class TransferError(Unavailable):
    """KV pages could not be moved."""


class Mismatch(_PeerError):
    """A peer is not the one that was meant: other epoch, fingerprint or version."""


class DeadlineExceeded(EpserveError):
    """The caller's deadline passed."""


class Cancelled(EpserveError):
    """The caller went away."""


class CheckpointError(EpserveError, ValueError):
    """A checkpoint folder is missing something, or holds something it must not."""


class InternalError(EpserveError):
    """A defect of ours; details are in the log of the process that raised it."""


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """One row of the table: gRPC status name, HTTP status, OpenAI `type` and `code`."""

    grpc: str
    http: int
    type: str
    code: str


_INVALID = "invalid_request_error"
# Of the classes with one gRPC status, the first is what the bare status means.
STATUS: dict[type[EpserveError], ErrorStatus] = {
    cls: ErrorStatus(grpc, http, type_, code)
    for cls, grpc, http, type_, code in (
        (InvalidRequest, "INVALID_ARGUMENT", 400, _INVALID, "invalid_value"),
        (ContextLengthExceeded, "INVALID_ARGUMENT", 400, _INVALID, "context_length_exceeded"),
        (PreviousNotFound, "INVALID_ARGUMENT", 400, _INVALID, "previous_response_not_found"),
        (Unauthenticated, "UNAUTHENTICATED", 401, _INVALID, "invalid_admin_token"),
        (ModelNotFound, "NOT_FOUND", 404, _INVALID, "model_not_found"),
        (NotFound, "NOT_FOUND", 404, _INVALID, "not_found"),
        (Overloaded, "RESOURCE_EXHAUSTED", 429, "rate_limit_error", "overloaded"),
        (RateLimited, "RESOURCE_EXHAUSTED", 429, "rate_limit_error", "rate_limit_exceeded"),
        (Unavailable, "UNAVAILABLE", 503, "server_error", "unavailable"),
        (Draining, "UNAVAILABLE", 503, "server_error", "draining"),
        (TransferError, "UNAVAILABLE", 503, "server_error", "transfer_failed"),
        (Mismatch, "FAILED_PRECONDITION", 503, "server_error", "mismatch"),
        (DeadlineExceeded, "DEADLINE_EXCEEDED", 504, "server_error", "deadline_exceeded"),
        (Cancelled, "CANCELLED", 499, "server_error", "cancelled"),
        (InternalError, "INTERNAL", 500, "server_error", "internal"),
        (CheckpointError, "INTERNAL", 500, "server_error", "checkpoint"),
        (EpserveError, "INTERNAL", 500, "server_error", "internal"),
    )
}

_BY_CODE: dict[str, type[EpserveError]] = {
    row.code: cls for cls, row in STATUS.items() if cls is not EpserveError
}
_BY_GRPC: dict[str, type[EpserveError]] = {"OUT_OF_RANGE": InvalidRequest}  # gRPC's library says it
for _cls, _status in STATUS.items():
    _BY_GRPC.setdefault(_status.grpc, _cls)
