"""Fields that other engines have: what they ask of workers, and what is told of it."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as TextParams

from core.errors import Unavailable
from core.token_ids import unpack_ids
from gateway.requests.chat_request import ChatRequest
from gateway.requests.completion_request import CompletionRequest
from proto.generate_pb2 import SamplingParams
from scripts.fields_doc import MEANINGS
from tests.gateway.conftest import ANSWERS, TOKENIZER, Gateway, running_gateway
from tests.gateway.fake_cluster import FakeCluster, Plan
from tests.gateway.model_folder import EOS_ID, TEMPLATE, THINK, make_model_folder
from tests.gateway.stream import events_of, join

pytestmark = pytest.mark.asyncio(loop_scope="module")

OPEN, CLOSE = (TOKENIZER.token_to_id(mark) for mark in THINK)
O_ID = TOKENIZER.token_to_id("o")


def sampling_of(gateway: Gateway) -> SamplingParams:
    return gateway.cluster.first.requests[0].sampling


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize("fails_after", [None, 3])
@pytest.mark.parametrize("fields", [{}, {"stop": "日本"}, {"n": 2}])
async def test_token_ids(
    gateway: Gateway, endpoint: str, fails_after: int | None, fields: dict[str, Any]
) -> None:
    ask = getattr(gateway, endpoint)
    whole = (await ask("unicode", return_token_ids=True, **fields)).json()
    gateway.cluster.first.plan = Plan(fail_after=fails_after, error=Unavailable("gone"))
    reply = await ask("unicode", return_token_ids=True, stream=True, **fields)
    prompt = list(unpack_ids(gateway.cluster.first.requests[0].prompt_token_ids))
    for holder in whole["choices"] if endpoint == "complete" else [whole]:
        assert holder["prompt_token_ids"] == prompt
    streamed: dict[int, list[int]] = {}
    for event in events_of(reply):
        (choice,) = event["choices"]
        if choice["index"] not in streamed:
            told = choice if endpoint == "complete" else event
            assert told["prompt_token_ids"] == prompt
        streamed.setdefault(choice["index"], []).extend(choice["token_ids"])
    for choice in whole["choices"]:
        ids = choice["token_ids"]
        assert ids == streamed[choice["index"]]
        expected = [*TOKENIZER.encode(ANSWERS["unicode"]).ids, EOS_ID]
        assert ids == expected[: len(ids)]
        assert ("stop" in fields) == (len(ids) < len(expected))
    assert sum(map(len, streamed.values())) == whole["usage"]["completion_tokens"]


ENDS: list[tuple[dict[str, Any], str | int | None, str]] = [
    ({}, None, ANSWERS["plain"]),
    ({"max_tokens": 3}, None, "The"),
    ({"stop": ["sun", "cat"]}, "cat", "The "),
    ({"stop": ["sun", "cat"], "include_stop_str_in_output": True}, "cat", "The cat"),
    ({"stop": "cat", "no_stop_trim": True}, "cat", "The cat"),
    ({"stop_token_ids": [O_ID]}, O_ID, "The cat and the d"),
    ({"stop_token_ids": [O_ID], "include_stop_str_in_output": True}, O_ID, "The cat and the do"),
    ({"include_stop_str_in_output": True}, None, ANSWERS["plain"]),
    (
        {"include_stop_str_in_output": True, "skip_special_tokens": False},
        None,
        ANSWERS["plain"] + "<|eos|>",
    ),
    ({"prompt": "special"}, None, "ab"),
    ({"prompt": "special", "skip_special_tokens": False}, None, ANSWERS["special"]),
]


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize(("fields", "reason", "text"), ENDS)
async def test_how_it_ends(
    gateway: Gateway, endpoint: str, fields: dict[str, Any], reason: str | int | None, text: str
) -> None:
    fields = fields.copy()
    prompt, is_chat = fields.pop("prompt", "plain"), endpoint == "chat"
    ask = getattr(gateway, endpoint)
    (choice,) = (await ask(prompt, **fields)).json()["choices"]
    assert choice["stop_reason"] == reason
    assert (choice["message"]["content"] if is_chat else choice["text"]) == text
    reply = await ask(prompt, **fields, stream=True)
    assert join(reply, chat=is_chat)[0][0].text == text
    assert events_of(reply)[-1]["choices"][0]["stop_reason"] == reason


async def test_usage_so_far(gateway: Gateway) -> None:
    gateway.cluster.first.plan = Plan(num_cached_tokens=2)
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = await gateway.chat("plain", stream=True, stream_options=options, return_token_ids=True)
    _, *events, last = events_of(reply)
    num_tokens = 0
    for event in events:
        num_tokens += len(event["choices"][0]["token_ids"])
        assert event["usage"]["completion_tokens"] == num_tokens
    final = last["usage"]
    assert final["prompt_cache_hit_tokens"] == 2
    assert final["prompt_cache_miss_tokens"] == final["prompt_tokens"] - 2
    assert events[-1]["usage"] == final


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
async def test_prompt_logprobs(gateway: Gateway, endpoint: str) -> None:
    body = (await getattr(gateway, endpoint)("plain", prompt_logprobs=2)).json()
    told = body["prompt_logprobs"] if endpoint == "chat" else body["choices"][0]["prompt_logprobs"]
    prompt = unpack_ids(gateway.cluster.first.requests[0].prompt_token_ids)
    first, *others = told
    assert first is None
    for token_id, entry in zip(prompt[1:], others, strict=True):
        assert entry[str(token_id)]["logprob"] == -token_id / 16
        assert sorted(one["rank"] or 9 for one in entry.values()) == [1, 2, 9]
    assert sampling_of(gateway).top_prompt_logprobs == 2


async def test_tokens_that_may_or_may_not_come(gateway: Gateway) -> None:
    await gateway.chat("plain", allowed_token_ids=[9, 5], bad_words=["the", " in x"])
    sampling = sampling_of(gateway)
    assert sampling.allowed_token_ids == [9, 5]
    words = [TOKENIZER.decode(list(word.token_ids)) for word in sampling.bad_words]
    assert words == ["the", " the", " in x"]


async def test_a_text_without_special_tokens(gateway: Gateway) -> None:
    await gateway.complete("plain", add_special_tokens=False)
    prompt = unpack_ids(gateway.cluster.first.requests[0].prompt_token_ids)
    assert list(prompt) == TOKENIZER.encode("plain").ids


async def test_thoughts_left_in_the_text(gateway: Gateway) -> None:
    body = (await gateway.chat("think", separate_reasoning=False)).json()
    assert body["choices"][0]["message"]["content"] == ANSWERS["think"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def thinking(
    shared_cluster: FakeCluster, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    """A model whose template opens the thoughts where it is to think."""
    folder = make_model_folder(tmp_path_factory.mktemp("thinking") / "model")
    opens = "{{ '<|Assistant|>' + ('<think>' if thinking else '</think>') }}"
    template = TEMPLATE.replace("{{ '<|Assistant|>' }}", opens)
    (folder / "chat_template.jinja").write_text(template)
    async with running_gateway(shared_cluster, folder) as gateway:
        yield gateway


BUDGETS: list[dict[str, Any]] = [
    {"thinking_budget": 7, "thinking": {"type": "enabled"}},
    {"thinking_token_budget": 7, "chat_template_kwargs": {"thinking": True}},
    {"max_thinking_tokens": 7, "reasoning_effort": "high"},
    {"thinking": {"type": "enabled", "budget_tokens": 7}},
]


async def test_budgets_of_thoughts(gateway: Gateway, thinking: Gateway) -> None:
    for fields in BUDGETS:
        thinking.cluster.router.reset()
        reply = await thinking.chat("plain", **fields, regex="[0-9]+")
        assert reply.status_code == 200, reply.text
        sampling = sampling_of(thinking)
        budget = sampling.thought_budget
        assert (budget.max_tokens, budget.is_open) == (7, True)
        assert (budget.open_token_id, budget.close_token_id) == (OPEN, CLOSE)
        assert sampling.grammar.after_token_id == CLOSE
    thinking.cluster.router.reset()
    body = {"model": "tiny/model", "max_tokens": 20, "messages": [{"role": "user", "content": "a"}]}
    body["thinking"] = {"type": "enabled", "budget_tokens": 9}
    reply = await thinking.client.post("/v1/messages", json=body)
    assert reply.status_code == 200, reply.text
    assert sampling_of(thinking).thought_budget.max_tokens == 9
    thinking.cluster.router.reset()
    await thinking.chat("plain", thinking_budget=7)  # it does not think
    assert not sampling_of(thinking).HasField("thought_budget")
    thinking.cluster.router.reset()
    await gateway.chat("plain", thinking_budget=0)  # the model may begin to
    budget = sampling_of(gateway).thought_budget
    assert (budget.max_tokens, budget.is_open) == (0, False)


async def test_the_page_explains_what_is_not_openais() -> None:
    models = (ChatRequest, CompletionRequest)
    openais = {*ChatParams.__annotations__, *TextParams.__annotations__, "stream"}
    assert {name for model in models for name in model.model_fields} - openais <= {*MEANINGS}
