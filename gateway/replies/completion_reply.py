"""Replies of POST /v1/completions."""

from collections.abc import Sequence
from typing import Any

from gateway.cluster.job import Job
from gateway.cluster.run import Usage
from gateway.output.choice_delta import ChoiceDelta
from gateway.replies.logprob_text import completion_logprobs
from gateway.replies.reply import chunk_frame, encode_json, envelope, sse_event, usage_object
from gateway.text.tokenizer import Tokenizer

KIND = "text_completion"


class CompletionReply:
    """`text_completion`, the same object whole and in chunks."""

    def __init__(self, job: Job, model: str, tokenizer: Tokenizer) -> None:
        self._job = job
        self._model = model
        self._tokenizer = tokenizer
        self._head, self._tail = chunk_frame(job, model, KIND)

    def opening(self, choice: int) -> bytes:
        return b""

    def events(self, choice: int, delta: ChoiceDelta) -> bytes:
        events = b""
        if delta.text or delta.entries:
            text = encode_json(delta.text)
            events = self._chunk(choice, text, encode_json(self._logprobs(delta)), b"null")
        if delta.finish_reason is not None:
            reason = encode_json(delta.finish_reason)
            events += self._chunk(choice, b'""', b"null", reason)
        return events

    def whole(self, choices: Sequence[ChoiceDelta], usage: Usage) -> bytes:
        objects = [
            {
                "index": index,
                "text": delta.text,
                "logprobs": self._logprobs(delta),
                "finish_reason": delta.finish_reason,
            }
            for index, delta in enumerate(choices)
        ]
        fields = {"choices": objects, "usage": usage_object(usage)}
        return encode_json(envelope(self._job, self._model, KIND) | fields)

    def usage_event(self, usage: Usage) -> bytes:
        fields = {"choices": [], "usage": usage_object(usage)}
        return sse_event(encode_json(envelope(self._job, self._model, KIND) | fields))

    def _chunk(self, choice: int, text: bytes, logprobs: bytes, reason: bytes) -> bytes:
        index = str(choice).encode()
        middle = b',"text":' + text + b',"logprobs":' + logprobs + b',"finish_reason":' + reason
        return self._head + index + middle + self._tail

    def _logprobs(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        if not self._job.tells_logprobs:
            return None
        return completion_logprobs(self._tokenizer, delta.entries)
