"""Body of POST /v1/chat/completions."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, Field, model_validator

from core.errors import InvalidRequest
from gateway.requests.request_body import BoundedParts, Items, RequestModel
from gateway.requests.sampling_fields import SamplingFields, is_text
from gateway.requests.thinking_fields import ThinkingFields
from gateway.requests.tool_fields import ToolCall, ToolFields

# A message's fields that are known but not supported, and could not be left out silently.
UNSUPPORTED_IN_MESSAGES = ("function_call", "audio")
# As OpenAI's API. Templates need not be made for more: those of DeepSeek's models copy all system
# messages so far for each one, a minute for as many small ones as a body may hold.
MAX_MESSAGES = 2048


class TextPart(RequestModel):
    type: Literal["text"]
    text: str


class ChatMessage(RequestModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[TextPart] | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    # As DeepSeek's API has them, and as vLLM's and Moonshot's do.
    reasoning_content: str | None = Field(
        None, validation_alias=AliasChoices("reasoning_content", "reasoning")
    )
    prefix: bool | None = Field(None, validation_alias=AliasChoices("prefix", "partial"))

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError("content is required")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only the assistant makes tool_calls")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("tool_call_id is required")
        return self

    @property
    def text(self) -> str:
        """Parts joined to one text."""
        content = self.content or ""
        return content if isinstance(content, str) else "\n".join(part.text for part in content)

    def for_template(self) -> dict[str, Any]:
        """As templates expect it: they know the developer as system, and a message that only
        calls tools by its content, which is none."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text,
        }
        if self.tool_calls:
            message["content"] = self.text or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": call.type,
                    "function": {
                        "name": call.function.name,
                        "arguments": call.function.arguments,
                    },
                }
                for call in self.tool_calls
            ]
        # V3.1's template opens the thoughts before a prefix, if the model is to think.
        for name in ("name", "tool_call_id", "reasoning_content", "prefix"):
            value = getattr(self, name)
            if value is not None:
                message[name] = value
        return message

    def texts(self) -> list[str]:
        """All that comes into the prompt."""
        calls = self.tool_calls or ()
        return [
            self.text,
            self.name or "",
            self.reasoning_content or "",
            *(call.function.name + call.function.arguments for call in calls),
        ]


Messages = Annotated[Items[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES), BoundedParts]


class MessagesFields(ToolFields, ThinkingFields):
    """What makes the prompt of a chat; /tokenize takes it as well."""

    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _check_final_message(self) -> Self:
        if self.continues_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        last = len(self.messages) - 1
        for position, message in enumerate(self.messages):
            if message.prefix and (position < last or message.role != "assistant"):
                param = f"messages[{position}].prefix"
                raise InvalidRequest(
                    f"{param}: only the last message, the assistant's, can be one", param=param
                )
        return self

    @property
    def continues_message(self) -> bool:
        """Whether the output goes on with the last message: DeepSeek's API says so in the
        message itself."""
        return bool(self.continue_final_message or self.messages[-1].prefix)

    @property
    def final_message(self) -> str | None:
        """The text that is to be continued, if that is asked for."""
        return self.messages[-1].text if self.continues_message else None

    @property
    def begins_turn(self) -> bool:
        """Whether the prompt ends with the beginning of the assistant's turn."""
        if self.add_generation_prompt is None:
            return not self.continues_message
        return self.add_generation_prompt

    def template_messages(self) -> list[Mapping[str, Any]]:
        """Raises InvalidRequest for what no template could be given."""
        rendered: list[Mapping[str, Any]] = []
        for position, message in enumerate(self.messages):
            for name in UNSUPPORTED_IN_MESSAGES:
                if (message.model_extra or {}).get(name):
                    param = f"messages[{position}].{name}"
                    raise InvalidRequest(f"{param} is not supported", param=param)
            if not all(is_text(text) for text in message.texts()):
                param = f"messages[{position}].content"
                raise InvalidRequest(f"{param} is not valid Unicode", param=param)
            rendered.append(message.for_template())
        return rendered


class ChatRequest(SamplingFields, MessagesFields):
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest(
                "top_logprobs is only allowed when logprobs is true", param="top_logprobs"
            )
        return self
