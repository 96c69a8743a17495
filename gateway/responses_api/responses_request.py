"""Body of POST /v1/responses."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from gateway.requests.chat_request import MAX_MESSAGES
from gateway.requests.request_body import BoundedParts, ClosedModel, Items
from gateway.requests.tool_fields import MAX_TOOLS, ToolName
from gateway.responses_api.input_items import InputItem, InputText, MessageItem

MAX_METADATA = 16


class FunctionTool(ClosedModel):
    """A tool of the client; those that OpenAI runs are not here."""

    type: Literal["function"]
    name: str = ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedChoice(ClosedModel):
    type: Literal["function"]
    name: str = ToolName


class PlainFormat(ClosedModel):
    type: Literal["text", "json_object"]


class SchemaFormat(ClosedModel):
    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    type: Literal["json_schema"]
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    json_schema: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(ClosedModel):
    """`verbosity` is a hint without effect."""

    format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(ClosedModel):
    """`effort` is that of a chat; summaries are hints without effect: thoughts come whole."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class StreamOptions(ClosedModel):
    include_obfuscation: bool | None = None


class ResponsesRequest(ClosedModel):
    model: str = Field(min_length=1, max_length=256)
    input: (
        str
        | Annotated[Items[InputItem], Field(min_length=1, max_length=MAX_MESSAGES), BoundedParts]
    )
    instructions: str | None = None
    previous_response_id: str | None = Field(None, min_length=1, max_length=256)
    store: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    tools: Items[FunctionTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, str] | None = Field(None, max_length=MAX_METADATA)
    stream: bool | None = None
    # Only these values; the rest of them has no effect.
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    top_logprobs: Literal[0] | None = None
    service_tier: Literal["auto", "default"] | None = None
    include: Items[Literal["reasoning.encrypted_content"]] | None = Field(None, max_length=16)
    stream_options: StreamOptions | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    client_metadata: dict[str, Any] | None = None
    user: str | None = None

    @property
    def items(self) -> list[InputItem]:
        """`input` as items."""
        if isinstance(self.input, str):
            text = InputText(type="input_text", text=self.input)
            return [MessageItem(type="message", role="user", content=[text])]
        return self.input
