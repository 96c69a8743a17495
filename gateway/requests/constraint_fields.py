"""The fields that constrain the form of the output, and what they ask of a grammar."""

import json
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from pydantic import ConfigDict, Field

from core.errors import InvalidRequest
from gateway.requests.request_body import ClosedModel, Items, RequestModel

MAX_CHOICES = 1024
# What each field of a request, and of `structured_outputs`, asks for.
GUIDED = {
    "guided_json": "json_schema", "guided_regex": "regex", "guided_grammar": "ebnf",
    "guided_choice": "choice", "json_schema": "json_schema", "regex": "regex", "ebnf": "ebnf",
}  # fmt: skip
OUTPUTS = {
    "json_": "json_schema", "json_object": "json_object", "regex": "regex", "grammar": "ebnf",
    "choice": "choice", "structural_tag": "structural_tag",
}  # fmt: skip

Schema = dict[str, Any] | str
Choices = Items[str]


class JsonSchemaFormat(ClosedModel):
    """OpenAI's wrapping of a schema. `strict` makes no difference: every schema is kept to."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(ClosedModel):
    """The last three are of structural tags: the form of today, and the one before it."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = None
    structures: Items[dict[str, Any]] | None = None
    triggers: Items[str] | None = None


class StructuredOutputs(ClosedModel):
    """vLLM's. JSON is without free whitespace, asked for or not."""

    model_config = ConfigDict(validate_by_name=False, validate_by_alias=True)

    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = Field(None, min_length=1)
    grammar: str | None = Field(None, min_length=1)
    choice: Choices | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    structural_tag: Schema | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: Literal[False] | None = None


class Constraint(NamedTuple):
    """What the output must match; `param` is the field that asks for it. The text of a
    `json_schema` may be empty: any JSON object; that of a `choice` is a JSON list of texts."""

    kind: Literal["json_schema", "regex", "ebnf", "choice", "structural_tag"]
    text: str
    param: str


class ConstraintFields(RequestModel):
    """`response_format` is OpenAI's; vLLM has the structured and the guided ones, SGLang the
    others."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = Field(None, min_length=1)
    guided_grammar: str | None = Field(None, min_length=1)
    guided_choice: Choices | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    json_schema: Schema | None = None
    regex: str | None = Field(None, min_length=1)
    ebnf: str | None = Field(None, min_length=1)

    def constraint(self) -> Constraint | None:
        """Raises InvalidRequest when there are several."""
        if self.model_fields_set.isdisjoint(CONSTRAINTS):
            return None
        constraints = [one for one in (self._of_format(), *self._guided()) if one is not None]
        if len(constraints) > 1:
            names = " and ".join(one.param for one in constraints)
            raise InvalidRequest(f"only one of {names} can be kept to", param=constraints[1].param)
        return constraints[0] if constraints else None

    def _of_format(self) -> Constraint | None:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return Constraint("json_schema", "", "response_format")
        if wanted.type == "structural_tag":
            tag = wanted.model_dump(exclude_none=True)
            return _constraint("structural_tag", tag, "response_format")
        if wanted.json_schema is None:
            param = "response_format.json_schema"
            raise InvalidRequest(f"{param} is required", param=param)
        schema = wanted.json_schema.json_schema
        # OpenAI's API lets the schema out: JSON of whatever form.
        text = "" if schema is None else _json_text(schema)
        return Constraint("json_schema", text, "response_format.json_schema.schema")

    def _guided(self) -> Iterator[Constraint]:
        for name, kind in GUIDED.items():
            if (value := getattr(self, name)) is not None:
                yield _constraint(kind, value, name)
        for name, kind in OUTPUTS.items():
            value = getattr(self.structured_outputs, name, None)
            if value is not None and value is not False:
                yield _constraint(kind, value, f"structured_outputs.{name.rstrip('_')}")


# Most requests have none of them.
CONSTRAINTS = frozenset(ConstraintFields.model_fields)


def _constraint(kind: str, value: Any, param: str) -> Constraint:  # noqa: ANN401 - the field's
    """Raises InvalidRequest for choices that are empty."""
    match kind:
        case "json_schema" | "structural_tag":
            return Constraint(kind, value if isinstance(value, str) else _json_text(value), param)
        case "json_object":
            return Constraint("json_schema", "", param)
        case "choice":
            if not all(value):
                raise InvalidRequest(f"{param}: choices are not empty", param=param)
            return Constraint(kind, _json_text(value), param)
        case "regex" | "ebnf":
            return Constraint(kind, value, param)
    raise AssertionError(kind)


def _json_text(value: dict[str, Any] | list[str]) -> str:
    # Order and spelling are kept: properties come in the order of the schema.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
