"""Replies of POST /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from gateway.cluster.job import Job
from gateway.cluster.run import Usage
from gateway.output.choice_delta import CallDelta, ChoiceDelta, TokenEntry
from gateway.replies.logprob_text import chat_logprob
from gateway.replies.reply import Reply
from gateway.replies.reply_form import encode_json
from gateway.text.tokenizer import Tokenizer


class ChatReply(Reply):
    """`chat.completion` and its chunks: role first, then contents, then the finish reason."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    content_field = b',"delta":'

    def __init__(self, job: Job, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(job, model, tokenizer)
        self._tells_thoughts = job.chat is None or job.chat.tells_thoughts

    def opening(self, choice: int, usage: Usage) -> bytes:
        return self._chunk(choice, b'{"role":"assistant","content":""}', b"null", b"null")

    def events(self, choice: int, delta: ChoiceDelta) -> bytes:
        events = []
        if self._tells_thoughts and (delta.reasoning or delta.reasoning_entries):
            content = b'{"reasoning_content":' + encode_json(delta.reasoning) + b"}"
            logprobs = self._logprobs([], delta.reasoning_entries)
            events.append(self._chunk(choice, content, encode_json(logprobs), b"null"))
        if delta.text or delta.entries:
            content = b'{"content":' + encode_json(delta.text) + b"}"
            logprobs = self._logprobs(delta.entries, [])
            events.append(self._chunk(choice, content, encode_json(logprobs), b"null"))
        for call in delta.calls:
            content = b'{"tool_calls":[' + encode_json(_call_delta(call)) + b"]}"
            events.append(self._chunk(choice, content, b"null", b"null"))
        if delta.finish_reason is not None:
            reason = encode_json(delta.finish_reason)
            events.append(self._chunk(choice, b"{}", b"null", reason))
        return b"".join(events)

    def _choice(self, index: int, delta: ChoiceDelta) -> dict[str, Any]:
        return {
            "index": index,
            "message": self._message(delta),
            "logprobs": self._logprobs(delta.entries, delta.reasoning_entries),
            "finish_reason": delta.finish_reason,
        }

    def _message(self, piece: ChoiceDelta) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": piece.text,
            "refusal": None,
        }
        if piece.reasoning and self._tells_thoughts:
            message["reasoning_content"] = piece.reasoning
        if piece.calls:
            message["content"] = piece.text or None
            message["tool_calls"] = [_whole_call(call) for call in piece.calls]
        return message

    def _logprobs(
        self, entries: Sequence[TokenEntry], thoughts: Sequence[TokenEntry]
    ) -> dict[str, Any] | None:
        """Those of thoughts stand apart, as in DeepSeek's API."""
        if not self._job.tells_logprobs:
            return None
        content = [chat_logprob(self._tokenizer, entry) for entry in entries]
        logprobs: dict[str, Any] = {"content": content, "refusal": None}
        if thoughts and self._tells_thoughts:
            told = [chat_logprob(self._tokenizer, entry) for entry in thoughts]
            logprobs["reasoning_content"] = told
        return logprobs


def _call_delta(call: CallDelta) -> dict[str, Any]:
    """The first of a call has everything, the others only more of the arguments."""
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **_whole_call(call)}


def _whole_call(call: CallDelta) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
