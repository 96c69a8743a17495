"""Items that a conversation is made of in OpenAI's Responses API, as they are sent in. Replies'
items are among them, so that clients can send those back."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter

from gateway.requests.request_body import ClosedModel, Items

Nothing = Annotated[list[Any], Field(max_length=0)]
Status = Literal["in_progress", "completed", "incomplete"]


class Item(ClosedModel):
    id: str | None = None
    status: Status | None = None


class InputText(ClosedModel):
    type: Literal["input_text"]
    text: str


class OutputText(ClosedModel):
    type: Literal["output_text"]
    text: str
    annotations: Nothing | None = None
    logprobs: Nothing | None = None


Part = Annotated[InputText | OutputText, Field(discriminator="type")]


class MessageItem(Item):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[Part]
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(Item):
    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1, max_length=64)
    arguments: str


class FunctionOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1)
    output: str | Items[InputText]


class SummaryText(ClosedModel):
    type: Literal["summary_text"]
    text: str


class ReasoningText(ClosedModel):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Item):
    """Encrypted thoughts are another server's: they cannot be read here."""

    type: Literal["reasoning"]
    summary: Items[SummaryText] | None = None
    content: Items[ReasoningText] | None = None
    encrypted_content: None = None


def _with_type(item: object) -> object:
    """A message may leave it out."""
    return {"type": "message", **item} if isinstance(item, dict) else item


AnyItem = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem
InputItem = Annotated[Annotated[AnyItem, Field(discriminator="type")], BeforeValidator(_with_type)]
ITEMS: TypeAdapter[list[AnyItem]] = TypeAdapter(list[InputItem])
