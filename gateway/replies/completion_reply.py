"""Replies of POST /v1/completions."""

from typing import Any

from gateway.output.choice_delta import ChoiceDelta
from gateway.replies.logprob_text import completion_logprobs
from gateway.replies.reply import Reply
from gateway.replies.reply_form import encode_json


class CompletionReply(Reply):
    """`text_completion`, the same object whole and in chunks."""

    kind = chunk_kind = "text_completion"
    content_field = b',"text":'

    def events(self, choice: int, delta: ChoiceDelta) -> bytes:
        events = b""
        if delta.text or delta.entries:
            text = encode_json(delta.text)
            events = self._chunk(choice, text, encode_json(self._logprobs(delta)), b"null")
        if delta.finish_reason is not None:
            reason = encode_json(delta.finish_reason)
            events += self._chunk(choice, b'""', b"null", reason)
        return events

    def _choice(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        return {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        if not self._job.tells_logprobs:
            return None
        return completion_logprobs(self._tokenizer, delta.entries)
