"""From the messages of a chat to the token ids of its prompt."""

from typing import NamedTuple

from core.errors import InvalidRequest
from gateway.prompt.served_model import ServedModel
from gateway.prompt.tool_prompt import with_tools
from gateway.requests.chat_request import MessagesFields
from gateway.text.think_marks import leaves_open


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
    messages = body.template_messages()
    tools = body.tool_use().offered
    if tools and not template.knows_tools:
        messages = with_tools(messages, tools, model.tool_form)
    text = template.render(
        messages,
        tools=[tool.model_dump(exclude_none=True) for tool in tools] or None,
        add_generation_prompt=body.begins_turn,
        continued=body.final_message,
        variables=body.template_variables,
    )
    is_thinking = leaves_open(text, final_message=body.final_message)
    if not template.knows_thinking and body.wants_thoughts not in (None, is_thinking):
        raise InvalidRequest(
            "thinking: the model's chat template leaves no choice", param="thinking"
        )
    token_ids = await model.tokenizer.encode(text, add_special_tokens=False)
    return ChatPrompt(token_ids, is_thinking)
