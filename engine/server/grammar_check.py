"""Refuses grammars that a compiler must not be given."""

import json
from typing import Any

from core.errors import InvalidRequest
from proto import generate_pb2

# Compilers take time and stack by size and depth.
MAX_GRAMMAR_BYTES = 128 * 2**10
MAX_SCHEMA_DEPTH = 96


def check_grammar(message: generate_pb2.Grammar) -> None:
    """Raises InvalidRequest for one that is too large, too deep, or no JSON."""
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest("the grammar is empty", param="grammar")
    text: str = getattr(message, kind)
    num_bytes = len(text.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"a grammar of {num_bytes} bytes is more than {MAX_GRAMMAR_BYTES}", param="grammar"
        )
    if kind == "json_schema" and text:
        _check_schema(text)


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the JSON schema is no JSON: {error}", param="grammar") from error
    if not isinstance(schema, dict | bool):
        raise InvalidRequest("a JSON schema is an object or a boolean", param="grammar")
    if _depth(schema) > MAX_SCHEMA_DEPTH:
        raise InvalidRequest(
            f"a JSON schema deeper than {MAX_SCHEMA_DEPTH} levels is not possible", param="grammar"
        )


def _depth(value: Any) -> int:  # noqa: ANN401 - any JSON
    """Level by level: without recursion."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            child
            for one in level
            if isinstance(one, dict | list)
            for child in (one.values() if isinstance(one, dict) else one)
        ]
    return depth
