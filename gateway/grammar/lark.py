"""What outputs are to match, as llguidance's Lark: https://github.com/guidance-ai/llguidance.

One start rule a grammar. Nothing is forced: any tokens that spell the text will do. Requests are
those of `gateway.grammar.grammar_process`.
"""

import json
from collections.abc import Mapping
from typing import Any

from llguidance import regex_to_lark

from gateway.grammar.ebnf_rules import cut_at_marks, literal, rules_of_ebnf
from gateway.grammar.json_schema_check import SINGLE_SCHEMAS
from gateway.grammar.schema_form import LISTS_OF_SCHEMAS, MAPS_OF_SCHEMAS

HEADER = '%llguidance {"no_forcing": true}'
# Whether only one of several schemas fits is not looked at.
SCHEMA_OPTIONS = {"whitespace_flexible": False, "coerce_one_of": True}
# A weak model that must call, and may again, would do so until its context is full.
MAX_CALLS = 16
ASCII_CLASSES = "dws"  # \d, \w and \s know ASCII only
# They say what other properties there may be, or leave it to others.
OPENING = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "$ref"}
)
Marks = Mapping[str, int]


def lark_of(request: Mapping[str, Any], shown: Marks, marks: Marks) -> str:
    """`shown` are added tokens that users' grammars may name, `marks` those of tool calls, too.
    Raises ValueError for what is no grammar."""
    if request["kind"] == "tool_calls":
        rules = _calls(request, shown, marks)
    else:
        rules = plain_rules(request["kind"], request["text"], "start", shown)
    return f"{HEADER}\n{rules}\n"


def plain_rules(kind: str, text: str, start: str, marks: Marks) -> str:
    """That define `start`. Raises as `lark_of`."""
    if kind == "json_schema":
        return f"{start}: {_json(text)}"
    if kind == "regex":
        return f"{start}: {_regex(text)}"
    if kind == "choice":  # one lexeme: of several the longest would be taken
        name = start.upper()
        return (
            f"{name}: {' | '.join(literal(one, {}) for one in json.loads(text))}\n{start}: {name}"
        )
    return rules_of_ebnf(text, start, marks)


def _regex(text: str) -> str:
    """An output matches as a whole: anchors around it say nothing."""
    bare = text.removeprefix("^")
    num_backslashes = len(bare.removesuffix("$")) - len(bare.removesuffix("$").rstrip("\\"))
    if num_backslashes % 2 == 0:
        bare = bare.removesuffix("$")
    elif not bare.endswith("$"):
        raise ValueError("a backslash is at its end")
    return f"/{regex_to_lark(bare, ASCII_CLASSES)}/" if bare else '""'


def _json(text: str) -> str:
    schema = json.loads(text) if text else {"type": "object"}
    if schema is False:
        raise ValueError("no output can match it")
    closed = {} if schema is True else _closed(schema)
    return f"%json {json.dumps({**closed, 'x-guidance': SCHEMA_OPTIONS})}"


def _closed(schema: Any) -> Any:  # noqa: ANN401 - a schema, or a boolean
    """Objects have no other properties than those named, where a schema leaves that open: a model
    would go on with them. What `allOf` joins stays as it is."""
    if not isinstance(schema, dict):
        return schema
    closed = {}
    for name, value in schema.items():
        if name in SINGLE_SCHEMAS:
            closed[name] = _closed(value)
        elif name in MAPS_OF_SCHEMAS:
            closed[name] = {key: _closed(part) for key, part in value.items()}
        elif name in LISTS_OF_SCHEMAS and not (name == "allOf" and len(value) > 1):
            closed[name] = [_closed(part) for part in value]
        else:
            closed[name] = value
    if "properties" in schema and OPENING.isdisjoint(schema):
        closed["additionalProperties"] = False
    return closed


def _calls(request: Mapping[str, Any], shown: Marks, marks: Marks) -> str:
    """One call, or up to MAX_CALLS, of any of the tools, marks and all; or none of them, and what
    there may be instead; or (`is_free`) any text, in which a trigger begins calls, and nothing of
    `not_in_text` is. `number` in a head stands for any number."""
    heads: dict[str, list[str]] = {}  # tools of one schema share its rules
    for head, schema in request["tools"]:
        heads.setdefault(schema, []).append(_with_number(head, request["number"], marks))
    tail, between, end = (literal(request[name], marks) for name in ("tail", "between", "end"))
    lines = [
        f"call_{position}: ({' | '.join(spelled)}) {_json(schema)} {tail}"
        for position, (schema, spelled) in enumerate(heads.items())
    ]
    lines.append(f"call: {' | '.join(f'call_{position}' for position in range(len(heads)))}")
    several = "" if request["at_most_one"] else f"({between} call){{0,{MAX_CALLS - 1}}}"
    lines.append(f"calls: call {several} {end}")
    texts = [*request["not_in_text"], *(trigger for trigger, _ in request["begins"])]
    free = _text_without(
        [text for text in texts if marks.keys().isdisjoint(cut_at_marks(text, marks))]
    )
    starts = []
    for position, (trigger, rest) in enumerate(request["begins"]):
        begin = _until(trigger, f"until_{position}", free, marks, lines) if trigger else ""
        starts.append(f"{begin} {literal(rest, marks)} calls")
    if request["is_free"]:
        lines.append(f"FREE: {free}")
        starts.append("FREE")
    if (instead := request["instead"]) is not None:
        lines.append(plain_rules(instead["kind"], instead["text"], "instead", shown))
        starts.append("instead")
    return "\n".join([*lines, f"start: {' | '.join(starts)}"])


def _text_without(texts: list[str]) -> str:
    found = "|".join(_exactly(text) for text in texts if text)
    return f"/(?s:.*)/ & ~/(?s:.*)({found})(?s:.*)/" if found else "/(?s:.*)/"


def _until(trigger: str, name: str, free: str, marks: Marks, lines: list[str]) -> str:
    """Text up to `trigger`, which ends with a mark."""
    *before, mark = cut_at_marks(trigger, marks)
    if mark in marks:
        lines.append(f"{name.upper()}: /(?s:.*){_exactly(''.join(before))}/ & {free}")
        return f"{name.upper()} <[{marks[mark]}]>"
    lines.append(f"{name}[lazy]: /(?s:.*){_exactly(trigger)}/")
    return name


def _exactly(text: str) -> str:
    """As a regular expression."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _with_number(text: str, number: str, marks: Marks) -> str:
    """With any digits in the place of `number`."""
    return " /[0-9]{1,4}/ ".join(literal(part, marks) for part in text.split(number))
