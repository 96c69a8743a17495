"""Server-sent events of one reply, read strictly and put together to the whole reply again."""

import json
from collections.abc import Iterable
from typing import Any


def events(content: str) -> list[dict[str, Any]]:
    """The JSON events of a complete stream.

    AssertionError for anything but `data: ` lines with a blank line behind each, comments
    aside, or when `[DONE]` is not there exactly once, last.
    """
    assert content.endswith("\n\n"), f"cut off: {content[-200:]!r}"
    blocks = [
        block
        for block in content.removesuffix("\n\n").split("\n\n")
        if not all(line.startswith(":") for line in block.split("\n"))
    ]
    data = [block.removeprefix("data: ") for block in blocks]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks), blocks
    assert data[-1] == "[DONE]", data[-3:]
    parsed = [json.loads(one) for one in data[:-1]]
    errors = [one["error"] for one in parsed if "error" in one]
    assert not errors, errors
    return parsed


def whole_reply(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """What the same request would have got without `stream`.

    AssertionError where the chunks contradict each other.
    """
    first = chunks[0]
    for name in ("id", "object", "created", "model"):
        assert len({json.dumps(chunk[name]) for chunk in chunks}) == 1, name
    with_usage = [chunk for chunk in chunks if chunk.get("usage")]
    assert len(with_usage) <= 1, "usage comes once"
    assert all(chunk["choices"] for chunk in chunks if chunk not in with_usage)
    indexes = sorted({choice["index"] for chunk in chunks for choice in chunk["choices"]})
    is_chat = first["object"] == "chat.completion.chunk"
    assemble = _chat_choice if is_chat else _text_choice
    reply = {
        "id": first["id"],
        "object": "chat.completion" if is_chat else first["object"],
        "created": first["created"],
        "model": first["model"],
        "choices": [assemble(index, list(_of_choice(chunks, index))) for index in indexes],
    }
    if with_usage:
        assert with_usage[0] is chunks[-1], "usage comes last"
        assert with_usage[0]["choices"] == []
        reply["usage"] = with_usage[0]["usage"]
    return reply


def _of_choice(chunks: list[dict[str, Any]], index: int) -> Iterable[dict[str, Any]]:
    return (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index)


def _finish_reason(parts: list[dict[str, Any]]) -> str:
    reasons = [part["finish_reason"] for part in parts if part.get("finish_reason")]
    assert len(reasons) == 1, f"one finish reason a choice: {reasons}"
    assert parts[-1]["finish_reason"] == reasons[0], "nothing comes behind the finish reason"
    return reasons[0]


def _text_choice(index: int, parts: list[dict[str, Any]]) -> dict[str, Any]:
    logprobs: dict[str, list[Any]] | None = None
    for part in parts:
        if part.get("logprobs"):
            logprobs = logprobs or {name: [] for name in part["logprobs"]}
            for name, values in part["logprobs"].items():
                logprobs[name] += values
    return {
        "index": index,
        "text": "".join(part["text"] for part in parts),
        "logprobs": logprobs,
        "finish_reason": _finish_reason(parts),
        "stop_reason": parts[-1]["stop_reason"],
    }


def _chat_choice(index: int, parts: list[dict[str, Any]]) -> dict[str, Any]:
    deltas = [part["delta"] for part in parts]
    assert deltas[0]["role"] == "assistant", deltas[0]
    assert not any("role" in delta for delta in deltas[1:])
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    for delta in deltas:
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                message[name] = (message.get(name) or "") + delta[name]
        for call in delta.get("tool_calls") or []:
            _add_tool_call(message.setdefault("tool_calls", []), call)
    found = [part["logprobs"] for part in parts if part.get("logprobs") is not None]
    logprobs: dict[str, Any] = {"content": [], "refusal": None}
    for one in found:
        for name in ("content", "reasoning_content"):
            if one.get(name):
                logprobs[name] = logprobs.get(name, []) + one[name]
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs if found else None,
        "finish_reason": _finish_reason(parts),
        "stop_reason": parts[-1]["stop_reason"],
    }


def _add_tool_call(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    """As the SDKs do: the first delta of a call has id, type and name; arguments are joined."""
    if delta["index"] == len(calls):
        function = {"name": delta["function"]["name"], "arguments": ""}
        calls.append({"id": delta["id"], "type": delta["type"], "function": function})
    assert delta["index"] == len(calls) - 1, "calls come one behind the other"
    calls[-1]["function"]["arguments"] += delta["function"].get("arguments") or ""
