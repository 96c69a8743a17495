"""Two schemas that a value must both keep to, as one."""

import math
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

# Of the parts of a merged schema; patterns are one or a list of them.
PATTERNS = "patterns"


class NoValue(ValueError):
    """Nothing keeps to both."""


def merged(one: Schema, other: Schema) -> Schema:
    """Without keywords that say nothing. Members that both have are left as `allOf` of two.
    Raises NoValue, and ValueError naming keywords that cannot be together."""
    whole = {**one, **other}
    for name in one.keys() & other.keys():
        if one[name] != other[name]:
            whole[name] = _combined(name, one[name], other[name])
    if "properties" in whole or "additionalProperties" in whole:
        _merge_members(whole, one, other)
    for first, second in ((one, other), (other, one)):
        if "prefixItems" in first and first.get("prefixItems") != second.get("prefixItems") and (
            "items" in second or "prefixItems" in second
        ):  # fmt: skip
            raise ValueError("prefixItems beside items of another schema is not supported")
    return whole


def _combined(name: str, one: Any, other: Any) -> Any:  # noqa: ANN401 - any JSON
    if name in _SIMPLE:
        return _SIMPLE[name](one, other)
    if name in ("items", "propertyNames", "additionalProperties", "properties"):
        return both_of(one, other)  # properties are done apart
    raise ValueError(f"two different values of {name} in one schema are not supported")


def both_of(one: Any, other: Any) -> Any:  # noqa: ANN401 - schemas, or booleans
    if False in (one, other):
        return False
    if True in (one, other) or one == other:
        return other if one is True else one
    return {"allOf": [one, other]}


def _merge_members(whole: Schema, one: Schema, other: Schema) -> None:
    """A member that only one of them names is one of the additional ones of the other."""
    members: Schema = {}
    for first, second in ((one, other), (other, one)):
        rest = second.get("additionalProperties", True)
        for name, schema in first.get("properties", {}).items():
            if name in second.get("properties", {}):
                members[name] = both_of(one["properties"][name], other["properties"][name])
            elif "patternProperties" in second:
                raise ValueError("patternProperties beside properties of another schema")
            else:
                members[name] = both_of(schema, rest)
    whole["properties"] = {name: schema for name, schema in members.items() if schema is not False}
    for name in whole.get("required", ()):
        if members.get(name) is False:
            raise NoValue(f"{name[:64]!r} is required, and not allowed")


def _types(one: Any, other: Any) -> Any:  # noqa: ANN401 - a name or a list of them
    names = [value if isinstance(value, list) else [value] for value in (one, other)]
    wider = [set(value) | ({"integer"} if "number" in value else set()) for value in names]
    common = [name for name in dict.fromkeys(names[0] + names[1])
              if name in wider[0] and name in wider[1]]  # fmt: skip
    if not common:
        raise NoValue("no type is allowed")
    return common if len(common) > 1 else common[0]


def _values(one: list[Any], other: list[Any]) -> list[Any]:
    common = [value for value in one if any(same(value, theirs) for theirs in other)]
    if not common:
        raise NoValue("no value of enum is allowed")
    return common


def _multiple(one: Any, other: Any) -> int:  # noqa: ANN401 - numbers
    if isinstance(one, int) and isinstance(other, int):
        return math.lcm(one, other)
    raise ValueError("two different values of multipleOf in one schema are not supported")


def same(one: Any, other: Any) -> bool:  # noqa: ANN401 - any JSON
    """As JSON Schema compares: 1 is 1.0, and not true."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


_SIMPLE: dict[str, Callable[[Any, Any], Any]] = {
    "type": _types,
    "enum": _values,
    "multipleOf": _multiple,
    "required": lambda one, other: list(dict.fromkeys([*one, *other])),
    "uniqueItems": lambda one, other: one or other,
    PATTERNS: lambda one, other: [*one, *other],
}
_SIMPLE |= dict.fromkeys(
    ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), max
)
_SIMPLE |= dict.fromkeys(
    ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), min
)
