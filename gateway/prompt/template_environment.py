"""What chat templates may call: the sandbox that transformers renders them in."""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.text.typed_tokens import BEGIN, END, without_marks

_OF_DICTIONARIES = frozenset(dir(dict))
_LOOKS_AT_ENDS = ("startswith", "endswith")


class _Generation(Extension):
    """`{% generation %}` says which text is the model's, for training: here it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Without access to anything but the variables that a template is given."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def getattr(self, obj: Any, attribute: str) -> Any:  # noqa: ANN401 - templates have no types
        # `message.role`: the library would raise an error and catch it in between.
        if type(obj) is dict and attribute in obj and attribute not in _OF_DICTIONARIES:
            return obj[attribute]
        return super().getattr(obj, attribute)

    # The names are the library's: templates name their arguments themselves.
    def call(
        __self, __context: Context, __obj: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:  # noqa: ANN401, N805
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str) and __obj.__name__ in _LOOKS_AT_ENDS:
            __obj = getattr(without_marks(text), __obj.__name__)
        return super().call(__context, __obj, *args, **kwargs)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own filter: not escaped for HTML."""
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if ensure_ascii:
        for mark in (BEGIN, END):
            text = text.replace(json.dumps(mark)[1:-1], mark)
    return text


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
