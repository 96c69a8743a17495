"""Masks against brute force over all strings of a language; whole outputs against `re` and
`jsonschema`."""

import json
import random
import re
import time
from contextlib import suppress
from itertools import product
from pathlib import Path

import jsonschema
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import bytes_to_unicode

from engine.grammar.grammar_match import GrammarCompiler, GrammarMatch
from engine.grammar.token_bytes import token_bytes
from engine.sampling.sampling_params import Grammar
from gateway.grammar.lark import lark_of
from tests.larks import ebnf, json_schema, regex

EOS, THINK_END, SPECIAL = 0, 1, 2
TEXTS = ["a", "b", "c", "ab", "bc", "abc", "cc", "{", "}", '"', ":", ",", "1", "2", "0", "-", ".",
         "true", "null", '{"', '":', "[", "]", "ba", " ", ", ", "\\", "x", "e", "é",
         "3", "4", "5", "6", "7", "8", "9"]  # fmt: skip
NUM_USED = 3 + len(TEXTS)
VOCAB = NUM_USED + 3


ALPHABET = bytes_to_unicode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    added = [(EOS, "<eos>", True), (THINK_END, "</think>", False), (SPECIAL, "<x>", True)]
    vocab = {
        "".join(ALPHABET[byte] for byte in text.encode()): number + 3
        for number, text in enumerate(TEXTS)
    }
    fields = {
        "model": {"vocab": vocab},
        "added_tokens": [{"id": i, "content": text, "special": s} for i, text, s in added],
        "decoder": {"type": "ByteLevel"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    return folder


@pytest.fixture(scope="module")
def compiler(folder: Path) -> GrammarCompiler:
    return GrammarCompiler(folder, VOCAB, (EOS,))


def begin(
    compiler: GrammarCompiler, grammar: Grammar, stop_token_ids: tuple[int, ...] = ()
) -> GrammarMatch:
    return compiler.match(grammar, stop_token_ids)


def allowed(match: GrammarMatch) -> set[int]:
    words = match.mask()
    return {token for token in range(VOCAB) if words[token // 32] >> token % 32 & 1}


def walk(match: GrammarMatch, choose: random.Random, most: int = 400) -> str | None:
    """A random output; None if it has no end within `most` tokens. Ends are preferred later."""
    text = b""
    for length in range(most):
        if match.is_complete:
            return text.decode()
        tokens = sorted(allowed(match))
        assert tokens, text
        token = EOS if EOS in tokens and length > 20 else choose.choice(tokens)
        assert match.accept(token)
        if token == EOS:
            assert match.is_complete
            return text.decode()
        text += TEXTS[token - 3].encode()
    return None


def test_bytes_of_tokens(folder: Path) -> None:
    entries, marks, special = token_bytes(folder, VOCAB)
    assert entries[:5] == [b"", b"", b"", b"a", b"b"]
    assert entries[3:NUM_USED] == [text.encode() for text in TEXTS]
    assert entries[NUM_USED:] == [b""] * 3
    assert marks == {EOS: "<eos>", THINK_END: "</think>", SPECIAL: "<x>"}
    assert special == {EOS, SPECIAL}


PIECES = ["a", "b", "[ab]", "(ab|c)", "(a|bc)", "c?", "(abc)?", "[bc]{1,2}"]


@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=4), data=st.data())
def test_masks_equal_brute_force(
    compiler: GrammarCompiler, pieces: list[str], data: st.DataObject
) -> None:
    text_of_regex = "".join(pieces)
    language = _language(pieces)
    match = begin(compiler, Grammar(lark=regex(text_of_regex)))
    text = ""
    while not match.is_complete:
        expected = {
            number + 3
            for number, token in enumerate(TEXTS)
            if any(string.startswith(text + token) for string in language)
        }
        if text in language:
            expected.add(EOS)
        assert allowed(match) == expected, (text_of_regex, text)
        token = data.draw(st.sampled_from(sorted(expected)))
        for other in {SPECIAL, NUM_USED, 3, 4} - expected:
            assert not match.accept(other)
        assert match.accept(token)
        if token == EOS:
            break
        text += TEXTS[token - 3]
    assert text in language
    assert re.fullmatch(text_of_regex, text)
    # Complete without an end token only when nothing could have followed.
    longer = [string for string in language if string.startswith(text) and string != text]
    assert match.is_complete
    assert not longer or token == EOS


def _language(pieces: list[str]) -> set[str]:
    """All strings of a concatenation of PIECES, by trying."""
    short = ["".join(s) for n in range(4) for s in product("abc", repeat=n)]
    strings = {""}
    for piece in pieces:
        choices = [one for one in short if re.fullmatch(piece, one)]
        strings = {begin + end for begin in strings for end in choices}
    return strings


SCHEMAS: list[dict[str, object]] = [
    {"type": "object"},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
     "required": ["a"], "additionalProperties": False},
    {"type": "array", "items": {"enum": ["a", "bc", None, 1]}, "minItems": 1, "maxItems": 3},
    {"type": "object", "properties": {"ab": {"type": "string", "minLength": 2, "maxLength": 5},
     "c": {"type": "array", "items": {"type": "number"}, "maxItems": 2}},
     "required": ["ab", "c"]},
    {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": -12, "maximum": 201}]},
    {"$defs": {"n": {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#/$defs/n"},
     {"type": "null"}]}}, "required": ["a"]}}, "$ref": "#/$defs/n"},
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: str(schema)[:30])
def test_json_is_valid_by_jsonschema(compiler: GrammarCompiler, schema: dict[str, object]) -> None:
    choose, num_ends = random.Random(7), 0
    for _ in range(15):
        match = begin(compiler, Grammar(lark=json_schema(json.dumps(schema))))
        text = walk(match, choose)
        if text is None:
            continue
        num_ends += 1
        value = json.loads(text)
        jsonschema.validate(value, schema)
        if "e" not in text and "." not in text:  # json writes 1e0 as 1.0
            assert text == json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert num_ends >= 3


