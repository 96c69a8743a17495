"""Constraints that would not be kept to are refused: judged by the metaschema of jsonschema, and by
what `re` takes."""

import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from core.errors import InvalidRequest
from gateway.grammar.json_schema_check import check_schema
from gateway.grammar.pattern_check import MAX_REPEATS, pattern_fault
from gateway.grammar.schema_form import FORMS, TYPES, wrong_form

VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 2**33),
        st.floats(allow_nan=False, allow_infinity=False),
        st.sampled_from([*sorted(TYPES), "", "a", "#"]),
    ),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=4,
)
KEYWORDS = [*FORMS, "items", "additionalProperties", "propertyNames"]


@seed(0)
@settings(max_examples=400, deadline=None)
@given(schema=st.dictionaries(st.sampled_from(KEYWORDS), VALUES, min_size=1, max_size=3))
def test_what_is_no_schema_is_refused(schema: dict[str, Any]) -> None:
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError:
        with pytest.raises(InvalidRequest):
            check_schema(schema, "guided_json")


@seed(0)
@settings(max_examples=400, deadline=None)
@given(schema=st.dictionaries(st.sampled_from(sorted(FORMS)), VALUES, min_size=1, max_size=3))
def test_what_is_a_schema_has_its_form(schema: dict[str, Any]) -> None:
    """But for what draft 2020-12 lets through and nobody means."""
    if not jsonschema.Draft202012Validator(jsonschema.Draft202012Validator.META_SCHEMA).is_valid(
        schema
    ):
        return
    fault = wrong_form(schema)
    assert fault is None or fault.startswith(("enum", "pattern")) or "whole number" in fault


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": []}, "type must be one of"),
        ({"type": ["string", "string"]}, "type must be one of"),
        ({"type": 3}, "type must be one of"),
        ({"enum": []}, "enum must be a list"),
        ({"type": "string", "minLength": -1}, "whole number"),
        ({"type": "string", "maxLength": 2**32 + 1}, "whole number"),
        ({"type": "string", "maxLength": True}, "whole number"),
        ({"type": "array", "minItems": 1.5}, "whole number"),
        ({"type": "integer", "minimum": "a"}, "minimum must be a number"),
        ({"type": "integer", "minimum": 10**30}, "minimum must be a number"),
        ({"type": "integer", "multipleOf": 0}, "multipleOf must be"),
        ({"type": "object", "required": ["a", "a"]}, "required must be"),
        ({"type": "object", "properties": {"a": 3}}, "must be an object"),
        ({"type": "string", "pattern": "a{4294967297}"}, "repeats"),
        ({"type": "object", "patternProperties": {"a{4294967297}": {}}}, "repeats"),
    ],
)
def test_schemas_that_are_none(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        check_schema(schema, "guided_json")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"a{{{MAX_REPEATS + 1}}}", "repeats"),
        ("a{4294967297}", "repeats"),
        ("a{0,4294967297}", "repeats"),
        ("a{4294967297,}", "repeats"),
        ("(b[a]){99999999999999999999999}", "repeats"),
        (r"\U00110000", "past the last"),
        (r"[\x{110000}]", "past the last"),
        (r"\u{ffffffffff}", "past the last"),
        (r"\ud800", "surrogate"),
        (r"[\u{dfff}]", "surrogate"),
    ],
)
@pytest.mark.parametrize("is_ebnf", [False, True])
def test_numbers_that_would_wrap(text: str, reason: str, is_ebnf: bool) -> None:
    assert reason in (pattern_fault(text, is_ebnf=is_ebnf) or "")


@pytest.mark.parametrize(
    "text",
    [f"a{{{MAX_REPEATS}}}", r"\U0010ffff", r"\\U00110000", r"\u{1f600}", "[{4294967297}]", "a{2,}",
     r"\{4294967297}", "日本"],
)  # fmt: skip
def test_numbers_that_are_kept(text: str) -> None:
    assert pattern_fault(text) is None


def test_texts_of_ebnf_are_no_repeats() -> None:
    assert pattern_fault('root ::= "a{4294967297}" "]" [\\"{9999999999}] # {9999999999}\n',
                         is_ebnf=True) is None  # fmt: skip
    assert pattern_fault('root ::= "[" ("a"){4294967297}', is_ebnf=True)


PIECES = st.sampled_from(["a", "[b-d]", "(ab|c)", ".", r"\d", r"\u00e9", r"\{", "x{2}", "y{1,3}"])


@seed(0)
@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(PIECES, min_size=1, max_size=6))
def test_expressions_that_re_takes_are_left_alone(pieces: list[str]) -> None:
    text = "".join(pieces)
    re.compile(text)
    assert pattern_fault(text) is None
