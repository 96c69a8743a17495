"""Messages of Anthropic's API and the blocks that they are made of."""

from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.requests.request_body import ClosedModel, Items


class CacheControl(ClosedModel):
    """A hint without effect: prefixes are kept whether they are marked or not."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(ClosedModel):
    cache_control: CacheControl | None = None


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ThinkingBlock(Block):
    """Its signature proves nothing here."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class DirectCaller(ClosedModel):
    type: Literal["direct"]


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1, max_length=64)
    input: dict[str, Any]
    caller: DirectCaller | None = None


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: str | Items[TextBlock] | None = None
    is_error: bool | None = None

    @property
    def text(self) -> str:
        """What the model is told: templates know of no failed calls."""
        text = joined_text(self.content or "")
        return f"Error: {text}" if self.is_error else text


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class UserMessage(ClosedModel):
    role: Literal["user"]
    content: str | Annotated[Items[UserBlock], Field(min_length=1)]


class AssistantMessage(ClosedModel):
    role: Literal["assistant"]
    content: str | Items[AssistantBlock]


class SystemMessage(ClosedModel):
    role: Literal["system"]
    content: str | Annotated[Items[TextBlock], Field(min_length=1)]


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


def joined_text(content: str | list[TextBlock]) -> str:
    """Blocks joined to one text."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
