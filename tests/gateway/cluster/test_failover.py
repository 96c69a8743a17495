"""Workers that fail: the client sees every token once, as if nothing had happened."""

from collections import deque
from typing import Any

import httpx
import pytest

from core.errors import (
    Cancelled,
    Draining,
    EpserveError,
    Mismatch,
    TransferError,
    Unavailable,
)
from core.token_ids import unpack_ids
from tests.gateway.conftest import ANSWERS, TOKENIZER, Gateway
from tests.gateway.fake_cluster import Plan
from tests.gateway.stream import join

pytestmark = pytest.mark.asyncio(loop_scope="module")

ANSWER_IDS = TOKENIZER.encode(ANSWERS["unicode"]).ids
NUM_TOKENS = len(ANSWER_IDS) + 1  # EOS

FIELDS: dict[str, Any] = {"logprobs": 2, "stop": ["never there"], "n": 2}


def comparable(reply: httpx.Response) -> Any:
    body = reply.json()
    return body["choices"], body["usage"]


async def undisturbed(gateway: Gateway, **body: Any) -> Any:
    reply = await gateway.complete(**{"prompt": "unicode"} | FIELDS | body)
    expected = comparable(reply)
    gateway.cluster.router.reset()
    return expected


@pytest.mark.parametrize("num_before", [0, 1, 2, 17, NUM_TOKENS - 1])
@pytest.mark.parametrize(
    "error",
    [
        Unavailable("lost its KV"),
        Unavailable("prefill died", failed_epoch="epoch-prefill"),
        TransferError("pages did not arrive"),
        Mismatch("another epoch"),
        Cancelled("stopped"),
        None,  # ends without a finish reason
    ],
    ids=["unavailable", "prefill", "transfer", "mismatch", "cancelled", "no reason"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_moves_after_any_token(
    gateway: Gateway, error: EpserveError | None, num_before: int, stream: bool
) -> None:
    expected = await undisturbed(gateway, temperature=1, seed=3)
    first = gateway.cluster.first
    first.plan = Plan(fail_after=num_before, error=error, step_tokens=3)
    body = {"temperature": 1, "seed": 3, "stream": stream} | FIELDS
    if error is not None and error.failed_epoch:
        # The decode worker is innocent: it gets the request again.
        reply = await with_healing(gateway, body)
    else:
        reply = await gateway.complete("unicode", **body)
    assert reply.status_code == 200, reply.text
    if stream:
        choices, _ = join(reply, chat=False)
        assert [(c.text, c.finish_reason) for c in choices] == [
            (c["text"], c["finish_reason"]) for c in expected[0]
        ]
    else:
        assert comparable(reply) == expected


async def with_healing(gateway: Gateway, body: dict[str, Any]) -> httpx.Response:
    """Each choice's first call on the first worker fails, the next one there works."""
    first = gateway.cluster.first
    plan, seen = first.plan, set()
    original = first._responses

    def responses(request: Any) -> Any:
        choice = request.request_id.partition(".")[0]
        first.plan = plan if choice not in seen else Plan()
        seen.add(choice)
        return original(request)

    first._responses = responses  # type: ignore[method-assign]
    try:
        return await gateway.complete("unicode", **body)
    finally:
        first._responses = original  # type: ignore[method-assign]


async def test_what_the_next_worker_is_told(gateway: Gateway) -> None:
    first, second = gateway.cluster.first, gateway.cluster.second
    first.plan = Plan(fail_after=5, error=Unavailable("gone"), step_seconds=0.02)
    reply = await gateway.complete("unicode", max_tokens=20)
    (before,), (after,) = first.requests, second.requests
    assert list(unpack_ids(after.output_token_ids)) == ANSWER_IDS[:5]
    assert after.prompt_token_ids == before.prompt_token_ids
    assert after.sampling == before.sampling
    assert after.request_id == before.request_id + ".1"
    assert reply.json()["usage"]["completion_tokens"] == 20
    initial, again = gateway.cluster.router.requests
    assert list(again.exclude_epochs) == [first.epoch]
    assert again.num_prompt_tokens == initial.num_prompt_tokens + 5
    assert (initial.max_new_tokens, again.max_new_tokens) == (20, 15)
    assert initial.waited_seconds == 0
    assert 0.05 < again.waited_seconds < 20  # its place at the router: that of its first call


async def test_blames_whom_the_worker_names(gateway: Gateway) -> None:
    gateway.cluster.first.plan.refusals = deque([Unavailable("it", failed_epoch="epoch-prefill")])
    assert (await gateway.complete()).status_code == 200
    assert list(gateway.cluster.router.requests[1].exclude_epochs) == ["epoch-prefill"]


async def test_many_moves_in_one_stream(gateway: Gateway) -> None:
    """The limit is on attempts without progress, not on moves."""
    expected = await undisturbed(gateway, n=1)
    for decode in (gateway.cluster.first, gateway.cluster.second):
        decode.plan = Plan(fail_after=1, error=Unavailable("flaky"))
    reply = await gateway.complete("unicode", **FIELDS | {"n": 1})
    assert comparable(reply) == expected
    calls = len(gateway.cluster.first.requests) + len(gateway.cluster.second.requests)
    assert calls == NUM_TOKENS  # the last token brings the finish reason along


@pytest.mark.parametrize(
    ("body", "reason"), [({"max_tokens": 7}, "length"), ({"max_tokens": 200}, "stop")]
)
async def test_the_last_token_came_but_not_the_end(
    gateway: Gateway, body: dict[str, Any], reason: str
) -> None:
    expected = await undisturbed(gateway, n=1, **body)
    gateway.cluster.first.plan.finish = False
    reply = await gateway.complete("unicode", **FIELDS | {"n": 1} | body)
    assert comparable(reply) == expected
    assert reply.json()["choices"][0]["finish_reason"] == reason
    assert not gateway.cluster.second.requests


@pytest.mark.parametrize("bad", [300, 2**32 - 1])
async def test_tokens_that_cannot_be(gateway: Gateway, bad: int) -> None:
    gateway.cluster.first.plan.bad_token_id = bad
    reply = await gateway.complete("unicode")
    assert reply.json()["choices"][0]["text"] == ANSWERS["unicode"]
    assert len(gateway.cluster.second.requests) == 1


async def test_cached_tokens_are_those_of_the_first_attempt(gateway: Gateway) -> None:
    gateway.cluster.first.plan = Plan(num_cached_tokens=2, fail_after=4, error=Unavailable("gone"))
    gateway.cluster.second.plan.num_cached_tokens = 6
    usage = (await gateway.complete("unicode")).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2


@pytest.mark.parametrize("kind", [Unavailable, Draining])
async def test_a_move_is_counted(gateway: Gateway, kind: type[EpserveError]) -> None:
    async def moves() -> float:
        text = (await gateway.client.get("/metrics")).text
        name = f'epserve_gateway_moves_total{{reason="{kind.__name__.lower()}"}} '
        lines = [line for line in text.splitlines() if line.startswith(name)]
        return float(lines[0].removeprefix(name)) if lines else 0.0

    before = await moves()
    gateway.cluster.first.plan = Plan(fail_after=4, error=kind("gone"))
    await gateway.complete("unicode")
    assert await moves() == before + 1
