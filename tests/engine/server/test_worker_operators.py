"""What operators may ask of a worker, over real sockets: settings, log level, explanations."""

import json
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from core.errors import EpserveError, InvalidRequest, NotFound, Unauthenticated
from core.log import current_level, set_level
from engine.server.request_records import LegRecord
from proto.worker_pb2 import (
    DrainRequest,
    ExplainRequestRequest,
    GetConfigRequest,
    SetLogLevelRequest,
)
from proto.worker_pb2_grpc import WorkerStub
from rpc.admin_token import bearer_metadata
from rpc.client import to_error
from rpc.multiplex_client import MultiplexClient
from tests.engine.server.test_worker_server import ready, running
from tests.eventually import eventually

Call = "grpc.aio.UnaryUnaryCall[object, object]"


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    before = logging.getLogger().level
    set_level("info")
    yield
    logging.getLogger().setLevel(before)


@pytest.fixture(autouse=True)
def python_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))


async def refusal(call: Call) -> EpserveError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return to_error(caught.value)


async def test_settings_and_version(tmp_path: Path) -> None:
    async with running(tmp_path, "serve", max_waiting=7) as (_, _, peer):
        reply = await WorkerStub(peer).GetConfig(GetConfigRequest(), timeout=30)
        settings = json.loads(reply.config_json)
        assert settings["max_waiting"] == 7
        assert settings["model"] == str(tmp_path)
        assert reply.version


async def test_how_long_ago_a_rank_ended_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.process.front.LOOK_SECONDS", 0.05)
    async with running(tmp_path, "serve", ranks=2, metrics_port=0) as (server, _, peer):
        assert [rank.quiet_seconds < 5 for rank in (await ready(peer)).ranks] == [True, True]
        os.kill(server.front.pids[1], signal.SIGSTOP)
        await eventually(lambda: server.status.status().ranks[1].quiet_seconds > 2)
        os.kill(server.front.pids[1], signal.SIGCONT)
        await eventually(lambda: server.status.status().ranks[1].quiet_seconds < 1)


async def test_the_log_level_of_front_and_ranks(tmp_path: Path) -> None:
    async with running(tmp_path, "serve", ranks=2) as (server, _, peer):
        await ready(peer)
        stub = WorkerStub(peer)
        reply = await stub.SetLogLevel(SetLogLevelRequest(level="WARNING"), timeout=30)
        assert reply.previous == "info"
        assert current_level() == "warning"
        error = await refusal(stub.SetLogLevel(SetLogLevelRequest(level="loud"), timeout=30))
        assert type(error) is InvalidRequest
        assert "debug, info, warning, error" in error.message
        # The fake rank reports the level that it logs from as its number of waiting requests.
        await eventually(
            lambda: [stats.num_waiting for stats in server.front.stats] == [logging.WARNING] * 2
        )


async def test_operators_calls_are_not_multiplexed(tmp_path: Path) -> None:
    # There, no metadata comes along.
    async with running(tmp_path, "serve") as (server, _, peer):
        await ready(peer)
        client = MultiplexClient(server.server.address)
        try:
            for method in ("Apply", "RollBack"):
                name = f"/epserve.experts.v1.Experts/{method}"
                call = client.call(name, b"", timeout_seconds=30)
                with call, pytest.raises(InvalidRequest, match="multiplexed"):
                    await call.take()
        finally:
            await client.close()


async def test_requests_are_explained(tmp_path: Path) -> None:
    async with running(tmp_path, "serve") as (server, _, peer):
        leg = LegRecord(leg_id="r-0", rank=0, num_prompt_tokens=3, num_earlier_tokens=1)
        server.service.records.begin(leg)
        stub = WorkerStub(peer)
        reply = await stub.ExplainRequest(ExplainRequestRequest(request_id="r"), timeout=30)
        (told,) = reply.legs
        assert (told.leg_id, told.num_prompt_tokens, told.finish) == ("r-0", 3, "")
        assert told.worker.epoch == server.front.epoch
        for unknown in ("r-1", ""):
            request = ExplainRequestRequest(request_id=unknown)
            assert type(await refusal(stub.ExplainRequest(request, timeout=30))) is NotFound


async def test_what_changes_a_worker_needs_the_token(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("sesame\n")
    async with running(tmp_path, "serve", admin_token_file=token_file) as (server, _, peer):
        stub = WorkerStub(peer)
        level = SetLogLevelRequest(level="info")
        for method, request in ((stub.Drain, DrainRequest()), (stub.SetLogLevel, level)):
            for metadata in ((), bearer_metadata("other"), (("authorization", "sesame"),)):
                error = await refusal(method(request, timeout=30, metadata=metadata))
                assert type(error) is Unauthenticated
                assert "sesame" not in error.message
            await method(request, timeout=30, metadata=bearer_metadata("sesame"))
        assert server.front.draining
        # What only looks needs none.
        await stub.GetConfig(GetConfigRequest(), timeout=30)
