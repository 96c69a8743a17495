"""What a JSON schema must not hold: the compiler would leave it out without a word, and the
output would not match the schema.

What is no schema at all is refused by `schema_form`. Other faults that the compiler finds by itself
(bad patterns, bounds that exclude each other) are left to it, save for those that it would look for
too long.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from core.errors import InvalidRequest
from gateway.grammar.schema_form import LISTS_OF_SCHEMAS, MAPS_OF_SCHEMAS, wrong_form

MAX_DEPTH = 64
MAX_SCHEMAS = 20_000

# Keywords that say something about the value and that the compiler does not keep to.
UNSUPPORTED = frozenset(
    {
        "not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains",
        "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef",
        "$anchor", "$dynamicAnchor", "additionalItems",
    }
)  # fmt: skip
# Keywords beside which the compiler looks at nothing else.
EXCLUSIVE = ("$ref", "anyOf", "oneOf", "allOf", "const", "enum")
# They say nothing about the value, or hold schemas for others to refer to.
NEUTRAL = frozenset(
    {
        "$schema", "$id", "$defs", "definitions", "$comment", "title", "description", "default",
        "examples", "deprecated", "readOnly", "writeOnly", "discriminator", "nullable", "example",
    }
)  # fmt: skip
# Keywords that hold for one type of value, which the compiler wants to be named with them.
OF_TYPE = {
    "pattern": "string", "format": "string", "minLength": "string", "maxLength": "string",
    "minimum": "number", "maximum": "number", "exclusiveMinimum": "number",
    "exclusiveMaximum": "number", "multipleOf": "number",
    "minItems": "array", "maxItems": "array", "prefixItems": "array",
    "minProperties": "object", "maxProperties": "object", "required": "object",
    "propertyNames": "object",
}  # fmt: skip
SINGLE_SCHEMAS = (
    "items", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip


class _Place(NamedTuple):
    """A schema somewhere within the whole, and the way there."""

    schema: object
    path: str
    depth: int


def check_schema(schema: object, param: str) -> None:
    """Raises InvalidRequest naming the first keyword that would not be kept to, and where."""
    waiting = [_Place(schema, "#", 1)]
    followed: set[str] = set()
    num_seen = 0
    while waiting:
        place = waiting.pop()
        num_seen += 1
        if num_seen > MAX_SCHEMAS:
            raise InvalidRequest(f"{param}: more than {MAX_SCHEMAS} subschemas", param=param)
        if place.depth > MAX_DEPTH:
            raise InvalidRequest(f"{param}: nested more than {MAX_DEPTH} levels deep", param=param)
        if isinstance(place.schema, bool):
            continue
        fault = (
            _fault(place.schema, schema, followed)
            if isinstance(place.schema, dict)
            else "a schema must be an object or a boolean"
        )
        if fault:
            raise InvalidRequest(f"{param}: at {place.path}: {fault}", param=param)
        assert isinstance(place.schema, dict)
        waiting.extend(_parts(place, place.schema))


def _parts(place: _Place, schema: Mapping[str, Any]) -> Iterator[_Place]:
    depth = place.depth + 1
    for name in SINGLE_SCHEMAS:
        if name in schema:
            yield _Place(schema[name], f"{place.path}/{name}", depth)
    for name in LISTS_OF_SCHEMAS:
        for position, part in enumerate(schema.get(name, ())):
            yield _Place(part, f"{place.path}/{name}/{position}", depth)
    for name in MAPS_OF_SCHEMAS:
        for key, part in schema.get(name, {}).items():
            yield _Place(part, f"{place.path}/{name}/{key[:64]}", depth)


def _fault(schema: dict[str, Any], root: object, followed: set[str]) -> str | None:
    """What is wrong with this schema, its parts apart."""
    return (
        wrong_form(schema)
        or _unsupported(schema)
        or _bad_reference(schema, root, followed)
        or _left_out_beside(schema)
        or _without_type(schema)
        or _cannot_be_combined(schema)
    )


def _unsupported(schema: dict[str, Any]) -> str | None:
    for name in schema:
        if name in UNSUPPORTED and schema[name] not in (False, None):
            return f"{name} is not supported"
    if len(schema.get("allOf", ())) > 1:
        return "allOf with several schemas is not supported"
    return None


def _bad_reference(schema: dict[str, Any], root: object, followed: set[str]) -> str | None:
    """References are followed, also around in a circle, until something else comes, or one of
    those that were `followed` to a good end before: long chains are walked along once."""
    seen: set[str] = set()
    while isinstance(schema, dict) and "$ref" in schema:
        reference = schema["$ref"]
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return "$ref must be '#' or begin with '#/': nothing outside is looked up"
        if reference in followed:
            break
        if reference in seen:
            return f"$ref {reference[:200]!r} leads back to itself"
        seen.add(reference)
        target = root
        for part in reference.split("/")[1:]:
            if not isinstance(target, dict) or part not in target:
                return f"$ref {reference[:200]!r} leads nowhere"
            target = target[part]
        schema = target if isinstance(target, dict) else {}
    followed |= seen
    return None


def _left_out_beside(schema: dict[str, Any]) -> str | None:
    for exclusive in EXCLUSIVE:
        if exclusive not in schema:
            continue
        others = set(schema) - NEUTRAL - {exclusive}
        if exclusive in ("const", "enum"):
            others.discard("type")
        if exclusive == "$ref" and isinstance(schema["$ref"], str):
            # `#/properties/x`: what is referred to stands beside the reference.
            others -= {schema["$ref"].split("/")[1]} if "/" in schema["$ref"] else set()
        if others:
            return f"{min(others)} beside {exclusive} is not supported"
        return None
    return None


def _without_type(schema: dict[str, Any]) -> str | None:
    if any(name in schema for name in EXCLUSIVE):
        return None
    types = schema.get("type")
    listed = types if isinstance(types, list) else [types]
    named = {one for one in listed if isinstance(one, str)}
    if "integer" in named:
        named.add("number")
    if "properties" in schema or "patternProperties" in schema:
        named.add("object")
    for name, type_ in OF_TYPE.items():
        if name in schema and type_ not in named and not (named and type_ != "object"):
            return f"{name} needs type {type_!r} beside it"
    return None


def _cannot_be_combined(schema: dict[str, Any]) -> str | None:
    has_bounds = any(name in schema for name in ("minLength", "maxLength"))
    if has_bounds and ("pattern" in schema or "format" in schema):
        return "minLength and maxLength beside pattern or format are not supported"
    if "pattern" in schema and "format" in schema:
        return "pattern beside format is not supported"
    if "multipleOf" in schema and (
        schema.get("type") != "integer"
        or any(name in schema for name in OF_TYPE if "inimum" in name or "aximum" in name)
    ):
        return "multipleOf is supported for integers without bounds only"
    names = schema.get("properties", {})
    if schema.get("additionalProperties", False) is False and "patternProperties" not in schema:
        missing = [name for name in schema.get("required", ()) if name not in names]
        if missing:
            return f"required names {missing[0][:64]!r}, which is not among properties"
    return None
