"""No pair of workers can do it: a clear error, in time."""

import asyncio
import json
import time
from collections import deque
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from core.errors import (
    DeadlineExceeded,
    Draining,
    EpserveError,
    InternalError,
    InvalidRequest,
    Mismatch,
    Overloaded,
    TransferError,
    Unavailable,
)
from proto.router_pb2 import AssignRequest
from tests.eventually import eventually
from tests.gateway.conftest import ANSWERS, MODEL, Gateway, running_gateway
from tests.gateway.fake_cluster import FakeCluster, Plan

pytestmark = pytest.mark.asyncio(loop_scope="module")


def both_refuse(cluster: FakeCluster, error: EpserveError, *, times: int) -> None:
    """The next calls of either decode worker."""
    for decode in (cluster.first, cluster.second):
        decode.plan.refusals = deque([error] * times)


@pytest.mark.parametrize("stream", [False, True])
async def test_every_worker_down_before_the_first_token(gateway: Gateway, stream: bool) -> None:
    cluster = gateway.cluster
    cluster.router.down = {cluster.first.epoch, cluster.second.epoch}
    started = time.monotonic()
    reply = await gateway.complete(stream=stream)
    assert time.monotonic() - started < 10
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
        await asyncio.wait_for(cluster.first.started.wait(), 20)
        cluster.router.down = {cluster.first.epoch}
        started = time.monotonic()
        reply = await task
    finally:
        cluster.router.decodes = [cluster.first, cluster.second]
    assert time.monotonic() - started < 10
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
    await eventually(lambda: len(cluster.router.requests) > 1)
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


async def test_attempts_are_bounded(gateway: Gateway, model_folder: Path) -> None:
    cluster = gateway.cluster
    both_refuse(cluster, Unavailable("no KV"), times=20)
    async with running_gateway(cluster, model_folder, max_attempts=4) as patient:
        started = time.monotonic()
        reply = await patient.complete("unicode")
    assert reply.status_code == 503
    assert reply.json()["error"]["message"] == "no KV"
    assert len(cluster.first.requests) + len(cluster.second.requests) == 4
    assert time.monotonic() - started < 10


async def test_what_the_client_is_not_told_is_in_the_log(
    gateway: Gateway, model_folder: Path
) -> None:
    cluster = gateway.cluster
    both_refuse(cluster, Mismatch("of another version"), times=20)
    async with running_gateway(cluster, model_folder, max_attempts=2) as patient:
        with capture_logs() as said:
            reply = await patient.complete("unicode")
    assert reply.status_code == 503
    told = [line for line in said if line.get("message") == "of another version"]
    assert [(line["event"], line.get("reason", line.get("code"))) for line in told] == [
        ("request moves to other workers", "mismatch"),
        ("request is given up", "mismatch"),
        ("request failed", "unavailable"),
    ]


async def test_workers_that_leave_as_planned_are_no_failures(
    gateway: Gateway, model_folder: Path
) -> None:
    cluster = gateway.cluster
    both_refuse(cluster, Draining("leaving"), times=4)
    async with running_gateway(cluster, model_folder, max_attempts=2) as patient:
        reply = await patient.complete("unicode")
    assert reply.json()["choices"][0]["text"] == ANSWERS["unicode"]
    assert len(cluster.first.requests) + len(cluster.second.requests) >= 5


async def test_whoever_left_as_planned_is_waited_for(gateway: Gateway, model_folder: Path) -> None:
    """Longer than for one that failed, but not for ever; the client hears the usual."""
    cluster = gateway.cluster
    cluster.router.down = {cluster.second.epoch}
    cluster.first.plan.refusals = deque([Draining("leaving")] * 1000)
    bounds = {"failover_seconds": 0.1, "replacement_seconds": 0.8}
    started = time.monotonic()
    async with running_gateway(cluster, model_folder, **bounds) as patient:
        reply = await patient.complete("unicode")
    assert 0.8 < time.monotonic() - started < 10
    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == "unavailable"


async def test_time_without_a_pair_is_bounded(gateway: Gateway) -> None:
    cluster = gateway.cluster
    both_refuse(cluster, Unavailable("no KV"), times=20)
    started = time.monotonic()
    reply = await gateway.complete("unicode")
    assert reply.status_code == 503
    assert time.monotonic() - started < 10


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
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("refused_by", ["router", "worker"])
async def test_full_for_one_choice_while_the_client_has_tokens_of_another(
    gateway: Gateway, refused_by: str
) -> None:
    cluster = gateway.cluster
    has_tokens = asyncio.Event()
    refusals = deque([Overloaded("full")] * 4)

    async def refuse_second(request: AssignRequest) -> None:
        if request.request_id.endswith("-1"):
            await has_tokens.wait()
            if refused_by == "worker":
                if refusals:
                    cluster.first.plan.refusals.append(refusals.popleft())
                    cluster.second.plan.refusals.append(refusals.popleft())
            elif refusals:
                raise refusals.popleft()

    cluster.router.before = refuse_second
    body = {"model": MODEL, "prompt": "unicode", "max_tokens": 200, "n": 2, "temperature": 0}
    stream = gateway.client.stream("POST", "/v1/completions", json=body | {"stream": True})
    async with stream as reply:
        events = reply.aiter_lines()
        lines = [await anext(events)]
        has_tokens.set()
        lines += [line async for line in events if line]
    assert not refusals
    assert lines.pop() == "data: [DONE]"
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    assert choices[0]["index"] == 0
    for index in range(2):
        text = "".join(choice["text"] for choice in choices if choice["index"] == index)
        assert text == ANSWERS["unicode"]


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
    assert 0.25 < time.monotonic() - started < 10


async def test_deadline_in_mid_stream(gateway: Gateway) -> None:
    for seconds in ("0.5", "3", "20"):  # time enough for the first tokens, on whatever machine
        gateway.cluster.first.plan.hang_after = 3
        reply = await timed_out(gateway, seconds, stream=True)
        if reply.status_code == 200:
            break
    assert reply.status_code == 200
    assert '"code":"deadline_exceeded"' in reply.text.split("\n\n")[-2]


async def test_deadline_at_the_router(gateway: Gateway) -> None:
    gateway.cluster.router.hang = True
    for seconds in ("0.5", "3", "20"):
        reply = await timed_out(gateway, seconds)
        assert reply.status_code == 504
        if gateway.cluster.router.requests:
            break
    await asyncio.wait_for(gateway.cluster.router.cancelled.wait(), 20)
