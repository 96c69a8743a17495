"""JSON schemas, as people's generators write them, in words that llguidance keeps to.

Values may be fewer than the schema allows, and never others. Objects have no other properties than
those named, where a schema leaves that open: a model would go on with them.
"""

import itertools
import math
import re
from typing import Any

from gateway.grammar.json_schema_check import SINGLE_SCHEMAS
from gateway.grammar.schema_form import COUNTS, LISTS_OF_SCHEMAS, MAPS_OF_SCHEMAS
from gateway.grammar.schema_spelling import of_today, target_of
from gateway.grammar.string_schemas import plain_string

MAX_CHOICES = 64  # of properties of which some are needed
MAX_SETS = 512  # that an array of different values may be
CHOICES = ("anyOf", "oneOf")
# They say what other properties there may be.
OPENING = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"}
)
Schema = dict[str, Any]
# References that the library follows by itself.
_PLAIN = re.compile(r"#(?:/(?:\$defs|definitions)/[\w.-]+)?")


def rewritten(schema: Any) -> Any:  # noqa: ANN401 - any JSON, as below
    """Raises ValueError saying what cannot be kept to, and where."""
    rewriter = _Rewriter(schema)
    try:
        new = rewriter.part(schema, "#")
    except RecursionError as error:
        raise ValueError("its references are nested too deeply, or lead to themselves") from error
    return new | {"$defs": new.get("$defs", {}) | rewriter.added} if rewriter.added else new


class _Rewriter:
    """`added` are definitions: what others join, which leaves other properties open, and what
    references lead to elsewhere."""

    def __init__(self, root: Any) -> None:  # noqa: ANN401
        self._root = root
        self._names: dict[tuple[str, bool], str] = {}
        self.added: Schema = {}

    def part(self, schema: Any, path: str, *, is_joined: bool = False) -> Any:  # noqa: ANN401
        """`is_joined`: others say something about the same value, and may name more properties."""
        schema = of_today(schema)
        if not isinstance(schema, dict):
            return schema
        joins = is_joined or "properties" in schema or _num_joined(schema) > 1
        new = {
            name: self._inner(name, value, f"{path}/{name}", joins=joins)
            for name, value in schema.items()
            if name not in ("$schema", "$id")  # references lead nowhere else
        }
        try:
            new = self._property_names(plain_string(new))
            new = _items_closed(self._closed(new, schema, is_open=is_joined or not joins))
            return self._set(_counted(new))
        except _Told:
            raise
        except ValueError as error:
            raise _Told(f"at {path}: {error}") from error

    def _inner(self, name: str, value: Any, path: str, *, joins: bool) -> Any:  # noqa: ANN401
        if name == "$ref":
            return self._reference(value, is_joined=joins)
        if name in SINGLE_SCHEMAS:
            return self.part(value, path)
        if name in MAPS_OF_SCHEMAS:
            return {key: self.part(one, f"{path}/{key[:64]}") for key, one in value.items()}
        if name in LISTS_OF_SCHEMAS:
            is_joined = joins and name != "prefixItems"
            return [
                self.part(one, f"{path}/{i}", is_joined=is_joined) for i, one in enumerate(value)
            ]
        return int(value) if name in COUNTS else value

    def _reference(self, reference: str, *, is_joined: bool) -> str:
        if not is_joined and _PLAIN.fullmatch(reference):
            return reference
        key = (reference, is_joined)
        if key not in self._names:
            name = self._names[key] = f"$added{len(self._names)}"
            self.added[name] = True  # until it is known
            target = target_of(self._root, reference)
            self.added[name] = self.part(target, reference, is_joined=is_joined)
        return f"#/$defs/{self._names[key]}"

    def _resolved(self, schema: Any) -> Any:  # noqa: ANN401
        while isinstance(schema, dict) and "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            is_added = name in self.added
            schema = self.added[name] if is_added else target_of(self._root, schema["$ref"])
        return schema

    def _closed(self, new: Schema, schema: Schema, *, is_open: bool) -> Schema:
        rest = new.pop("unevaluatedProperties", True)
        if "additionalProperties" in new or (rest is True and is_open):
            return new
        names = self._named({name: value for name, value in schema.items()
                             if name != "unevaluatedProperties"}, set())  # fmt: skip
        if rest is not True and (names is None or any(name in schema for name in CHOICES)):
            raise ValueError("unevaluatedProperties is supported beside properties and allOf only")
        if rest is True and not names:
            return new
        properties = new.get("properties", {}) | {
            name: True for name in names or () if name not in new.get("properties", {})
        }
        return new | {
            "properties": properties, "additionalProperties": rest is not True and rest
        }  # fmt: skip

    def _named(self, schema: Any, followed: set[str]) -> list[str] | None:  # noqa: ANN401
        """Properties that the schema and those that it joins name; None if they say what others
        there may be."""
        if not isinstance(schema, dict):
            return []
        if not OPENING.isdisjoint(schema):
            return None
        names = [*schema.get("properties", ()), *schema.get("required", ())]
        for part in _joined(schema):
            if isinstance(part, str):
                if part in followed:
                    continue
                followed.add(part)
                part = target_of(self._root, part)
            inner = self._named(part, followed)
            if inner is None:
                return None
            names += inner
        return names

    def _property_names(self, new: Schema) -> Schema:
        """Names that are known become properties, others patterns of properties."""
        named, rest = new.pop("propertyNames", True), new.get("additionalProperties", True)
        if isinstance(named, dict) and "$ref" in named:
            named = self.part(self._resolved(named), named["$ref"])
        properties = new.get("properties", {})
        values = self._values(named)
        pattern = None if values is not None else _pattern_of(named)
        if values is None and not pattern:
            return new
        if "patternProperties" in new:
            raise ValueError("propertyNames beside patternProperties is not supported")
        new["additionalProperties"] = False
        if pattern:
            if not all(_is_found(pattern, name) for name in properties):
                raise ValueError("propertyNames does not allow one of properties")
            return new | ({"patternProperties": {pattern: rest}} if rest is not False else {})
        allowed = [name for name in values or () if isinstance(name, str)]
        return new | {"properties": {
            name: properties.get(name, rest)
            for name in dict.fromkeys([*(one for one in properties if one in allowed), *allowed])
            if name in properties or rest is not False
        }}  # fmt: skip

    def _set(self, new: Schema) -> Schema:
        """Different items: those of a few known values, in the order in which these are listed."""
        low, high = new.get("minItems", 0), new.get("maxItems", math.inf)
        if not new.pop("uniqueItems", False) or high <= 1:
            return new
        values = None if "prefixItems" in new else self._values(new.get("items"))
        if values is None or low > MAX_CHOICES:
            raise ValueError("uniqueItems is supported where items are an enum, or at most one")
        sets: list[list[Any]] = []
        for size in range(low, int(min(high, len(values))) + 1):
            if len(sets) + math.comb(len(values), size) > MAX_SETS and sets:
                break
            sets.extend(map(list, itertools.islice(itertools.combinations(values, size), MAX_SETS)))
        if not sets:
            raise ValueError("there are not as many different items")
        return {"enum": sets}

    def _values(self, schema: Any) -> list[Any] | None:  # noqa: ANN401
        """All of a schema's, if they are listed."""
        schema = self._resolved(schema)
        if not isinstance(schema, dict):
            return [] if schema is False else None
        if "const" in schema or "enum" in schema:
            return [schema["const"]] if "const" in schema else list(schema["enum"])
        for name in CHOICES:
            if name in schema:
                lists = [self._values(one) for one in schema[name]]
                known = [one for one in lists if one is not None]
                return list(itertools.chain(*known)) if len(known) == len(lists) else None
        listed: dict[Any, list[Any]] = {"boolean": [True, False], "null": [None]}
        types = schema.get("type")
        return listed.get(types) if isinstance(types, str) else None


