"""Bodies of POST /v1/messages and /v1/messages/count_tokens."""

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from core.errors import InvalidRequest
from gateway.messages_api.content_blocks import CacheControl, Message, TextBlock
from gateway.requests.chat_request import MAX_MESSAGES
from gateway.requests.request_body import MAX_PARTS, BoundedParts, ClosedModel, Items
from gateway.requests.sampling_fields import MAX_STOPS, StopString
from gateway.requests.tool_fields import MAX_TOOLS, ToolName


class CustomTool(ClosedModel):
    """A tool of the client; those that Anthropic runs are not here."""

    type: Literal["custom"] | None = None
    name: str = ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None
    # Arguments are streamed as they come, asked for or not.
    eager_input_streaming: bool | None = None


class FreeChoice(ClosedModel):
    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool | None = None


class NamedChoice(ClosedModel):
    type: Literal["tool"]
    name: str = ToolName
    disable_parallel_tool_use: bool | None = None


class NoChoice(ClosedModel):
    type: Literal["none"]


ToolChoice = Annotated[FreeChoice | NamedChoice | NoChoice, Field(discriminator="type")]


class ThinkingConfig(ClosedModel):
    """`adaptive`: as the model's chat template decides."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, lt=2**31)
    display: Literal["summarized", "omitted"] | None = None


class JsonOutput(ClosedModel):
    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(ClosedModel):
    """`effort` is a hint without effect."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutput | None = None


class ClearThinking(ClosedModel):
    """That keeps all of it: what a template leaves out is left out anyway."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(ClosedModel):
    """Coding agents ask for the one edit that changes nothing; the others would."""

    edits: Items[ClearThinking] | None = Field(None, max_length=1)


class PromptFields(ClosedModel):
    """What makes the prompt, and can be counted."""

    model: str = Field(min_length=1, max_length=256)
    messages: Annotated[Items[Message], Field(min_length=1, max_length=MAX_MESSAGES), BoundedParts]
    system: str | Annotated[Items[TextBlock], Field(max_length=MAX_PARTS)] | None = None
    tools: Items[CustomTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None


class CountTokensRequest(PromptFields):
    pass


class Metadata(ClosedModel):
    user_id: str | None = None


class MessagesRequest(PromptFields):
    max_tokens: int = Field(ge=1, lt=2**31)
    stop_sequences: Annotated[Items[StopString], Field(max_length=MAX_STOPS)] | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    stream: bool | None = None
    # Neither has an effect.
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        budget = self.thinking and self.thinking.budget_tokens
        if budget and budget >= self.max_tokens:
            raise InvalidRequest("thinking.budget_tokens must be less than max_tokens")
        return self
