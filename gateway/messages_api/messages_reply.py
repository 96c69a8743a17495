"""Replies of POST /v1/messages."""

from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

from core.errors import EpserveError
from gateway.base.anthropic_error import anthropic_error_body
from gateway.cluster.job import Job
from gateway.cluster.run import Usage
from gateway.output.choice_delta import ChoiceDelta
from gateway.replies.parted_reply import PartedReply, Piece
from gateway.replies.reply_form import encode_json


def _sse(kind: str, **fields: object) -> bytes:
    return _named_event(kind, encode_json({"type": kind, **fields}))


def _named_event(kind: str, content: bytes) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + content + b"\n\n"


class MessagesReply(PartedReply):
    """A message whose content is a list of blocks; `max_tokens` is what the client asked for."""

    ping = _sse("ping")

    def __init__(self, job: Job, model: str, max_tokens: int) -> None:
        super().__init__(job)
        self._model = model
        self._max_tokens = max_tokens
        self._is_object: bool | None = None  # arguments that are being told; None: not known yet

    def opening(self, choice: int, usage: Usage) -> bytes:
        return _sse("message_start", message=self._message([], None, usage))

    def ending(self, usage: Usage) -> bytes:
        delta = {**self._stop(self._last), "stop_details": None, "container": None}
        told = _sse("message_delta", delta=delta, usage=_usage_object(usage))
        return told + _sse("message_stop")

    def failure(self, error: EpserveError) -> bytes:
        return _named_event("error", anthropic_error_body(error))

    def whole(self, choices: Sequence[ChoiceDelta], usage: Usage) -> bytes:
        blocks = [self._whole_block(piece) for piece in self._pieces(choices[0])]
        return encode_json(self._message(blocks, choices[0], usage))

    def _begin(self, piece: Piece) -> bytes:
        block = self._block(piece, "")
        if piece.call is not None:
            block["input"] = {}
            self._is_object = None
        return _sse("content_block_start", index=self._num_parts, content_block=block)

    def _more(self, piece: Piece) -> bytes:
        match piece.kind:
            case "thoughts":
                delta = {"type": "thinking_delta", "thinking": piece.text}
            case "text":
                delta = {"type": "text_delta", "text": piece.text}
            case "call":
                delta = {"type": "input_json_delta", "partial_json": self._more_input(piece.text)}
        return _sse("content_block_delta", index=self._num_parts - 1, delta=delta)

    def _end(self, piece: Piece) -> bytes:
        index, events = self._num_parts - 1, b""
        if piece.kind == "thoughts":
            # Clients that send thoughts back leave out those without any signature.
            delta = {"type": "signature_delta", "signature": self._job.id}
            events = _sse("content_block_delta", index=index, delta=delta)
        elif piece.kind == "call" and self._is_object is False:
            delta = {"type": "input_json_delta", "partial_json": '"}'}
            events = _sse("content_block_delta", index=index, delta=delta)
        return events + _sse("content_block_stop", index=index)

    def _more_input(self, arguments: str) -> str:
        """As of `_input`, while they arrive."""
        if self._is_object is None:
            self._is_object = arguments.startswith("{")
            return arguments if self._is_object else '{"arguments":"' + _escaped(arguments)
        return arguments if self._is_object else _escaped(arguments)

    def _whole_block(self, piece: Piece) -> dict[str, Any]:
        block = self._block(piece, piece.text)
        if piece.call is not None:
            block["input"] = _input(piece.text)
        elif piece.kind == "thoughts":
            block["signature"] = self._job.id
        return block

    def _block(self, piece: Piece, text: str) -> dict[str, Any]:
        if piece.call is not None:
            return {"type": "tool_use", "id": piece.call.id, "name": piece.call.name}
        if piece.kind == "thoughts":
            return {"type": "thinking", "thinking": text, "signature": ""}
        return {"type": "text", "text": text, "citations": None}

    def _message(
        self, blocks: list[dict[str, Any]], end: ChoiceDelta | None, usage: Usage
    ) -> dict[str, Any]:
        return {
            "id": self._job.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            **self._stop(end),
            "usage": _usage_object(usage),
        }

    def _stop(self, end: ChoiceDelta | None) -> dict[str, str | int | None]:
        reason: str | None = None
        match end.finish_reason if end else None:
            case "length":
                asked = self._job.prompts[0].max_tokens == self._max_tokens
                reason = "max_tokens" if asked else "model_context_window_exceeded"
            case "tool_calls":
                reason = "tool_use"
            case "stop":
                reason = "stop_sequence" if end and end.stop_reason else "end_turn"
        return {"stop_reason": reason, "stop_sequence": end.stop_reason if end else None}


def _usage_object(usage: Usage) -> dict[str, Any]:
    """`input_tokens` are those that were computed for this request."""
    fields: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    if usage.reasoning_tokens is not None:
        fields["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return fields


def _input(arguments: str) -> dict[str, Any]:
    """The object, or as much of it as there is when the output was cut off."""
    try:
        value = from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        value = None
    # What is no object is told all the same.
    return value if isinstance(value, dict) else {"arguments": arguments}


def _escaped(text: str) -> str:
    """As it stands in a JSON string."""
    return encode_json(text)[1:-1].decode()
