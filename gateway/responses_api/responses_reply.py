"""Replies of POST /v1/responses."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from core.errors import EpserveError
from gateway.cluster.job import Job
from gateway.cluster.run import Usage
from gateway.output.choice_delta import CallDelta, ChoiceDelta
from gateway.replies.parted_reply import PartedReply, Piece
from gateway.replies.reply_form import encode_json
from gateway.responses_api.responses_request import NamedChoice, ResponsesRequest

# Takes the response as JSON, and its output items.
Keep = Callable[[bytes, list[dict[str, Any]]], None]
Status = Literal["in_progress", "completed", "incomplete", "failed"]


class ResponsesReply(PartedReply):
    """A response whose output is a list of items. Its events are numbered."""

    def __init__(self, job: Job, body: ResponsesRequest, keep: Keep | None) -> None:
        """`keep` is called with a response that came to its end."""
        super().__init__(job)
        self._body = body
        self._keep = keep
        self._num_events = 0
        self._texts: list[str] = []  # of the item that is open
        self._items: list[dict[str, Any]] = []  # that are closed
        self._call: CallDelta | None = None  # that was opened last

    def opening(self, choice: int, usage: Usage) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def ending(self, usage: Usage) -> bytes:
        assert self._last is not None
        response = self._ended(self._last, usage)
        return self._event(f"response.{response['status']}", response=response)

    def failure(self, error: EpserveError) -> bytes:
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
        told = {
            "code": code.get(error.status.http, "server_error"),
            "message": error.message,
        }
        return self._event("response.failed", response=self._response("failed", error=told))

    def whole(self, choices: Sequence[ChoiceDelta], usage: Usage) -> bytes:
        for piece in self._pieces(choices[0]):
            self._call = piece.call
            self._items.append(self._item(piece, piece.text, "completed"))
        if self._items and choices[0].finish_reason == "length":
            self._items[-1]["status"] = "incomplete"
        return encode_json(self._ended(choices[0], usage))

    # ---- events of items

    def _begin(self, piece: Piece) -> bytes:
        self._texts, self._call = [], piece.call
        item = self._item(piece, "", "in_progress")
        events = self._event("response.output_item.added", output_index=self._index, item=item)
        if piece.kind != "call":
            events += self._part_event("content_part.added", item, part=_part(piece, ""))
        return events

    def _more(self, piece: Piece) -> bytes:
        self._texts.append(piece.text)
        return self._text_event("delta", piece, delta=piece.text)

    def _end(self, piece: Piece) -> bytes:
        text = "".join(self._texts)
        is_cut_off = self._last is not None and self._last.finish_reason == "length"
        item = self._item(piece, text, "incomplete" if is_cut_off else "completed")
        if piece.kind == "call":
            events = self._text_event("done", piece, arguments=text, name=item["name"])
        else:
            events = self._text_event("done", piece, text=text)
            events += self._part_event("content_part.done", item, part=_part(piece, text))
        events += self._event("response.output_item.done", output_index=self._index, item=item)
        self._items.append(item)
        return events

    @property
    def _index(self) -> int:
        """Of the item that is open, or being opened."""
        return len(self._items)

    def _text_event(self, what: str, piece: Piece, **fields: object) -> bytes:
        item = self._item(piece, "", "in_progress")
        if piece.kind == "call":
            return self._event(
                f"response.function_call_arguments.{what}",
                item_id=item["id"], output_index=self._index, **fields,
            )  # fmt: skip
        if piece.kind == "text":
            return self._part_event(f"output_text.{what}", item, **fields, logprobs=[])
        return self._part_event(f"reasoning_text.{what}", item, **fields)

    def _part_event(self, kind: str, item: dict[str, Any], **fields: object) -> bytes:
        return self._event(
            f"response.{kind}",
            item_id=item["id"], output_index=self._index, content_index=0, **fields,
        )  # fmt: skip

    def _event(self, kind: str, **fields: object) -> bytes:
        content = encode_json({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + content + b"\n\n"

    # ---- objects

    def _item(self, piece: Piece, text: str, status: Status) -> dict[str, Any]:
        own = f"{self._job.id.removeprefix('resp_')}{self._index}"
        match piece.kind:
            case "thoughts":
                content = [_part(piece, text)] if text else []
                return {"id": f"rs_{own}", "type": "reasoning", "status": status, "summary": [],
                        "content": content}  # fmt: skip
            case "text":
                content = [_part(piece, text)] if text else []
                return {"id": f"msg_{own}", "type": "message", "status": status,
                        "role": "assistant", "content": content}  # fmt: skip
            case "call":
                call = self._call or piece.call
                assert call is not None
                return {"id": f"fc_{own}", "type": "function_call", "status": status,
                        "call_id": call.id, "name": call.name, "arguments": text}  # fmt: skip

    def _ended(self, end: ChoiceDelta, usage: Usage) -> dict[str, Any]:
        """The response at its end, kept if that is asked for."""
        is_cut_off = end.finish_reason == "length"
        response = self._response(
            "incomplete" if is_cut_off else "completed",
            incomplete_details={"reason": "max_output_tokens"} if is_cut_off else None,
            completed_at=None if is_cut_off else int(time.time()),
            usage=_usage_object(usage),
        )
        if self._keep is not None:
            self._keep(encode_json(response), self._items)
        return response

    def _response(self, status: Status, **fields: object) -> dict[str, Any]:
        body, sampling = self._body, self._job.sampling
        text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
        choice = body.tool_choice
        return {
            "id": self._job.id,
            "object": "response",
            "created_at": self._job.created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model,
            "output": self._items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {
                "effort": body.reasoning and body.reasoning.effort,
                "summary": body.reasoning and body.reasoning.summary,
            },
            "service_tier": "default",
            "store": self._keep is not None,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}} | text,
            "tool_choice": choice.model_dump()
            if isinstance(choice, NamedChoice)
            else choice or "auto",
            "tools": [
                {"parameters": None, "strict": False, **tool.model_dump(exclude_none=True)}
                for tool in body.tools or ()
            ],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            **fields,
        }


def _part(piece: Piece, text: str) -> dict[str, Any]:
    if piece.kind == "thoughts":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
