"""The whole prefill worker: its processes, two ranks in one EP group, gRPC and NIXL.

The test is the decode side: it registers a pool, calls, and looks at what lands in it.
"""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path

import grpc
import msgspec
import pytest
import torch

from core.errors import Draining
from core.process import new_epoch
from core.token_ids import pack_ids
from engine.kv.pages import pages_of
from engine.link.kv_notice import decode_notices
from engine.link.messages import (
    KvTarget,
    PageRun,
)
from engine.sampling.sampling_params import Sampling
from engine.server.wire import target_message
from proto import generate_pb2, generate_pb2_grpc, worker_pb2, worker_pb2_grpc
from rpc.client import channel, to_error
from tests.eventually import eventually
from tests.free_ports import free_port
from tests.packed_sampling import params_of
from tests.prefill_worker.one_rank import PAGE, Model, check_kv, tokens
from transfer.nixl_agent import NixlTransfer

NUM_RANKS = 2
MAX_TOKENS = 1024
POOL_PAGES = 512
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
Started = tuple[str, "subprocess.Popen[bytes]"]  # its address
ATTEMPTS = (f"attempt-{number}" for number in count())


@contextmanager
def worker_process(model: Model) -> Iterator[Started]:
    address = f"127.0.0.1:{free_port()}"
    flags = {
        "model": model.folder,
        "served-model-name": "tiny",
        "ranks": NUM_RANKS,
        "threads": 1,
        "listen": address,
        "page-tokens": PAGE,
        "kv-pages": MAX_TOKENS // PAGE,
        "speculative-tokens": 1,
        "chunk-tokens": 2 * PAGE,  # a long prompt takes many steps: time to interfere
    }
    command = [sys.executable, "-m", "prefill_worker"]
    command += [f"--{name}={value}" for name, value in flags.items()]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    try:
        yield address, process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def worker(model: Model) -> Iterator[Started]:
    with worker_process(model) as started:
        yield started


