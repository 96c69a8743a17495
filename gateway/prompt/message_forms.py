"""The forms in which templates want calls of tools: there is no one standard.

Arguments are an object for templates that write JSON themselves or go through the fields, and
JSON's text for those that put it between other texts. The content of a message that only calls is none,
which V3's and R1's first templates ask for, or "", in which later ones search.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from core.errors import InvalidRequest

_NONE_WRITTEN = ("None", "null")

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]


class CallArguments(dict[str, Any]):
    """The arguments of a call; as a string, the text that the client sent."""

    def __init__(self, fields: Mapping[str, Any], text: str) -> None:
        super().__init__(fields)
        self._text = text

    def __str__(self) -> str:
        return self._text


def as_templates_read(message: Message) -> Message:
    """The message with its calls' arguments as objects, and its thoughts by both their names."""
    named = {"thinking": message["reasoning_content"]} if "reasoning_content" in message else {}
    return _with_arguments({**message, **named}, _parsed)


def _parsed(text: str) -> CallArguments | str:
    """`text` itself where it is no JSON object; none at all are an empty object."""
    try:
        fields = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return text
    return CallArguments(fields, text) if isinstance(fields, dict) else text


def _with_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        changed = function | {"arguments": change(function["arguments"])}
        calls.append(call | {"function": changed})
    return {**message, "tool_calls": calls}


def each_text(value: Any, change: Callable[[str], str]) -> Any:  # noqa: ANN401 - JSON is anything
    """`value` with `change` done to every string in it, names of fields included."""
    match value:
        case str():
            return change(value)
        case list():
            return [each_text(one, change) for one in value]
        case dict():
            fields = {change(name): each_text(one, change) for name, one in value.items()}
            return (
                CallArguments(fields, change(str(value)))
                if isinstance(value, CallArguments)
                else fields
            )
    return value


def rendered(render: Render, messages: Sequence[Message]) -> str:
    """`render(messages)`, with calls in the first form that the template takes. Raises what
    `render` raises for the last one."""
    if not any("tool_calls" in message for message in messages):
        return render(messages)
    forms = [messages, [_with_arguments(message, str) for message in messages]]
    if any(map(_only_calls, messages)):
        forms += [_with_empty_content(form) for form in forms]
    for form in forms[:-1]:
        try:
            return _without_written_none(render, form, render(form))
        except InvalidRequest:
            continue
    return render(forms[-1])


def _without_written_none(render: Render, messages: Sequence[Message], text: str) -> str:
    """`text`, unless the template has written a content that is none as a word."""
    if not any(map(_only_calls, messages)) or not any(word in text for word in _NONE_WRITTEN):
        return text
    try:
        other = render(_with_empty_content(messages))
    except InvalidRequest:
        return text
    writes_none = any(text.count(word) > other.count(word) for word in _NONE_WRITTEN)
    has_calls = all(other.count(name) >= text.count(name) for name in _called(messages))
    return other if writes_none and has_calls else text


def _only_calls(message: Message) -> bool:
    return "tool_calls" in message and message["content"] is None


def _with_empty_content(messages: Sequence[Message]) -> Sequence[Message]:
    return [{**one, "content": ""} if _only_calls(one) else one for one in messages]


def _called(messages: Sequence[Message]) -> set[str]:
    return {call["function"]["name"] for one in messages for call in one.get("tool_calls", ())}
