"""Body of POST /v1/chat/completions."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from core.errors import InvalidRequest
from gateway.request_body import RequestModel
from gateway.sampling_fields import SamplingFields, is_text

# A message's fields that are known but not supported, and could not be left out silently.
UNSUPPORTED_IN_MESSAGES = ("tool_calls", "function_call", "audio")


class TextPart(RequestModel):
    type: Literal["text"]
    text: str


class ChatMessage(RequestModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError("content is required")
        return self

    def for_template(self) -> Mapping[str, Any]:
        """Parts joined to one text; templates know the developer as system."""
        content = self.content or ""
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(SamplingFields):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest(
                "top_logprobs is only allowed when logprobs is true", param="top_logprobs"
            )
        return self

    def template_messages(self) -> list[Mapping[str, Any]]:
        """Raises InvalidRequest for what no template could be given."""
        rendered = []
        for position, message in enumerate(self.messages):
            for name in UNSUPPORTED_IN_MESSAGES:
                if (message.model_extra or {}).get(name):
                    param = f"messages[{position}].{name}"
                    raise InvalidRequest(f"{param} is not supported", param=param)
            one = message.for_template()
            if not is_text(one["content"]):
                param = f"messages[{position}].content"
                raise InvalidRequest(f"{param} is not valid Unicode", param=param)
            rendered.append(one)
        return rendered
