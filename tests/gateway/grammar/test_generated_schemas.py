"""Schemas that pydantic and zod make of ordinary classes: outputs keep to them, or the reason is
told.

The judge is a validator that knows formats. zod's are made as `zod/README.md` says.
"""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from pydantic import TypeAdapter

from core.errors import InvalidRequest
from gateway.formats.registry import TOOL_FORMATS
from gateway.grammar.grammar_compiler import GrammarCompiler
from gateway.grammar.grammar_request import request_grammar
from gateway.requests.constraint_fields import Constraint
from tests.gateway.grammar.pydantic_classes import CLASSES

pytest.importorskip("torch")
from tests.gateway.grammar.walks import begin, walk  # noqa: E402 - needs torch

pytestmark = pytest.mark.asyncio(loop_scope="module")


def made_by_zod(file: str) -> dict[str, Any]:
    schemas: dict[str, Any] = json.loads((Path(__file__).parent / "zod" / file).read_text())
    return schemas


SCHEMAS = {one.__name__: TypeAdapter(one).json_schema() for one in CLASSES}
SCHEMAS |= made_by_zod("schemas.json")
SCHEMAS |= {f"{name} of zod 3": schema for name, schema in made_by_zod("zod3.json").items()}
# No grammar can tell whether two strings are different.
REFUSED = {"Tags": "uniqueItems"}
NUM_WALKS = 2


def finite(text: str) -> float:
    """JSON has numbers, such as 1e999, that floats do not."""
    return max(-1e300, min(1e300, float(text)))


async def test_few_are_refused() -> None:
    assert len(SCHEMAS) > 100
    assert len(REFUSED) < 0.02 * len(SCHEMAS)


@pytest.mark.parametrize("name", SCHEMAS)
async def test_generated_schemas(folder: Path, compiler: GrammarCompiler, name: str) -> None:
    schema = SCHEMAS[name]
    constraint = Constraint("json_schema", json.dumps(schema), "guided_json")
    asked = request_grammar(constraint, None, TOOL_FORMATS[0], compiler, client="c")
    if name in REFUSED:
        with pytest.raises(InvalidRequest, match=REFUSED[name]):
            await asked
        return
    grammar = await asked
    judge = jsonschema_rs.validator_for(schema, validate_formats=True)
    for seed in range(NUM_WALKS):
        output = walk(begin(folder, grammar), random.Random(seed))
        judge.validate(json.loads(output, parse_float=finite))
