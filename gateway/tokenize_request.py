"""Bodies of POST /tokenize and /detokenize."""

from typing import Any, Self

from pydantic import Field, model_validator

from core.errors import InvalidRequest
from gateway.chat_request import ChatMessage, MessagesFields
from gateway.completion_request import TokenId
from gateway.request_body import RequestModel
from gateway.sampling_fields import is_text
from gateway.tool_fields import Tool

MAX_TOKENS = 2**17


class TokenizeRequest(RequestModel):
    """A text, as /v1/completions would take it, or messages, as a chat would."""

    model: str | None = Field(None, min_length=1, max_length=256)
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None

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
                    "chat_template_kwargs", "tools",
                }
            )
        )  # fmt: skip


class DetokenizeRequest(RequestModel):
    model: str | None = Field(None, min_length=1, max_length=256)
    tokens: list[TokenId] = Field(max_length=MAX_TOKENS)
