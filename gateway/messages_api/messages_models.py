"""What /v1/messages answers, for the OpenAPI document."""

from typing import Any, Literal

from gateway.replies.reply_models import ReplyModel


class AnthropicErrorObject(ReplyModel):
    type: str
    message: str


class AnthropicError(ReplyModel):
    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str | None


class TextContent(ReplyModel):
    type: Literal["text"]
    text: str
    citations: None


class ThinkingContent(ReplyModel):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseContent(ReplyModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class OutputTokensDetails(ReplyModel):
    thinking_tokens: int


class MessageUsage(ReplyModel):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails | None = None


class MessageReply(ReplyModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextContent | ThinkingContent | ToolUseContent]
    stop_reason: Literal[
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
    ]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(ReplyModel):
    input_tokens: int
