"""The Decode service over gRPC: peers that fail, at each point."""

import asyncio
import socket
from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs

from core.address import parse_address
from core.errors import (
    Cancelled,
    ContextLengthExceeded,
    EpserveError,
    InternalError,
    InvalidRequest,
    Mismatch,
    Overloaded,
    Unavailable,
)
from decode_worker.liveness import Liveness
from rpc.client import to_error
from tests.decode_worker.scripted import (
    NUM_PAGES,
    Cluster,
    cluster,
    collect,
    failure,
    ids,
)
from tests.eventually import eventually

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

    monkeypatch.setattr("decode_worker.prefill_calls.prefilled_of", broken)
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
        await eventually(lambda: both.service.num_accepted_total == 6)
        await eventually(lambda: both.prefill.calls)
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
    await eventually(lambda: both.front.ranks[0].state.awaits_kv)
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


async def test_a_prefill_that_dies_in_vain_is_not_blamed_for_a_later_failure(both: Cluster) -> None:
    both.script.hold = asyncio.Event()
    call = asyncio.create_task(failure(both.decode.Generate(both.request(), timeout=60)))
    await both.prefill.called.wait()
    (rank,), (mine,) = both.front.ranks, both.service._calls.values()
    rank.step_seconds, rank.deaf = 60.0, True
    both.script.hold.set()
    await eventually(lambda: both.service._prefill_calls._prefill_calls[mine.attempt_id].delivered)
    await both.kill_prefill()
    await eventually(lambda: mine.prefill_error is not None)
    rank.deaf = False
    await eventually(lambda: mine.num_sent_tokens > 0)
    text = "no token fits the grammar"
    for message in rank.state._give_up(rank.state.requests[mine.key], "INVALID_ARGUMENT", text):
        both.front.on_message(0, message)
    error = await call
    assert (type(error), error.message) == (InvalidRequest, text)
    rank.step_seconds = 0.002
    await both.quiet()


async def test_a_restarted_prefill_worker_frees_the_pages_of_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode_worker.quarantine.LATE_SECONDS", 0)
    async with cluster(tmp_path, quarantine_lease_seconds=60) as both:
        both.script.kv, both.script.hold = "some", asyncio.Event()
        call = asyncio.create_task(failure(both.decode.Generate(both.request(), timeout=60)))
        await both.prefill.called.wait()
        with capture_logs() as lines:
            await both.kill_prefill()
            await call
            await eventually(lambda: any("confirm" in line["event"] for line in lines))
        assert both.front.ranks[0].state.pool.num_free == NUM_PAGES - 2
        await both.restart_prefill()
        await both.quiet()


async def test_a_worker_that_does_not_confirm_keeps_the_pages_out_of_use(both: Cluster) -> None:
    both.script.kv, both.script.error = "some", InternalError("bug")
    both.script.abort_error = InternalError("another bug")
    await failure(both.decode.Generate(both.request(), timeout=60))
    # Asked for longer than the lease: it is connected, so that it may still write.
    await eventually(lambda: both.prefill.num_abort_calls >= 6)
    assert both.front.ranks[0].state.pool.counts().quarantined == 2
    both.script.abort_error = None
    await both.quiet()


async def test_a_frozen_prefill_worker_keeps_the_pages_out_of_use(
    both: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it goes on, it writes on: for whom the pages are by then would be wrong."""
    answers: list[bool] = []

    async def is_there(self: Liveness) -> bool:
        answers.append(await really_there(self))
        return answers[-1]

    really_there = Liveness.is_there
    monkeypatch.setattr(Liveness, "is_there", is_there)
    both.script.kv, both.script.hold = "some", asyncio.Event()
    call = asyncio.create_task(failure(both.decode.Generate(both.request(), timeout=60)))
    await both.prefill.called.wait()
    await both.kill_prefill()
    with socket.create_server(parse_address(both.prefill_server.address)):  # accepts nobody
        await call
        await eventually(lambda: len(answers) > 1)  # only asked for when the lease is over
        assert both.front.ranks[0].state.pool.counts().quarantined == 2
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


@pytest.mark.parametrize("refusal", [Overloaded("full"), ContextLengthExceeded("too long")])
async def test_a_preempted_request_whose_prefill_is_refused_may_carry_on_elsewhere(
    both: Cluster, refusal: EpserveError
) -> None:
    request = {"prompt_token_ids": list(range(20, 40)), "sampling": {"max_tokens": 28}}
    calls = [both.decode.Generate(both.request(f"r{n}", **request), timeout=60) for n in range(4)]
    both.front.ranks[0].step_seconds = 0.05  # pages shall not run out before
    firsts = [await call.read() for call in calls]
    both.script.error = refusal
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


# ---- what operators read


async def test_a_failed_prefill_is_found_by_the_clients_request_id(both: Cluster) -> None:
    both.script.error = InternalError("the disk is gone")
    with capture_logs() as lines:
        ids_of_client = (("x-request-id", "of the client"),)
        call = both.decode.Generate(both.request("leg"), timeout=60, metadata=ids_of_client)
        await failure(call)
        await both.quiet()
    (line,) = [line for line in lines if line["event"] == "prefill failed"]
    assert (line["request_id"], line["id"]) == ("of the client", "leg")
    ends = {line["method"]: line for line in lines if line["event"] == "call ended"}
    for method in ("Prefill/Prefill", "Decode/Generate"):
        end = ends[f"/epserve.generate.v1.{method}"]
        assert (end["code"], end["reason"]) == ("INTERNAL", "the disk is gone")


async def test_pages_that_wait_for_a_prefill_worker_have_its_name_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode_worker.quarantine.LATE_SECONDS", 0.2)
    async with cluster(tmp_path, quarantine_lease_seconds=60) as both:
        both.script.kv, both.script.hold = "some", asyncio.Event()
        both.script.abort_error = Unavailable("busy")
        with capture_logs() as lines:
            call = both.decode.Generate(both.request(), timeout=60)
            await both.prefill.called.wait()
            call.cancel()
            await eventually(lambda: any("confirm" in line["event"] for line in lines))
            enough = both.prefill.num_abort_calls + 2
            await eventually(lambda: both.prefill.num_abort_calls >= enough)
            both.script.abort_error = None
            await both.quiet()
    (line,) = [line for line in lines if "confirm" in line["event"]]
    assert line["log_level"] == "warning"
    assert line["peer"] == both.prefill_server.address
    assert (line["connected"], line["reason"]) == (True, "UNAVAILABLE: busy")
