"""What generators write of older drafts and of OpenAPI, in the words of draft 2020-12."""

from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]
# The compiler knows no larger bounds of numbers that are no integers.
MAX_BOUND = 2.0**62


def of_today(schema: Any) -> Any:  # noqa: ANN401 - any JSON
    """This schema, its parts apart. Bounds beyond all sensible numbers come nearer."""
    if not isinstance(schema, dict):
        return schema
    if schema.get("not", False) in ({}, True) and "$ref" not in schema:
        return False
    new = {name: value for name, value in schema.items() if name != "additionalItems"}
    if isinstance(schema.get("items"), list):
        new["prefixItems"] = new.pop("items")
        if "additionalItems" in schema:
            new["items"] = schema["additionalItems"]
    if new.get("prefixItems") == []:
        del new["prefixItems"]
    for bound, sign in (("minimum", -1), ("maximum", 1)):
        exclusive = f"exclusive{bound.capitalize()}"
        if isinstance(new.get(exclusive), bool) and new.pop(exclusive) and bound in new:
            new[exclusive] = new.pop(bound)
        for name in (bound, exclusive):
            if isinstance(value := new.get(name), float) and value * sign > MAX_BOUND:
                new[name] = sign * MAX_BOUND
    return new


def target_of(root: Any, reference: str) -> Any:  # noqa: ANN401 - any JSON
    """What a reference within `root` leads to. Raises LookupError where that is nothing."""
    target = root
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and name.isdecimal():
            target = target[int(name)]
        elif isinstance(target, dict):
            target = target[name]
        else:
            raise LookupError(name)
    return target
