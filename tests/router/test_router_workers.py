"""Which workers the router uses: restarts, silence, drain, misfits, and broken peers."""

import asyncio
import itertools
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, MutableMapping
from contextlib import suppress
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from core.errors import (
    Draining,
    Unavailable,
)
from router.workers.table import StatusArrived, StreamBroken
from router.workers.worker import WorkerState
from tests.free_ports import free_port
from tests.router.fake_worker import FakeWorker
from tests.router.running_router import RunningRouter


def pack_hashes(hashes: Iterable[int]) -> bytes:
    return array("Q", hashes).tobytes()


async def test_a_dead_worker_gets_nothing_and_its_successor_is_another(
    router: RunningRouter, prefill: FakeWorker, decode: FakeWorker
) -> None:
    await decode.say(num_running=4)
    await router.until(lambda: router.seen(decode).num_requests == 4)
    waiting = router.call()
    await router.until_waiting(1)
    await decode.kill()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await waiting
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert type(await router.refusal()) is Unavailable
    assert [status.identity.epoch for status in (await router.status()).workers] == ["p-1"]
    async with FakeWorker("decode", "d-2", listen=decode.address) as successor:
        await router.until_ready(successor)
        response = await router.assign()
        assert response.decode.epoch == "d-2"
        assert router.epochs() == {"p-1", "d-2"}


async def test_a_silent_worker_is_dead_until_it_speaks_again(
    prefill: FakeWorker, decode: FakeWorker, start: Callable[..., RunningRouter]
) -> None:
    router = start(prefill=[prefill.address], decode=[decode.address], silence_seconds=1.1)
    await router.until_ready(prefill, decode)
    decode.silent = True
    await router.until(lambda: router.in_state(WorkerState.LOST) == {decode.address})
    assert type(await router.refusal()) is Unavailable
    decode.silent = False
    await decode.say()
    await router.until_ready(decode)
    assert (await router.assign()).decode.epoch == "d-1"


