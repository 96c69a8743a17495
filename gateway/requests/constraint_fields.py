"""The fields that constrain the form of the output, and what they ask of a grammar."""

import json
from typing import Any, Literal, NamedTuple

from pydantic import ConfigDict, Field

from core.errors import InvalidRequest
from gateway.requests.request_body import Items, RequestModel

MAX_CHOICES = 1024


class JsonSchemaFormat(RequestModel):
    """OpenAI's wrapping of a schema. `strict` makes no difference: every schema is kept to."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class Constraint(NamedTuple):
    """What the output must match; `param` is the field that asks for it. The text of a
    `json_schema` may be empty: any JSON object; that of a `choice` is a JSON list of texts."""

    kind: Literal["json_schema", "regex", "ebnf", "choice"]
    text: str
    param: str


class ConstraintFields(RequestModel):
    """`response_format` is OpenAI's, the guided ones are the usual extensions."""

    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = Field(None, min_length=1)
    guided_grammar: str | None = Field(None, min_length=1)
    guided_choice: Items[str] | None = Field(None, min_length=1, max_length=MAX_CHOICES)

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
        if wanted.json_schema is None:
            param = "response_format.json_schema"
            raise InvalidRequest(f"{param} is required", param=param)
        schema = wanted.json_schema.json_schema
        # OpenAI's API lets the schema out: JSON of whatever form.
        text = "" if schema is None else _json_text(schema)
        return Constraint("json_schema", text, "response_format.json_schema.schema")

    def _guided(self) -> list[Constraint]:
        constraints = []
        if self.guided_json is not None:
            schema = self.guided_json
            text = schema if isinstance(schema, str) else _json_text(schema)
            constraints.append(Constraint("json_schema", text, "guided_json"))
        if self.guided_regex is not None:
            constraints.append(Constraint("regex", self.guided_regex, "guided_regex"))
        if self.guided_grammar is not None:
            constraints.append(Constraint("ebnf", self.guided_grammar, "guided_grammar"))
        if self.guided_choice is not None:
            if not all(self.guided_choice):
                raise InvalidRequest("guided_choice: choices are not empty", param="guided_choice")
            text = _json_text(self.guided_choice)
            constraints.append(Constraint("choice", text, "guided_choice"))
        return constraints


# Most requests have none of them.
CONSTRAINTS = frozenset(ConstraintFields.model_fields)


def _json_text(value: dict[str, Any] | list[str]) -> str:
    # Order and spelling are kept: properties come in the order of the schema.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
