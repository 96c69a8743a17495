"""A whole worker front with fake ranks: gRPC, status stream, metrics, ends."""

import asyncio
import os
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from core.errors import EpserveError, Unavailable
from core.token_ids import pack_ids
from core.version import software_version
from engine.link.messages import (
    RankMessage,
    Submit,
)
from engine.process.front import WorkerFront
from engine.process.pairing_version import pairing_version
from engine.process.settings import WorkerSettings
from engine.server import status_service
from engine.server.request_records import RequestRecords
from engine.server.worker_metrics import WorkerMetrics
from engine.server.worker_server import RoleService, WorkerServer
from engine.server.worker_service import Load
from proto import generate_pb2, generate_pb2_grpc, worker_pb2, worker_pb2_grpc
from rpc.client import channel
from tests.eventually import eventually

FAKE_RANK = Path(__file__).parents[1] / "fake_rank.py"
SUBMIT = Submit(
    request_id="a",
    num_prompt_tokens=1,
    last_token_id=5,
    output_token_ids=pack_ids([5]),
    sampling=b"",
)


class Books(generate_pb2_grpc.DecodeServicer):
    """Keeps what the front tells it; its requests are numbers that the test sets, and are over
    when it is told to hand them over."""

    def __init__(self, front: WorkerFront, metrics: WorkerMetrics) -> None:
        self.front = front
        self.num_accepted_total = 0
        self.records = RequestRecords()
        self.num_open = 0
        self.heard: list[RankMessage] = []
        self.failed: list[EpserveError] = []
        self.handed_over: list[EpserveError] = []
        self.clings = False  # does not let go of requests that it has handed over
        self.closed = False

    @property
    def is_quiet(self) -> bool:
        return self.num_open == 0

    def end_all(self) -> None:
        self.num_open = 0
        self.front.on_change()

    def on_message(self, rank: int, message: RankMessage) -> None:
        self.heard.append(message)

    def load(self, rank: int) -> Load:
        return Load(num_open=self.num_open, num_waiting_tokens=0)

    def fail_all(self, error: EpserveError) -> None:
        self.failed.append(error)

    def hand_over(self, error: EpserveError) -> None:
        self.handed_over.append(error)
        if not self.clings:
            self.end_all()

    async def close(self) -> None:
        self.closed = True


@asynccontextmanager
async def running(
    tmp_path: Path, behaviour: str, **values: object
) -> AsyncIterator[tuple[WorkerServer, "asyncio.Task[int]", grpc.aio.Channel]]:
    (tmp_path / "config.json").write_text("{}")
    values = {"stop_grace_seconds": 0.1, **values}
    settings = WorkerSettings.model_validate({"model": tmp_path, **values})
    role = RoleService(
        "decode", Books, generate_pb2_grpc.add_DecodeServicer_to_server, generate_pb2, "Decode"
    )
    server = WorkerServer(settings, role, (sys.executable, str(FAKE_RANK), behaviour))
    run = asyncio.create_task(server.run())
    async with channel(server.server.address) as peer:
        yield server, run, peer
    server.stop_asked.set()
    await asyncio.wait_for(run, 20)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not any(Path(f"/proc/{pid}").exists() for pid in server.front.pids if pid)


@pytest.fixture(autouse=True)
def python_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.getcwd())


async def ready(peer: grpc.aio.Channel) -> worker_pb2.WorkerStatus:
    """The first status that says ready; the stream is then ended."""
    stub = worker_pb2_grpc.WorkerStub(peer)
    stream = stub.WatchStatus(worker_pb2.WatchStatusRequest(), timeout=30)
    async for status in stream:
        if status.ready:
            stream.cancel()
            return status
    raise AssertionError("the stream ended before the worker was ready")


async def health(peer: grpc.aio.Channel, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(peer)
    reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=30)
    status: int = reply.status
    return status


async def test_status_is_streamed_on_change_and_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert status_service.LONGEST_SILENCE_SECONDS == 1
    names = {"served_model_name": "m", "advertise": "node-7"}
    async with running(tmp_path, "serve", ranks=2, **names) as (server, _, peer):
        status = await ready(peer)
        assert status.identity.role == worker_pb2.ROLE_DECODE
        assert status.identity.address == f"node-7:{server.server.bound_port}"
        assert status.identity.epoch == server.front.epoch
        assert (status.model, status.kv_fingerprint, status.page_tokens) == ("m", "f", 4)
        assert status.pairing_version == pairing_version()
        assert status.identity.version == software_version()
        assert [rank.pages_total for rank in status.ranks] == [100, 100]
        assert [rank.pid for rank in status.ranks] == list(server.front.pids)

        monkeypatch.setattr(status_service, "LONGEST_SILENCE_SECONDS", 1000)
        stub = worker_pb2_grpc.WorkerStub(peer)
        stream = stub.WatchStatus(worker_pb2.WatchStatusRequest(min_interval_ms=20), timeout=30)
        await anext(aiter(stream))
        server.service.num_open = 5
        server.front.send(1, SUBMIT)
        status = await anext(aiter(stream))
        assert status.ranks[1].num_running == 1
        assert status.ranks[1].num_waiting == 4
        stream.cancel()
        # Nothing changes any more.
        monkeypatch.setattr(status_service, "LONGEST_SILENCE_SECONDS", 0.2)
        stream = stub.WatchStatus(worker_pb2.WatchStatusRequest(min_interval_ms=20), timeout=30)
        for _ in range(3):
            await anext(aiter(stream))
        stream.cancel()


