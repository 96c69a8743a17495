"""The fields by which other engines are asked for a form: they mean what ours mean."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import Gateway
from tests.larks import accepts

pytestmark = pytest.mark.asyncio(loop_scope="module")

SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"guided_choice": ["a", "b"]}),
    ({"structured_outputs": {"json": {"type": "integer"}, "disable_any_whitespace": True}},
     {"guided_json": {"type": "integer"}}),
    ({"structured_outputs": {"json_object": True, "regex": None}},
     {"response_format": {"type": "json_object"}}),
    ({"structured_outputs": {"regex": "[0-9]{3}"}}, {"guided_regex": "[0-9]{3}"}),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, {"guided_grammar": 'root ::= "a"'}),
    ({"json_schema": '{"type":"integer"}'}, {"guided_json": {"type": "integer"}}),
    ({"regex": "[0-9]{3}"}, {"guided_regex": "[0-9]{3}"}),
    ({"ebnf": 'root ::= "a"'}, {"guided_grammar": 'root ::= "a"'}),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "ours"), SAME)
async def test_the_same_grammar(
    gateway: Gateway, fields: dict[str, Any], ours: dict[str, Any]
) -> None:
    for asked in (fields, ours):
        reply = await gateway.complete("plain", **asked)
        assert reply.status_code == 200, reply.text
    first, second = (one.sampling.grammar for one in gateway.cluster.first.requests)
    assert first == second
    assert first.lark


TAGGED = {"begin": "<f>", "end": "</f>"}
INTEGER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f>"],
        "tags": [TAGGED | {"content": {"type": "json_schema", "json_schema": INTEGER}}],
    },
}
OLD_TAG = {
    "type": "structural_tag",
    "structures": [TAGGED | {"schema": INTEGER}],
    "triggers": ["<f>"],
}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": TAG},
        {"response_format": OLD_TAG},
        {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
    ],
)
async def test_structural_tags(
    gateway: Gateway, model_folder: Path, fields: dict[str, Any]
) -> None:
    reply = await gateway.chat("plain", **fields)
    assert reply.status_code == 200, reply.text
    lark = gateway.cluster.first.requests[0].sampling.grammar.lark
    for text, expected in (("", True), ("free", True), ('so <f>{"n":-5}</f> or so', True),
                           ('<f>{"n":1}</f><f>{"n":2}</f>', True), ("<f>", False),
                           ('<f>{"n": 5}</f>', False), ('<f>{"n":"5"}</f>', False)):  # fmt: skip
        assert accepts(model_folder, lark, text) == expected, text
