"""From the messages of a chat to the token ids of its prompt."""

from typing import NamedTuple

from core.errors import InvalidRequest
from gateway.prompt.chat_template import ChatTemplate
from gateway.prompt.served_model import ServedModel
from gateway.prompt.tool_prompt import with_tools
from gateway.requests.chat_request import MessagesFields
from gateway.text.think_marks import CLOSE, ThinkMarks, leaves_open
from proto.generate_pb2 import Grammar


class ChatPrompt(NamedTuple):
    """`is_thinking`: what comes after it are thoughts. `may_think`: the model may open some
    before its answer."""

    token_ids: list[int]
    is_thinking: bool
    may_think: bool

    def let_think_first(self, grammar: Grammar, marks: ThinkMarks) -> None:
        """What `grammar` constrains is the answer, not the thoughts before it."""
        if self.is_thinking:
            grammar.after_token_id = marks.close
        elif self.may_think:
            grammar.thoughts.open_token_id = marks.open
            grammar.thoughts.close_token_id = marks.close


async def make_chat_prompt(body: MessagesFields, model: ServedModel) -> ChatPrompt:
    """Raises InvalidRequest when there is no template, or it refuses the messages or cannot do
    what they ask for."""
    template = model.chat_template
    if template is None:
        raise InvalidRequest(f"{model.name} has no chat template; use /v1/completions")
    messages = body.template_messages()
    tools = body.tool_use().offered
    if tools and not template.knows_tools:
        messages = with_tools(messages, tools, model.tool_format)
    text = template.render(
        messages,
        tools=[tool.model_dump(exclude_none=True) for tool in tools] or None,
        add_generation_prompt=body.begins_turn,
        continued=body.final_message,
        variables=body.template_variables,
    )
    is_thinking = leaves_open(text, final_message=body.final_message)
    may_think = body.final_message is None and not text.rstrip().endswith(CLOSE)
    _check_choice(body, template, thinks=is_thinking or (may_think and template.mentions_thoughts))
    may_think = may_think and not is_thinking and body.wants_thoughts is not False
    token_ids = await model.tokenizer.encode(text, add_special_tokens=False)
    return ChatPrompt(token_ids, is_thinking, may_think)


def _check_choice(body: MessagesFields, template: ChatTemplate, *, thinks: bool) -> None:
    """Raises InvalidRequest for thoughts that are, or are not, whatever the client says."""
    param, wants = body.thinking_choice
    if param == "reasoning_effort":
        if template.knows_effort or template.knows_thinking or (not wants and not thinks):
            return
    elif template.knows_thinking or wants in (None, thinks):
        return
    raise InvalidRequest(f"{param}: the model's chat template leaves no choice", param=param)
