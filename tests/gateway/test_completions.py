"""POST /v1/completions against workers whose answers are known."""

from typing import Any

import pytest

from core.hashing import unpack_hashes
from core.token_ids import unpack_ids
from proto.generate_pb2 import GenerateRequest
from tests.gateway.conftest import ANSWERS, MODEL, TOKENIZER, Gateway
from tests.gateway.model_folder import BOS_ID
from tests.gateway.stream import events_of, join, joined_logprobs

pytestmark = pytest.mark.asyncio(loop_scope="module")

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "unicode": {"prompt": "unicode"},
    "think": {"prompt": "think"},
    "nothing": {"prompt": "empty"},
    "token ids": {"prompt": TOKENIZER.encode("unicode").ids},
    "texts": {"prompt": ["plain", "unicode", "think"]},
    "lists of ids": {"prompt": [TOKENIZER.encode(text).ids for text in ("plain", "unicode")]},
    "texts twice": {"prompt": ["plain", "unicode"], "n": 2, "temperature": 1, "seed": 5},
    "stop": {"prompt": "unicode", "stop": "日本語 🙂"},
    "stops": {"prompt": "plain", "stop": ["sun", "cat and the d"]},
    "stop at once": {"prompt": "plain", "stop": ["T"]},
    "stop not there": {"prompt": "plain", "stop": ["The end"]},
    "stop overlapping": {"prompt": "repeat", "stop": "abababc"},
    "stop and min_tokens": {"prompt": "repeat", "stop": "ab", "min_tokens": 7},
    "length": {"prompt": "unicode", "max_tokens": 14},
    "one token": {"prompt": "plain", "max_tokens": 1},
    "default length": {"prompt": "long", "max_tokens": None},
    "stop token": {"prompt": "plain", "stop_token_ids": [TOKENIZER.token_to_id("o")]},
    "ignore_eos": {"prompt": "plain", "ignore_eos": True},
    "logprobs": {"prompt": "unicode", "logprobs": 3},
    "logprobs 0": {"prompt": "unicode", "logprobs": 0},
    "logprobs and stop": {"prompt": "plain", "logprobs": 2, "stop": ["sun"]},
    "sampled": {"prompt": "plain", "temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": -3},
    "several": {"prompt": "plain", "n": 4, "temperature": 1, "seed": 9, "stop": ["cat"]},
}


@pytest.mark.parametrize("step_tokens", [1, 7])
@pytest.mark.parametrize("case", CASES)
async def test_streamed_equals_whole(gateway: Gateway, case: str, step_tokens: int) -> None:
    gateway.cluster.first.plan.step_tokens = step_tokens
    whole = (await gateway.complete(**CASES[case])).json()
    reply = await gateway.complete(
        **CASES[case], stream=True, stream_options={"include_usage": True}
    )
    choices, usage = join(reply, chat=False)
    assert [c["index"] for c in whole["choices"]] == list(range(len(choices)))
    assert [(c["text"], c["finish_reason"]) for c in whole["choices"]] == [
        (joined.text, joined.finish_reason) for joined in choices
    ]
    assert usage == whole["usage"]
    for choice, joined in zip(whole["choices"], choices, strict=True):
        if choice["logprobs"] is None:
            assert not joined.logprobs
        else:
            assert joined_logprobs(joined.logprobs, chat=False) == choice["logprobs"]


async def test_whole_reply(gateway: Gateway) -> None:
    gateway.cluster.first.plan.num_cached_tokens = 3
    reply = await gateway.complete("plain")
    body = reply.json()
    assert reply.headers["content-type"] == "application/json"
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == MODEL
    num_prompt = len(TOKENIZER.encode("plain").ids) + 1  # bos
    num_output = len(TOKENIZER.encode(ANSWERS["plain"]).ids) + 1  # eos
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": 3},
        "prompt_cache_hit_tokens": 3,
        "prompt_cache_miss_tokens": num_prompt - 3,
    }
    (choice,) = body["choices"]
    assert choice == {
        "index": 0, "text": ANSWERS["plain"], "logprobs": None, "finish_reason": "stop",
        "stop_reason": None,
    }  # fmt: skip


async def test_stream_headers_and_order(gateway: Gateway) -> None:
    gateway.cluster.first.plan.step_seconds = 0.002
    reply = await gateway.complete("plain", stream=True)
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    events = events_of(reply)
    assert all("usage" not in event for event in events)
    (last,) = events[-1]["choices"]
    assert (last["index"], last["logprobs"], last["finish_reason"]) == (0, None, "stop")
    assert "".join(event["choices"][0]["text"] for event in events) == ANSWERS["plain"]
    # One token a message, and what waits together is one event: it was really streamed.
    assert len(events) > 2


async def test_usage_of_several_choices(gateway: Gateway) -> None:
    """Each prompt counts once, the output of every choice; cached tokens are the first's."""
    gateway.cluster.first.plan.num_cached_tokens = 2
    body = (await gateway.complete(["plain", "unicode"], n=3, max_tokens=5)).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert body["usage"]["completion_tokens"] == 30
    prompts = [TOKENIZER.encode(text).ids for text in ("plain", "unicode")]
    assert body["usage"]["prompt_tokens"] == sum(len(ids) + 1 for ids in prompts)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 4


