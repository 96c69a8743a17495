"""What a reply looks like on the wire: what the replies of both endpoints have in common.

Chunks are put together from bytes: the parts that stay the same are encoded once a request,
and a token costs the encoding of its text.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from core.errors import EpserveError
from gateway.base.openai_error import error_body
from gateway.cluster.job import Job
from gateway.cluster.run import Usage
from gateway.output.choice_delta import ChoiceDelta
from gateway.replies.reply_form import SSE_DONE, ReplyForm, encode_json, sse_event
from gateway.text.tokenizer import Tokenizer


class Reply(ReplyForm):
    """OpenAI's objects with `choices`; one subclass for each endpoint."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    content_field: ClassVar[bytes]  # of the one choice in a chunk

    def __init__(self, job: Job, model: str, tokenizer: Tokenizer) -> None:
        self._job = job
        self._model = model
        self._tokenizer = tokenizer
        head = encode_json(self._envelope(self.chunk_kind))[:-1] + b',"choices":[{"index":'
        tail = b'}],"usage":null}' if job.include_usage else b"}]}"
        self._head, self._tail = b"data: " + head, tail + b"\n\n"

    def whole(self, choices: Sequence[ChoiceDelta], usage: Usage) -> bytes:
        objects = [self._choice(index, delta) for index, delta in enumerate(choices)]
        fields = {"choices": objects, "usage": usage_object(usage)}
        return encode_json(self._envelope(self.kind) | fields)

    def ending(self, usage: Usage) -> bytes:
        if not self._job.include_usage:
            return SSE_DONE
        fields = {"choices": [], "usage": usage_object(usage)}
        return sse_event(encode_json(self._envelope(self.chunk_kind) | fields)) + SSE_DONE

    def failure(self, error: EpserveError) -> bytes:
        return sse_event(error_body(error))

    @abstractmethod
    def _choice(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        """One of the choices of `whole`."""

    def _chunk(self, choice: int, content: bytes, logprobs: bytes, reason: bytes) -> bytes:
        index = str(choice).encode()
        logprobs_and_reason = b',"logprobs":' + logprobs + b',"finish_reason":' + reason
        return self._head + index + self.content_field + content + logprobs_and_reason + self._tail

    def _envelope(self, kind: str) -> dict[str, Any]:
        """The fields that every object of a reply begins with."""
        return {
            "id": self._job.id, "object": kind, "created": self._job.created, "model": self._model,
        }  # fmt: skip


def usage_object(usage: Usage) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    details = {}
    if usage.reasoning_tokens is not None:
        details["reasoning_tokens"] = usage.reasoning_tokens
    if usage.accepted_drafts or usage.rejected_drafts:
        details["accepted_prediction_tokens"] = usage.accepted_drafts
        details["rejected_prediction_tokens"] = usage.rejected_drafts
    return fields | {"completion_tokens_details": details} if details else fields
