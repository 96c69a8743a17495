"""Workers that fail: the client sees every token once, or a clear error in time."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.errors import (
    Cancelled,
    DeadlineExceeded,
    EpserveError,
    InternalError,
    InvalidRequest,
    Mismatch,
    Overloaded,
    TransferError,
    Unavailable,
)
from tests.gateway.conftest import ANSWERS, MODEL, TOKENIZER, Gateway, running_gateway, tokens_of
from tests.gateway.fake_cluster import FakeCluster, Plan
from tests.gateway.model_folder import EOS_ID
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


# ---- nothing lost, nothing repeated


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
    first.plan = Plan(fail_after=5, error=Unavailable("gone"))
    reply = await gateway.complete("unicode", max_tokens=20)
    (before,), (after,) = first.requests, second.requests
    assert list(after.output_token_ids) == ANSWER_IDS[:5]
    assert after.prompt_token_ids == before.prompt_token_ids
    assert after.sampling == before.sampling
    assert after.request_id == before.request_id + ".1"
    assert reply.json()["usage"]["completion_tokens"] == 20
    initial, again = gateway.cluster.router.requests
    assert list(again.exclude_epochs) == [first.epoch]
    assert again.num_prompt_tokens == initial.num_prompt_tokens + 5
    assert (initial.max_new_tokens, again.max_new_tokens) == (20, 15)


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


async def test_a_move_is_counted(gateway: Gateway) -> None:
    async def moves() -> float:
        text = (await gateway.client.get("/metrics")).text
        name = 'epserve_gateway_moves_total{reason="unavailable"} '
        lines = [line for line in text.splitlines() if line.startswith(name)]
        return float(lines[0].removeprefix(name)) if lines else 0.0

    before = await moves()
    gateway.cluster.first.plan = Plan(fail_after=4, error=Unavailable("gone"))
    await gateway.complete("unicode")
    assert await moves() == before + 1


# ---- giving up


@pytest.mark.parametrize("stream", [False, True])
async def test_every_worker_down_before_the_first_token(gateway: Gateway, stream: bool) -> None:
    cluster = gateway.cluster
    cluster.router.down = {cluster.first.epoch, cluster.second.epoch}
    started = time.monotonic()
    reply = await gateway.complete(stream=stream)
    assert time.monotonic() - started < 2
    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == "unavailable"
    assert int(reply.headers["retry-after"]) >= 1


async def test_every_worker_down_in_mid_stream(gateway: Gateway) -> None:
    cluster = gateway.cluster
    cluster.first.plan = Plan(fail_after=6, error=Unavailable("gone"))
    cluster.router.decodes = [cluster.first]
    cluster.router.down = set()
    cluster.second.plan = Plan()
    try:
        task = asyncio.create_task(gateway.complete("unicode", stream=True))
        await asyncio.wait_for(cluster.first.started.wait(), 5)
        cluster.router.down = {cluster.first.epoch}
        started = time.monotonic()
        reply = await task
    finally:
        cluster.router.decodes = [cluster.first, cluster.second]
    assert time.monotonic() - started < 2.5
    assert reply.status_code == 200
    *events, last, _ = reply.text.split("\n\n")
    assert last.startswith('data: {"error":{')
    assert '"code":"unavailable"' in last
    assert "[DONE]" not in reply.text
    assert len(events) >= 1


async def test_a_pair_that_comes_back_in_time(gateway: Gateway) -> None:
    cluster = gateway.cluster
    cluster.router.down = {cluster.first.epoch, cluster.second.epoch}
    task = asyncio.create_task(gateway.complete("unicode"))
    await asyncio.sleep(0.4)
    cluster.router.down.clear()
    assert (await task).json()["choices"][0]["text"] == ANSWERS["unicode"]


async def test_the_only_pair_failed_once(gateway: Gateway) -> None:
    """Excluded for a moment, then asked again: there is no other, and it lives."""
    cluster = gateway.cluster
    cluster.router.down = {cluster.second.epoch}
    cluster.first.plan.refusals = deque([TransferError("hiccup")])
    reply = await gateway.complete("unicode")
    assert reply.json()["choices"][0]["text"] == ANSWERS["unicode"]
    assert len(cluster.first.requests) == 2


async def test_attempts_are_bounded(gateway: Gateway) -> None:
    cluster = gateway.cluster
    for decode in (cluster.first, cluster.second):
        decode.plan.refusals = deque([Unavailable("no KV")] * 20)
    started = time.monotonic()
    reply = await gateway.complete("unicode")
    assert reply.status_code == 503
    assert reply.json()["error"]["message"] == "no KV"
    assert len(cluster.first.requests) + len(cluster.second.requests) == 4
    assert time.monotonic() - started < 2


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequest("can never fit", param="prompt"), 400),
        (InternalError("broken"), 500),
        (DeadlineExceeded("too late"), 504),
    ],
)
async def test_what_is_not_tried_again(gateway: Gateway, error: EpserveError, status: int) -> None:
    gateway.cluster.first.plan.refusals = deque([error])
    reply = await gateway.complete("unicode")
    assert reply.status_code == status
    assert reply.json()["error"]["message"] == error.message
    assert not gateway.cluster.second.requests


# ---- full workers


async def test_full_worker_another_has_room(gateway: Gateway) -> None:
    gateway.cluster.first.plan.refusals = deque([Overloaded("full")])
    reply = await gateway.complete("unicode")
    assert reply.status_code == 200
    assert len(gateway.cluster.second.requests) == 1
    assert list(gateway.cluster.router.requests[1].exclude_epochs) == [gateway.cluster.first.epoch]


async def test_both_full(gateway: Gateway) -> None:
    for decode in (gateway.cluster.first, gateway.cluster.second):
        decode.plan.refusals = deque([Overloaded("full", retry_after_seconds=4)])
    reply = await gateway.complete("unicode")
    assert reply.status_code == 429
    assert reply.headers["retry-after"] == "4"
    assert len(gateway.cluster.router.requests) == 2


async def test_the_only_one_is_full(gateway: Gateway) -> None:
    """Full is 429 even though the router then knows no pair at all (503)."""
    cluster = gateway.cluster
    cluster.router.down = {cluster.second.epoch}
    cluster.first.plan.refusals = deque([Overloaded("full")])
    started = time.monotonic()
    reply = await gateway.complete("unicode")
    assert reply.status_code == 429
    assert time.monotonic() - started < 1


# ---- deadlines


async def timed_out(gateway: Gateway, seconds: str, **body: Any) -> httpx.Response:
    return await gateway.client.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": "unicode", "max_tokens": 200} | body,
        headers={"x-request-timeout": seconds},
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_deadline_before_the_first_token(gateway: Gateway, stream: bool) -> None:
    gateway.cluster.first.plan.hang_after = 0
    started = time.monotonic()
    reply = await timed_out(gateway, "0.3", stream=stream)
    assert reply.status_code == 504
    assert reply.json()["error"]["code"] == "deadline_exceeded"
    assert 0.25 < time.monotonic() - started < 1.5


async def test_deadline_in_mid_stream(gateway: Gateway) -> None:
    gateway.cluster.first.plan.hang_after = 3
    reply = await timed_out(gateway, "0.3", stream=True)
    assert reply.status_code == 200
    assert '"code":"deadline_exceeded"' in reply.text.split("\n\n")[-2]


async def test_deadline_at_the_router(gateway: Gateway) -> None:
    gateway.cluster.router.hang = True
    reply = await timed_out(gateway, "0.3")
    assert reply.status_code == 504
    await asyncio.wait_for(gateway.cluster.router.cancelled.wait(), 1)


# ---- processes that are really gone


@asynccontextmanager
async def running_cluster(folder: Path) -> AsyncIterator[tuple[FakeCluster, Gateway]]:
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        running_gateway(cluster, folder) as gateway,
    ):
        yield cluster, gateway


async def test_sockets_that_are_gone(model_folder: Path) -> None:
    async with running_cluster(model_folder) as (cluster, gateway):
        cluster.first.plan.step_seconds = 0.02
        task = asyncio.create_task(gateway.complete("unicode", stream=True))
        await asyncio.wait_for(cluster.first.started.wait(), 5)
        await asyncio.sleep(0.1)
        await cluster.first.server.stop(0)
        (choice,), _ = join(await task, chat=False)
        assert choice.text == ANSWERS["unicode"]
        assert cluster.second.requests[0].output_token_ids
        # The router still names the dead one: refused connection, then the other.
        reply = await gateway.complete("unicode")
        assert reply.json()["choices"][0]["text"] == ANSWERS["unicode"]


async def test_a_restarted_worker_is_another_peer(model_folder: Path) -> None:
    async with running_cluster(model_folder) as (cluster, gateway):
        cluster.router.decodes = [cluster.first]
        assert (await gateway.complete("unicode")).status_code == 200
        address = cluster.first.server.address
        await cluster.first.server.stop(0)
        cluster.first.epoch = "epoch-restarted"
        await cluster.first.start(address)
        reply = await gateway.complete("unicode")
        assert reply.json()["choices"][0]["text"] == ANSWERS["unicode"]


async def test_router_restart(model_folder: Path) -> None:
    async with running_cluster(model_folder) as (cluster, gateway):
        address = cluster.router.server.address
        cluster.first.plan.step_seconds = 0.02
        running = asyncio.create_task(gateway.complete("unicode"))
        await asyncio.wait_for(cluster.first.started.wait(), 5)
        await cluster.router.server.stop(0)
        task = asyncio.create_task(gateway.complete("unicode"))
        await asyncio.sleep(0.4)
        await cluster.router.start(address)
        # What runs needs no router; what is new waits for it.
        assert (await running).json()["choices"][0]["text"] == ANSWERS["unicode"]
        assert (await task).json()["choices"][0]["text"] == ANSWERS["unicode"]


async def test_router_gone(model_folder: Path) -> None:
    async with running_cluster(model_folder) as (cluster, gateway):
        await cluster.router.server.stop(0)
        started = time.monotonic()
        reply = await gateway.complete("unicode")
        assert reply.status_code == 503
        assert time.monotonic() - started < 2.5
        async with asyncio.timeout(5):
            while (await gateway.client.get("/health")).status_code == 200:
                await asyncio.sleep(0.05)
