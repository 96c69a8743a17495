"""From the messages of a chat to the token ids of its prompt."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from core.errors import InvalidRequest
from gateway.prompt.message_forms import Message, as_templates_read, each_text
from gateway.prompt.served_model import ServedModel
from gateway.prompt.tool_prompt import with_tools
from gateway.requests.chat_request import MessagesFields
from gateway.text.think_marks import CLOSE, OPEN, leaves_open
from gateway.text.typed_tokens import TypedTokens


class ChatPrompt(NamedTuple):
    """`is_thinking`: what comes after it are thoughts."""

    token_ids: list[int]
    is_thinking: bool


async def make_chat_prompt(body: MessagesFields, model: ServedModel) -> ChatPrompt:
    """Raises InvalidRequest when there is no template, or it refuses the messages or cannot do
    what they ask for."""
    template = model.chat_template
    if template is None:
        raise InvalidRequest(f"{model.name} has no chat template; use /v1/completions")
    parts = _parts(body)
    if model.sanitizes_control_tokens:
        parts = _marked(parts, model.tokenizer.typed_tokens)
    messages = parts.messages
    if parts.tools and not template.knows_tools:
        messages = with_tools(messages, parts.tools, model.tool_form)
    text = template.render(
        messages,
        tools=parts.tools or None,
        add_generation_prompt=body.begins_turn,
        continued=parts.continued,
        variables=parts.variables,
    )
    is_thinking = leaves_open(text, final_message=parts.continued)
    if not template.knows_thinking and body.wants_thoughts not in (None, is_thinking):
        raise InvalidRequest(
            "thinking: the model's chat template leaves no choice", param="thinking"
        )
    if model.sanitizes_control_tokens:
        return ChatPrompt(await model.tokenizer.encode_marked(text), is_thinking)
    token_ids = await model.tokenizer.encode(text, add_special_tokens=False)
    return ChatPrompt(token_ids, is_thinking)


class _Parts(NamedTuple):
    """All that a template gets of a client's texts."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    continued: str | None


def _parts(body: MessagesFields) -> _Parts:
    return _Parts(
        [as_templates_read(message) for message in body.template_messages()],
        [tool.model_dump(exclude_none=True) for tool in body.tool_use().offered],
        body.template_variables,
        body.final_message,
    )


def _marked(parts: _Parts, tokens: TypedTokens) -> _Parts:
    """With special tokens in them marked, except the marks of thoughts in what the assistant is
    said to have written: these are its own."""
    its_own = partial(tokens.mark, but=(OPEN, CLOSE))
    messages = []
    for message in parts.messages:
        marked = each_text(message, tokens.mark)
        if message["role"] == "assistant":
            marked["content"] = each_text(message["content"], its_own)
        messages.append(marked)
    return _Parts(
        messages,
        each_text(parts.tools, tokens.mark),
        each_text(parts.variables, tokens.mark),
        each_text(parts.continued, its_own),
    )
