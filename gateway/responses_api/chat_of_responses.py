"""From a body of the Responses API to the chat request that means the same."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from gateway.requests.chat_request import ChatRequest
from gateway.requests.request_body import parse_fields
from gateway.responses_api.input_items import (
    AnyItem,
    FunctionCallItem,
    FunctionOutputItem,
    MessageItem,
    ReasoningItem,
)
from gateway.responses_api.responses_request import NamedChoice, PlainFormat, ResponsesRequest

# Fields of the chat request, as regular expressions, and what they are called in this API.
FIELD_NAMES = {
    r"\.function\.parameters": ".parameters",
    r"^response_format(\.json_schema)?": "text.format",
    r"^messages$": "input",
    r"^reasoning_effort$": "reasoning.effort",
}


def chat_of(body: ResponsesRequest, items: Sequence[AnyItem]) -> ChatRequest:
    """`items` are the whole conversation. All but `max_output_tokens`, of which as many are
    generated as fit into the context.

    Raises InvalidRequest for what a chat could not be.
    """
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": [*_system(body), *_messages(items)],
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stream": body.stream,
        "tools": [_tool(tool.model_dump(exclude_none=True)) for tool in body.tools or ()] or None,
        "tool_choice": body.tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body),
    }
    if isinstance(body.tool_choice, NamedChoice):
        fields["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    known = {name: value for name, value in fields.items() if value is not None}
    return parse_fields(known, ChatRequest)


def _system(body: ResponsesRequest) -> Iterator[dict[str, Any]]:
    if body.instructions:
        yield {"role": "system", "content": body.instructions}


def _messages(items: Sequence[AnyItem]) -> Iterator[dict[str, Any]]:
    """The assistant's items that follow each other are one message."""
    for is_assistants, turn in groupby(items, key=_is_assistants):
        if is_assistants:
            yield _assistant(list(turn))
            continue
        for item in turn:
            if isinstance(item, FunctionOutputItem):
                yield {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
            elif isinstance(item, MessageItem):
                yield {"role": item.role, "content": _text(item.content)}


def _is_assistants(item: AnyItem) -> bool:
    if isinstance(item, MessageItem):
        return item.role == "assistant"
    return not isinstance(item, FunctionOutputItem)


def _assistant(items: Sequence[AnyItem]) -> dict[str, Any]:
    texts = [_text(item.content) for item in items if isinstance(item, MessageItem)]
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    thoughts = [
        part.text
        for item in items
        if isinstance(item, ReasoningItem)
        for part in item.content or ()
    ]
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    calls = [
        {
            "id": item.call_id,
            "type": "function",
            "function": {"name": item.name, "arguments": item.arguments},
        }
        for item in items
        if isinstance(item, FunctionCallItem)
    ]
    if calls:
        message["tool_calls"] = calls
    return message


def _text(content: str | list[Any]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content)


def _tool(fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": fields.pop("type"), "function": fields}


def _response_format(body: ResponsesRequest) -> dict[str, Any] | None:
    wanted = body.text.format if body.text is not None else None
    if wanted is None:
        return None
    if isinstance(wanted, PlainFormat):
        return {"type": wanted.type}
    schema = {"name": wanted.name, "schema": wanted.json_schema}
    return {"type": wanted.type, "json_schema": schema}
