"""`echo`, prompt log-probabilities and `best_of` of completions."""

from typing import Any

import pytest

from core.errors import Unavailable
from core.token_ids import unpack_ids
from tests.gateway.conftest import ANSWERS, TOKENIZER, Gateway
from tests.gateway.model_folder import BOS_ID
from tests.gateway.stream import join, joined_logprobs

pytestmark = pytest.mark.asyncio(loop_scope="module")

IDS = TOKENIZER.encode("unicode naïve").ids
CASES: list[tuple[Any, str]] = [
    ("plain naïve — 日本", "plain naïve — 日本"),
    ("plain <|User|>", "plain <|User|>"),
    (IDS, "unicode naïve"),
    ([BOS_ID, *IDS], "unicode naïve"),
]


@pytest.mark.parametrize(("prompt", "text"), CASES)
async def test_echo(gateway: Gateway, prompt: Any, text: str) -> None:
    answer = ANSWERS["unicode" if "unicode" in text else "plain"]
    body = (await gateway.complete(prompt, echo=True)).json()
    assert body["choices"][0]["text"] == text + answer
    (joined,), _ = join(await gateway.complete(prompt, echo=True, stream=True), chat=False)
    assert joined.text == text + answer


@pytest.mark.parametrize("max_tokens", [0, 1, 5, 200])
@pytest.mark.parametrize(("prompt", "text"), CASES)
async def test_echo_with_logprobs(
    gateway: Gateway, prompt: Any, text: str, max_tokens: int
) -> None:
    fields = {"echo": True, "logprobs": 2, "max_tokens": max_tokens}
    body = (await gateway.complete(prompt, **fields)).json()
    (choice,) = body["choices"]
    (request,) = gateway.cluster.first.requests
    assert (request.sampling.prompt_logprobs, request.sampling.top_prompt_logprobs) == (True, 2)
    num_prompt = len(unpack_ids(request.prompt_token_ids))
    logprobs = choice["logprobs"]
    assert len({len(values) for values in logprobs.values()}) == 1
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:num_prompt] == [
        -token_id / 16 for token_id in unpack_ids(request.prompt_token_ids)[1:]
    ]
    assert None not in logprobs["token_logprobs"][1:]
    assert choice["text"].startswith(text)
    if max_tokens < 10:
        assert choice["finish_reason"] == "length"
        assert len(logprobs["tokens"]) == num_prompt + max_tokens
        assert body["usage"]["completion_tokens"] == max_tokens
    # Whole tokens stand where they are said to, the prompt's and those behind it.
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith(("bytes:", "<|bos")):
            assert choice["text"][offset : offset + len(token)] == token

    reply = await gateway.complete(prompt, **fields, stream=True)
    (joined,), _ = join(reply, chat=False)
    assert joined.text == choice["text"]
    assert joined_logprobs(joined.logprobs, chat=False) == logprobs


async def test_nothing_to_generate(gateway: Gateway) -> None:
    body = (await gateway.complete("plain", echo=True, max_tokens=0)).json()
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("plain", "length")
    assert choice["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 0


async def test_echo_of_several(gateway: Gateway) -> None:
    body = (await gateway.complete(["plain", "unicode"], echo=True, n=2, logprobs=0)).json()
    texts = [choice["text"] for choice in body["choices"]]
    expected = ["plain" + ANSWERS["plain"]] * 2 + ["unicode" + ANSWERS["unicode"]] * 2
    assert texts == expected


async def test_a_moved_request_echoes_once(gateway: Gateway) -> None:
    undisturbed = (await gateway.complete("plain", echo=True, logprobs=1)).json()
    gateway.cluster.router.reset()
    gateway.cluster.first.plan.fail_after = 4
    gateway.cluster.first.plan.error = Unavailable("lost it")
    moved = (await gateway.complete("plain", echo=True, logprobs=1)).json()
    assert moved["choices"] == undisturbed["choices"]
    (request,) = gateway.cluster.second.requests
    assert len(unpack_ids(request.output_token_ids)) == 4
    assert not request.sampling.prompt_logprobs


async def test_best_of(gateway: Gateway) -> None:
    # The fake's sampled choices begin with a letter that depends on the seed, its
    # log-probability falling with the letter.
    fields = {"temperature": 1, "seed": 3, "max_tokens": 5}
    every = (await gateway.complete("plain", n=6, **fields)).json()
    texts = [choice["text"] for choice in every["choices"]]
    gateway.cluster.router.reset()
    best = (await gateway.complete("plain", n=2, best_of=6, **fields)).json()
    assert [choice["text"] for choice in best["choices"]] == sorted(texts)[:2]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in best["choices"])
    assert best["usage"]["completion_tokens"] == 30
    assert all(request.sampling.logprobs for request in gateway.cluster.first.requests)
