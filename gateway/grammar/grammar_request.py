"""From what a request asks of its output's form to the grammar that workers keep to."""

import json
from collections.abc import Iterator
from typing import Any

from core.errors import InvalidRequest
from gateway.formats.tool_format import ToolFormat
from gateway.grammar.grammar_compiler import GrammarCompiler
from gateway.grammar.json_schema_check import check_schema
from gateway.grammar.pattern_check import pattern_fault
from gateway.requests.constraint_fields import Constraint
from gateway.requests.request_body import aside, parse_json
from gateway.requests.tool_fields import Tool, ToolUse
from proto.generate_pb2 import Grammar

ANY_OBJECT = '{"type":"object"}'
# Stands for the number of a call within its head; no tool's name has it.
NUMBER = "\0"


def needs_grammar(constraint: Constraint | None, tools: ToolUse | None) -> bool:
    """Whether the output is bound to any form."""
    return constraint is not None or (tools is not None and bool(tools.forced or tools.strict))


async def request_grammar(
    constraint: Constraint | None,
    tools: ToolUse | None,
    form: ToolFormat,
    compiler: GrammarCompiler,
    *,
    client: str,
) -> Grammar:
    """Compiled once here, so that a grammar that does not compile is refused at once. Where
    `needs_grammar`:

        forced tools                calls of those; an answer's format is not asked of them
        a constraint and tools      what it asks for, or calls
        a constraint                what it asks for
        strict tools                any text, and behind it perhaps calls

    Arguments of forced and of strict tools keep to their schemas, others are any object. Compiling
    is shared out by `client`.
    Raises InvalidRequest that names the field and the reason; else as `GrammarCompiler.compile`.
    """
    request: dict[str, Any] | None = None
    param = "tools"
    if constraint is not None:
        await aside(len(constraint.text), _check, constraint)
        request, param = {"kind": constraint.kind, "text": constraint.text}, constraint.param
        if constraint.kind == "structural_tag":
            request["marks"] = form.marks
    if tools is not None and tools.forced:
        if constraint is not None and not constraint.param.startswith("response_format"):
            raise InvalidRequest(
                f"{constraint.param} cannot be kept to while tool_choice forces a call",
                param=constraint.param,
            )
        request = calls_request(form, _schemas(tools), at_most_one=tools.at_most_one)
        param = "tools"
    elif tools is not None and tools.offered:
        # The first token tells whether the model calls a tool or answers.
        if request is not None and request["kind"] == "json_schema" and not request["text"]:
            request["text"] = ANY_OBJECT
        request = calls_request(
            form, _schemas(tools), at_most_one=tools.at_most_one,
            is_free=request is None, instead=request,
        )  # fmt: skip
    assert request is not None
    return Grammar(lark=await compiler.compile(request, param=param, client=client))


def calls_request(
    form: ToolFormat,
    schemas: list[tuple[str, str]],
    *,
    at_most_one: bool,
    is_free: bool = False,
    instead: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What `grammar_process` is asked for. `schemas` are names of tools and JSON schemas.
    `is_free`: any text may be before the calls, or instead of them; `instead` of calls there may
    be what that request asks for."""
    return {
        "kind": "tool_calls",
        "tools": [
            (form.call_begin + form.head_of(name, NUMBER), schema) for name, schema in schemas
        ],
        "number": NUMBER,
        "begins": form.triggers() if is_free else [("", form.begins[0])],
        "tail": form.close,
        "between": form.between,
        "end": form.end,
        "at_most_one": at_most_one or not form.has_several,
        "is_free": is_free,
        # Parsers take it for a call also where none were opened.
        "not_in_text": [form.call_begin] if form.call_begin else [],
        "instead": instead,
    }


def _schemas(tools: ToolUse) -> list[tuple[str, str]]:
    """Of those that may be called."""
    return [
        (
            tool.function.name,
            _arguments_schema(tool, f"tools[{tools.offered.index(tool)}].function.parameters")
            if tools.forced or tool.function.strict
            else ANY_OBJECT,
        )
        for tool in tools.forced or tools.offered
    ]


def _arguments_schema(tool: Tool, param: str) -> str:
    """As JSON. Raises as `request_grammar`."""
    schema = tool.function.parameters or {"type": "object", "properties": {}}
    check_schema(schema, param)
    if schema.get("type") != "object":
        raise InvalidRequest(f"{param}: type must be 'object'", param=param)
    return json.dumps(schema, ensure_ascii=False)


def _check(constraint: Constraint) -> None:
    kind, text, param = constraint
    if kind in ("json_schema", "structural_tag") and text:
        try:
            value: Any = parse_json(text.encode("utf-8", "surrogatepass"))
        except InvalidRequest as error:
            raise InvalidRequest(f"{param} is not valid JSON", param=param) from error
        if kind == "structural_tag":
            for one in _within_tag(value, param):
                _check(one)
        else:
            check_schema(value, param)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{param} is not valid Unicode", param=param) from error
    fault = pattern_fault(text, is_ebnf=kind == "ebnf") if kind in ("regex", "ebnf") else None
    if fault:
        raise InvalidRequest(f"{param}: {fault}", param=param)


def _within_tag(value: object, param: str) -> Iterator[Constraint]:
    """What a structural tag's parts ask for."""
    if isinstance(value, dict):
        schema = value.get("json_schema", value.get("schema"))
        if schema is not None:
            yield Constraint("json_schema", json.dumps(schema), param)
        if isinstance(pattern := value.get("pattern"), str):
            yield Constraint("regex", pattern, param)
        if isinstance(grammar := value.get("grammar"), str):
            yield Constraint("ebnf", grammar, param)
        value = [one for name, one in value.items() if name not in ("json_schema", "schema")]
    if isinstance(value, list):
        for one in value:
            yield from _within_tag(one, param)
