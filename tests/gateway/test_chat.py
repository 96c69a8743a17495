"""POST /v1/chat/completions against workers whose answers are known."""

from typing import Any

import pytest

from core.token_ids import unpack_ids
from tests.gateway.conftest import ANSWERS, TOKENIZER, Gateway
from tests.gateway.model_folder import MAX_POSITION
from tests.gateway.stream import events_of, join, joined_logprobs

pytestmark = pytest.mark.asyncio(loop_scope="module")

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "unicode": {"content": "unicode"},
    "think": {"content": "think"},
    "nothing": {"content": "empty"},
    "parts": {"content": [{"type": "text", "text": "uni"}, {"type": "text", "text": "code"}]},
    "stop": {"content": "unicode", "stop": ["🙂"]},
    "length": {"content": "unicode", "max_completion_tokens": 9},
    "several": {"content": "unicode", "n": 3, "temperature": 1, "seed": 1},
    "logprobs": {"content": "unicode", "logprobs": True, "top_logprobs": 3, "n": 2},
    "logprobs and stop": {"content": "plain", "logprobs": True, "stop": ["sun"]},
}


@pytest.mark.parametrize("step_tokens", [1, 5])
@pytest.mark.parametrize("case", CASES)
async def test_streamed_equals_whole(gateway: Gateway, case: str, step_tokens: int) -> None:
    gateway.cluster.first.plan.step_tokens = step_tokens
    whole = (await gateway.chat(**CASES[case])).json()
    reply = await gateway.chat(**CASES[case], stream=True, stream_options={"include_usage": True})
    choices, usage = join(reply, chat=True)
    assert [(c["message"]["content"], c["finish_reason"]) for c in whole["choices"]] == [
        (joined.text, joined.finish_reason) for joined in choices
    ]
    assert usage == whole["usage"]
    for choice, joined in zip(whole["choices"], choices, strict=True):
        if choice["logprobs"] is None:
            assert not joined.logprobs
        else:
            content = joined_logprobs(joined.logprobs, chat=True)
            assert content == choice["logprobs"]["content"]


async def test_whole_reply(gateway: Gateway) -> None:
    body = (await gateway.chat("plain")).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"] == {
        "role": "assistant", "content": ANSWERS["plain"], "refusal": None,
    }  # fmt: skip


async def test_chunks(gateway: Gateway) -> None:
    events = events_of(await gateway.chat("plain", stream=True))
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert all(set(delta) == {"content"} for delta in deltas[1:-1])


async def test_logprobs_bytes_are_the_content(gateway: Gateway) -> None:
    body = (await gateway.chat("unicode", logprobs=True, top_logprobs=2)).json()
    (choice,) = body["choices"]
    content = choice["logprobs"]["content"]
    spelled = b"".join(bytes(entry["bytes"]) for entry in content)
    assert spelled.decode() == choice["message"]["content"]
    for entry in content:
        assert entry["token"] == bytes(entry["bytes"]).decode("utf-8", "replace")
        assert [set(top) for top in entry["top_logprobs"]] == [{"token", "logprob", "bytes"}] * 2


async def test_the_prompt_is_what_the_template_makes(gateway: Gateway) -> None:
    messages = [
        {"role": "developer", "content": "be good. "},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "plain"},
    ]
    await gateway.post("/v1/chat/completions", messages=messages)
    (request,) = gateway.cluster.first.requests
    prompt = TOKENIZER.decode(list(unpack_ids(request.prompt_token_ids)), skip_special_tokens=False)
    assert prompt == (
        "<|bos|>be good. <|User|>hello<|Assistant|>hi<|eos|><|User|>plain<|Assistant|>"
    )


async def test_output_may_fill_the_context(gateway: Gateway) -> None:
    await gateway.chat("plain")
    (request,) = gateway.cluster.first.requests
    assert request.sampling.max_tokens == MAX_POSITION - len(unpack_ids(request.prompt_token_ids))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 9, "max_completion_tokens": 5}, 5),
    ],
)
async def test_both_names_of_the_limit(
    gateway: Gateway, fields: dict[str, int], expected: int
) -> None:
    body = (await gateway.chat("plain", **fields)).json()
    assert body["usage"]["completion_tokens"] == expected
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "fields",
    [
        {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "tools": []},
        {"response_format": {"type": "text"}, "tool_choice": "none", "modalities": ["text"]},
        {"frequency_penalty": None, "response_format": None, "tools": None, "top_p": None},
        {"store": False, "metadata": {"a": "b"}, "service_tier": "auto", "user": "u"},
        {"safety_identifier": "s", "prompt_cache_key": "k", "reasoning_effort": "none"},
    ],
)
async def test_harmless_fields_are_accepted(gateway: Gateway, fields: dict[str, Any]) -> None:
    reply = await gateway.chat("plain", **fields)
    assert reply.status_code == 200, reply.text


async def test_a_prefix_is_continued(gateway: Gateway) -> None:
    """As DeepSeek's API asks for it; /tokenize counts the same prompt."""
    messages = [
        {"role": "user", "content": "plain"},
        {"role": "assistant", "content": "The cat", "prefix": True},
    ]
    reply = await gateway.post("/v1/chat/completions", messages=messages)
    assert reply.status_code == 200, reply.text
    (request,) = gateway.cluster.first.requests
    prompt = TOKENIZER.decode(list(unpack_ids(request.prompt_token_ids)), skip_special_tokens=False)
    assert prompt == "<|bos|><|User|>plain<|Assistant|>The cat"
    counted = (await gateway.client.post("/tokenize", json={"messages": messages})).json()
    assert counted["tokens"] == list(unpack_ids(request.prompt_token_ids))
