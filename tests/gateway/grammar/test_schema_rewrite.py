"""What schemas become for llguidance: judged by outputs of random tokens, a validator and `re`."""

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from gateway.grammar.schema_rewrite import rewritten
from gateway.grammar.string_schemas import plain_patterns
from proto.generate_pb2 import Grammar
from tests.larks import accepts, json_schema

pytest.importorskip("torch")
from tests.gateway.grammar.walks import begin, walk  # noqa: E402 - needs torch

PATTERNS = [
    "^a+$", "b", "^a|b$", r"^(?!ab)[a-c]+$", r"^(?=.*\d)(?=.*[a-z])[a-z0-9]{3,}$", r"^(?=a|z$)[az]",
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", r"^(?!.*z)a", "^(?!(?:ab|c)$)[a-c]{1,3}$", "^(?![^a]b|c)..",
    "^(?![a-z]+$).{2}", r"^(?=.{2,5}\.?$)[a-c]+\.?$",
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*)$",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
@seed(0)
@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="abcz01.-+ ", max_size=7))
def test_patterns_without_lookaheads_say_the_same(pattern: str, text: str) -> None:
    patterns = plain_patterns(pattern)
    assert not any("(?=" in one or "(?!" in one for one in patterns)
    assert all(re.search(one, text) for one in patterns) == bool(re.search(pattern, text))


A: dict[str, Any] = {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]
}  # fmt: skip
B: dict[str, Any] = {"properties": {"b": {"type": "string", "maxLength": 3}}, "required": ["b"]}
ABC = {"type": "object", "properties": {name: {"type": "integer"} for name in "abc"}}
SETS = {"type": "array", "uniqueItems": True}
KEPT: dict[str, dict[str, Any]] = {
    "inherited": {"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}},
    "inherited and plain": {
        "type": "object", "required": ["x", "y"], "$defs": {"A": A},
        "properties": {"x": {"$ref": "#/$defs/A", **B}, "y": {"$ref": "#/$defs/A"}},
    },
    "draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#", "$id": "https://example.com/a",
        "type": "object", "properties": {"x": {"$ref": "#/definitions/A", "description": "d"}},
        "required": ["x"], "definitions": {"A": A},
    },
    "draft 7's lists": {
        "$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "minItems": 4,
        "items": [{"type": "integer"}, {"$ref": "#/items/0"}], "maxItems": 5,
        "additionalItems": {"type": "null"},
    },
    "draft 4's bounds": {
        "$schema": "http://json-schema.org/draft-04/schema#", "type": "number",
        "minimum": 0, "exclusiveMinimum": True, "maximum": 1, "exclusiveMaximum": False,
    },
    "never": {
        "type": "object", "properties": {"a": {"not": {}}, "b": {"type": "integer"}},
        "required": ["b"],
    },
    "of 32 bits": {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4e38},
    "references to anywhere": {
        "type": "object", "required": ["a/b ~", "c"],
        "properties": {"a/b ~": {"anyOf": [{"type": "null"}, {"type": "integer"}]},
                       "c": {"$ref": "#/properties/a~1b%20~0/anyOf/1"}},
    },
    "unevaluated": {"type": "object", "allOf": [A, B], "unevaluatedProperties": False},
    "unevaluated items": {
        "type": "array", "prefixItems": [{"type": "integer"}], "unevaluatedItems": False
    },
    "counted": ABC | {"minProperties": 2, "required": ["b"]},
    "counted, open": ABC | {"minProperties": 2, "additionalProperties": {"type": "null"}},
    "counted to all": ABC | {"maxProperties": 3},
    "required only": {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["z"]},
    "names": {
        "type": "object", "propertyNames": {"$ref": "#/$defs/C"}, "required": ["r"],
        "additionalProperties": {"type": "integer"}, "$defs": {"C": {"enum": ["r", "g"]}},
    },
    "names of lengths": {
        "type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}, "maxProperties": 1
    },
    "names of a format": {
        "type": "object", "propertyNames": {"format": "uuid"}, "maxProperties": 1,
        "additionalProperties": {"type": "integer"},
    },
    "set": SETS | {"items": {"anyOf": [{"const": "a"}, {"enum": [1, 2, 3]}]}, "minItems": 2},
    "set of one": SETS | {"items": {"type": "string", "maxLength": 2}, "maxItems": 1},
    "note": {"type": "string", "format": "of-our-own", "maxLength": 4},
    "note of no string": {"type": "integer", "format": "int32"},
    "multiples": {"type": "number", "multipleOf": 0.05, "minimum": 0.3, "maximum": 17},
    "format and pattern": {"type": "string", "format": "email", "pattern": "@example\\.com$",
                           "maxLength": 40},
    "date or null": {"type": ["string", "null"], "format": "date", "pattern": "^20"},
    "password": {"type": "string", "pattern": r"^(?=.*[a-z])(?=.*\d)[a-z\d!]+$", "maxLength": 9},
    "beside": {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^3$"}], "minimum": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_outputs_keep_to_it(folder: Path, name: str) -> None:
    judge = jsonschema_rs.validator_for(KEPT[name], validate_formats=True)
    grammar = Grammar(lark=json_schema(json.dumps(KEPT[name])))
    for number in range(8):
        output = walk(begin(folder, grammar), random.Random(number))
        judge.validate(json.loads(output))


def test_objects_are_closed(folder: Path) -> None:
    """With all the properties that joined schemas name."""
    lark = json_schema(json.dumps(KEPT["inherited"]))
    assert accepts(folder, lark, '{"a":1,"b":"x"}')
    assert not accepts(folder, lark, '{"a":1,"b":"x","c":2}')
    lark = json_schema(json.dumps(KEPT["inherited and plain"]))
    assert accepts(folder, lark, '{"x":{"a":1,"b":"x"},"y":{"a":1}}')
    assert not accepts(folder, lark, '{"x":{"a":1,"b":"x"},"y":{"a":1,"b":"x"}}')


def test_a_format_that_contradicts_the_pattern_is_a_note(folder: Path) -> None:
    schema = {"type": "string", "format": "date-time", "pattern": r"^\d{4}$"}
    assert accepts(folder, json_schema(json.dumps(schema)), '"2024"')


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (SETS | {"items": {"type": "string"}}, "at #/items: uniqueItems is supported where"),
        (SETS | {"items": {"enum": [1]}, "minItems": 2}, "not as many different items"),
        ({"type": "string", "pattern": "^(?=ab)a|c$"}, "look-ahead"),
        ({"type": "string", "pattern": "^(?!.*--)a"}, "look-ahead"),
        ({"allOf": [A], "anyOf": [A, B], "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"type": "object", "propertyNames": {"pattern": "a", "minLength": 2}}, "propertyNames"),
        (A | {"propertyNames": {"pattern": "^b"}}, "propertyNames does not allow"),
        (ABC | {"minProperties": 4}, "minProperties"),
    ],
)
def test_what_is_not_supported_is_said(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        rewritten({"items": schema})