LETTERS = st.text("abcx", min_size=1, max_size=4)
RANDOM_SCHEMAS = st.recursive(
    st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.builds(
            lambda low, width: {"type": "integer", "minimum": low, "maximum": low + width},
            st.integers(-30, 300),
            st.integers(0, 60),
        ),
        st.builds(
            lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
            st.integers(0, 3),
            st.integers(0, 4),
        ),
        st.builds(lambda values: {"enum": values}, st.lists(LETTERS, min_size=1, unique=True)),
        st.builds(lambda value: {"const": value}, st.integers(-9, 99) | LETTERS),
    ),
    lambda inner: st.one_of(
        st.builds(
            lambda items, low, more: {
                "type": "array",
                "items": items,
                "minItems": low,
                "maxItems": low + more,
            },
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.builds(
            lambda properties, closed: {
                "type": "object",
                "properties": properties,
                "required": sorted(properties)[::2],
                "additionalProperties": not closed,
            },
            st.dictionaries(LETTERS, inner, min_size=1, max_size=3),
            st.booleans(),
        ),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
    ),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None)
@given(schema=RANDOM_SCHEMAS, seed=st.integers(0, 99))
def test_json_of_random_schemas_is_valid(
    compiler: GrammarCompiler, schema: dict[str, object], seed: int
) -> None:
    text = walk(begin(compiler, Grammar(lark=json_schema(json.dumps(schema)))), random.Random(seed))
    assert text is None or jsonschema.validate(json.loads(text), schema) is None
    event("has ended" if text is not None else "has no end")


def test_no_schema_means_any_object(compiler: GrammarCompiler) -> None:
    match = begin(compiler, Grammar(lark=json_schema("")))
    for text in ("{", '"', "a", '":', "[", "1", ",", "true", "]", "}"):
        assert not match.is_complete
        assert match.accept(TEXTS.index(text) + 3), text
    assert match.is_complete
    assert not match.is_active


