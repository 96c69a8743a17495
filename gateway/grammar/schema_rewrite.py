"""JSON schemas, as people's generators write them, in words that the compiler keeps to.

What is written beside `$ref`, `anyOf`, `oneOf` or `allOf` is merged with them. Strings with several
of pattern, format and lengths get one pattern; sets of known values become those that there are;
multiples become an expression of their digits. Values may be fewer than the schema allows, and
never others.
"""

import itertools
import math
from fractions import Fraction
from typing import Any

from gateway.grammar.json_schema_check import NEUTRAL, without_type
from gateway.grammar.number_language import multiples
from gateway.grammar.pattern_language import (
    fitted,
    length_ahead,
    read_pattern,
    spelled,
    write_pattern,
)
from gateway.grammar.regular import NOTHING, plain
from gateway.grammar.schema_merge import PATTERNS, NoValue, Schema, merged
from gateway.grammar.string_formats import FORMATS, LONGEST, common_language

MAX_ALTERNATIVES = 64
MAX_MERGED_DEPTH = 32
MAX_SETS = 512  # that an array of different values may be
# Of the compiler.
KNOWN_FORMATS = ("uri-reference", "uri-template", "json-pointer", "relative-json-pointer")
CHOICES = ("anyOf", "oneOf")
_OTHERS = ("$ref", "allOf", *CHOICES)


