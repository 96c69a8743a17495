"""Bodies of POST /tokenize and /detokenize."""

from typing import Self

from pydantic import Field, model_validator

from core.errors import InvalidRequest
from gateway.requests.chat_request import Messages, MessagesFields
from gateway.requests.request_body import WHOLE_BODY, Items, RequestModel
from gateway.requests.sampling_fields import TokenId, is_text
from gateway.requests.thinking_fields import ThinkingFields
from gateway.requests.tool_fields import MAX_TOOLS, Tool

MAX_TOKENS = 2**17


class TokenizeRequest(ThinkingFields):
    """A text, as /v1/completions would take it, or messages, as a chat would."""

    model_config = WHOLE_BODY

    model: str | None = Field(None, min_length=1, max_length=256)
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Items[Tool] | None = Field(None, max_length=MAX_TOOLS)

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("either prompt or messages is required", param="prompt")
        if self.prompt is not None and not is_text(self.prompt):
            raise InvalidRequest("prompt is not valid Unicode", param="prompt")
        return self

    @property
    def text(self) -> str:
        assert self.prompt is not None
        return self.prompt

    def chat(self) -> MessagesFields:
        """The part that a chat request has as well."""
        return MessagesFields.model_validate(
            self.model_dump(
                include={
                    "messages", "add_generation_prompt", "continue_final_message",
                    "chat_template_kwargs", "thinking", "reasoning_effort", "tools",
                }
            )
        )  # fmt: skip


class DetokenizeRequest(RequestModel):
    model_config = WHOLE_BODY

    model: str | None = Field(None, min_length=1, max_length=256)
    tokens: Items[TokenId] = Field(max_length=MAX_TOKENS)