async def test_a_worker_that_is_never_reached_is_told_of_once(
    decode: FakeWorker, start: Callable[..., RunningRouter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.watch.UNREACHABLE_SECONDS", 0.3)
    nobody = f"127.0.0.1:{free_port()}"
    with capture_logs() as lines:

        def told() -> list[MutableMapping[str, Any]]:
            return [line for line in lines if line["event"] == "worker cannot be reached"]

        router = start(prefill=[nobody], decode=[decode.address])
        await router.until_ready(decode)
        await router.until(lambda: bool(told()))
        attempts = itertools.count()
        await router.until(lambda: next(attempts) == 10)
        (line,) = told()
    assert (line["worker_role"], line["address"]) == ("prefill", nobody)
    assert "UNAVAILABLE" in line["reason"]


async def test_failed_workers_are_left_out(
    router: RunningRouter, prefill: FakeWorker, start: Callable[..., RunningRouter]
) -> None:
    error = await router.refusal(exclude_epochs=["d-1"])
    assert type(error) is Unavailable
    async with FakeWorker("decode", "d-2") as d2, FakeWorker("decode", "d-3") as d3:
        wider = start(prefill=[prefill.address], decode=[d2.address, d3.address])
        await wider.until_ready(prefill, d2, d3)
        for _ in range(3):
            assert (await wider.assign(exclude_epochs=["d-2"])).decode.epoch == "d-3"


async def test_a_draining_worker_gets_nothing_new(
    router: RunningRouter, decode: FakeWorker
) -> None:
    await decode.say(draining=True)
    await router.until(lambda: router.in_state(WorkerState.DRAINING) == {decode.address})
    assert type(await router.refusal()) is Draining
    await decode.say(draining=False)
    await router.until_ready(decode)
    await router.assign()


async def test_only_equal_fingerprints_are_paired_and_the_rest_is_told_why(
    prefill: FakeWorker, decode: FakeWorker, start: Callable[..., RunningRouter]
) -> None:
    async with (
        FakeWorker("decode", "d-other", fingerprint="f2", name="stranger") as stranger,
        FakeWorker("decode", "d-role") as misplaced,
        FakeWorker("prefill", "p-empty", page_tokens=0) as silly,
    ):
        router = start(
            prefill=[prefill.address, misplaced.address, silly.address],
            decode=[stranger.address, decode.address],
        )
        await router.until_ready(prefill, decode, stranger)
        await router.until(lambda: len(router.in_state(WorkerState.REFUSED)) == 2)
        for _ in range(4):
            assert (await router.assign()).decode.epoch == "d-1"
        reasons = {
            rejected.identity.epoch: rejected.reason
            for rejected in (await router.status()).rejected
        }
    assert set(reasons) == {"d-other", "d-role", "p-empty"}
    assert "'f2' (there 'f1')" in reasons["d-other"]
    assert "it is a decode worker, configured as prefill" in reasons["d-role"]
    assert "page_tokens" in reasons["p-empty"]


async def test_versions_side_by_side(
    prefill: FakeWorker, decode: FakeWorker, start: Callable[..., RunningRouter]
) -> None:
    """Old workers serve until both roles are there in the new version; then both versions do, each
    with its own kind; then the new ones alone."""
    await decode.say(max_running=100)
    new: dict[str, Any] = {"pairing_version": "2", "ready": False, "max_running": 100}
    async with FakeWorker("decode", "d-2", **new) as d2, FakeWorker("prefill", "p-2", **new) as p2:
        router = start(prefill=[prefill.address, p2.address], decode=[decode.address, d2.address])
        await router.until_ready(prefill, decode)

        async def pairs(number: int) -> set[tuple[str, str]]:
            found = [await router.assign() for _ in range(number)]
            return {(one.prefill.epoch, one.decode.epoch) for one in found}

        await d2.say(ready=True)
        await router.until_ready(d2)
        assert await pairs(4) == {("p-1", "d-1")}
        status = await router.status()
        assert set(status.paired_epochs) == {"p-1", "d-1"}
        (rejected,) = status.rejected
        assert rejected.identity.epoch == "d-2"
        assert "pairing version '2' (there '1')" in rejected.reason

        await p2.say(ready=True)
        await router.until_ready(p2)
        assert await pairs(12) == {("p-1", "d-1"), ("p-2", "d-2")}
        status = await router.status()
        assert set(status.paired_epochs) == {"p-1", "d-1", "p-2", "d-2"}
        assert not status.rejected

        await prefill.say(draining=True)
        await router.until(lambda: router.in_state(WorkerState.DRAINING) == {prefill.address})
        assert await pairs(4) == {("p-2", "d-2")}
        await decode.kill()
        await router.until(lambda: router.in_state(WorkerState.LOST) == {decode.address})
        status = await router.status()
        (lost,) = status.lost
        assert (lost.identity.epoch, lost.seconds >= 0, bool(lost.reason)) == ("d-1", True, True)
        assert set(status.paired_epochs) == {"p-2", "d-2"}
        assert not status.rejected, "the last of its version, which drains, is nobody's fault"


async def test_one_worker_behind_two_addresses_counts_once(
    prefill: FakeWorker, decode: FakeWorker, start: Callable[..., RunningRouter]
) -> None:
    twin = decode.address.replace("127.0.0.1", "localhost")
    router = start(prefill=[prefill.address], decode=[decode.address, twin])
    await router.until_ready(prefill)
    await router.until(lambda: len(router.in_state(WorkerState.REFUSED)) == 1)
    for _ in range(4):
        await router.assign()
    fifth = router.call()
    await router.until_waiting(1)
    fifth.cancel()


async def test_requests_with_a_common_prefix_go_to_the_same_worker(
    decode: FakeWorker, start: Callable[..., RunningRouter]
) -> None:
    await decode.say(max_running=100)
    async with FakeWorker("prefill", "p-a") as a, FakeWorker("prefill", "p-b") as b:
        router = start(prefill=[a.address, b.address], decode=[decode.address])
        await router.until_ready(a, b, decode)
        first = await router.assign(num_prompt_tokens=640, prefix_hashes=pack_hashes(range(10)))
        other = await router.assign(num_prompt_tokens=640, prefix_hashes=pack_hashes(range(20, 30)))
        assert {first.prefill.epoch, other.prefill.epoch} == {"p-a", "p-b"}
        # Both have taken in what they were given.
        await a.say(accepted=1)
        await b.say(accepted=1)
        await router.until(lambda: not router.seen(a).pending and not router.seen(b).pending)
        again = await router.assign(
            num_prompt_tokens=700, prefix_hashes=pack_hashes([*range(20, 30), 99])
        )
        assert again.prefill.epoch == other.prefill.epoch


async def test_peers_that_are_no_workers_do_no_harm(
    prefill: FakeWorker, decode: FakeWorker, start: Callable[..., RunningRouter]
) -> None:
    """One that ends each stream, a web server, one that never answers, rubbish in protobuf's
    place, a name that does not exist, and a router instead of a worker."""
    await decode.say(max_running=100)

    mute_writers: list[asyncio.StreamWriter] = []

    async def web(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        with suppress(ConnectionError):
            await writer.drain()
        writer.close()

    async def mute(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mute_writers.append(writer)

    async def rubbish(_request: bytes, _context: object) -> AsyncIterator[bytes]:
        yield b"\xff\xff\xff\xff rubbish"

    handler = grpc.unary_stream_rpc_method_handler(rubbish)
    generic = grpc.method_handlers_generic_handler(
        "epserve.worker.v1.Worker", {"WatchStatus": handler}
    )
    rubbish_server = grpc.aio.server(handlers=[generic])
    rubbish_port = rubbish_server.add_insecure_port("127.0.0.1:0")
    await rubbish_server.start()
    web_server = await asyncio.start_server(web, "127.0.0.1", 0)
    mute_server = await asyncio.start_server(mute, "127.0.0.1", 0)
    other_router = start(prefill=[], decode=[])
    async with FakeWorker("decode", "d-end") as ending:
        ending.end_streams = True
        bad = [
            ending.address,
            *(f"127.0.0.1:{s.sockets[0].getsockname()[1]}" for s in (web_server, mute_server)),
            f"127.0.0.1:{rubbish_port}",
            "no.such.host.invalid:1",
            other_router.process.address,
        ]
        broken: set[str] = set()
        router = start(
            prefill=[prefill.address], decode=[*bad, decode.address], silence_seconds=1.1
        )
        observed = router.cluster.apply

        def note(event: StatusArrived | StreamBroken) -> None:
            if isinstance(event, StreamBroken):
                broken.add(event.address)
            observed(event)

        router.cluster.apply = note  # type: ignore[method-assign]
        await router.until_ready(prefill, decode)
        await router.until(lambda: broken == set(bad))
        assert (await router.assign()).decode.epoch == "d-1"
        assert router.epochs() == {"p-1", "d-1"}
        await router.close()
    for server in (web_server, mute_server):
        server.close()
    for writer in mute_writers:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
    await rubbish_server.stop(None)
