"""From the messages of a chat to the token ids of its prompt."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from core.errors import InvalidRequest
from gateway.prompt.chat_template import ChatTemplate
from gateway.prompt.message_forms import Message, as_templates_read, each_text
from gateway.prompt.served_model import ServedModel
from gateway.prompt.tool_prompt import with_tools
from gateway.requests.chat_request import MessagesFields
from gateway.requests.request_body import aside
from gateway.text.think_marks import CLOSE, OPEN, ThinkMarks, leaves_open
from gateway.text.typed_tokens import TypedTokens
from proto.generate_pb2 import Grammar, SamplingParams, ThoughtBudget

MESSAGE_BYTES = 256  # a short one takes a template as long as so many bytes of a long one


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
        if marks.also_ends_at is not None and (self.is_thinking or self.may_think):
            grammar.begins_with_token_id = marks.also_ends_at

    def bound_thoughts(
        self, sampling: SamplingParams, body: MessagesFields, marks: ThinkMarks | None
    ) -> None:
        """By the client's budget, if it has one. Raises InvalidRequest where none can be bound."""
        param, max_tokens = body.budget
        if max_tokens is None:
            return
        if marks is None:
            raise InvalidRequest(f"{param}: this model's thoughts are not told apart", param=param)
        if self.is_thinking or self.may_think:
            budget = ThoughtBudget(
                max_tokens=max_tokens,
                open_token_id=marks.open,
                close_token_id=marks.close,
                also_ends_at=marks.also_ends_at,
                is_open=self.is_thinking,
            )
            sampling.thought_budget.CopyFrom(budget)


async def make_chat_prompt(
    body: MessagesFields, model: ServedModel, *, num_bytes: int
) -> ChatPrompt:
    """`num_bytes` are those of the request. Raises InvalidRequest when there is no template, or it
    refuses the messages or cannot do what they ask for."""
    size = max(num_bytes, len(body.messages) * MESSAGE_BYTES)
    text, is_thinking, may_think = await aside(size, _rendered, body, model)
    if model.sanitizes_control_tokens:
        return ChatPrompt(await model.tokenizer.encode_marked(text), is_thinking, may_think)
    token_ids = await model.tokenizer.encode(text, add_special_tokens=False)
    return ChatPrompt(token_ids, is_thinking, may_think)


def _rendered(body: MessagesFields, model: ServedModel) -> tuple[str, bool, bool]:
    """The prompt's text, and the others of `ChatPrompt`."""
    template = model.chat_template
    if template is None:
        raise InvalidRequest(f"{model.name} has no chat template; use /v1/completions")
    parts = _parts(body)
    if model.sanitizes_control_tokens:
        parts = _marked(parts, model.tokenizer.typed_tokens)
    messages = parts.messages
    if parts.tools and not template.knows_tools:
        messages = with_tools(messages, parts.tools, model.tool_format)
    text = template.render(
        messages,
        tools=parts.tools or None,
        add_generation_prompt=body.begins_turn,
        continued=parts.continued,
        variables=parts.variables,
    )
    is_thinking = leaves_open(text, final_message=parts.continued)
    may_think = body.final_message is None and not text.rstrip().endswith(CLOSE)
    _check_choice(body, template, thinks=is_thinking or (may_think and template.mentions_thoughts))
    may_think = may_think and not is_thinking and body.wants_thoughts is not False
    return text, is_thinking, may_think


def _check_choice(body: MessagesFields, template: ChatTemplate, *, thinks: bool) -> None:
    """Raises InvalidRequest for thoughts that are, or are not, whatever the client says."""
    param, wants = body.thinking_choice
    if param == "reasoning_effort":
        if template.knows_effort or template.knows_thinking or (not wants and not thinks):
            return
    elif template.knows_thinking or wants in (None, thinks):
        return
    raise InvalidRequest(f"{param}: the model's chat template leaves no choice", param=param)


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