async def test_health_follows_readiness_and_draining(tmp_path: Path) -> None:
    async with running(tmp_path, "serve", stop_grace_seconds=9) as (server, run, peer):
        assert await health(peer, "") == health_pb2.HealthCheckResponse.NOT_SERVING
        await ready(peer)
        async with asyncio.timeout(20):
            while await health(peer, "epserve.generate.v1.Decode") != 1:
                await asyncio.sleep(0.01)
        server.service.num_open = 1
        server.stop_asked.set()
        async with asyncio.timeout(20):
            while await health(peer, "") == 1:
                await asyncio.sleep(0.005)
        status = await ready(peer)
        assert status.draining
        assert (status.num_open, status.drained) == (1, False)
        assert not run.done()  # a request is open: the grace runs
        server.service.end_all()
        assert await asyncio.wait_for(run, 20) == 0
        assert server.service.handed_over == []
        assert server.service.closed


async def test_a_dead_rank_fails_what_is_open_and_ends_the_worker(tmp_path: Path) -> None:
    async with running(tmp_path, "die") as (server, run, peer):
        await ready(peer)
        server.front.send(0, SUBMIT)
        assert await asyncio.wait_for(run, 20) == 1
        (error,) = server.service.failed
        assert error.failed_epoch == server.front.epoch
        assert "signal 9" in error.message


async def test_a_stalled_worker_is_not_ready_and_comes_back(tmp_path: Path) -> None:
    async with running(tmp_path, "serve", stall_seconds=3) as (server, run, peer):
        pid = (await ready(peer)).ranks[0].pid
        os.kill(pid, signal.SIGSTOP)
        async with asyncio.timeout(20):
            while await health(peer, "") == 1 or not server.front.stalled:
                await asyncio.sleep(0.01)
        (error,) = server.service.failed
        assert isinstance(error, Unavailable)
        assert error.failed_epoch == server.front.epoch
        status = server.status.status()
        assert not status.ready
        assert status.ranks[0].stalled
        assert status.ranks[0].quiet_seconds > 3
        stalled = server.metrics.stalled.collect()[0].samples[0].value
        assert stalled == 1
        os.kill(pid, signal.SIGCONT)
        assert (await ready(peer)).identity.epoch == server.front.epoch
        async with asyncio.timeout(20):
            while await health(peer, "") != 1:
                await asyncio.sleep(0.01)
        assert not run.done()


async def test_a_start_that_fails_ends_the_worker(tmp_path: Path) -> None:
    async with running(tmp_path, "fail") as (_, run, _peer):
        assert await asyncio.wait_for(run, 20) == 1


async def test_a_stop_during_the_start_is_obeyed(tmp_path: Path) -> None:
    async with running(tmp_path, "hang") as (server, run, _peer):
        await eventually(lambda: any(server.front.pids))
        server.stop_asked.set()
        assert await asyncio.wait_for(run, 20) == 0


async def test_rank_statistics_become_metrics(tmp_path: Path) -> None:
    async with running(tmp_path, "serve", ranks=2, metrics_port=0) as (server, _, peer):
        await ready(peer)
        server.front.send(0, SUBMIT)
        await eventually(lambda: server.service.heard)
        port = server._metrics_server.port
        text = await asyncio.to_thread(
            lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
        )
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#")
        steps = server.front.stats[0].num_steps
        role = 'role="decode"'
        assert float(lines[f'epserve_kv_pages{{rank="0",{role},state="owned"}}']) == steps
        assert float(lines[f'epserve_kv_pages{{rank="1",{role},state="quarantined"}}']) == 0
        assert float(lines[f'epserve_kv_usage_ratio{{rank="0",{role}}}']) == steps / 100
        assert float(lines[f"epserve_generation_tokens_total{{{role}}}"]) == steps
        assert float(lines[f"epserve_step_seconds_count{{{role}}}"]) == steps
        assert float(lines[f'epserve_batch_size_bucket{{le="2.0",{role}}}']) == steps
        assert float(lines[f'epserve_prefill_tokens_total{{{role},source="transferred"}}']) == 0
        assert float(lines[f"epserve_kv_wait_seconds_count{{{role}}}"]) == 2 * steps
        assert float(lines[f'epserve_start_seconds{{phase="load",rank="1",{role}}}']) == 1.5
        assert float(lines[f"epserve_worker_draining{{{role}}}"]) == 0
        assert float(lines[f'epserve_max_running_requests{{rank="1",{role}}}']) == 8
        assert float(lines[f'epserve_rank_memory_bytes{{rank="1",{role}}}']) > 1e6
        assert "epserve_kv_transfer_seconds" not in text  # prefill's
