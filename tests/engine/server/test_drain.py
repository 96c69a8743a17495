"""Draining a worker with fake ranks: graces, handing over, pages, and the ways out of it."""

import asyncio
import math
import signal
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from core.errors import Draining, InvalidRequest, Unavailable
from engine.server.worker_server import stop_by_signal
from proto import worker_pb2, worker_pb2_grpc
from rpc.client import to_error
from rpc.server import LIVENESS
from tests.engine.server.test_worker_server import SUBMIT, health, python_path, ready, running
from tests.eventually import eventually

__all__ = ["python_path"]  # a fixture

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def drain(peer: grpc.aio.Channel, **fields: object) -> None:
    request = worker_pb2.DrainRequest(**fields)  # type: ignore[arg-type]
    await worker_pb2_grpc.WorkerStub(peer).Drain(request, timeout=30)


async def status_with(
    peer: grpc.aio.Channel, *, draining: bool, drained: bool
) -> worker_pb2.WorkerStatus:
    """The first status of this kind."""
    stream = worker_pb2_grpc.WorkerStub(peer).WatchStatus(
        worker_pb2.WatchStatusRequest(), timeout=30
    )
    async for status in stream:
        if (status.draining, status.drained) == (draining, drained):
            stream.cancel()
            return status
    raise AssertionError("the stream ended first")


async def test_an_idle_worker_is_drained_at_once_and_stays(tmp_path: Path) -> None:
    async with running(tmp_path, "serve") as (server, run, peer):
        await ready(peer)
        await drain(peer)
        await status_with(peer, draining=True, drained=True)
        await eventually(lambda: server.drain._timer is None)  # the grace ends with it
        assert server.service.handed_over == []
        assert not run.done()
        assert await health(peer, LIVENESS) == SERVING  # whoever restarts it need not


async def test_health_says_not_serving_until_the_worker_is_taken_back(tmp_path: Path) -> None:
    async with running(tmp_path, "serve") as (_server, _run, peer):
        await ready(peer)
        for undo in (False, True, False):
            await drain(peer, undo=undo)
            await health_becomes(peer, SERVING if undo else NOT_SERVING)
        assert await health(peer, LIVENESS) == SERVING


async def health_becomes(peer: grpc.aio.Channel, wanted: int) -> None:
    watch = health_pb2_grpc.HealthStub(peer).Watch(health_pb2.HealthCheckRequest(), timeout=30)
    async for reply in watch:
        if reply.status == wanted:
            watch.cancel()
            return
    raise AssertionError("the watch ended first")


async def test_a_grace_ends_with_handing_over(tmp_path: Path) -> None:
    async with running(tmp_path, "serve", stop_grace_seconds=99) as (server, run, peer):
        await ready(peer)
        server.service.num_open, server.service.clings = 2, True
        await drain(peer, grace_seconds=0.1)
        status = await status_with(peer, draining=True, drained=False)
        assert status.num_open == 2
        await eventually(lambda: server.service.handed_over)
        server.service.end_all()
        await status_with(peer, draining=True, drained=True)
        (error,) = server.service.handed_over
        assert isinstance(error, Draining)
        assert error.failed_epoch == server.front.epoch
        assert server.service.failed == []
        assert not run.done()


async def test_pages_that_are_held_keep_it_from_being_drained(tmp_path: Path) -> None:
    async with running(tmp_path, "serve") as (server, _, peer):
        await ready(peer)
        server.front.send(0, SUBMIT)  # the fake rank holds pages from then on
        await eventually(lambda: server.service.heard)
        await drain(peer, grace_seconds=0)
        await eventually(lambda: server.service.handed_over)
        assert not (await status_with(peer, draining=True, drained=False)).num_open


async def test_undoing_forgets_the_grace(tmp_path: Path) -> None:
    async with running(tmp_path, "serve") as (server, _, peer):
        await ready(peer)
        server.service.num_open = 1
        await drain(peer, grace_seconds=60)
        await status_with(peer, draining=True, drained=False)
        await drain(peer, undo=True)
        assert (await status_with(peer, draining=False, drained=False)).num_open == 1
        server.drain.begin(0.05)
        server.drain.undo()
        assert server.drain._timer is None
        assert server.service.handed_over == []
        await drain(peer, grace_seconds=0)
        await status_with(peer, draining=True, drained=True)
        await drain(peer, undo=True)
        await status_with(peer, draining=False, drained=False)


