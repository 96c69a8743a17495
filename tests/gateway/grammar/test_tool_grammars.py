"""Calls that a worker's grammar has produced, read by the parser of the same format."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from core.clock import SystemClock
from gateway.formats.registry import TOOL_FORMATS
from gateway.formats.tool_format import ToolFormat
from gateway.grammar.grammar_compiler import GrammarCompiler
from gateway.grammar.grammar_request import request_grammar
from gateway.requests.constraint_fields import Constraint
from gateway.requests.tool_fields import FunctionDefinition, Tool, ToolUse
from proto.generate_pb2 import Grammar
from tests.gateway.model_folder import EOS_ID, THINK
from tests.gateway.output.test_tool_formats import read
from tests.larks import regex

pytest.importorskip("torch")
from engine.grammar import grammar_match, paced_match  # noqa: E402 - needs torch
from tests.gateway.grammar.walks import TOKENIZER, allowed, begin, walk  # noqa: E402 - as above

pytestmark = pytest.mark.asyncio(loop_scope="module")

each_format = pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.models)
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 5}},
                "required": ["city"], "additionalProperties": False},
    "IDX": {"type": "object", "properties": {"n": {"enum": [1, "<|tool_call_end|>", None]}},
            "required": ["n"], "additionalProperties": False},
}  # fmt: skip


def tool(name: str, *, strict: bool) -> Tool:
    function = FunctionDefinition(name=name, parameters=SCHEMAS[name], strict=strict)
    return Tool(type="function", function=function)


STRICT = tuple(tool(name, strict=True) for name in SCHEMAS)
LOOSE = tuple(tool(name, strict=False) for name in SCHEMAS)


async def compiled(
    compiler: GrammarCompiler,
    form: ToolFormat,
    tools: ToolUse,
    constraint: Constraint | None = None,
) -> Grammar:
    return await request_grammar(constraint, tools, form, compiler, client="c")


def follow(match: grammar_match.GrammarMatch, text: str) -> bool:
    """Whether an output may be `text`, and end behind it."""
    tokens = TOKENIZER.encode(text, add_special_tokens=False).ids
    return all(map(match.accept, tokens)) and (match.is_complete or EOS_ID in allowed(match))


def check_calls(calls: list[tuple[str | None, str]]) -> None:
    for name, arguments in calls:
        Draft202012Validator(SCHEMAS[name or ""]).validate(json.loads(arguments))


@each_format
async def test_forced_calls_are_read_as_they_were_written(
    folder: Path, compiler: GrammarCompiler, form: ToolFormat
) -> None:
    grammar = await compiled(compiler, form, ToolUse(LOOSE, LOOSE, at_most_one=False))
    for seed in range(12):
        output = walk(begin(folder, grammar), random.Random(seed))
        text, calls = read(form, [output])
        assert text == ""
        assert calls
        check_calls(calls)
        assert read(form, list(output)) == (text, calls)
    assert not follow(begin(folder, grammar), "no call")


@each_format
async def test_strict_tools_are_kept_to_where_nothing_is_forced(
    folder: Path, compiler: GrammarCompiler, form: ToolFormat
) -> None:
    """Text is free; a call that the model opens keeps to its schema."""
    grammar = await compiled(compiler, form, ToolUse(STRICT, (), at_most_one=False))
    good, bad = '{"city":"Bern"}', '{"city":5}'
    for begin_of in form.begins:
        calls = form.write(form.call("weather", good)).replace(form.begins[0], begin_of)
        for text in ("", "I look. "):
            assert follow(begin(folder, grammar), text + calls)
            assert not follow(begin(folder, grammar), text + calls.replace(good, bad))
            assert not follow(begin(folder, grammar), text + calls.replace("weather", "nobody"))
    assert follow(begin(folder, grammar), 'Only text, {"and": 1} JSON.')
    for seed in range(12):
        output = walk(begin(folder, grammar), random.Random(seed))
        check_calls(read(form, [output])[1])


async def test_tools_that_are_not_strict_take_any_object(
    folder: Path, compiler: GrammarCompiler
) -> None:
    form = TOOL_FORMATS[0]
    tools = ToolUse((STRICT[0], LOOSE[1]), (), at_most_one=False)
    grammar = await compiled(compiler, form, tools)
    for name, expected in (("weather", False), ("IDX", True)):
        output = form.write(form.call(name, '{"other":1}'))
        assert follow(begin(folder, grammar), output) == expected


@each_format
async def test_a_constraint_or_calls(
    folder: Path, compiler: GrammarCompiler, form: ToolFormat
) -> None:
    constraint = Constraint("regex", "[0-9]+", "guided_regex")
    grammar = await compiled(compiler, form, ToolUse(STRICT, (), at_most_one=True), constraint)
    call = form.write(form.call("weather", '{"city":"Bern"}'))
    for output, expected in ((call, True), ("12", True), ("a", False), ("12" + call, False),
                             (call.replace("city", "town"), False)):  # fmt: skip
        assert follow(begin(folder, grammar), output) == expected


async def test_thoughts_come_before_what_is_constrained(folder: Path) -> None:
    open_id, close_id = map(TOKENIZER.token_to_id, THINK)
    grammar = Grammar(lark=regex("ab"))
    grammar.thoughts.open_token_id, grammar.thoughts.close_token_id = open_id, close_id
    letter_a, letter_b = (TOKENIZER.token_to_id(letter) for letter in "ab")
    match = begin(folder, grammar)
    assert set(allowed(match)) == {letter_a, open_id}
    assert match.accept(letter_a)  # without thoughts
    assert set(allowed(match)) == {letter_b}
    match = begin(folder, grammar)
    for token in (open_id, letter_b, open_id):
        assert match.accept(token)
        assert not match.is_active
    assert match.accept(close_id)
    assert match.is_active
    assert set(allowed(match)) == {letter_a}


@pytest.mark.parametrize("closes", [True, False])
async def test_a_step_waits_for_no_thoughts(folder: Path, closes: bool) -> None:
    """As a rank works with it: wherever the tokens so far end, the next mask is the same."""
    open_id, close_id = map(TOKENIZER.token_to_id, THINK)
    grammar = Grammar(lark=regex("ab"))
    grammar.thoughts.open_token_id, grammar.thoughts.close_token_id = open_id, close_id
    letter_a, letter_b = (TOKENIZER.token_to_id(letter) for letter in "ab")
    tokens = [open_id, letter_b, close_id, letter_a, letter_b]
    active = [True, False, False, True, True]
    if not closes:  # what it constrains ends the thoughts
        grammar.begins_with_token_id = letter_a
        del tokens[2], active[2]
        active[2] = False
    with ThreadPoolExecutor(1) as threads:
        for num_before in range(len(tokens)):
            match = paced_match.PacedMatch(
                begin(folder, grammar), tokens[:num_before], threads, SystemClock()
            )
            paced_match.settle([match])
            for token, is_active in list(zip(tokens, active, strict=True))[num_before:]:
                assert match.is_ready
                assert match.masks[0].is_active == is_active
                assert match.accept(token)
            assert match.is_ready
            assert match.is_complete
