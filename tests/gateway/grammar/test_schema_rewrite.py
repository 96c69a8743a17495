"""Patterns and numbers as the compiler is given them, judged by `re` and by arithmetic; schemas
that are merged, judged by jsonschema."""

import math
import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from gateway.grammar.number_language import multiples
from gateway.grammar.pattern_language import (
    fitted,
    lengths,
    read_pattern,
    spelled,
    write_pattern,
)
from gateway.grammar.regular import plain
from gateway.grammar.schema_rewrite import Rewriter

PATTERNS = [
    "^a+$", "b", "^a|b$", "(?:a|b)c", r"^(?!ab)[a-c]+$", r"^(?=.*\d)(?=.*[a-z])[a-z0-9]{3,}$",
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", "^[^a-c]{1,2}$", r"^(?:a(?=b)|b)*$|c", "^a{2,3}?b*$",
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*)$",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS[:8] + PATTERNS[9:])
@seed(0)
@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet="abcz01.-+ ", max_size=7))
def test_patterns_are_found_where_re_finds_them(pattern: str, text: str) -> None:
    written = write_pattern(spelled(plain(read_pattern(pattern))))
    assert bool(re.fullmatch(written, text)) == bool(re.search(pattern, text))


def test_lookaheads_within_repeats_are_refused() -> None:
    with pytest.raises(ValueError, match="not supported"):
        read_pattern(PATTERNS[8])


@pytest.mark.parametrize("pattern", ["^[a-z0-9]+(-[a-z0-9]+)*$", "^a*(b|cc)+d?$", r"^\w+@\w+$"])
@pytest.mark.parametrize(("low", "high"), [(0, 7), (3, 9), (5, math.inf), (6, 6)])
def test_lengths_are_kept_to(pattern: str, low: int, high: float) -> None:
    found = fitted(read_pattern(pattern), low, high)
    least, most = lengths(found)
    assert low <= least
    assert most <= high


@pytest.mark.parametrize(
    ("step", "low", "high"),
    [
        (0.01, -math.inf, math.inf),
        (0.25, -1.3, 7),
        (5, 0, 1_000_000),
        (12.5, -100, 100),
        (0.1, 0, 1),
    ],
)
def test_multiples(step: float, low: float, high: float) -> None:
    written = re.compile(write_pattern(multiples(step, low, high)))
    exact = Fraction(str(step))
    places = len(str(step).partition(".")[2])
    for scaled in range(-1200, 1201):
        digits = str(abs(scaled)).zfill(places + 1)
        text = f"{digits[:-places]}.{digits[-places:]}" if places else digits
        value = Fraction(scaled, 10**places)
        is_one = (value / exact).denominator == 1 and low <= value <= high
        assert bool(written.match(f"{'-' * (scaled < 0)}{text}")) == is_one


A, B = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, {
    "type": "object", "properties": {"a": {"minimum": 3, "type": "number"}, "b": {"type": "string"}}
}  # fmt: skip


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [A, B]},
        {"$ref": "#/$defs/A", "required": ["b"], "$defs": {"A": B}},
        {"type": "object", "properties": {"a": {"type": "integer"}}, "anyOf": [
            {"required": ["a"]}, {"properties": {"c": {"const": 1}}, "required": ["c"]}]},
        {"allOf": [{"enum": [1, "1", True]}, {"type": "integer"}]},
        {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^3$"}], "minimum": 3},
    ],
)  # fmt: skip
def test_what_is_merged_says_the_same(schema: dict[str, Any]) -> None:
    """But that members are closed where nothing says that they are open."""
    old, new = (Draft202012Validator(one) for one in (schema, Rewriter(schema).rewritten()))
    for value in ({}, {"a": 3}, {"a": 2}, {"b": "x"}, {"a": 4, "b": "x"}, {"a": 3.5}, {"c": 1},
                  {"c": 2}, 1, True, "1", "3", 3, 2):  # fmt: skip
        assert old.is_valid(value) == new.is_valid(value), value
