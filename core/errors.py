"""Errors that cross process borders, and what they look like on each side of one.

    EpserveError                    gRPC status          HTTP  OpenAI type, code
    |- InvalidRequest               INVALID_ARGUMENT     400   invalid_request_error, invalid_value
    |  `- ContextLengthExceeded     INVALID_ARGUMENT     400   .., context_length_exceeded
    |- Unauthenticated              UNAUTHENTICATED      401   .., invalid_admin_token
    |- ModelNotFound                NOT_FOUND            404   .., model_not_found
    |- NotFound                     NOT_FOUND            404   .., not_found
    |- Overloaded                   RESOURCE_EXHAUSTED   429   rate_limit_error, overloaded
    |  `- RateLimited               RESOURCE_EXHAUSTED   429   .., rate_limit_exceeded
    |- Unavailable                  UNAVAILABLE          503   server_error, unavailable
    |  |- Draining                  UNAVAILABLE          503   server_error, draining
    |  `- TransferError             UNAVAILABLE          503   server_error, transfer_failed
    |- Mismatch                     FAILED_PRECONDITION  503   server_error, mismatch
    |- DeadlineExceeded             DEADLINE_EXCEEDED    504   server_error, deadline_exceeded
    |- Cancelled                    CANCELLED            499   server_error, cancelled
    |- CheckpointError (ValueError) INTERNAL             500   server_error, checkpoint
    `- InternalError                INTERNAL             500   server_error, internal

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


class Unavailable(EpserveError):
    """A needed peer is not there, or died; the request may be tried elsewhere."""

    def __init__(
        self, message: str, *, failed_epoch: str = "", retry_after_seconds: float = 1.0
    ) -> None:
        super().__init__(message)
        self.failed_epoch = failed_epoch
        self.retry_after_seconds = retry_after_seconds


class Draining(Unavailable):
    """A process is about to leave, as somebody wants it to, and has let go of the request: it
    writes nothing for it any more. Somebody else is there, or about to come."""


class TransferError(Unavailable):
    """KV pages could not be moved."""


class Mismatch(EpserveError):
    """A peer is not the one that was meant: other epoch, fingerprint or version."""

    def __init__(
        self, message: str, *, failed_epoch: str = "", retry_after_seconds: float = 1.0
    ) -> None:
        super().__init__(message)
        self.failed_epoch = failed_epoch
        self.retry_after_seconds = retry_after_seconds


class DeadlineExceeded(EpserveError):
    """The caller's deadline passed."""


class Cancelled(EpserveError):
    """The caller went away."""


class CheckpointError(EpserveError, ValueError):
    """A checkpoint folder is missing something, or holds something it must not."""


class InternalError(EpserveError):
    """A defect of ours; details are in the log of the process that raised it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorStatus:
    """One row of the table: gRPC status name, HTTP status, OpenAI `type` and `code`."""

    grpc: str
    http: int
    type: str
    code: str


def _row(grpc: str, http: int, type_: str, code: str) -> ErrorStatus:
    return ErrorStatus(grpc=grpc, http=http, type=type_, code=code)


STATUS: dict[type[EpserveError], ErrorStatus] = {
    InvalidRequest: _row("INVALID_ARGUMENT", 400, "invalid_request_error", "invalid_value"),
    ContextLengthExceeded: _row(
        "INVALID_ARGUMENT", 400, "invalid_request_error", "context_length_exceeded"
    ),
    Unauthenticated: _row("UNAUTHENTICATED", 401, "invalid_request_error", "invalid_admin_token"),
    ModelNotFound: _row("NOT_FOUND", 404, "invalid_request_error", "model_not_found"),
    NotFound: _row("NOT_FOUND", 404, "invalid_request_error", "not_found"),
    Overloaded: _row("RESOURCE_EXHAUSTED", 429, "rate_limit_error", "overloaded"),
    RateLimited: _row("RESOURCE_EXHAUSTED", 429, "rate_limit_error", "rate_limit_exceeded"),
    Unavailable: _row("UNAVAILABLE", 503, "server_error", "unavailable"),
    Draining: _row("UNAVAILABLE", 503, "server_error", "draining"),
    TransferError: _row("UNAVAILABLE", 503, "server_error", "transfer_failed"),
    Mismatch: _row("FAILED_PRECONDITION", 503, "server_error", "mismatch"),
    DeadlineExceeded: _row("DEADLINE_EXCEEDED", 504, "server_error", "deadline_exceeded"),
    Cancelled: _row("CANCELLED", 499, "server_error", "cancelled"),
    CheckpointError: _row("INTERNAL", 500, "server_error", "checkpoint"),
    InternalError: _row("INTERNAL", 500, "server_error", "internal"),
    EpserveError: _row("INTERNAL", 500, "server_error", "internal"),
}

_BY_CODE: dict[str, type[EpserveError]] = {
    row.code: cls for cls, row in STATUS.items() if cls is not EpserveError
}
# What a bare status means; also statuses that only the gRPC library itself produces.
_BY_GRPC: dict[str, type[EpserveError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "OUT_OF_RANGE": InvalidRequest,
    "NOT_FOUND": ModelNotFound,
    "UNAUTHENTICATED": Unauthenticated,
    "RESOURCE_EXHAUSTED": Overloaded,
    "UNAVAILABLE": Unavailable,
    "FAILED_PRECONDITION": Mismatch,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Cancelled,
}
