"""Replies of POST /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from gateway.cluster.job import Job
from gateway.cluster.run import Usage
from gateway.output.choice_delta import CallDelta, ChoiceDelta, TokenEntry
from gateway.replies.logprob_text import chat_logprob
from gateway.replies.reply import chunk_frame, encode_json, envelope, sse_event, usage_object
from gateway.text.tokenizer import Tokenizer

CHUNK = "chat.completion.chunk"
WHOLE = "chat.completion"


class ChatReply:
    """`chat.completion` and its chunks: role first, then contents, then the finish reason."""

    def __init__(self, job: Job, model: str, tokenizer: Tokenizer) -> None:
        self._job = job
        self._model = model
        self._tokenizer = tokenizer
        self._tells_thoughts = job.chat is None or job.chat.tells_thoughts
        self._head, self._tail = chunk_frame(job, model, CHUNK)

    def opening(self, choice: int) -> bytes:
        return self._chunk(choice, b'{"role":"assistant","content":""}', b"null", b"null")

    def events(self, choice: int, piece: ChoiceDelta) -> bytes:
        events = []
        if self._tells_thoughts and (piece.reasoning or piece.reasoning_entries):
            delta = b'{"reasoning_content":' + encode_json(piece.reasoning) + b"}"
            logprobs = self._logprobs([], piece.reasoning_entries)
            events.append(self._chunk(choice, delta, encode_json(logprobs), b"null"))
        if piece.text or piece.entries:
            delta = b'{"content":' + encode_json(piece.text) + b"}"
            logprobs = self._logprobs(piece.entries, [])
            events.append(self._chunk(choice, delta, encode_json(logprobs), b"null"))
        for call in piece.calls:
            delta = b'{"tool_calls":[' + encode_json(_call_delta(call)) + b"]}"
            events.append(self._chunk(choice, delta, b"null", b"null"))
        if piece.finish_reason is not None:
            reason = encode_json(piece.finish_reason)
            events.append(self._chunk(choice, b"{}", b"null", reason))
        return b"".join(events)

    def whole(self, choices: Sequence[ChoiceDelta], usage: Usage) -> bytes:
        objects = [
            {
                "index": index,
                "message": self._message(piece),
                "logprobs": self._logprobs(piece.entries, piece.reasoning_entries),
                "finish_reason": piece.finish_reason,
            }
            for index, piece in enumerate(choices)
        ]
        fields = {"choices": objects, "usage": usage_object(usage)}
        return encode_json(envelope(self._job, self._model, WHOLE) | fields)

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

    def usage_event(self, usage: Usage) -> bytes:
        fields = {"choices": [], "usage": usage_object(usage)}
        return sse_event(encode_json(envelope(self._job, self._model, CHUNK) | fields))

    def _chunk(self, choice: int, delta: bytes, logprobs: bytes, reason: bytes) -> bytes:
        index = str(choice).encode()
        middle = b',"delta":' + delta + b',"logprobs":' + logprobs + b',"finish_reason":' + reason
        return self._head + index + middle + self._tail

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
