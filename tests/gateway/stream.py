"""Server-sent events of a reply, read strictly, and put together again."""

import json
from dataclasses import dataclass, field
from typing import Any

import httpx


def events_of(reply: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a stream that ended well: one `[DONE]`, last."""
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in reply.headers
    *events, last, nothing = reply.text.split("\n\n")
    assert nothing == ""
    assert last == "data: [DONE]"
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


@dataclass
class Joined:
    """One choice of a stream."""

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[Any] = field(default_factory=list)
    num_chunks: int = 0


def join(reply: httpx.Response, *, chat: bool) -> tuple[list[Joined], dict[str, Any] | None]:
    """All choices, and the usage where there was one. Checks what holds for every stream."""
    choices: dict[int, Joined] = {}
    usage = None
    events = events_of(reply)
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events}) == 1
    for event in events:
        if not event["choices"]:
            assert event is events[-1]
            usage = event["usage"]
            continue
        assert event.get("usage") is None
        (choice,) = event["choices"]
        is_first = choice["index"] not in choices
        joined = choices.setdefault(choice["index"], Joined())
        assert joined.finish_reason is None, "nothing comes behind the finish reason"
        delta = choice["delta"] if chat else choice
        if chat:
            assert ("role" in delta) == is_first
        text = delta.get("content" if chat else "text", "")
        joined.text += text
        joined.reasoning += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            _join_call(joined.calls, call)
        joined.num_chunks += 1
        joined.finish_reason = choice["finish_reason"]
        assert not (joined.finish_reason and text)
        if choice["logprobs"] is not None:
            joined.logprobs.append(choice["logprobs"])
    return [choices[index] for index in sorted(choices)], usage


def _join_call(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    """The first delta of a call has its id, type and name, the others only arguments."""
    function = delta["function"]
    if delta["index"] == len(calls):
        assert delta["type"] == "function"
        calls.append({"id": delta["id"], "name": function["name"], "arguments": ""})
    else:
        assert set(delta) == {"index", "function"}
        assert set(function) == {"arguments"}
    assert delta["index"] == len(calls) - 1, "one call after the other"
    calls[-1]["arguments"] += function["arguments"]


def joined_logprobs(parts: list[Any], *, chat: bool) -> Any:
    """The chunks' logprobs in the form of a whole reply."""
    if chat:
        return [entry for part in parts for entry in part["content"]]
    names = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
    return {name: [value for part in parts for value in part[name]] for name in names}
