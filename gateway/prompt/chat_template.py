"""The checkpoint's chat template, rendered in a sandbox as transformers renders it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, meta

from core.errors import CheckpointError, InvalidRequest
from gateway.prompt import message_forms
from gateway.prompt.template_environment import TemplateEnvironment
from gateway.requests.thinking_fields import THINKING_SWITCHES
from gateway.text.think_marks import CLOSE
from model.config import Fields

# Stands for a message's text where the end of that is looked for; nobody writes it.
MARK = "\U0010fffd"


class ChatTemplate:
    """Turns messages into the text that the model was trained on."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises CheckpointError when `source` is not a template."""
        self._special_tokens = dict(special_tokens)
        environment = TemplateEnvironment()
        try:
            self._template: Template = environment.from_string(source)
            # As a plain dictionary: jinja's chain of them is walked through at each rendering.
            self._template.globals = dict(self._template.globals)
            names = meta.find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            raise CheckpointError(f"the chat template does not compile: {error}") from error
        self.source = source
        self.knows_tools = "tools" in names
        self.knows_thinking = not names.isdisjoint(THINKING_SWITCHES)
        self.knows_effort = "reasoning_effort" in names
        # Thoughts of earlier turns are left out: its model thinks, whoever opens the thoughts.
        self.mentions_thoughts = CLOSE in source

    @classmethod
    def load(cls, folder: Path, special_tokens: Mapping[str, str]) -> "ChatTemplate | None":
        """From chat_template.jinja or tokenizer_config.json; None when the folder has none.

        Raises CheckpointError for a template that is of the wrong type or does not compile.
        """
        source = _source(folder)
        return None if source is None else cls(source, special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continued: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The whole prompt, up to where the assistant's turn begins, or, where `continued` is
        the last message's text, up to the end of that text. `variables` are the client's own.

        Raises InvalidRequest when the template refuses the messages, or variables that are the
        gateway's to set.
        """
        variables = variables or {}
        for name in ("messages", "tools", "add_generation_prompt", *self._special_tokens):
            if name in variables:
                raise InvalidRequest(
                    f"chat_template_kwargs: {name} cannot be set", param="chat_template_kwargs"
                )

        def rendered(messages: Sequence[Mapping[str, Any]]) -> str:
            known = {
                "messages": messages,
                "add_generation_prompt": add_generation_prompt,
                "tools": tools,
            }
            return self._rendered(
                {"documents": None} | known | self._special_tokens | dict(variables)
            )

        text = message_forms.rendered(rendered, messages)
        if continued is None:
            return text
        marked = message_forms.rendered(
            rendered, [*messages[:-1], {**messages[-1], "content": MARK}]
        )
        return _cut_behind(text, continued, tail=marked.rpartition(MARK)[2])

    def _rendered(self, variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render(variables)
        # Templates are programs: one that meets a message it was not made for may raise these.
        except (
            TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
            RecursionError,
        ) as error:  # fmt: skip
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error


def _cut_behind(text: str, continued: str, *, tail: str) -> str:
    """Up to the end of the last message, after which stands `tail`: what ends a turn, and may
    have the same characters in it. Templates may strip what they are given."""
    wanted = continued.strip()
    cut = text.removesuffix(tail)
    if not wanted or not cut.rstrip().endswith(wanted):
        raise InvalidRequest(
            "the last message cannot be continued: it is empty, or the model's chat template "
            "leaves it out",
            param="messages",
        )
    return cut


def _source(folder: Path) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    config_path = folder / "tokenizer_config.json"
    if not config_path.is_file():
        return None
    fields = Fields.read(config_path)
    value = fields.values.get("chat_template")
    if isinstance(value, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in value}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise fields.wrong("chat_template", "a template")
    return value
