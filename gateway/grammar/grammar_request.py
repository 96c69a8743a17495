"""From what a request asks of its output's form to the grammar that workers keep to."""

import json
from collections.abc import Sequence
from typing import Any

from core.errors import InvalidRequest
from gateway.grammar.grammar_compiler import GrammarCompiler
from gateway.grammar.json_schema_check import check_schema
from gateway.grammar.tool_form import ToolForm
from gateway.requests.constraint_fields import Constraint
from gateway.requests.request_body import parse_json
from gateway.requests.tool_fields import Tool
from proto.generate_pb2 import Grammar

ANY_OBJECT = '{"type":"object"}'


async def constraint_grammar(
    constraint: Constraint, compiler: GrammarCompiler, *, after_token_id: int | None
) -> Grammar:
    """Compiled once here, so that a grammar that does not compile is refused at once.

    `after_token_id`: the constraint begins behind this token (the end of the thoughts).
    Raises InvalidRequest that names the field and the reason.
    """
    _check(constraint)
    kind, text, param = constraint
    ebnf = await compiler.compile({"kind": kind, "text": text}, param=param)
    if ebnf:
        kind, text = "ebnf", ebnf
    return Grammar(**{kind: text}, compact=True, after_token_id=after_token_id)


async def tool_grammar(
    tools: Sequence[Tool],
    form: ToolForm,
    compiler: GrammarCompiler,
    *,
    at_most_one: bool,
    after_token_id: int | None,
) -> Grammar:
    """One call of any of `tools`, or several. Raises as `constraint_grammar`."""
    named = []
    for position, tool in enumerate(tools):
        schema = tool.function.parameters
        if not schema:
            schema = {"type": "object", "properties": {}}
        param = f"tools[{position}].function.parameters"
        check_schema(schema, param)
        if schema.get("type") != "object":
            raise InvalidRequest(f"{param}: type must be 'object'", param=param)
        named.append((tool.function.name, json.dumps(schema, ensure_ascii=False)))
    request = form.grammar_request(named, at_most_one=at_most_one)
    ebnf = await compiler.compile(request, param="tools")
    return Grammar(ebnf=ebnf, compact=True, after_token_id=after_token_id)


async def constraint_or_tool_grammar(
    constraint: Constraint,
    tools: Sequence[Tool],
    form: ToolForm,
    compiler: GrammarCompiler,
    *,
    at_most_one: bool,
    after_token_id: int | None,
) -> Grammar:
    """For a model that may call `tools`, and otherwise has to keep to `constraint`: from the
    first token on, which tells which of both it is. Arguments are any objects, as they are
    without a constraint. Raises as `constraint_grammar`."""
    _check(constraint)
    named = [(tool.function.name, ANY_OBJECT) for tool in tools]
    instead = {"kind": constraint.kind, "text": constraint.text}
    if constraint.kind == "json_schema" and not constraint.text:
        instead["text"] = ANY_OBJECT
    request = form.grammar_request(named, at_most_one=at_most_one, instead=instead)
    ebnf = await compiler.compile(request, param=constraint.param)
    return Grammar(ebnf=ebnf, compact=True, after_token_id=after_token_id)


def _check(constraint: Constraint) -> None:
    kind, text, param = constraint
    if kind == "json_schema" and text:
        _check_schema_text(text, param)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{param} is not valid Unicode", param=param) from error


def _check_schema_text(text: str, param: str) -> None:
    try:
        schema: Any = parse_json(text.encode("utf-8", "surrogatepass"))
    except InvalidRequest as error:
        raise InvalidRequest(f"{param} is not valid JSON", param=param) from error
    check_schema(schema, param)
