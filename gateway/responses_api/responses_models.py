"""What /v1/responses answers, for the OpenAPI document."""

from typing import Any, Literal

from gateway.replies.reply_models import ReplyModel


class OutputTextPart(ReplyModel):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class ReasoningPart(ReplyModel):
    type: Literal["reasoning_text"]
    text: str


class OutputItem(ReplyModel):
    id: str
    status: Literal["completed", "incomplete"]


class OutputMessage(OutputItem):
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputTextPart]


class OutputReasoning(OutputItem):
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningPart]


class OutputCall(OutputItem):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ResponseError(ReplyModel):
    code: str
    message: str


class IncompleteDetails(ReplyModel):
    reason: Literal["max_output_tokens"]


class InputTokensDetails(ReplyModel):
    cached_tokens: int
    cache_write_tokens: int


class ResponseTokensDetails(ReplyModel):
    reasoning_tokens: int


class ResponseUsage(ReplyModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: ResponseTokensDetails
    total_tokens: int


class ReasoningEcho(ReplyModel):
    effort: str | None
    summary: str | None


class ResponseReply(ReplyModel):
    """Much of it repeats the request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete"]
    background: Literal[False]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningEcho
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage
    user: str | None


class DeletedResponse(ReplyModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]
