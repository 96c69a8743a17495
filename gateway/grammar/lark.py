"""What outputs are to match, as llguidance's Lark: https://github.com/guidance-ai/llguidance.

One start rule a grammar. Nothing is forced: any tokens that spell the text will do. Requests are
those of `gateway.grammar.grammar_process`.
"""

import json
from collections.abc import Mapping
from typing import Any

from gateway.grammar.ebnf_rules import rules_of_ebnf
from gateway.grammar.lark_terms import (
    Marks,
    cut_at_marks,
    json_term,
    literal,
    mark_of,
    regex_term,
    text_without,
    until,
)
from gateway.grammar.structural_tag import rules_of_tag

HEADER = '%llguidance {"no_forcing": true}'
# A weak model that must call, and may again, would do so until its context is full.
MAX_CALLS = 16


def lark_of(request: Mapping[str, Any], shown: Marks, marks: Marks) -> str:
    """`shown` are added tokens that users' grammars may name, `marks` those of tool calls, too.
    Raises ValueError for what is no grammar."""
    if request["kind"] == "tool_calls":
        rules = _calls(request, shown, marks)
    else:
        rules = _plain(request, "start", shown, marks)
    return f"{HEADER}\n{rules}\n"


def _plain(request: Mapping[str, Any], start: str, shown: Marks, marks: Marks) -> str:
    """Rules that define `start`."""
    kind, text = request["kind"], request["text"]
    if kind == "json_schema":
        return f"{start}: {json_term(text)}"
    if kind == "regex":
        return f"{start}: {regex_term(text)}"
    if kind == "choice":  # one lexeme: of several the longest would be taken
        name = start.upper()
        return (
            f"{name}: {' | '.join(literal(one, {}) for one in json.loads(text))}\n{start}: {name}"
        )
    if kind == "structural_tag":
        named = {mark: marks[mark] for mark in request["marks"] if mark in marks}
        return rules_of_tag(json.loads(text), start, {**shown, **named})
    return rules_of_ebnf(text, start, shown)


def _calls(request: Mapping[str, Any], shown: Marks, marks: Marks) -> str:
    """One call, or up to MAX_CALLS, of any of the tools, marks and all; or none of them, and what
    there may be instead; or (`is_free`) any text, in which a trigger begins calls, and nothing of
    `not_in_text` is. `number` in a head stands for any number."""
    heads: dict[str, list[str]] = {}  # tools of one schema share its rules
    for head, schema in request["tools"]:
        heads.setdefault(schema, []).append(_with_number(head, request["number"], marks))
    tail, between, end = (literal(request[name], marks) for name in ("tail", "between", "end"))
    lines = [
        f"call_{position}: ({' | '.join(spelled)}) {json_term(schema)} {tail}"
        for position, (schema, spelled) in enumerate(heads.items())
    ]
    lines.append(f"call: {' | '.join(f'call_{position}' for position in range(len(heads)))}")
    several = "" if request["at_most_one"] else f"({between} call){{0,{MAX_CALLS - 1}}}"
    lines.append(f"calls: call {several} {end}")
    texts = [*request["not_in_text"], *(trigger for trigger, _ in request["begins"])]
    texts = [text for text in texts if text and not {*cut_at_marks(text, marks)} & {*marks}]
    starts = []
    for position, (trigger, rest) in enumerate(request["begins"]):
        if trigger:
            lines.append(f"UNTIL_{position}: {until(trigger, texts, marks)}")
            starts.append(
                f"UNTIL_{position} {mark_of(trigger, marks)} {literal(rest, marks)} calls"
            )
        else:
            starts.append(f"{literal(rest, marks)} calls")
    if request["is_free"]:
        lines.append(f"FREE: {text_without(texts)}")
        starts.append("FREE")
    if (instead := request["instead"]) is not None:
        lines.append(_plain(instead, "instead", shown, marks))
        starts.append("instead")
    return "\n".join([*lines, f"start: {' | '.join(starts)}"])


def _with_number(text: str, number: str, marks: Marks) -> str:
    """With any digits in the place of `number`."""
    return " /[0-9]{1,4}/ ".join(literal(part, marks) for part in text.split(number))
