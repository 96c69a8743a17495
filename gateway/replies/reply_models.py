"""What is answered, for the OpenAPI document. Replies are put together by hand, for speed; the
tests hold them against these models."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class ReplyModel(BaseModel):
    """A field with a default may be absent."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorObject(ReplyModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(ReplyModel):
    error: ErrorObject


class PromptTokensDetails(ReplyModel):
    cached_tokens: int


class CompletionTokensDetails(ReplyModel):
    reasoning_tokens: int | None = None
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class UsageObject(ReplyModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    prompt_cache_hit_tokens: int
    prompt_cache_miss_tokens: int
    completion_tokens_details: CompletionTokensDetails | None = None


class TopLogprob(ReplyModel):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ReplyModel):
    content: list[ContentLogprob]
    refusal: None
    reasoning_content: list[ContentLogprob] | None = None


class CalledFunction(ReplyModel):
    name: str
    arguments: str


class MadeToolCall(ReplyModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ReplyMessage(ReplyModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[MadeToolCall] | None = None


class PromptLogprob(ReplyModel):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class EndedChoice(ReplyModel):
    """As vLLM tells it: what the client asked for that ended the output, and its tokens."""

    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatChoice(EndedChoice):
    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(ReplyModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageObject
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionLogprobs(ReplyModel):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(EndedChoice):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(ReplyModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageObject


class ModelObject(ReplyModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(ReplyModel):
    object: Literal["list"]
    data: list[ModelObject]


class TokenizeReply(ReplyModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(ReplyModel):
    prompt: str


class VersionReply(ReplyModel):
    version: str


class HealthReply(ReplyModel):
    status: Literal["ok"]
