"""What a reply looks like on the wire: one class for each endpoint, behind one protocol.

Chunks are put together from bytes: the parts that stay the same are encoded once a request,
and a token costs the encoding of its text.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from gateway.cluster.job import Job
from gateway.cluster.run import Usage
from gateway.output.choice_delta import ChoiceDelta

SSE_DONE = b"data: [DONE]\n\n"

encode_json = msgspec.json.encode


def sse_event(content: bytes) -> bytes:
    """`content` must be without line breaks, as JSON is."""
    return b"data: " + content + b"\n\n"


class Reply(Protocol):
    """Renders the pieces of one request."""

    def opening(self, choice: int) -> bytes:
        """SSE events before a choice's first piece."""
        ...

    def events(self, choice: int, delta: ChoiceDelta) -> bytes:
        """SSE events of a piece, that of its finish reason included."""
        ...

    def whole(self, choices: Sequence[ChoiceDelta], usage: Usage) -> bytes:
        """The JSON object of a reply that is not streamed; one piece a choice."""
        ...

    def usage_event(self, usage: Usage) -> bytes:
        """The last event where `stream_options.include_usage` asks for it."""
        ...


def envelope(job: Job, model: str, kind: str) -> dict[str, Any]:
    """The fields that every object of a reply begins with."""
    return {"id": job.id, "object": kind, "created": job.created, "model": model}


def chunk_frame(job: Job, model: str, kind: str) -> tuple[bytes, bytes]:
    """What stands before and behind the fields of the one choice in a chunk."""
    head = encode_json(envelope(job, model, kind))[:-1] + b',"choices":[{"index":'
    tail = b'}],"usage":null}' if job.include_usage else b"}]}"
    return b"data: " + head, tail + b"\n\n"


def usage_object(usage: Usage) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.reasoning_tokens is not None:
        fields["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return fields
