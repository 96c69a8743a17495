"""Workers and routers whose sockets are really gone."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.eventually import eventually
from tests.gateway.conftest import ANSWERS, MODEL, Gateway, running_gateway, tokens_of
from tests.gateway.fake_cluster import FakeCluster
from tests.gateway.model_folder import EOS_ID

pytestmark = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def running_cluster(
    folder: Path, **values: object
) -> AsyncIterator[tuple[FakeCluster, Gateway]]:
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        running_gateway(cluster, folder, **values) as gateway,
    ):
        yield cluster, gateway


async def test_sockets_that_are_gone(model_folder: Path) -> None:
    async with running_cluster(model_folder) as (cluster, gateway):
        cluster.first.plan.step_seconds = 0.02
        body = {"model": MODEL, "prompt": "unicode", "max_tokens": 200}
        body |= {"temperature": 0, "stream": True}
        async with gateway.client.stream("POST", "/v1/completions", json=body) as streamed:
            lines = streamed.aiter_lines()
            events = [await anext(lines)]
            await cluster.first.server.stop(0)  # in mid-stream
            events += [line async for line in lines]
        chunks = [json.loads(line[6:]) for line in events if line.startswith("data: {")]
        text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        assert text == ANSWERS["unicode"]
        assert cluster.second.requests[0].output_token_ids
        # The router still names the dead one: refused connection, then the other.
        reply = await gateway.complete("unicode")
        assert reply.json()["choices"][0]["text"] == ANSWERS["unicode"]


async def test_a_restarted_worker_is_another_peer(model_folder: Path) -> None:
    async with running_cluster(model_folder) as (cluster, gateway):
        cluster.router.decodes = [cluster.first]
        assert (await gateway.complete("unicode")).status_code == 200
        address = cluster.first.server.address
        await cluster.first.server.stop(0)
        cluster.first.epoch = "epoch-restarted"
        await cluster.first.start(address)
        reply = await gateway.complete("unicode")
        assert reply.json()["choices"][0]["text"] == ANSWERS["unicode"]


async def test_router_restart(model_folder: Path) -> None:
    async with running_cluster(model_folder) as (cluster, gateway):
        address = cluster.router.server.address
        cluster.first.plan.step_seconds = 0.02
        running = asyncio.create_task(gateway.complete("unicode"))
        await asyncio.wait_for(cluster.first.started.wait(), 20)
        await cluster.router.server.stop(0)
        task = asyncio.create_task(gateway.complete("unicode"))

        async def is_waiting() -> bool:
            metrics = (await gateway.client.get("/metrics")).text
            return "epserve_gateway_num_running_requests 2.0" in metrics

        await eventually(is_waiting)
        await cluster.router.start(address)
        # What runs needs no router; what is new waits for it.
        assert (await running).json()["choices"][0]["text"] == ANSWERS["unicode"]
        assert (await task).json()["choices"][0]["text"] == ANSWERS["unicode"]


async def test_router_gone(model_folder: Path) -> None:
    """A router that is started again is waited for longer than a pair of workers."""
    async with running_cluster(model_folder, router_seconds=2.0) as (cluster, gateway):
        await cluster.router.server.stop(0)
        started = time.monotonic()
        with capture_logs() as said:
            reply = await gateway.complete("unicode")
        assert reply.status_code == 503
        assert reply.json()["error"]["message"] == "no router can be reached"
        assert 1.5 < time.monotonic() - started < 15
        # Which router, and why, is the operator's to know.
        (given_up,) = [line for line in said if line["event"] == "request is given up"]
        assert cluster.router.server.address in given_up["message"]
        async with asyncio.timeout(20):
            while (await gateway.client.get("/health")).status_code == 200:
                await asyncio.sleep(0.05)
