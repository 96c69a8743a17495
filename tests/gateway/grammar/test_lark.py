"""Grammars of users and structural tags, by the outputs that they let through."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.grammar.lark import lark_of
from tests.gateway.conftest import TOKENIZER
from tests.gateway.model_folder import THINK
from tests.larks import accepts, ebnf

pytestmark = pytest.mark.asyncio(loop_scope="module")

LITERALS = ('a"b\\c', "日本🙂\n\t\x7f", "<｜tool▁sep｜>", "[a]{2}|(b)", "a/b'c")


@pytest.mark.parametrize("rest", ["", ' | "x" root'])
async def test_literals_are_what_they_spell(model_folder: Path, rest: str) -> None:
    for text in LITERALS:
        escaped = "".join(f"\\U{ord(one):08x}" for one in text)
        lark = ebnf(f'root ::= "{escaped}"{rest}')
        assert accepts(model_folder, lark, text)
        assert not accepts(model_folder, lark, text + "x")
        assert accepts(model_folder, lark, "x" + text) == bool(rest)


EBNF: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    ('root ::= [a-z]+ "b"', ("ab", "bb"), ("b", "a", "aba")),
    ('root ::= e\ne ::= [a-z]+ "b" | "(" e ")"', ("ab", "(bb)"), ("b", "(ab")),
    ('root ::= ("a" | "ab") "bc" x\nx ::= "" | x "!"', ("abc", "abbc!!"), ("ab", "abb")),
    ('root ::=\n  "a"\n  | "b"   # or\n  | c-d\nc-d ::= ("x" . )*', ("a", "b", "x\n", ""), ("x",)),
    (r"root ::= [^\]\x41-\u0043\\-]{2}", ("ab", "é["), ("a]", "aB", "a-", "a\\", "a")),
    ('root ::= "a"{2,} "b"? | n\nn ::= [0-9]{1,2} ("." n)?', ("aaab", "1.22.3"), ("a", "1.")),
]


@pytest.mark.parametrize(("text", "good", "bad"), EBNF)
async def test_grammars_of_users(
    model_folder: Path, text: str, good: tuple[str, ...], bad: tuple[str, ...]
) -> None:
    """Also where the longest lexeme is not the right one."""
    lark = ebnf(text)
    for output in good:
        assert accepts(model_folder, lark, output), output
    for output in bad:
        assert not accepts(model_folder, lark, output), output


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("root ::= nowhere", "no rule named nowhere"),
        ('start ::= "a"', "no rule named root"),
        ('root ::= "a"\nroot ::= "b"', "there twice"),
        ('root ::= ("a"', "not closed"),
        ('root ::= "a")', r"'\)' was not expected"),
        ("root ::= *", r"'\*' was not expected"),
        ('root ::= "a"\nb ::= "', "line 2"),
        ('"a"', "line 1"),
        ("root ::= []", "no character"),
        ("\n".join(f"{'root' if n == 0 else f'r{n}'} ::= r{n + 1}" for n in range(5000)), "rules"),
    ],
)
async def test_what_is_no_grammar(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ebnf(text)


TAGGED = {"begin": "<f>", "end": "</f>"}
INTEGER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TAGS = [TAGGED | {"content": {"type": "json_schema", "json_schema": INTEGER}}]
TAG = {
    "type": "structural_tag",
    "format": {"type": "triggered_tags", "triggers": ["<f>"], "tags": TAGS},
}
TEXT = {"type": "any_text"}
WORD = {"type": "regex", "pattern": "[a-z]+"}
FORMATS: list[tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = [
    ({"type": "sequence", "elements": [{"type": "const_string", "value": "<think>"},
      {"type": "tag", "begin": "", "content": TEXT, "end": "</think>"}, WORD]},
     ("<think>a 1</think>bc", "<think></think>b"), ("bc", "<think>a", "<think>a</think>1")),
    ({"type": "or", "elements": [{"type": "grammar", "grammar": 'root ::= "1" root | "2"'}, WORD]},
     ("112", "ab"), ("11", "1a", "")),
    ({"type": "tags_with_separator", "separator": ", ", "tags": [
        {"type": "tag", "begin": "a=", "content": WORD, "end": ["!", "?"]}], "at_least_one": True},
     ("a=b!", "a=b!, a=c?"), ("", "a=b", "a=b!,a=c!")),
    (TAG["format"] | {"stop_after_first": True},  # type: ignore[operator]
     ("text", 'text<f>{"n":1}</f>'), ('<f>{"n":1}</f>more',)),
]  # fmt: skip


@pytest.mark.parametrize(("form", "good", "bad"), FORMATS)
async def test_formats_of_structural_tags(
    model_folder: Path, form: dict[str, Any], good: tuple[str, ...], bad: tuple[str, ...]
) -> None:
    marks = {mark: TOKENIZER.token_to_id(mark) for mark in THINK}
    text = json.dumps({"type": "structural_tag", "format": form})
    lark = lark_of({"kind": "structural_tag", "text": text, "marks": ()}, marks, marks)
    for output in good:
        assert accepts(model_folder, lark, output), output
    for output in bad:
        assert not accepts(model_folder, lark, output), output