class _Told(ValueError):
    """Names the place already."""


def _num_joined(schema: Schema) -> int:
    return len(schema.get("allOf", ())) + sum(name in schema for name in ("$ref", *CHOICES))


def _joined(schema: Schema) -> Any:  # noqa: ANN401 - schemas, and a reference
    for name in ("allOf", *CHOICES):
        yield from schema.get(name, ())
    if "$ref" in schema:
        yield schema["$ref"]


def _pattern_of(named: Any) -> str | None:  # noqa: ANN401 - a schema
    """Of names, which are strings; None for any."""
    if not isinstance(named, dict):
        return None
    said = named.keys() - {"type", "title", "description", "$comment"}
    if said == {"pattern"}:
        return str(named["pattern"])
    if said <= {"minLength", "maxLength"}:
        bounds = f"{named.get('minLength', 0)},{named.get('maxLength', '')}"
        return rf"^[\s\S]{{{bounds}}}$" if said else None
    raise ValueError("propertyNames is supported as an enum, a pattern, a format, or lengths")


def _is_found(pattern: str, text: str) -> bool:
    try:
        return bool(re.search(pattern, text))
    except re.error as error:
        raise ValueError(f"pattern: {error}") from error


def _items_closed(new: Schema) -> Schema:
    rest = new.pop("unevaluatedItems", True)
    if rest is True or "items" in new:
        return new
    if list(_joined(new)):
        raise ValueError("unevaluatedItems is supported beside prefixItems only")
    return new | {"items": rest}


def _counted(new: Schema) -> Schema:
    """How many properties there are, where some may be left out: the library knows 0 and 1."""
    properties, required = new.get("properties", {}), new.get("required", ())
    optional = [name for name in properties if name not in required]
    is_closed = new.get("additionalProperties") is False and "patternProperties" not in new
    if is_closed and new.get("maxProperties", 0) >= len(properties):
        new.pop("maxProperties", None)
    missing = new.get("minProperties", 0) - len(required)
    if not optional or "maxProperties" in new or missing <= is_closed:
        return new
    del new["minProperties"]
    if not missing <= len(optional) or math.comb(len(optional), missing) > MAX_CHOICES:
        raise ValueError("minProperties beside as many optional properties is not supported")
    choice = [{"required": list(one)} for one in itertools.combinations(optional, missing)]
    return new | {"allOf": [*new.get("allOf", ()), {"anyOf": choice}]}
