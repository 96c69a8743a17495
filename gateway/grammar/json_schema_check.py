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
from gateway.grammar.schema_spelling import of_today, target_of

MAX_DEPTH = 64
MAX_SCHEMAS = 20_000

# Keywords that say something about the value and that the compiler does not keep to.
UNSUPPORTED = frozenset(
    {
        "not", "if", "then", "else", "contains", "minContains", "maxContains",
        "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef",
        "$anchor", "$dynamicAnchor",
    }
)  # fmt: skip
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
    led: set[str] = set()
    num_seen = 0
    while waiting:
        place = waiting.pop()
        num_seen += 1
        if num_seen > MAX_SCHEMAS:
            raise InvalidRequest(f"{param}: more than {MAX_SCHEMAS} subschemas", param=param)
        if place.depth > MAX_DEPTH:
            raise InvalidRequest(f"{param}: nested more than {MAX_DEPTH} levels deep", param=param)
        here = of_today(place.schema)
        if isinstance(here, bool):
            continue
        fault = (
            _fault(here, schema, followed)
            if isinstance(here, dict)
            else "a schema must be an object or a boolean"
        )
        if fault:
            raise InvalidRequest(f"{param}: at {place.path}: {fault}", param=param)
        waiting.extend(_parts(place, here))
        if "$ref" in here and here["$ref"] not in led:  # perhaps to where no schema is expected
            led.add(here["$ref"])
            waiting.append(_Place(target_of(schema, here["$ref"]), here["$ref"], 1))


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
    return wrong_form(schema) or _unsupported(schema) or _bad_reference(schema, root, followed)


def _unsupported(schema: dict[str, Any]) -> str | None:
    for name in schema:
        if name in UNSUPPORTED and schema[name] not in (False, None):
            return f"{name} is not supported"
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
        try:
            target = target_of(root, reference)
        except LookupError:
            return f"$ref {reference[:200]!r} leads nowhere"
        schema = target if isinstance(target, dict) else {}
    followed |= seen
    return None
