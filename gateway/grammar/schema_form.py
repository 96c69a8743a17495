"""The values that keywords of JSON schemas may have, as the metaschema of draft 2020-12 says."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gateway.grammar.pattern_check import pattern_fault

TYPES = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})
LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# Above these the compiler's own numbers wrap, or are others.
MAX_COUNT = 2**31 - 1
MAX_NUMBER = 2**63 - 1


class _Form(NamedTuple):
    holds: Callable[[Any], bool]
    text: str


def _is_types(value: Any) -> bool:  # noqa: ANN401 - any JSON, as below
    if isinstance(value, str):
        return value in TYPES
    return _is_names(value) and bool(value) and TYPES.issuperset(value)


def _is_names(value: Any) -> bool:  # noqa: ANN401
    is_list = isinstance(value, list) and all(isinstance(one, str) for one in value)
    return is_list and len(set(value)) == len(value)


def _is_number(value: Any) -> bool:  # noqa: ANN401
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) if isinstance(value, float) else abs(value) <= MAX_NUMBER


def _is_count(value: Any) -> bool:  # noqa: ANN401
    return _is_number(value) and value == int(value) and 0 <= value <= MAX_COUNT


_COUNT = _Form(_is_count, f"a whole number from 0 to {MAX_COUNT}")
_NUMBER = _Form(_is_number, "a number of at most 64 bits")
_STRING = _Form(lambda value: isinstance(value, str), "a string")
_BOOLEAN = _Form(lambda value: isinstance(value, bool), "true or false")
_NAMES = _Form(_is_names, "a list of different names")
_LIST = _Form(lambda value: isinstance(value, list), "a list")
_SCHEMAS = _Form(
    lambda value: isinstance(value, list) and bool(value), "a list of schemas, not an empty one"
)
_MAP = _Form(lambda value: isinstance(value, dict), "an object")

FORMS: dict[str, _Form] = {
    "type": _Form(_is_types, f"one of {', '.join(sorted(TYPES))}, or a list of different ones"),
    "enum": _Form(
        lambda value: isinstance(value, list) and bool(value), "a list of values, not an empty one"
    ),
    "required": _NAMES,
    "multipleOf": _Form(lambda value: _is_number(value) and value > 0, "a number above 0"),
    "pattern": _STRING,
    "format": _STRING,
    "examples": _LIST,
}
FORMS |= dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBER)
FORMS |= dict.fromkeys(COUNTS, _COUNT)
FORMS |= dict.fromkeys(LISTS_OF_SCHEMAS, _SCHEMAS)
FORMS |= dict.fromkeys(MAPS_OF_SCHEMAS, _MAP)
FORMS |= dict.fromkeys(("title", "description", "$comment", "$id", "$schema", "$ref"), _STRING)
FORMS |= dict.fromkeys(("deprecated", "readOnly", "writeOnly", "uniqueItems"), _BOOLEAN)


def wrong_form(schema: Mapping[str, Any]) -> str | None:
    """What is wrong with the keywords of this schema; those of its parts are not looked at."""
    for name, value in schema.items():
        if name in FORMS and not FORMS[name].holds(value):
            return f"{name} must be {FORMS[name].text}"
    patterns = [schema["pattern"]] if "pattern" in schema else []
    for pattern in (*patterns, *schema.get("patternProperties", ())):
        if fault := pattern_fault(pattern):
            return f"pattern: {fault}"
    return None
