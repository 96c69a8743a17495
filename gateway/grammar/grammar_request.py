"""From what a request asks of its output's form to the grammar that workers keep to."""

import json
from typing import Any

from core.errors import InvalidRequest
from gateway.grammar.grammar_compiler import GrammarCompiler
from gateway.grammar.json_schema_check import check_schema
from gateway.grammar.pattern_check import pattern_fault
from gateway.grammar.tool_form import ToolForm
from gateway.requests.constraint_fields import Constraint
from gateway.requests.request_body import parse_json
from gateway.requests.tool_fields import Tool, ToolUse
from proto.generate_pb2 import Grammar

ANY_OBJECT = '{"type":"object"}'


async def request_grammar(
    constraint: Constraint | None,
    tools: ToolUse | None,
    form: ToolForm,
    compiler: GrammarCompiler,
    *,
    client: str,
    after_token_id: int | None,
) -> Grammar:
    """Compiled once here, so that a grammar that does not compile is refused at once. There is a
    constraint, or `tools` force a call.

    Compiling is shared out by `client`. `after_token_id`: the grammar begins after this token
    (the end of the thoughts).
    Raises InvalidRequest that names the field and the reason; else as `GrammarCompiler.compile`.
    """
    if tools is not None and tools.forced:
        if constraint is not None:
            raise InvalidRequest(
                f"{constraint.param} cannot be kept to while tool_choice forces a call",
                param=constraint.param,
            )
        schemas = [
            (tool.function.name, _arguments_schema(tool, f"tools[{position}].function.parameters"))
            for position, tool in enumerate(tools.forced)
        ]
        request = form.grammar_request(schemas, at_most_one=tools.at_most_one)
        param = "tools"
    else:
        assert constraint is not None
        _check(constraint)
        request, param = {"kind": constraint.kind, "text": constraint.text}, constraint.param
        if tools is not None and tools.offered:
            # The first token tells whether the model calls a tool or answers. Arguments are any
            # objects, as they are without a constraint.
            schemas = [(tool.function.name, ANY_OBJECT) for tool in tools.offered]
            if constraint.kind == "json_schema" and not constraint.text:
                request["text"] = ANY_OBJECT
            request = form.grammar_request(schemas, at_most_one=tools.at_most_one, instead=request)
    ebnf = await compiler.compile(request, param=param, client=client)
    written = {"ebnf": ebnf} if ebnf else {request["kind"]: request["text"]}
    return Grammar(**written, compact=True, after_token_id=after_token_id)


def _arguments_schema(tool: Tool, param: str) -> str:
    """As JSON. Raises as `request_grammar`."""
    schema = tool.function.parameters or {"type": "object", "properties": {}}
    check_schema(schema, param)
    if schema.get("type") != "object":
        raise InvalidRequest(f"{param}: type must be 'object'", param=param)
    return json.dumps(schema, ensure_ascii=False)


def _check(constraint: Constraint) -> None:
    kind, text, param = constraint
    if kind == "json_schema" and text:
        try:
            schema: Any = parse_json(text.encode("utf-8", "surrogatepass"))
        except InvalidRequest as error:
            raise InvalidRequest(f"{param} is not valid JSON", param=param) from error
        check_schema(schema, param)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{param} is not valid Unicode", param=param) from error
    if kind != "json_schema" and (fault := pattern_fault(text, is_ebnf=kind == "ebnf")):
        raise InvalidRequest(f"{param}: {fault}", param=param)