class Receiver:
    """The test's own pool, filled by NIXL."""

    def __init__(self, model: Model) -> None:
        self.cache = model.new_cache(POOL_PAGES)
        self.transfer = NixlTransfer(f"test-{new_epoch()}")
        self.transfer.register(self.cache)
        self.landed: dict[str, list[tuple[int, int]]] = {}  # attempt -> (layer, page index)
        self.next_page = 0

    def reserve(self, num_tokens: int, fingerprint: str) -> KvTarget:
        """Two runs, the second half first; pages are never used twice."""
        num_pages = -(-num_tokens // PAGE)
        first, self.next_page = self.next_page, self.next_page + num_pages
        if self.next_page > POOL_PAGES:
            first, self.next_page = 0, num_pages
        half = num_pages // 2
        runs = [
            PageRun(first=first + half, count=num_pages - half),
            PageRun(first=first, count=half),
        ]
        return KvTarget(
            agent=msgspec.msgpack.encode(self.transfer.describe()),
            runs=tuple(run for run in runs if run.count),
            kv_fingerprint=fingerprint,
        )

    def poll(self) -> None:
        for notification in self.transfer.notifications():
            for notice in decode_notices(notification.message):
                layers = range(notice.first_layer, notice.first_layer + notice.num_layers)
                pages = range(notice.first_page, notice.first_page + notice.num_pages)
                self.landed.setdefault(notice.attempt_id, []).extend(product(layers, pages))

    async def poll_for_ever(self) -> None:
        """As a decode rank does that waits for KV: without it nothing gets past a handshake."""
        while True:
            self.poll()
            await asyncio.sleep(0.0005)

    async def wait_for(self, attempt_id: str, num_layers: int, num_tokens: int) -> None:
        """Until all is announced, each page of each layer once."""
        expected = list(product(range(num_layers), range(-(-num_tokens // PAGE))))
        await eventually(lambda: len(self.landed.get(attempt_id, ())) >= len(expected))
        assert sorted(self.landed[attempt_id]) == expected

    def kv(self, target: KvTarget, num_tokens: int) -> torch.Tensor:
        return self.cache[:, pages_of(target.runs)].flatten(1, 2)[:, :num_tokens]


@pytest.fixture(scope="module")
def receiver(model: Model) -> Iterator[Receiver]:
    receiver = Receiver(model)
    yield receiver
    receiver.transfer.close()


@dataclass
class Client:
    """A connected worker, as decode knows it."""

    prefill: "generate_pb2_grpc.PrefillAsyncStub"
    worker: "worker_pb2_grpc.WorkerAsyncStub"
    status: worker_pb2.WorkerStatus
    receiver: Receiver

    def request(
        self, token_ids: Sequence[int], sampling: Sampling | None = None
    ) -> tuple[generate_pb2.PrefillRequest, KvTarget]:
        target = self.receiver.reserve(len(token_ids), self.status.kv_fingerprint)
        attempt_id = next(ATTEMPTS)
        request = generate_pb2.PrefillRequest(
            request_id=f"request of {attempt_id}",
            attempt_id=attempt_id,
            model="tiny",
            token_ids=pack_ids(token_ids),
            num_prompt_tokens=len(token_ids),
            sampling=params_of(sampling or Sampling()),
            kv_target=target_message(target),
            prefill_epoch=self.status.identity.epoch,
        )
        return request, target

    async def watch_until(
        self, condition: Callable[[worker_pb2.WorkerStatus], bool]
    ) -> worker_pb2.WorkerStatus:
        stream = self.worker.WatchStatus(worker_pb2.WatchStatusRequest(), wait_for_ready=True)
        async with asyncio.timeout(240):
            async for status in stream:
                if condition(status):
                    stream.cancel()
                    return status
        raise AssertionError("the stream has ended")


def is_quiet(status: worker_pb2.WorkerStatus) -> bool:
    """No request is known, and every page of every rank is free (or merely cached)."""
    return all(
        rank.pages_free == rank.pages_total and not rank.num_running and not rank.num_waiting
        for rank in status.ranks
    )


def num_steps(status: worker_pb2.WorkerStatus) -> int:
    return max(rank.num_steps for rank in status.ranks)


@asynccontextmanager
async def connect(address: str, receiver: Receiver) -> AsyncIterator[Client]:
    polling = asyncio.create_task(receiver.poll_for_ever())
    async with channel(address) as peer:
        stubs = generate_pb2_grpc.PrefillStub(peer), worker_pb2_grpc.WorkerStub(peer)
        client = Client(*stubs, worker_pb2.WorkerStatus(), receiver)
        client.status = await client.watch_until(lambda status: status.ready)
        yield client
    polling.cancel()


@pytest.fixture
async def client(worker: Started, receiver: Receiver) -> AsyncIterator[Client]:
    async with connect(worker[0], receiver) as client:
        yield client


async def code_of(call: "grpc.aio.UnaryUnaryCall[object, object]") -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


async def test_kv_lands_in_the_target_and_equals_one_forward_pass(
    client: Client, model: Model
) -> None:
    """Alone (the other rank idles), then many at once, then with the prefix known."""
    prompts = [tokens(75)], [tokens(5 + 9 * i, seed=i) for i in range(10)], [tokens(75)]
    cached: list[int] = []
    for batch in prompts:
        requests = [client.request(prompt, Sampling(logprobs=True)) for prompt in batch]
        replies = await asyncio.gather(
            *(client.prefill.Prefill(r, timeout=60) for r, _ in requests)
        )
        for prompt, (request, target), reply in zip(batch, requests, replies, strict=True):
            num_layers = model.config.num_kv_layers
            await client.receiver.wait_for(request.attempt_id, num_layers, len(prompt))
            kv, logits = model.reference(prompt)
            landed = client.receiver.kv(target, len(prompt))
            check_kv(landed, kv)
            assert reply.first_token.token_id == int(logits.argmax())
            best = float(logits.log_softmax(0).max())
            assert reply.first_token.logprob == pytest.approx(best, abs=1e-4)
            assert reply.num_cached_tokens + reply.num_computed_tokens == len(prompt)
            cached.append(reply.num_cached_tokens)
    assert cached[0] == 0
    assert cached[-1] == 72
    status = await client.watch_until(is_quiet)
    assert all(rank.num_steps > 0 for rank in status.ranks)
    assert status.num_accepted_total >= 12


async def test_requests_that_cannot_be_right_get_their_status(client: Client) -> None:
    def changed(**fields: object) -> generate_pb2.PrefillRequest:
        request, _ = client.request(tokens(20))
        for name, value in fields.items():
            setattr(request, name, pack_ids(value) if isinstance(value, list) else value)
        return request

    nan, _ = client.request(tokens(20), Sampling(temperature=float("nan")))
    other, _ = client.request(tokens(20))
    other.kv_target.kv_fingerprint = "another model"
    short, _ = client.request(tokens(20))
    del short.kv_target.runs[0]
    invalid, mismatch = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION
    cases = [
        (changed(prefill_epoch="0123456789abcdef"), mismatch),
        (changed(model="gpt-5"), grpc.StatusCode.NOT_FOUND),
        (changed(request_id=""), invalid),
        (changed(attempt_id=""), invalid),
        (changed(token_ids=[]), invalid),
        (changed(token_ids=[5] * (MAX_TOKENS + 1), num_prompt_tokens=3), invalid),
        (changed(token_ids=[260]), invalid),
        (changed(token_ids=pack_ids(tokens(20)) + b"x"), invalid),
        (changed(num_prompt_tokens=21), invalid),
        (changed(num_prompt_tokens=0), invalid),
        (nan, invalid),
        (other, mismatch),
        (short, invalid),
        (generate_pb2.PrefillRequest(), mismatch),
    ]
    for request, expected in cases:
        assert await code_of(client.prefill.Prefill(request, timeout=30)) == expected, request
    assert await code_of(client.prefill.Abort(generate_pb2.AbortRequest())) == invalid
    await client.watch_until(is_quiet)


async def test_an_abort_that_overtakes_its_prefill_refuses_it(client: Client) -> None:
    request, _ = client.request(tokens(20))
    abort = generate_pb2.AbortRequest(attempt_id=request.attempt_id)
    assert not (await client.prefill.Abort(abort, timeout=30)).was_known
    call = client.prefill.Prefill(request, timeout=30)
    assert await code_of(call) == grpc.StatusCode.CANCELLED


async def test_an_abort_ends_the_call_and_nothing_lands_any_more(client: Client) -> None:
    num_in_time = 0
    for delay_seconds in (0.0, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128):
        request, target = client.request(tokens(400, seed=int(delay_seconds * 1000)))
        call = client.prefill.Prefill(request, timeout=60)
        await asyncio.sleep(delay_seconds)
        abort = generate_pb2.AbortRequest(attempt_id=request.attempt_id)
        first, second = await asyncio.gather(*[client.prefill.Abort(abort, timeout=30)] * 2)
        after = client.receiver.kv(target, 400).clone()
        assert first.was_known == second.was_known
        if not call.done() or await call.code() != grpc.StatusCode.OK:
            assert await code_of(call) == grpc.StatusCode.CANCELLED
            num_in_time += 1
        await client.watch_until(is_quiet)
        assert torch.equal(client.receiver.kv(target, 400), after)
    assert num_in_time


@pytest.mark.parametrize("how", ["cancel", "disconnect", "deadline"])
async def test_a_client_that_goes_away_aborts_its_attempt(
    client: Client, worker: Started, how: str
) -> None:
    for number in range(9):  # whoever runs these processes may let us come too late, but not always
        before = num_steps(await client.watch_until(is_quiet))
        request, _ = client.request(tokens(1000, seed=100 * number + len(how)))  # 63 steps
        async with channel(worker[0]) as peer:
            stub = generate_pb2_grpc.PrefillStub(peer)
            call = stub.Prefill(request, timeout=0.05 if how == "deadline" else 60)
            if how != "deadline":
                await client.watch_until(lambda status, before=before: num_steps(status) > before)
            if how == "cancel":
                call.cancel()
            if how != "disconnect":
                with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                    await call
        if num_steps(await client.watch_until(is_quiet)) < before + 60:
            return
    raise AssertionError("no attempt of nine was aborted")


async def test_the_same_attempt_twice_at_once_is_refused(client: Client) -> None:
    request, _ = client.request(tokens(300, seed=7))
    first = client.prefill.Prefill(request, timeout=60)
    await asyncio.sleep(0)
    second = client.prefill.Prefill(request, timeout=60)
    assert await code_of(second) == grpc.StatusCode.INVALID_ARGUMENT
    reply = await first
    assert reply.num_cached_tokens + reply.num_computed_tokens == 300


async def test_what_outlives_the_grace_is_let_go_of_before_its_caller_hears(
    client: Client,
) -> None:
    before = num_steps(await client.watch_until(is_quiet))
    request, target = client.request(tokens(1000, seed=11))  # 63 steps
    call = client.prefill.Prefill(request, timeout=60)
    await client.watch_until(lambda status: num_steps(status) > before)
    await client.worker.Drain(worker_pb2.DrainRequest(grace_seconds=0), timeout=30)
    try:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        after = client.receiver.kv(target, 1000).clone()
        error = to_error(caught.value)
        assert type(error) is Draining
        assert error.failed_epoch == client.status.identity.epoch
        status = await client.watch_until(lambda status: status.drained)
        assert is_quiet(status)
        assert status.num_open == 0
        assert num_steps(status) < before + 60
        late, _ = client.request(tokens(20))
        assert await code_of(client.prefill.Prefill(late, timeout=30)) == UNAVAILABLE
        # Whoever means an earlier process is told so: blaming this one would not help.
        late.prefill_epoch = "0123456789abcdef"
        mismatch = grpc.StatusCode.FAILED_PRECONDITION
        assert await code_of(client.prefill.Prefill(late, timeout=30)) == mismatch
        abort = generate_pb2.AbortRequest(attempt_id=request.attempt_id)
        assert not (await client.prefill.Abort(abort, timeout=30)).was_known
        assert torch.equal(client.receiver.kv(target, 1000), after)
    finally:
        await client.worker.Drain(worker_pb2.DrainRequest(undo=True), timeout=30)
    again, _ = client.request(tokens(20))
    assert (await client.prefill.Prefill(again, timeout=30)).HasField("first_token")


@pytest.mark.slow  # another start of a worker; of decode and in whole clusters it is seen quickly
async def test_a_rank_that_dies_ends_the_worker(model: Model, receiver: Receiver) -> None:
    with worker_process(model) as (address, process):
        async with connect(address, receiver) as client:
            request, _ = client.request(tokens(1000, seed=8))
            call = client.prefill.Prefill(request, timeout=60)
            await client.watch_until(lambda status: num_steps(status) > 0)
            victim = client.status.ranks[1].pid
            subprocess.run(["kill", "-9", str(victim)], check=True)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() == UNAVAILABLE
            metadata = dict(caught.value.trailing_metadata() or ())
            assert metadata["failed-epoch"] == client.status.identity.epoch
        assert await asyncio.to_thread(process.wait, 60) == 1
    for rank in client.status.ranks:
        assert not Path(f"/proc/{rank.pid}").exists()


# NOTE: the last one: it is the end of everybody's worker.
async def test_draining_ends_the_worker(model: Model, client: Client, worker: Started) -> None:
    before = num_steps(await client.watch_until(is_quiet))
    request, _ = client.request(tokens(500, seed=21))
    call = client.prefill.Prefill(request, timeout=60)
    late, _ = client.request(tokens(500, seed=22))
    await client.watch_until(lambda status: num_steps(status) > before)
    worker[1].send_signal(signal.SIGTERM)
    assert (await call).num_computed_tokens == 500
    await client.receiver.wait_for(request.attempt_id, model.config.num_kv_layers, 500)
    code = await code_of(client.prefill.Prefill(late, timeout=30))
    assert code in (UNAVAILABLE, grpc.StatusCode.CANCELLED)  # it leaves at this moment
    assert await asyncio.to_thread(worker[1].wait, 60) == 0
