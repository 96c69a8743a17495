"""The fields of a chat request about tools."""

from typing import Any, Literal, NamedTuple

from pydantic import Field

from core.errors import InvalidRequest
from gateway.requests.request_body import Items, RequestModel

MAX_TOOLS = 128
ToolName = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")


class FunctionDefinition(RequestModel):
    name: str = ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(RequestModel):
    name: str = ToolName


class NamedToolChoice(RequestModel):
    type: Literal["function"]
    function: NamedFunction


class FunctionCall(RequestModel):
    name: str = Field(min_length=1, max_length=64)
    arguments: str


class ToolCall(RequestModel):
    """A call that the assistant made earlier in the conversation."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ToolUse(NamedTuple):
    """What a request's tools come to.

    `offered` are told to the model; `forced` are those of which one must be called (none: the
    model is free to answer). Calls of `strict` ones keep to their schemas also where they are
    not forced.
    """

    offered: tuple[Tool, ...]
    forced: tuple[Tool, ...]
    at_most_one: bool

    @property
    def strict(self) -> tuple[Tool, ...]:
        return tuple(tool for tool in self.offered if tool.function.strict)


class ToolFields(RequestModel):
    """Part of the body of a chat request."""

    tools: Items[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None

    def tool_use(self) -> ToolUse:
        """Raises InvalidRequest for a choice among tools that are not there, and for two tools of
        one name."""
        tools = tuple(self.tools or ())
        names = [tool.function.name for tool in tools]
        if len(set(names)) < len(names):
            raise InvalidRequest("tools: two of them have the same name", param="tools")
        choice = self.tool_choice
        at_most_one = self.parallel_tool_calls is False
        if isinstance(choice, NamedToolChoice):
            named = tuple(tool for tool in tools if tool.function.name == choice.function.name)
            if not named:
                raise InvalidRequest(
                    f"tool_choice names {choice.function.name!r}, which is not among tools",
                    param="tool_choice",
                )
            return ToolUse(tools, named[:1], True)
        if choice == "required":
            if not tools:
                raise InvalidRequest("tool_choice requires tools", param="tool_choice")
            return ToolUse(tools, tools, at_most_one)
        return ToolUse(() if choice == "none" else tools, (), at_most_one)
