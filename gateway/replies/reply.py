"""What a reply looks like on the wire: what the replies of both endpoints have in common.

Chunks are put together from bytes: the parts that stay the same are encoded once a request,
and a token costs the encoding of its text.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from core.errors import EpserveError
from core.token_ids import unpack_ids
from gateway.base.openai_error import error_body
from gateway.cluster.job import Job
from gateway.cluster.run import Usage
from gateway.output.choice_delta import ChoiceDelta
from gateway.replies.logprob_text import prompt_logprobs
from gateway.replies.reply_form import SSE_DONE, ReplyForm, encode_json, sse_event
from gateway.text.tokenizer import Tokenizer


class Reply(ReplyForm):
    """OpenAI's objects with `choices`; one subclass for each endpoint."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    content_field: ClassVar[bytes]  # of the one choice in a chunk
    no_content: ClassVar[bytes]

    def __init__(self, job: Job, model: str, tokenizer: Tokenizer) -> None:
        self._job = job
        self._model = model
        self._tokenizer = tokenizer
        head = encode_json(self._envelope(self.chunk_kind))[:-1] + b',"choices":[{"index":'
        self._head = b"data: " + head
        self._tail = (b',"usage":null}' if job.include_usage else b"}") + b"\n\n"
        self._no_ids = b',"token_ids":[]' if job.tells_token_ids else b""

    def note_usage(self, usage: Usage) -> None:
        self._tail = b',"usage":' + encode_json(usage_object(usage)) + b"}\n\n"

    def events(self, choice: int, delta: ChoiceDelta) -> bytes:
        ids = self._no_ids
        if delta.token_ids:
            ids = b',"token_ids":' + encode_json(delta.token_ids)
        events = []
        for content, logprobs in self._contents(delta):
            events.append(self._chunk(choice, content, logprobs, ids))
            ids = self._no_ids
        if delta.finish_reason is not None:
            end = ids + b',"stop_reason":' + encode_json(delta.stop_reason)
            reason = encode_json(delta.finish_reason)
            events.append(self._chunk(choice, self.no_content, b"null", end, reason))
        elif delta.token_ids and not events:
            events.append(self._chunk(choice, self.no_content, b"null", ids))
        return b"".join(events)

    def whole(self, choices: Sequence[ChoiceDelta], usage: Usage) -> bytes:
        objects = [self._choice(index, delta) for index, delta in enumerate(choices)]
        for told, delta in zip(objects, choices, strict=True):
            told["stop_reason"] = delta.stop_reason
            if self._job.tells_token_ids:
                told["token_ids"] = delta.token_ids
        fields = {"choices": objects, "usage": usage_object(usage)}
        return encode_json(self._envelope(self.kind) | fields | self._beside(choices))

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

    @abstractmethod
    def _contents(self, delta: ChoiceDelta) -> Iterator[tuple[bytes, bytes]]:
        """Content and log-probabilities of each chunk that a piece comes to, as JSON."""

    def _beside(self, choices: Sequence[ChoiceDelta]) -> dict[str, Any]:
        """What `whole` has beside its choices."""
        return {}

    def _prompt_fields(self, choice: int, delta: ChoiceDelta | None) -> dict[str, Any]:
        """What is told of a choice's prompt, as far as it is asked for."""
        fields: dict[str, Any] = {}
        if self._job.tells_token_ids:
            prompt = self._job.prompts[choice // self._job.num_returned]
            fields["prompt_token_ids"] = list(unpack_ids(prompt.token_ids))
        if self._job.tells_prompt_logprobs and delta is not None:
            fields["prompt_logprobs"] = prompt_logprobs(self._tokenizer, delta.prompt_logprobs)
        return fields

    def _chunk(
        self,
        choice: int,
        content: bytes,
        logprobs: bytes,
        in_choice: bytes,
        reason: bytes = b"null",
        *,
        beside: bytes = b"",
    ) -> bytes:
        """`in_choice` and `beside` are further fields of the choice and of the chunk."""
        begin = self._head + str(choice).encode() + self.content_field + content
        end = b',"finish_reason":' + reason + in_choice + b"}]" + beside + self._tail
        return begin + b',"logprobs":' + logprobs + end

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
        # As DeepSeek's API has them.
        "prompt_cache_hit_tokens": usage.cached_tokens,
        "prompt_cache_miss_tokens": usage.prompt_tokens - usage.cached_tokens,
    }
    details = {}
    if usage.reasoning_tokens is not None:
        details["reasoning_tokens"] = usage.reasoning_tokens
    if usage.accepted_drafts or usage.rejected_drafts:
        details["accepted_prediction_tokens"] = usage.accepted_drafts
        details["rejected_prediction_tokens"] = usage.rejected_drafts
    return fields | {"completion_tokens_details": details} if details else fields
