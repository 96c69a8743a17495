"""Decode workers that drain, and prefill workers that drain behind them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from core.errors import Draining, EpserveError, Unavailable
from engine.server.drain import Drain
from proto import router_pb2
from rpc.client import to_error
from tests.decode_worker.scripted import Cluster, cluster, collect, failure, ids
from tests.eventually import eventually

LONG = {"prompt_token_ids": [5] * 50, "sampling": {"max_tokens": 5}}


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path, quarantine_lease_seconds=60) as running:
        yield running


def drain_of(both: Cluster) -> Drain:
    drain = Drain(both.front.as_worker_front(), both.service)
    both.front.on_change = drain.note_change
    return drain


async def drained(drain: Drain) -> None:
    async with asyncio.timeout(20):
        while not drain.is_drained:
            await asyncio.sleep(0.005)
        drain.note_change()  # a scripted rank does not tell of every page
        await drain.drained()


async def test_open_requests_finish_within_the_grace(both: Cluster) -> None:
    drain = drain_of(both)
    both.front.ranks[0].step_seconds = 0.01
    call = both.decode.Generate(both.request(sampling={"max_tokens": 40}), timeout=40)
    first = await call.read()
    drain.begin(60)
    assert not drain.is_drained
    assert both.service.num_open == 1
    error = await failure(both.decode.Generate(both.request("late")))
    assert type(error) is Draining
    assert len(ids([first, *await collect(call)])) == 40
    await drained(drain)
    assert both.service.num_open == 0


async def test_what_outlives_the_grace_is_handed_over_behind_its_tokens(both: Cluster) -> None:
    drain = drain_of(both)
    both.front.ranks[0].step_seconds = 0.1  # it shall not be done before it is told
    call = both.decode.Generate(both.request(sampling={"max_tokens": 58}), timeout=40)
    tokens = ids([await call.read()])
    drain.begin(0)
    error: EpserveError | None = None
    while error is None:
        try:
            tokens += ids([await call.read()])
        except grpc.aio.AioRpcError as failed:
            error = to_error(failed)
    assert type(error) is Draining
    assert error.failed_epoch == "decode-epoch"
    assert tokens == list(range(100, 100 + len(tokens)))
    await drained(drain)
    await both.quiet()


async def test_pages_that_prefill_still_writes_keep_the_worker(both: Cluster) -> None:
    drain = drain_of(both)
    both.script.kv, both.script.hold = "some", asyncio.Event()
    both.script.abort_error = Unavailable("busy")
    call = asyncio.create_task(failure(both.decode.Generate(both.request(), timeout=40)))
    await both.prefill.called.wait()
    drain.begin(0)
    assert type(await call) is Draining
    assert both.service.num_open == 0
    await eventually(lambda: both.prefill.num_abort_calls > 1)
    assert both.front.ranks[0].state.pool.counts().quarantined
    assert not drain.is_drained
    both.script.abort_error = None
    await drained(drain)
    assert both.prefill.aborts


async def test_undone_it_takes_requests_again(both: Cluster) -> None:
    drain = drain_of(both)
    drain.begin(0)
    await drained(drain)
    drain.undo()
    assert not drain.is_drained
    assert len(ids(await collect(both.decode.Generate(both.request(), timeout=40)))) == 5


@pytest.mark.parametrize("kv", ["none", "some"])
async def test_a_draining_prefill_worker_has_let_go_of_the_pages(both: Cluster, kv: str) -> None:
    both.script.kv = kv
    both.script.error = Draining("leaving", failed_epoch="prefill-epoch")
    error = await failure(both.decode.Generate(both.request(), timeout=40))
    assert type(error) is Draining
    assert error.failed_epoch == "prefill-epoch"
    await both.quiet()
    assert both.prefill.aborts == []  # nothing to ask
    # Should it stay, nothing is held against it.
    both.script.kv, both.script.error = "all", None
    assert len(ids(await collect(both.decode.Generate(both.request("again"), timeout=40)))) == 5


async def test_those_that_wait_for_pages_hear_of_a_draining_prefill_at_once(both: Cluster) -> None:
    both.script.kv, both.script.hold = "none", asyncio.Event()
    calls = [
        asyncio.create_task(failure(both.decode.Generate(both.request(name, **LONG), timeout=40)))
        for name in ("r0", "r1", "r2", "r3", "r4")
    ]
    elsewhere = router_pb2.WorkerRef(address=both.prefill_server.address, epoch="another-epoch")
    other = both.decode.Generate(both.request("other", prefill=elsewhere, **LONG), timeout=40)
    await eventually(lambda: both.service.num_accepted_total == 6)
    await eventually(lambda: both.prefill.calls)
    hold, both.script.error = both.script.hold, Draining("leaving", failed_epoch="prefill-epoch")
    hold.set()
    errors = await asyncio.gather(*calls)
    assert {type(error) for error in errors} == {Draining}
    assert {error.failed_epoch for error in errors} == {"prefill-epoch"}
    with pytest.raises(grpc.aio.AioRpcError):
        await collect(other)
    # Those that had no pages yet never asked it.
    assert len(both.prefill.calls) < 6
    await both.quiet()
