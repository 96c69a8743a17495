"""Replies of POST /v1/chat/completions."""

from collections.abc import Iterator, Sequence
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
    content_field, no_content = b',"delta":', b"{}"

    def __init__(self, job: Job, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(job, model, tokenizer)
        self._tells_thoughts = job.chat is None or job.chat.tells_thoughts

    def opening(self, choice: int, usage: Usage) -> bytes:
        beside = b""
        if fields := self._prompt_fields(choice, None):
            beside = b"," + encode_json(fields)[1:-1]
        content = b'{"role":"assistant","content":""}'
        return self._chunk(choice, content, b"null", self._no_ids, beside=beside)

    def _contents(self, delta: ChoiceDelta) -> Iterator[tuple[bytes, bytes]]:
        if self._tells_thoughts and (delta.reasoning or delta.reasoning_entries):
            content = b'{"reasoning_content":' + encode_json(delta.reasoning) + b"}"
            logprobs = self._logprobs([], delta.reasoning_entries)
            yield content, encode_json(logprobs)
        if delta.text or delta.entries:
            content = b'{"content":' + encode_json(delta.text) + b"}"
            yield content, encode_json(self._logprobs(delta.entries, []))
        for call in delta.calls:
            yield b'{"tool_calls":[' + encode_json(_call_delta(call)) + b"]}", b"null"

    def _beside(self, choices: Sequence[ChoiceDelta]) -> dict[str, Any]:
        return self._prompt_fields(0, choices[0])

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
