"""The Decode service over gRPC: peers that fail, clients that leave, at each point."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from core.errors import (
    Cancelled,
    DeadlineExceeded,
    EpserveError,
    InternalError,
    InvalidRequest,
    Mismatch,
    Overloaded,
    Unavailable,
)
from rpc.client import to_error
from tests.decode_worker.scripted import (
    NUM_PAGES,
    Cluster,
    cluster,
    collect,
    failure,
    ids,
    until,
)


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path, quarantine_lease_seconds=0.4) as running:
        yield running


# ---- what fails

PREFILL_ERRORS = [
    (Overloaded("full", retry_after_seconds=3), Overloaded, ""),
    (InvalidRequest("no", param="token_ids"), InvalidRequest, ""),
    (Mismatch("other epoch"), Mismatch, "prefill-epoch"),
    (Unavailable("leaving"), Unavailable, "prefill-epoch"),
    (Unavailable("other", failed_epoch="x"), Unavailable, "x"),
    (InternalError("bug"), InternalError, ""),
    (Cancelled("server stops"), Unavailable, "prefill-epoch"),
]


@pytest.mark.parametrize("kv", ["none", "some", "all"])
@pytest.mark.parametrize(
    ("raised", "kind", "epoch"), PREFILL_ERRORS, ids=lambda value: str(value)[:20]
)
async def test_an_error_of_prefill_ends_the_request_with_it(
    both: Cluster, kv: str, raised: EpserveError, kind: type[EpserveError], epoch: str
) -> None:
    both.script.kv, both.script.error = kv, raised
    error = await failure(both.decode.Generate(both.request(), timeout=60))
    assert type(error) is kind
    assert error.failed_epoch == epoch
    assert error.message == raised.message
    await both.quiet()
    # What may still be written to was confirmed to be left alone.
    assert len(both.prefill.aborts) == (0 if kv == "all" else 1)


async def test_a_defect_ends_the_request_too(
    both: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a secret of the worker")

    monkeypatch.setattr("decode_worker.prefill_legs.prefilled_of", broken)
    error = await failure(both.decode.Generate(both.request(), timeout=60))
    assert type(error) is InternalError
    assert "secret" not in error.message
    await both.quiet()


async def test_prefill_that_dies_in_the_call_is_named_at_once(both: Cluster) -> None:
    both.script.kv, both.script.hold = "some", asyncio.Event()
    call = asyncio.create_task(failure(both.decode.Generate(both.request(), timeout=60)))
    await both.prefill.called.wait()
    began = asyncio.get_running_loop().time()
    await both.kill_prefill()
    error = await call
    assert asyncio.get_running_loop().time() - began < 30
    assert isinstance(error, Unavailable)
    assert error.failed_epoch == "prefill-epoch"
    # Its pages are held for the lease, then they are free.
    assert both.front.ranks[0].state.pool.counts().quarantined == 2
    await both.quiet()
    assert asyncio.get_running_loop().time() - began > 0.4


async def test_those_that_wait_for_pages_hear_of_a_dead_prefill_at_once(tmp_path: Path) -> None:
    async with cluster(tmp_path, quarantine_lease_seconds=60) as both:
        both.script.kv, both.script.hold = "some", asyncio.Event()
        long = {"prompt_token_ids": [5] * 50, "sampling": {"max_tokens": 5}}
        calls = [
            asyncio.create_task(
                failure(both.decode.Generate(both.request(f"r{n}", **long), timeout=60))
            )
            for n in range(6)
        ]
        await until(lambda: both.service.num_accepted_total == 6)
        await until(lambda: both.prefill.calls)
        assert len(both.prefill.calls) < 6
        began = asyncio.get_running_loop().time()
        await both.kill_prefill()
        errors = await asyncio.gather(*calls)
        assert asyncio.get_running_loop().time() - began < 30
        assert {error.failed_epoch for error in errors} == {"prefill-epoch"}
        # One that comes later, from a router that does not know yet, does not wait either.
        error = await asyncio.wait_for(failure(both.decode.Generate(both.request("late"))), 20)
        assert error.failed_epoch == "prefill-epoch"
        # When the address answers again, nothing is held against it.
        await both.restart_prefill()
        await both.quiet()
        responses = await collect(both.decode.Generate(both.request("new"), timeout=60))
        assert len(ids(responses)) == 5


async def test_prefill_that_dies_between_reply_and_kv_is_noticed(both: Cluster) -> None:
    both.script.kv = "none"
    call = asyncio.create_task(failure(both.decode.Generate(both.request(), timeout=60)))
    await until(lambda: both.front.ranks[0].state.awaits_kv)
    began = asyncio.get_running_loop().time()
    await both.kill_prefill()
    error = await call
    assert asyncio.get_running_loop().time() - began < 30
    assert error.failed_epoch == "prefill-epoch"
    await both.quiet()


async def test_prefill_that_dies_after_its_kv_has_landed_harms_nobody(both: Cluster) -> None:
    request = both.request(sampling={"max_tokens": 58})
    call = both.decode.Generate(request, timeout=60)
    responses = [await call.read()]
    await both.kill_prefill()
    responses += await collect(call)
    assert len(ids(responses)) == 58
    await both.quiet()


async def test_a_restarted_prefill_worker_frees_the_pages_of_the_old_one(tmp_path: Path) -> None:
    async with cluster(tmp_path, quarantine_lease_seconds=60) as both:
        both.script.kv, both.script.hold = "some", asyncio.Event()
        call = asyncio.create_task(failure(both.decode.Generate(both.request(), timeout=60)))
        await both.prefill.called.wait()
        await both.kill_prefill()
        await call
        await asyncio.sleep(0.1)
        assert both.front.ranks[0].state.pool.num_free == NUM_PAGES - 2
        await both.restart_prefill()
        await both.quiet()


async def test_a_worker_that_does_not_confirm_keeps_the_pages_out_of_use(both: Cluster) -> None:
    both.script.kv, both.script.error = "some", InternalError("bug")
    both.script.abort_error = InternalError("another bug")
    await failure(both.decode.Generate(both.request(), timeout=60))
    await asyncio.sleep(0.8)  # twice the lease: it is connected, so that it may still write
    assert both.front.ranks[0].state.pool.counts().quarantined == 2
    both.script.abort_error = None
    await both.quiet()


async def test_prefill_that_was_never_there(both: Cluster) -> None:
    await both.kill_prefill()
    error = await failure(both.decode.Generate(both.request(), timeout=60))
    assert isinstance(error, Unavailable)
    assert error.failed_epoch == "prefill-epoch"
    await both.quiet()


async def test_kv_that_never_comes_fails_within_its_bound(tmp_path: Path) -> None:
    async with cluster(tmp_path, kv_arrival_seconds=0.2) as both:
        both.script.kv = "some"
        error = await failure(both.decode.Generate(both.request(), timeout=60))
        assert isinstance(error, Unavailable)
        assert error.failed_epoch == "prefill-epoch"
        assert "has not arrived" in error.message
        await both.quiet()
        assert len(both.prefill.aborts) == 1


async def test_a_preempted_request_whose_prefill_is_refused_may_carry_on_elsewhere(
    both: Cluster,
) -> None:
    request = {"prompt_token_ids": list(range(20, 40)), "sampling": {"max_tokens": 28}}
    calls = [both.decode.Generate(both.request(f"r{n}", **request), timeout=60) for n in range(4)]
    both.front.ranks[0].step_seconds = 0.05  # pages shall not run out before
    firsts = [await call.read() for call in calls]
    both.script.error = Overloaded("full")
    both.front.ranks[0].step_seconds = 0.002
    results = await asyncio.gather(*(collect(call) for call in calls), return_exceptions=True)
    errors = [to_error(each) for each in results if isinstance(each, grpc.aio.AioRpcError)]
    assert errors
    assert all(isinstance(error, Unavailable) for error in errors)
    assert all(error.failed_epoch == "prefill-epoch" for error in errors)
    for first, rest in zip(firsts, results, strict=True):
        if isinstance(rest, list):
            assert len(ids([first, *rest])) == 28
    await both.quiet()


async def test_a_dying_worker_fails_what_is_open(both: Cluster) -> None:
    both.script.hold = asyncio.Event()
    call = asyncio.create_task(failure(both.decode.Generate(both.request(), timeout=60)))
    await both.prefill.called.wait()
    both.service.fail_all(Unavailable("rank 0 is gone", failed_epoch="decode-epoch"))
    error = await asyncio.wait_for(call, 20)
    assert error.failed_epoch == "decode-epoch"
    await both.quiet()
    assert both.service.num_open == 0


# ---- who goes away

Reach = Callable[[Cluster, Any], Awaitable[object]]


async def _unheard(both: Cluster, call: Any) -> None:
    both.front.ranks[0].deaf = True
    await until(lambda: both.service.num_accepted_total)


async def _prefilling(both: Cluster, call: Any) -> None:
    await both.prefill.called.wait()


async def _awaiting_kv(both: Cluster, call: Any) -> None:
    await until(lambda: both.front.ranks[0].state.awaits_kv)


async def _streaming(both: Cluster, call: Any) -> None:
    await call.read()
    await call.read()


POINTS: dict[str, tuple[Reach, str, bool]] = {
    # how to get there, what prefill writes, whether its call hangs
    "unheard": (_unheard, "all", False),
    "prefilling, no KV": (_prefilling, "none", True),
    "prefilling, some KV": (_prefilling, "some", True),
    "prefilling, all KV": (_prefilling, "all", True),
    "prefilled, no KV": (_awaiting_kv, "none", False),
    "prefilled, some KV": (_awaiting_kv, "some", False),
    "streaming": (_streaming, "all", False),
}


@pytest.mark.parametrize("how", ["cancel", "deadline"])
@pytest.mark.parametrize("point", POINTS)
async def test_leaving_at_any_point_clears_both_legs(both: Cluster, point: str, how: str) -> None:
    reach, kv, hangs = POINTS[point]
    both.script.kv = kv
    both.script.hold = asyncio.Event() if hangs else None
    timeout = 0.3 if how == "deadline" else 9
    # The context is 64 tokens: streaming does not end by itself before the deadline.
    call = both.decode.Generate(both.request(sampling={"max_tokens": 58}), timeout=timeout)
    await reach(both, call)
    if how == "cancel":
        call.cancel()
    elif point == "streaming":
        both.front.ranks[0].deaf = True  # or it would be done in time
    if how == "deadline":
        assert isinstance(await failure(call), DeadlineExceeded)
    await until(lambda: both.service._num_streams == 0)
    both.front.ranks[0].deaf = False
    await both.quiet()
    if hangs:
        await until(lambda: both.prefill.cancelled == [both.prefill.calls[0].attempt_id])
    outcome = "cancelled" if how == "cancel" else "deadline_exceeded"
    assert both.metric("epserve_worker_requests_total", outcome=outcome) == 1
    # The worker is as good as new.
    both.script.kv, both.script.hold = "all", None
    assert len(ids(await collect(both.decode.Generate(both.request(), timeout=60)))) == 5


async def test_the_deadline_is_handed_on(both: Cluster) -> None:
    await collect(both.decode.Generate(both.request(), timeout=50))
    (seconds,) = both.prefill.seconds_left
    assert seconds is not None
    assert 30 < seconds < 50.1


async def test_the_same_request_may_come_again_before_the_old_one_is_cleared(
    both: Cluster,
) -> None:
    both.front.ranks[0].deaf = True
    first = both.decode.Generate(both.request(), timeout=60)
    await until(lambda: both.service.num_accepted_total == 1)
    first.cancel()
    second = asyncio.create_task(collect(both.decode.Generate(both.request(), timeout=60)))
    await until(lambda: both.service.num_accepted_total == 2)
    both.front.ranks[0].deaf = False
    assert len(ids(await second)) == 5
    await both.quiet()


async def test_a_storm_of_requests_and_cancellations_leaves_nothing(both: Cluster) -> None:
    async def one(number: int) -> None:
        call = both.decode.Generate(
            both.request(f"r{number}", sampling={"max_tokens": 20}), timeout=60
        )
        try:
            for _ in range(number % 5):
                await call.read()
            if number % 3:
                await asyncio.sleep(0.002 * (number % 7))
                call.cancel()
            else:
                await collect(call)
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            return

    for begin in range(0, 120, 8):
        both.script.kv = ("all", "late", "some")[begin % 3] if begin % 2 else "late"
        await asyncio.gather(*(one(number) for number in range(begin, begin + 8)))
    await both.quiet()
    assert both.front.ranks[0].state.pool.num_free == NUM_PAGES
