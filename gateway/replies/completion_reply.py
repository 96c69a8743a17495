"""Replies of POST /v1/completions."""

from collections.abc import Iterator
from typing import Any

from gateway.cluster.run import Usage
from gateway.output.choice_delta import ChoiceDelta
from gateway.replies.logprob_text import completion_logprobs
from gateway.replies.reply import Reply
from gateway.replies.reply_form import encode_json


class CompletionReply(Reply):
    """`text_completion`, the same object whole and in chunks."""

    kind = chunk_kind = "text_completion"
    content_field, no_content = b',"text":', b'""'

    def opening(self, choice: int, usage: Usage) -> bytes:
        """Only where something is told of the prompt."""
        fields = self._prompt_fields(choice, None)
        if not fields:
            return b""
        in_choice = self._no_ids + b"," + encode_json(fields)[1:-1]
        return self._chunk(choice, self.no_content, b"null", in_choice)

    def _contents(self, delta: ChoiceDelta) -> Iterator[tuple[bytes, bytes]]:
        if delta.text or delta.entries:
            yield encode_json(delta.text), encode_json(self._logprobs(delta))

    def _choice(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        return {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
            **self._prompt_fields(index, delta),
        }

    def _logprobs(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        if not self._job.tells_logprobs:
            return None
        return completion_logprobs(self._tokenizer, delta.entries)
