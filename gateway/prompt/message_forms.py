"""The forms in which templates want calls of tools: there is no one standard.

Arguments are an object for templates that write JSON themselves or go through the fields, and JSON's
text for those that put it between other texts. The content of a message that only calls is none,
which V3's and R1's first templates ask for, or "", in which later ones search.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from core.errors import InvalidRequest

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]


class CallArguments(dict[str, Any]):
    """The arguments of a call; as a string, the text that the client sent."""

    def __init__(self, fields: Mapping[str, Any], text: str) -> None:
        super().__init__(fields)
        self._text = text

    def __str__(self) -> str:
        return self._text


def with_objects(message: Message) -> Message:
    """The message with its calls' arguments as objects."""
    return _with_arguments(message, _parsed)


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
    try:
        return _with_content(render, messages)
    except InvalidRequest:
        return _with_content(render, [_with_arguments(message, str) for message in messages])


def _with_content(render: Render, messages: Sequence[Message]) -> str:
    """A template may also write Python's word for none: then "" was meant."""
    empty = [{**one, "content": ""} if _only_calls(one) else one for one in messages]
    try:
        text = render(messages)
    except InvalidRequest:
        return render(empty)
    if "None" not in text or not any(map(_only_calls, messages)):
        return text
    try:
        other = render(empty)
    except InvalidRequest:
        return text
    return other if other.replace("None", "") == text.replace("None", "") else text


def _only_calls(message: Message) -> bool:
    return "tool_calls" in message and message["content"] is None
