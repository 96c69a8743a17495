"""Bodies that are small to send and would take long to refuse, or to serve: no other request may
wait for them."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from pydantic import ValidationError

from core.errors import InvalidRequest
from gateway.grammar.json_schema_check import check_schema
from gateway.requests.chat_request import MAX_MESSAGES, ChatRequest
from gateway.requests.completion_request import CompletionRequest
from gateway.requests.request_body import MAX_PARTS, RequestModel
from gateway.requests.tokenize_request import DetokenizeRequest, TokenizeRequest
from tests.gateway.conftest import MODEL, Gateway
from tests.gateway.model_folder import MAX_POSITION

HI = {"role": "user", "content": "hi"}
MANY = 5000


@pytest.mark.parametrize("end", ["string", "a0"])
def test_a_long_chain_of_references(end: str) -> None:
    chain: dict[str, Any] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(MANY)}
    chain[f"a{MANY}"] = {"type": "string"} if end == "string" else {"$ref": f"#/$defs/{end}"}
    began = time.process_time()
    if end == "string":
        check_schema({"$defs": chain, "$ref": "#/$defs/a0"}, "guided_json")
    else:
        with pytest.raises(InvalidRequest, match="leads back"):
            check_schema({"$defs": chain, "type": "string"}, "guided_json")
    assert time.process_time() - began < 2  # walked along from each of its members: minutes


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionRequest, {"model": MODEL, "prompt": [None] * MANY}),
        (CompletionRequest, {"model": MODEL, "prompt": [[1.5]] * MANY}),
        (CompletionRequest, {"model": MODEL, "prompt": [[None] * MANY]}),
        (CompletionRequest, {"model": MODEL, "prompt": "a", "stop": [1] * MANY}),
        (CompletionRequest, {"model": MODEL, "prompt": "a", "stop_token_ids": [-1] * MANY}),
        (CompletionRequest, {"model": MODEL, "prompt": "a", "guided_choice": [1] * MANY}),
        (CompletionRequest,
         {"model": MODEL, "prompt": "a", "logit_bias": {f"a{i}": 1 for i in range(MANY)}}),
        (ChatRequest, {"model": MODEL, "messages": [1] * MANY}),
        (ChatRequest, {"model": MODEL, "messages": [HI | {"content": [1] * MANY}]}),
        (ChatRequest, {"model": MODEL, "messages": [HI | {"tool_calls": [1] * MANY}]}),
        (ChatRequest, {"model": MODEL, "messages": [HI], "tools": [1] * MANY}),
        (TokenizeRequest, {"messages": [1] * MANY}),
        (TokenizeRequest, {"messages": [HI], "tools": [1] * MANY}),
        (DetokenizeRequest, {"tokens": [-1] * MANY}),
    ],
)  # fmt: skip
def test_faults_are_not_counted_to_the_end(model: type[RequestModel], body: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() < 10


@pytest.mark.asyncio(loop_scope="module")
async def test_too_many_messages(gateway: Gateway) -> None:
    messages = [HI] * (MAX_MESSAGES + 1)
    for path, body in (
        ("/v1/chat/completions", {"model": MODEL, "messages": messages}),
        ("/tokenize", {"messages": messages}),
    ):
        reply = await gateway.client.post(path, json=body)
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] == "messages"


def text_parts(kind: str, count: int) -> list[dict[str, str]]:
    return [{"type": kind, "text": "a"}] * count


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("surplus", [0, 1])
@pytest.mark.parametrize("num_messages", [1, 2])
async def test_parts_of_messages_are_counted_together(
    gateway: Gateway, num_messages: int, surplus: int
) -> None:
    """The last that is allowed is refused only by what comes later: the model's context."""
    count = MAX_PARTS // num_messages
    assert count * num_messages == MAX_PARTS

    def messages(content: Callable[[int], Any]) -> list[Any]:
        first = [HI | {"content": content(count)}] * (num_messages - 1)
        return [*first, HI | {"content": content(count + surplus)}]

    texts = messages(partial(text_parts, "text"))
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    of_calls = [{"role": "assistant", "tool_calls": calls * (MAX_PARTS + surplus)}]
    blocks = text_parts("text", MAX_PARTS + surplus - 1)
    result = {"type": "tool_result", "tool_use_id": "1", "content": blocks}
    results = [HI | {"content": [result]}]
    for path, param, body in (
        ("/v1/chat/completions", "messages", {"messages": texts}),
        ("/v1/chat/completions", "messages", {"messages": of_calls}),
        ("/tokenize", "messages", {"messages": texts}),
        ("/v1/messages", "messages", {"messages": texts, "max_tokens": 1}),
        ("/v1/messages", "messages", {"messages": results, "max_tokens": 1}),
        ("/v1/responses", "input", {"input": messages(partial(text_parts, "input_text"))}),
    ):
        reply = await gateway.client.post(path, json={"model": MODEL} | body)
        is_refused = f"more than {MAX_PARTS} parts and calls in all" in reply.text
        assert is_refused == bool(surplus), (path, reply.text[:500])
        if is_refused:
            assert reply.status_code == 400
            assert param in reply.json()["error"].get("param", reply.text)


@pytest.mark.asyncio(loop_scope="module")
async def test_choices_are_counted_before_prompts_are_looked_at(gateway: Gateway) -> None:
    too_long = [5] * (MAX_POSITION + 1)
    for body, param in (
        ({"prompt": [too_long] * 129}, "prompt"),
        ({"prompt": [too_long] * 65, "n": 2}, "n"),
    ):
        reply = await gateway.client.post("/v1/completions", json={"model": MODEL} | body)
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] == param
