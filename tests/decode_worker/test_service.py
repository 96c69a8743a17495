"""The Decode service over gRPC: what it answers, and what it refuses."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from core.errors import (
    EpserveError,
    InvalidRequest,
    Mismatch,
    Overloaded,
    Unavailable,
)
from core.token_ids import unpack_ids
from proto import generate_pb2, router_pb2
from tests.decode_worker.scripted import (
    EOS,
    FIRST_TOKEN,
    Cluster,
    cluster,
    collect,
    failure,
    ids,
)
from tests.eventually import eventually

# ---- what goes well


async def test_tokens_come_in_order_and_nothing_is_left(both: Cluster) -> None:
    both.script.num_cached_tokens = 4
    responses = await collect(both.decode.Generate(both.request(), timeout=60))
    assert ids(responses) == [FIRST_TOKEN + step for step in range(5)]
    assert responses[0].num_cached_tokens == 4
    assert responses[0].tokens[0].logprob == -0.5
    reasons = [response.finish_reason for response in responses]
    assert reasons[-1] == generate_pb2.FINISH_REASON_LENGTH
    assert not any(reasons[:-1])
    await both.quiet()
    (asked,) = both.prefill.calls
    assert (asked.request_id, asked.model, asked.prefill_epoch) == ("r", "m", "prefill-epoch")
    assert list(unpack_ids(asked.token_ids)) == [10, 11, 12, 13, 14, 15]
    assert asked.num_prompt_tokens == 6
    assert asked.kv_target.kv_fingerprint == "f"


async def test_kv_that_lands_after_the_reply_starts_the_request(both: Cluster) -> None:
    both.script.kv = "late"
    responses = await collect(both.decode.Generate(both.request(), timeout=60))
    assert len(ids(responses)) == 5
    await both.quiet()


async def test_a_request_goes_on_behind_the_tokens_it_has(both: Cluster) -> None:
    request = both.request(output_token_ids=[50, 51, 52])
    responses = await collect(both.decode.Generate(request, timeout=60))
    assert ids(responses) == [53, 54]
    assert list(unpack_ids(both.prefill.calls[0].token_ids)) == [10, 11, 12, 13, 14, 15, 50, 51, 52]
    assert both.prefill.calls[0].num_prompt_tokens == 6


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
async def test_log_probabilities_of_the_prompt_come_once(both: Cluster, max_tokens: int) -> None:
    sampling = {"max_tokens": max_tokens, "prompt_logprobs": True, "top_prompt_logprobs": 2}
    request = both.request(sampling=sampling, priority=-7)
    responses = await collect(both.decode.Generate(request, timeout=60))
    assert ids(responses) == [FIRST_TOKEN + step for step in range(max_tokens)]
    assert [one.token_id for one in responses[0].prompt_logprobs] == [10, 11, 12, 13, 14, 15]
    assert not any(response.prompt_logprobs for response in responses[1:])
    assert responses[-1].finish_reason == generate_pb2.FINISH_REASON_LENGTH
    assert both.prefill.calls[0].sampling.top_prompt_logprobs == 2
    assert both.prefill.calls[0].priority == -7
    await both.quiet()


async def test_nothing_at_all_cannot_be_asked_for(both: Cluster) -> None:
    request = both.request(sampling={"max_tokens": 0})
    error = await failure(both.decode.Generate(request, timeout=60))
    assert isinstance(error, InvalidRequest)
    assert not both.prefill.calls


async def test_the_first_token_may_be_the_last(both: Cluster) -> None:
    both.script.token_id = EOS
    responses = await collect(both.decode.Generate(both.request(), timeout=60))
    assert ids(responses) == [EOS]
    assert responses[-1].finish_reason == generate_pb2.FINISH_REASON_STOP
    await both.quiet()


async def test_many_at_once_also_under_preemption(both: Cluster) -> None:
    # Four at a time of up to 12 pages each want more than the 32 there are.
    request = {"prompt_token_ids": list(range(20, 40)), "sampling": {"max_tokens": 28}}
    calls = [
        collect(both.decode.Generate(both.request(f"r{n}", **request), timeout=60))
        for n in range(7)
    ]
    for responses in await asyncio.gather(*calls):
        assert ids(responses) == [FIRST_TOKEN + step for step in range(28)]
    assert both.front.ranks[0].state.totals.preemptions > 0
    await both.quiet()


async def test_ranks_share_the_load(tmp_path: Path) -> None:
    async with cluster(tmp_path, num_ranks=2) as both:
        both.script.hold = asyncio.Event()
        calls = [
            asyncio.create_task(collect(both.decode.Generate(both.request(f"r{n}"), timeout=60)))
            for n in range(6)
        ]
        await eventually(lambda: len(both.prefill.calls) == 6)
        agents = [call.kv_target.agent for call in both.prefill.calls]
        assert agents.count(b"agent0") == 3
        assert [both.service.load(rank).num_open for rank in range(2)] == [3, 3]
        both.script.hold.set()
        ranks = {(await call)[0].rank for call in calls}
        assert ranks == {0, 1}
        await both.quiet()


# ---- what is refused

REFUSED: list[tuple[dict[str, Any], type[EpserveError], str]] = [
    ({"prompt_token_ids": []}, InvalidRequest, "prompt_token_ids"),
    ({"prompt_token_ids": [256]}, InvalidRequest, "prompt_token_ids"),
    ({"prompt_token_ids": b"12345"}, InvalidRequest, "prompt_token_ids"),
    ({"output_token_ids": b"1"}, InvalidRequest, "output_token_ids"),
    ({"output_token_ids": [999]}, InvalidRequest, "output_token_ids"),
    ({"output_token_ids": [1] * 5}, InvalidRequest, "output_token_ids"),
    ({"sampling": {"max_tokens": 0}}, InvalidRequest, "max_tokens"),
    ({"sampling": {"max_tokens": 59}}, InvalidRequest, "max_tokens"),
    ({"sampling": {"min_tokens": 6}}, InvalidRequest, "min_tokens"),
    ({"sampling": {"temperature": float("nan")}}, InvalidRequest, "temperature"),
    ({"sampling": {"temperature": -1}}, InvalidRequest, "temperature"),
    ({"sampling": {"top_p": 1.5}}, InvalidRequest, "top_p"),
    ({"sampling": {"min_p": -0.1}}, InvalidRequest, "min_p"),
    ({"sampling": {"top_logprobs": 129}}, InvalidRequest, "top_logprobs"),
    ({"sampling": {"stop_token_ids": [256]}}, InvalidRequest, "stop_token_ids"),
    ({"sampling": {"stop_token_ids": [1] * 257}}, InvalidRequest, "stop_token_ids"),
    ({"request_id": ""}, InvalidRequest, "request_id"),
    ({"prefill": router_pb2.WorkerRef()}, InvalidRequest, "prefill"),
    ({"prefill": router_pb2.WorkerRef(address="no port")}, InvalidRequest, "prefill"),
]


@pytest.mark.parametrize(("values", "kind", "param"), REFUSED, ids=lambda value: str(value)[:40])
async def test_bad_requests_are_refused_by_field(
    both: Cluster, values: dict[str, Any], kind: type[EpserveError], param: str
) -> None:
    error = await failure(both.decode.Generate(both.request(**{"request_id": "r", **values})))
    assert isinstance(error, kind)
    assert error.param == param
    assert both.service.num_open == 0
    assert both.prefill.calls == []


async def test_prompt_and_output_must_fit_the_context(both: Cluster) -> None:
    error = await failure(both.decode.Generate(both.request(sampling={"max_tokens": 59})))
    assert error.status.code == "context_length_exceeded"
    assert "64" in error.message
    responses = await collect(both.decode.Generate(both.request(sampling={"max_tokens": 58})))
    assert len(ids(responses)) == 58


async def test_another_epoch_is_refused(both: Cluster) -> None:
    error = await failure(both.decode.Generate(both.request(decode_epoch="older")))
    assert isinstance(error, Mismatch)
    assert error.failed_epoch == "older"


async def test_another_model_is_not_found(both: Cluster) -> None:
    error = await failure(both.decode.Generate(both.request(model="other")))
    assert error.status.grpc == "NOT_FOUND"


async def test_a_draining_or_dead_worker_takes_nothing(both: Cluster) -> None:
    both.front.draining = True
    error = await failure(both.decode.Generate(both.request()))
    assert error.failed_epoch == "decode-epoch"
    both.front.draining = False
    both.front.died.set_result("rank 0 is gone")
    error = await failure(both.decode.Generate(both.request()))
    assert isinstance(error, Unavailable)


async def test_a_full_queue_refuses_at_once_and_has_room_again_later(both: Cluster) -> None:
    both.script.hold = asyncio.Event()
    calls = [
        asyncio.create_task(collect(both.decode.Generate(both.request(f"r{n}"), timeout=60)))
        for n in range(8)
    ]
    await eventually(lambda: both.service.num_accepted_total == 8)
    error = await failure(both.decode.Generate(both.request("r8")))
    assert isinstance(error, Overloaded)
    assert error.retry_after_seconds is not None
    both.script.hold.set()
    await asyncio.gather(*calls)
    assert ids(await collect(both.decode.Generate(both.request("r9"), timeout=60)))
    await both.quiet()


async def test_metrics_move(both: Cluster) -> None:
    await collect(both.decode.Generate(both.request(), timeout=60))
    await failure(both.decode.Generate(both.request(model="other")))
    await both.quiet()
    assert both.metric("epserve_worker_requests_total", outcome="ok") == 1
    assert both.metric("epserve_worker_requests_total", outcome="not_found") == 1
    assert both.metric("epserve_worker_time_to_first_token_seconds_count") == 1
    assert both.metric("epserve_worker_inter_token_latency_seconds_count") == 4
    assert both.metric("epserve_worker_e2e_request_latency_seconds_count") == 1
    assert both.metric("epserve_worker_queue_time_seconds_count") == 1
