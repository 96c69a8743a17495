"""Anthropic's error object.

{"type": "error", "error": {"type": ..., "message": ...}, "request_id": ...}
"""

import msgspec

from core.errors import EpserveError
from core.log import REQUEST_ID

PATH = "/v1/messages"
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_anthropic(path: str) -> bool:
    """Whether `path` belongs to Anthropic's API."""
    return path == PATH or path.startswith(PATH + "/")


def anthropic_error(status: int, message: str) -> bytes:
    """`status` as in HTTP."""
    type_ = TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode(
        {
            "type": "error",
            "error": {"type": type_, "message": message},
            "request_id": REQUEST_ID.get() or None,
        }
    )


def anthropic_error_body(error: EpserveError) -> bytes:
    """The payload of an error event in a stream."""
    return anthropic_error(error.status.http, error.message)