def test_grammar_begins_behind_a_token(compiler: GrammarCompiler) -> None:
    match = begin(compiler, Grammar(lark=ebnf('root ::= "a" "b"?'), after_token_id=THINK_END))
    for token in (5, EOS, SPECIAL, 9):
        assert not match.is_active
        assert match.accept(token)
    assert match.accept(THINK_END)
    assert match.is_active
    assert allowed(match) == {TEXTS.index("a") + 3, TEXTS.index("ab") + 3}
    assert match.accept(TEXTS.index("a") + 3)
    assert not match.is_complete
    assert allowed(match) == {TEXTS.index("b") + 3, EOS}
    assert match.accept(TEXTS.index("b") + 3)
    assert match.is_complete


def test_a_token_that_a_grammar_begins_with(compiler: GrammarCompiler) -> None:
    """Without the one that it begins after; only where it allows that first."""
    letter_a, letter_b = (TEXTS.index(letter) + 3 for letter in "ab")
    lark = ebnf('root ::= "a" "b"?')
    for begins, active in ((letter_a, True), (letter_b, False)):
        match = begin(
            compiler, Grammar(lark=lark, after_token_id=THINK_END, begins_with_token_id=begins)
        )
        for token in (5, letter_b, begins):
            assert not match.is_active
            assert match.accept(token)
        assert match.is_active == active
    match = begin(
        compiler, Grammar(lark=lark, thoughts=(SPECIAL, THINK_END), begins_with_token_id=letter_a)
    )
    for token in (SPECIAL, 5, letter_a):
        assert match.accept(token)
    assert allowed(match) == {letter_b, EOS}


def test_stop_tokens_without_text_end_an_output_that_may_end(compiler: GrammarCompiler) -> None:
    letter = TEXTS.index("a") + 3
    match = begin(compiler, Grammar(lark=regex("a+")), stop_token_ids=(SPECIAL, letter))
    assert SPECIAL not in allowed(match)
    assert match.accept(letter)
    assert {SPECIAL, EOS, letter} <= allowed(match)
    assert match.accept(SPECIAL)
    assert match.is_complete


@pytest.mark.parametrize(
    ("lark", "reason"),
    [
        ("start: /(a/", "unclosed group"),
        ("start: nowhere", "nowhere"),
        ('root: "a"', "start"),
        ('start: %json {"$ref":"#/nowhere"}', "does not exist"),
        ('start: %json {"type":"strange"}', "strange"),
        ("start: %json {", "json"),
        ("start: /a{2,1}/", "repetition"),
    ],
)
def test_no_grammar(compiler: GrammarCompiler, lark: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        begin(compiler, Grammar(lark=lark))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("lark", [ebnf("root ::= root"), regex("[^\\s\\S]")])
def test_no_output(compiler: GrammarCompiler, lark: str) -> None:
    with pytest.raises(ValueError, match="no output"):
        begin(compiler, Grammar(lark=lark)).mask()


@pytest.mark.parametrize(
    "lark",
    [
        regex("(.{1,100}){1,100}"),
        regex("(?:[a-z ]{1,90}){1,90}!"),
        ebnf("root ::= root root | [a-z ]*"),
        ebnf("root ::= s\ns ::= s s | s s s | [a-z ]"),
        json_schema('{"type":"string","pattern":"^(.{1,30}){1,30}$"}'),
    ],
)
def test_the_work_of_a_mask_is_bounded(compiler: GrammarCompiler, lark: str) -> None:
    """It ends, one way or the other, where each byte more would double it."""
    match = begin(compiler, Grammar(lark=lark))
    cpu = time.process_time()
    with suppress(ValueError):
        for token in ('"', *"abcabcabcabc"):
            if TEXTS.index(token) + 3 in allowed(match):
                match.accept(TEXTS.index(token) + 3)
    assert time.process_time() - cpu < 5


def test_marks_are_tokens_only_where_the_grammar_names_them(compiler: GrammarCompiler) -> None:
    assert THINK_END not in allowed(begin(compiler, Grammar(lark=regex(".*"))))
    request = {"kind": "ebnf", "text": 'root ::= "\\x3C/think\\U0000003e" [ab]'}
    marks = {"</think>": THINK_END}
    match = begin(compiler, Grammar(lark=lark_of(request, marks, marks)))
    assert allowed(match) == {THINK_END}
    assert match.accept(THINK_END)
    assert match.accept(TEXTS.index("a") + 3)
    assert match.is_complete
