"""From a body of Anthropic's API to the chat request that means the same."""

import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from gateway.messages_api.content_blocks import (
    Message,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    joined_text,
)
from gateway.messages_api.messages_request import (
    CountTokensRequest,
    FreeChoice,
    MessagesRequest,
    NamedChoice,
    PromptFields,
)
from gateway.requests.chat_request import ChatRequest
from gateway.requests.request_body import parse_fields

# Fields of the chat request, as regular expressions, and what they are called in this API.
FIELD_NAMES = {
    r"\.function\.parameters": ".input_schema",
    r"^response_format(\.json_schema)?": "output_config.format",
    r"^thinking_budget$": "thinking.budget_tokens",
}


def chat_of(body: MessagesRequest | CountTokensRequest) -> ChatRequest:
    """All but `max_tokens`, of which as many are generated as fit into the context.

    Raises InvalidRequest for what a chat could not be.
    """
    fields = _prompt_fields(body)
    if isinstance(body, MessagesRequest):
        fields |= {
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": body.stop_sequences,
            "stream": body.stream,
        }
    known = {name: value for name, value in fields.items() if value is not None}
    return parse_fields(known, ChatRequest)


def _prompt_fields(body: PromptFields) -> dict[str, Any]:
    thinking, output = body.thinking, body.output_config
    messages = [*_system(body), *_messages(body.messages)]
    is_prefix = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "continue_final_message": is_prefix or None,
        **_tools(body),
    }
    if thinking is not None:
        fields["thinking"] = None if thinking.type == "adaptive" else {"type": thinking.type}
        fields["thinking_budget"] = thinking.budget_tokens
        fields["include_reasoning"] = thinking.display != "omitted"
    if output is not None and output.format is not None:
        schema = {"name": "output", "schema": output.format.json_schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _system(body: PromptFields) -> Iterator[dict[str, Any]]:
    if body.system:
        yield {"role": "system", "content": joined_text(body.system)}


def _messages(messages: Iterable[Message]) -> Iterator[dict[str, Any]]:
    """Neighbours of one role are one turn."""
    for role, turn in groupby(messages, key=lambda message: message.role):
        blocks = [block for message in turn for block in _blocks(message)]
        if role == "assistant":
            yield _assistant(blocks)
        else:
            yield from _others(role, blocks)


def _blocks(message: Message) -> list[Any]:
    if isinstance(message.content, str):
        return [TextBlock(type="text", text=message.content)]
    return message.content


def _assistant(blocks: list[Any]) -> dict[str, Any]:
    thoughts = "".join(one.thinking for one in blocks if isinstance(one, ThinkingBlock))
    calls = [
        {
            "id": one.id,
            "type": "function",
            "function": {
                "name": one.name,
                "arguments": json.dumps(one.input, ensure_ascii=False),
            },
        }
        for one in blocks
        if isinstance(one, ToolUseBlock)
    ]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": joined_text([one for one in blocks if isinstance(one, TextBlock)]),
    }
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = calls
    return message


def _others(role: str, blocks: list[Any]) -> Iterator[dict[str, Any]]:
    """Results of tools are messages of their own."""
    for is_result, group in groupby(blocks, key=lambda block: isinstance(block, ToolResultBlock)):
        if is_result:
            for one in group:
                yield {"role": "tool", "tool_call_id": one.tool_use_id, "content": one.text}
        else:
            yield {"role": role, "content": joined_text(list(group))}


def _tools(body: PromptFields) -> dict[str, Any]:
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.input_schema,
                "strict": tool.strict,
            },
        }
        for tool in body.tools or ()
    ]
    fields: dict[str, Any] = {"tools": tools or None}
    match body.tool_choice:
        case FreeChoice(type=kind, disable_parallel_tool_use=at_most_one):
            fields["tool_choice"] = "required" if kind == "any" else "auto"
        case NamedChoice(name=name, disable_parallel_tool_use=at_most_one):
            fields["tool_choice"] = {"type": "function", "function": {"name": name}}
        case None:
            at_most_one = None
        case _:
            fields["tool_choice"], at_most_one = "none", None
    fields["parallel_tool_calls"] = False if at_most_one else None
    return fields