async def test_what_workers_are_asked(gateway: Gateway) -> None:
    await gateway.complete(
        "the plain", temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, seed=11, max_tokens=9,
        min_tokens=2, stop_token_ids=[5, 6], ignore_eos=True, logprobs=4,
    )  # fmt: skip
    (request,) = gateway.cluster.first.requests
    assert list(unpack_ids(request.prompt_token_ids)) == [
        BOS_ID,
        *TOKENIZER.encode("the plain").ids,
    ]
    assert list(unpack_ids(request.output_token_ids)) == []
    assert request.model == MODEL
    assert request.prefill.epoch == "epoch-prefill"
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 7)
    assert (sampling.min_p, sampling.seed, sampling.max_tokens) == (0.125, 11, 9)
    assert (sampling.min_tokens, list(sampling.stop_token_ids)) == (2, [5, 6])
    assert (sampling.ignore_eos, sampling.logprobs, sampling.top_logprobs) == (True, True, 4)
    (assigned,) = gateway.cluster.router.requests
    assert assigned.num_prompt_tokens == len(unpack_ids(request.prompt_token_ids))
    assert assigned.max_new_tokens == 9


async def test_penalties_and_biases(gateway: Gateway) -> None:
    fields = {"frequency_penalty": 0.5, "presence_penalty": -1.5, "repetition_penalty": 1.25}
    biases = {"9": -100, "5": 2.5}
    await gateway.complete("plain", **fields, logit_bias=biases)
    await gateway.chat("plain", **fields, logit_bias=biases)
    await gateway.complete("plain")
    *penalised, plain = (request.sampling for request in gateway.cluster.first.requests)
    for sampling in penalised:
        assert {name: getattr(sampling, name) for name in fields} == fields
        assert [(one.token_id, one.bias) for one in sampling.logit_bias] == [(5, 2.5), (9, -100)]
    assert (plain.frequency_penalty, plain.presence_penalty) == (0, 0)
    assert plain.repetition_penalty in (0, 1)
    assert not plain.logit_bias


async def test_the_router_is_told_of_full_pages(gateway: Gateway) -> None:
    ids = list(range(4, 54))  # three pages of 16 and a bit
    await gateway.complete(ids)
    await gateway.complete([*ids[:32], *ids[:18]])
    first, second = (unpack_hashes(r.prefix_hashes) for r in gateway.cluster.router.requests)
    assert len(first) == len(second) == 3
    assert first[:2] == second[:2]
    assert first[2] != second[2]


async def test_defaults_are_openais(gateway: Gateway) -> None:
    await gateway.post("/v1/completions", prompt="plain", temperature=None)
    sampling = gateway.cluster.first.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert sampling.max_tokens == 16
    assert not sampling.logprobs


async def test_a_tiny_top_p_is_not_none(gateway: Gateway) -> None:
    await gateway.complete(top_p=1e-60)
    assert 0 < gateway.cluster.first.requests[0].sampling.top_p < 1e-30


async def test_top_k_minus_one_is_off(gateway: Gateway) -> None:
    await gateway.complete(top_k=-1)
    assert gateway.cluster.first.requests[0].sampling.top_k == 0


async def seeds(gateway: Gateway, **body: Any) -> list[int]:
    def index(request: GenerateRequest) -> int:
        return int(request.request_id.rpartition("-")[2])

    gateway.cluster.first.requests.clear()
    assert (await gateway.complete(**body)).status_code == 200
    requests = sorted(gateway.cluster.first.requests, key=index)
    return [request.sampling.seed for request in requests]


async def test_seeds(gateway: Gateway) -> None:
    first, *others = await seeds(gateway, n=4, seed=7)
    assert first == 7
    assert len({first, *others}) == 4
    # A choice depends on seed and number alone: not on n, nor on the prompts beside it.
    assert await seeds(gateway, n=2, seed=7) == [first, others[0]]
    assert await seeds(gateway, prompt=["plain", "think"], n=2, seed=7) == [first, others[0]] * 2
    assert await seeds(gateway, seed=-1) == [2**64 - 1]
    random_seeds = [(await seeds(gateway))[0] for _ in range(3)]
    assert len(set(random_seeds)) == 3


async def test_ids_on_all_legs(gateway: Gateway) -> None:
    headers = {"x-request-id": "my-own.id_7"}
    body = {"model": MODEL, "prompt": "plain", "n": 2}
    reply = await gateway.client.post("/v1/completions", json=body, headers=headers)
    assert reply.headers["x-request-id"] == "my-own.id_7"
    assert gateway.cluster.first.request_ids == ["my-own.id_7"] * 2
    ids = {request.request_id for request in gateway.cluster.first.requests}
    assert ids == {f"{reply.json()['id']}-{index}" for index in range(2)}


@pytest.mark.parametrize("value", ["a b", "x" * 129, "é".encode(), "a\tb", ""])
async def test_unsafe_request_ids_are_replaced(gateway: Gateway, value: Any) -> None:
    reply = await gateway.client.get("/version", headers={"x-request-id": value})
    assert reply.headers["x-request-id"].startswith("req-")


async def test_logprobs_have_exact_texts(gateway: Gateway) -> None:
    body = (await gateway.complete("unicode", logprobs=2)).json()
    (choice,) = body["choices"]
    logprobs = choice["logprobs"]
    ids = TOKENIZER.encode(ANSWERS["unicode"]).ids
    assert len(logprobs["tokens"]) == len(ids)
    assert logprobs["token_logprobs"] == [-i / 16 for i in ids]
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert len(top) == 3  # two alternatives and the chosen one
        assert token in top
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert choice["text"][offset : offset + len(token)] == token
    assert any(token.startswith("bytes:\\x") for token in logprobs["tokens"])


async def test_fields_that_change_nothing(gateway: Gateway) -> None:
    reply = await gateway.complete(
        user="me", best_of=1, echo=False, wholly_unknown=None, use_beam_search=False
    )
    assert reply.status_code == 200
