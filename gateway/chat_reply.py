"""Replies of POST /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from gateway.job import Job
from gateway.logprob_text import chat_logprob
from gateway.output_text import Piece
from gateway.reply import chunk_frame, encode_json, envelope, sse_event, usage_object
from gateway.run import Usage
from gateway.tokenizer import Tokenizer

CHUNK = "chat.completion.chunk"
WHOLE = "chat.completion"


class ChatReply:
    """`chat.completion` and its chunks: role first, then contents, then the finish reason."""

    def __init__(self, job: Job, model: str, tokenizer: Tokenizer) -> None:
        self._job = job
        self._model = model
        self._tokenizer = tokenizer
        self._head, self._tail = chunk_frame(job, model, CHUNK)

    def opening(self, choice: int) -> bytes:
        return self._chunk(choice, b'{"role":"assistant","content":""}', b"null", b"null")

    def events(self, choice: int, piece: Piece) -> bytes:
        events = b""
        if piece.text or piece.entries:
            delta = b'{"content":' + encode_json(piece.text) + b"}"
            events = self._chunk(choice, delta, encode_json(self._logprobs(piece)), b"null")
        if piece.finish_reason is not None:
            reason = encode_json(piece.finish_reason)
            events += self._chunk(choice, b"{}", b"null", reason)
        return events

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        objects = [
            {
                "index": index,
                "message": {"role": "assistant", "content": piece.text, "refusal": None},
                "logprobs": self._logprobs(piece),
                "finish_reason": piece.finish_reason,
            }
            for index, piece in enumerate(choices)
        ]
        fields = {"choices": objects, "usage": usage_object(usage)}
        return encode_json(envelope(self._job, self._model, WHOLE) | fields)

    def usage_event(self, usage: Usage) -> bytes:
        fields = {"choices": [], "usage": usage_object(usage)}
        return sse_event(encode_json(envelope(self._job, self._model, CHUNK) | fields))

    def _chunk(self, choice: int, delta: bytes, logprobs: bytes, reason: bytes) -> bytes:
        index = str(choice).encode()
        middle = b',"delta":' + delta + b',"logprobs":' + logprobs + b',"finish_reason":' + reason
        return self._head + index + middle + self._tail

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not self._job.sampling.logprobs:
            return None
        content = [chat_logprob(self._tokenizer, entry) for entry in piece.entries]
        return {"content": content, "refusal": None}