class Rewriter:
    """`numbers` are expressions by the text that stands for them in the schema; where it says
    nothing else than before, nothing `is_changed`."""

    def __init__(self, root: Any) -> None:  # noqa: ANN401 - any JSON, as below
        self._root = root
        self._names: dict[str, str] = {}
        self._definitions: Schema = {}
        self.numbers: dict[str, str] = {}
        self.is_changed = False

    def rewritten(self) -> Any:  # noqa: ANN401
        """Raises ValueError saying what cannot be kept to, and where."""
        schema = self._part(self._root, "#")
        return schema | {"$defs": self._definitions} if self._definitions else schema

    def _part(self, schema: Any, path: str) -> Any:  # noqa: ANN401
        if not isinstance(schema, dict):
            return schema
        try:
            ways = self._alternatives(schema)
            if not ways:
                raise NoValue("no value is allowed")
        except _Told:
            raise
        except ValueError as error:
            raise _Told(f"at {path}: {error}") from error
        if len(ways) == 1:
            return self._one(ways[0], path)
        return {"anyOf": [self._one(way, f"{path}/anyOf/{i}") for i, way in enumerate(ways)]}

    def _alternatives(self, schema: Schema, depth: int = 0) -> list[Schema]:
        """Schemas without `anyOf` and the like, of which a value keeps to one; a reference that has
        nothing beside it stays."""
        if depth > MAX_MERGED_DEPTH:
            raise ValueError("schemas within schemas lead back to themselves")
        base = {name: value for name, value in schema.items() if name not in (*_OTHERS, *NEUTRAL)}
        others = [name for name in _OTHERS if name in schema]
        if "pattern" in base:
            base[PATTERNS] = [base.pop("pattern")]
        ways = [base]
        if "multipleOf" in base and isinstance(base.get("type"), list):
            ways = [base | {"type": name} for name in base["type"]]
        if not others:
            return ways
        if others == ["$ref"] and not base and not depth:
            return [{"$ref": self._definition(schema["$ref"])}]
        if len(others) == 1 and others[0] in CHOICES and not base and not depth:
            return [branch for one in schema[others[0]] for branch in self._branch(one)]
        self.is_changed = True
        needed = [[self._target(schema["$ref"])]] if "$ref" in schema else []
        needed += [[one] for one in schema.get("allOf", ())]
        needed += [schema[name] for name in CHOICES if name in schema]
        for choice in needed:
            ways = self._products(ways, choice, depth)
        return ways

    def _branch(self, schema: Any) -> list[Schema]:  # noqa: ANN401
        if schema is False:
            return []
        return [{}] if schema is True else self._alternatives(schema)

    def _products(self, ways: list[Schema], choice: list[Any], depth: int) -> list[Schema]:
        products, reason = [], NoValue("no value is allowed")
        for one in choice:
            parts = (
                [] if one is False else [{}] if one is True else self._alternatives(one, depth + 1)
            )
            for way, part in itertools.product(ways, parts):
                try:
                    products.append(merged(_comparable(way, part), _comparable(part, way)))
                except NoValue as error:
                    reason = error
        if not products:
            raise reason
        if len(products) > MAX_ALTERNATIVES:
            raise ValueError(f"its parts together have more than {MAX_ALTERNATIVES} forms")
        return products

    def _target(self, reference: str) -> Any:  # noqa: ANN401
        target = self._root
        for part in reference.split("/")[1:]:
            target = target[part]
        return target

    def _definition(self, reference: str) -> str:
        """Where the rewritten schema is that `reference` leads to."""
        if reference not in self._names:
            name = self._names[reference] = f"d{len(self._names)}"
            self._definitions[name] = self._part(self._target(reference), reference)
        return f"#/$defs/{self._names[reference]}"

    def _one(self, schema: Schema, path: str) -> Schema:
        """A schema without `anyOf` and the like, and its parts."""
        if "$ref" in schema:
            return schema
        try:
            if fault := without_type(schema):
                raise ValueError(fault)
            if "const" in schema or "enum" in schema:
                return _of_values(schema)
            new = self._object(self._string(self._number(schema)), path)
            self.is_changed |= new != schema
            inner = self._inner(new, path)
            new = self._array(inner)
            self.is_changed |= new != inner
            return new
        except _Told:
            raise
        except ValueError as error:
            raise _Told(f"at {path}: {error}") from error

    def _inner(self, schema: Schema, path: str) -> Schema:
        new = dict(schema)
        for name in ("items", "additionalProperties", "propertyNames", "unevaluatedItems",
                     "unevaluatedProperties"):  # fmt: skip
            if name in new:
                new[name] = self._part(new[name], f"{path}/{name}")
        if "prefixItems" in new:
            new["prefixItems"] = [
                self._part(one, f"{path}/prefixItems/{i}")
                for i, one in enumerate(new["prefixItems"])
            ]
        for name in ("properties", "patternProperties"):
            if name in new:
                new[name] = {
                    _key_pattern(key) if name != "properties" else key:
                    self._part(one, f"{path}/{name}/{key[:64]}") for key, one in new[name].items()
                }  # fmt: skip
        return new

    def _string(self, schema: Schema) -> Schema:
        new = dict(schema)
        patterns, name = new.pop(PATTERNS, []), new.pop("format", "")
        if not _may_be(schema, "string"):
            return new
        if not patterns and name not in FORMATS:
            return new | ({"format": name} if name in KNOWN_FORMATS else {})
        low, high = new.pop("minLength", 0), new.pop("maxLength", math.inf)
        counted = [length_ahead(pattern) for pattern in patterns]
        low = max(low, *(least for _, least, _ in counted)) if counted else low
        high = min(high, *(most for *_, most in counted)) if counted else high
        language = spelled(common_language([pattern for pattern, *_ in counted], name))
        found = fitted(language, low, min(high, LONGEST.get(name, math.inf)))
        if found == NOTHING:
            raise ValueError("no string has this pattern, format and length")
        return new | {"pattern": write_pattern(found)}

    def _number(self, schema: Schema) -> Schema:
        """Multiples; the compiler itself knows those of 7, where bounds are narrow."""
        if "multipleOf" not in schema or schema.get("type") not in ("number", "integer"):
            return schema
        step = schema["multipleOf"]
        if schema["type"] == "integer" and not float(step).is_integer():
            step = Fraction(str(step)).numerator  # the least whole multiple
        low = max(schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf))
        high = min(schema.get("maximum", math.inf), schema.get("exclusiveMaximum", math.inf))
        excluded = {schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")}
        try:
            language = multiples(step, low, high, excluded=excluded)
        except ValueError:
            if schema["type"] == "integer":
                return schema
            raise
        text = f"multiple {len(self.numbers)}"
        self.numbers[text] = write_pattern(language)
        return {"const": text}

    def _object(self, schema: Schema, path: str) -> Schema:
        """Names that are known become properties."""
        new = dict(schema)
        rest = new.get("additionalProperties", "patternProperties" not in new)
        named = new.get("propertyNames")
        if (
            isinstance(named, dict)
            and "type" not in named
            and not named.keys() & {*_OTHERS, "enum"}
        ):
            named = new["propertyNames"] = named | {"type": "string"}
        names = self._finite(self._part(named, f"{path}/propertyNames"))
        members = dict(new.get("properties", {}))
        if names is not None:
            members = {
                name: members.get(name, rest)
                for name in names
                if isinstance(name, str) and (name in members or rest is not False)
            }
            new |= {"properties": members, "additionalProperties": False}
            del new["propertyNames"]
            rest = False
        for name in new.get("required", ()):
            if name in members:
                continue
            if rest is False or "patternProperties" in new:
                raise ValueError(f"required names {name[:64]!r}, which is not among properties")
            new["properties"] = members = members | {name: rest}
        if new.get("propertyNames") in ({"type": "string"}, {}, True):
            del new["propertyNames"]
        return new

    def _array(self, schema: Schema) -> Schema:
        """Different items: those of a few known values, in the order in which these are listed."""
        if not schema.get("uniqueItems"):
            return {name: value for name, value in schema.items() if name != "uniqueItems"}
        low, high = schema.get("minItems", 0), schema.get("maxItems", math.inf)
        if high <= 1:
            return {name: value for name, value in schema.items() if name != "uniqueItems"}
        values = self._finite(schema.get("items", True)) if "prefixItems" not in schema else None
        if values is None:
            raise ValueError("uniqueItems is supported where items are an enum, or at most one")
        sets: list[list[Any]] = []
        for size in range(low, min(int(min(high, len(values))), len(values)) + 1):
            if len(sets) + math.comb(len(values), size) > MAX_SETS and sets:
                break
            sets.extend(map(list, itertools.islice(itertools.combinations(values, size), MAX_SETS)))
        if not sets:
            raise ValueError("there are not as many different items")
        return {"enum": sets}

    def _finite(self, schema: Any) -> list[Any] | None:  # noqa: ANN401
        """All values of a rewritten schema, if they are listed."""
        if not isinstance(schema, dict):
            return None
        if "$ref" in schema:
            return self._finite(self._definitions.get(schema["$ref"].rpartition("/")[2]))
        if "const" in schema or "enum" in schema:
            return _listed(schema)
        if "anyOf" in schema:
            lists = [self._finite(one) for one in schema["anyOf"]]
            known = [one for one in lists if one is not None]
            return list(itertools.chain(*known)) if len(known) == len(lists) else None
        listed: dict[Any, list[Any]] = {"boolean": [True, False], "null": [None]}
        types = schema.get("type")
        return listed.get(types) if isinstance(types, str) else None


class _Told(ValueError):
    """Names the place already."""


def _listed(schema: Schema) -> list[Any]:
    return [schema["const"]] if "const" in schema else list(schema["enum"])


def _comparable(schema: Schema, beside: Schema) -> Schema:
    """A constant as an enum, where another says which values there are."""
    if "const" in schema and beside.keys() & {"const", "enum", "type"}:
        rest = {name: value for name, value in schema.items() if name != "const"}
        return rest | {"enum": [schema["const"]]}
    return schema


def _of_values(schema: Schema) -> Schema:
    """Values of the type; other keywords cannot be beside them."""
    others = schema.keys() - {"const", "enum", "type"}
    if others:
        raise ValueError(f"{min(others)} beside const or enum is not supported")
    types = schema.get("type")
    named = types if isinstance(types, list) else [str(types)]
    values = [
        one for one in _listed(schema) if types is None or any(_is(one, name) for name in named)
    ]
    if not values:
        raise ValueError("no value of enum has the type")
    return {"const": values[0]} if "const" in schema else {"enum": values}


def _may_be(schema: Schema, name: str) -> bool:
    types = schema.get("type")
    return types is None or name in (types if isinstance(types, list) else [types])


def _is(value: Any, name: str) -> bool:  # noqa: ANN401
    if isinstance(value, bool):
        return name == "boolean"
    if isinstance(value, int | float):
        return name == "number" or (name == "integer" and float(value).is_integer())
    kinds: dict[str, Any] = {"string": str, "array": list, "object": dict, "null": type(None)}
    return isinstance(value, kinds.get(name, ()))


def _key_pattern(pattern: str) -> str:
    found = spelled(plain(read_pattern(pattern)))
    if found == NOTHING:
        raise ValueError(f"pattern {pattern[:64]!r} fits no name")
    return write_pattern(found)