async def test_a_later_grace_replaces_an_earlier_one(tmp_path: Path) -> None:
    async with running(tmp_path, "serve") as (server, _, peer):
        await ready(peer)
        server.service.num_open = 1
        await drain(peer, grace_seconds=60)
        await drain(peer, grace_seconds=0)
        await status_with(peer, draining=True, drained=True)
        assert len(server.service.handed_over) == 1


@pytest.mark.parametrize("grace", [-1.0, math.nan, math.inf, 1e9])
async def test_graces_that_cannot_be(tmp_path: Path, grace: float) -> None:
    async with running(tmp_path, "serve") as (server, _, peer):
        await ready(peer)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await drain(peer, grace_seconds=grace)
        error = to_error(caught.value)
        assert isinstance(error, InvalidRequest)
        assert error.param == "grace_seconds"
        assert not server.front.draining


async def test_stopping_hands_over_then_waits_then_leaves(tmp_path: Path) -> None:
    async with running(tmp_path, "serve") as (server, run, peer):
        await ready(peer)
        service = server.service
        service.num_open, service.clings = 1, True
        server.stop_asked.set()
        await eventually(lambda: service.handed_over)
        await status_with(peer, draining=True, drained=False)
        assert not run.done()  # it has not let go of it yet
        service.end_all()
        assert await asyncio.wait_for(run, 20) == 0
        assert service.failed == []


async def test_the_wait_behind_handing_over_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.server.worker_server.RELEASE_SECONDS", 0.2)
    async with running(tmp_path, "serve") as (server, run, peer):
        await ready(peer)
        server.service.num_open, server.service.clings = 1, True
        server.stop_asked.set()
        assert await asyncio.wait_for(run, 20) == 0
        (error,) = server.service.failed
        assert type(error) is Unavailable  # nobody knows what is still being written
        assert error.failed_epoch == server.front.epoch


async def test_asked_twice_it_leaves_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, "serve", stop_grace_seconds=99) as (server, run, peer):
        await ready(peer)
        server.service.num_open = 1
        server.stop_asked.set()
        await status_with(peer, draining=True, drained=False)
        assert not run.done()
        server.hurry_asked.set()
        assert await asyncio.wait_for(run, 20) == 0
        assert len(server.service.failed) == 1


async def test_who_leaves_does_not_come_back(tmp_path: Path) -> None:
    async with running(tmp_path, "serve", stop_grace_seconds=99) as (server, run, peer):
        await ready(peer)
        server.service.num_open = 1
        await drain(peer, grace_seconds=60)
        server.stop_asked.set()
        async with asyncio.timeout(20):
            while await health(peer, "") == 1:
                await asyncio.sleep(0.005)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await drain(peer, undo=True)
        assert isinstance(to_error(caught.value), Unavailable)
        assert server.front.draining
        await drain(peer, grace_seconds=0)
        assert await asyncio.wait_for(run, 20) == 0
        assert len(server.service.handed_over) == 1


async def test_who_leaves_gets_no_longer_grace(tmp_path: Path) -> None:
    async with running(tmp_path, "serve", stop_grace_seconds=2) as (server, run, peer):
        await ready(peer)
        server.service.num_open = 1
        server.stop_asked.set()
        await health_becomes(peer, NOT_SERVING)
        await drain(peer, grace_seconds=60)
        assert await asyncio.wait_for(run, 30) == 0
        assert [type(error) for error in server.service.handed_over] == [Draining]
        assert server.service.failed == []


async def test_the_first_signal_drains_and_the_second_hurries(tmp_path: Path) -> None:
    async with running(tmp_path, "serve", stop_grace_seconds=99) as (server, run, peer):
        await ready(peer)
        server.service.num_open = 1
        stop_by_signal(server, signal.SIGTERM)
        await status_with(peer, draining=True, drained=False)
        assert not run.done()
        stop_by_signal(server, signal.SIGINT)
        assert await asyncio.wait_for(run, 20) == 0
