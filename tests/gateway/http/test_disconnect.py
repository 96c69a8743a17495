"""Clients that go away: everything done for them ends within a second, and no task is left."""

import asyncio
import json
import random
from typing import Any

import pytest

from core.errors import Unavailable
from tests.eventually import eventually
from tests.gateway.conftest import MODEL, Gateway
from tests.gateway.fake_cluster import Plan

pytestmark = pytest.mark.asyncio(loop_scope="module")


class RawClient:
    """One HTTP request on a socket of its own, dropped when told to."""

    def __init__(self, gateway: Gateway) -> None:
        self._host, self._port = gateway.url.removeprefix("http://").split(":")
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def send(self, path: str, body: dict[str, Any]) -> None:
        self.reader, self.writer = await asyncio.open_connection(self._host, int(self._port))
        content = json.dumps({"model": MODEL} | body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
        self.writer.write(head.encode() + content)
        await self.writer.drain()

    def drop(self, *, hard: bool) -> None:
        if hard:
            self.writer.transport.abort()
        else:
            self.writer.close()


async def inflight(gateway: Gateway) -> float:
    text = (await gateway.client.get("/metrics")).text
    name = "epserve_gateway_num_running_requests "
    (line,) = (line for line in text.splitlines() if line.startswith(name))
    return float(line.removeprefix(name))


async def until_idle(gateway: Gateway) -> None:
    async with asyncio.timeout(20):
        while await inflight(gateway):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("hang_after", [0, 3])
async def test_while_a_worker_is_at_it(
    gateway: Gateway, path: str, stream: bool, hard: bool, hang_after: int
) -> None:
    decode = gateway.cluster.first
    decode.plan.hang_after = hang_after
    client = RawClient(gateway)
    prompt: dict[str, Any] = {"prompt": "plain"}
    if "chat" in path:
        prompt = {"messages": [{"role": "user", "content": "plain"}]}
    await client.send(path, prompt | {"stream": stream, "n": 2})
    await eventually(lambda: decode.num_running == 2)
    assert await inflight(gateway) == 1
    if stream and hang_after:
        head = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), 20)
        assert b"200 OK" in head
    client.drop(hard=hard)
    await asyncio.wait_for(decode.cancelled.wait(), 20)
    await eventually(lambda: decode.num_running == 0)
    await until_idle(gateway)


@pytest.mark.parametrize("stream", [False, True])
async def test_while_waiting_at_the_router(gateway: Gateway, stream: bool) -> None:
    router = gateway.cluster.router
    router.hang = True
    client = RawClient(gateway)
    await client.send("/v1/completions", {"prompt": "plain", "stream": stream})
    await eventually(lambda: router.requests)
    client.drop(hard=False)
    await asyncio.wait_for(router.cancelled.wait(), 20)


async def test_while_looking_for_another_pair(gateway: Gateway) -> None:
    cluster = gateway.cluster
    assert (await gateway.complete("plain")).status_code == 200
    await until_idle(gateway)
    before = len(asyncio.all_tasks())
    cluster.router.reset()
    cluster.router.errors.extend([Unavailable("nobody")] * 100)
    client = RawClient(gateway)
    await client.send("/v1/completions", {"prompt": "plain"})
    await eventually(lambda: len(cluster.router.requests) > 1)
    client.drop(hard=False)
    await until_idle(gateway)
    await eventually(lambda: len(asyncio.all_tasks()) <= before)  # nobody is left who could ask
    assert cluster.router.errors


async def test_a_stop_string_ends_the_call(gateway: Gateway) -> None:
    """The worker knows nothing of stop strings: it must hear that it is enough."""
    decode = gateway.cluster.first
    decode.plan = Plan(hang_after=6)
    reply = await gateway.complete("plain", stop=["he "])
    assert reply.json()["choices"][0]["finish_reason"] == "stop"
    await asyncio.wait_for(decode.cancelled.wait(), 20)


async def test_one_failed_choice_ends_the_others(gateway: Gateway) -> None:
    """The request fails as a whole."""
    cluster = gateway.cluster
    cluster.first.plan.hang_after = 2
    task = asyncio.create_task(
        gateway.client.post("/v1/completions", json={"model": MODEL, "prompt": ["plain", "think"]})
    )
    await eventually(lambda: cluster.first.num_running == 2)
    # Nobody is there before the worker goes: its requests move while it still stops.
    cluster.router.down = {cluster.first.epoch, cluster.second.epoch}
    await cluster.first.server.stop(0)
    try:
        reply = await asyncio.wait_for(task, 20)
        assert reply.status_code == 503
        await eventually(lambda: cluster.first.num_running == 0)
    finally:
        await cluster.first.start()


async def test_slow_readers_hold_little(gateway: Gateway) -> None:
    """A client that does not read: the worker is slowed down, not the memory filled."""
    decode = gateway.cluster.first
    client = RawClient(gateway)
    client_body = {"prompt": "long", "stream": True, "max_tokens": 400, "n": 100}
    await client.send("/v1/completions", client_body)
    await eventually(lambda: decode.num_running > 0)
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await asyncio.sleep(0.5)
    client.drop(hard=True)
    await eventually(lambda: decode.num_running == 0)
    await until_idle(gateway)


async def test_random_drops_leave_nothing(gateway: Gateway) -> None:
    """Tasks, worker calls and slots are as before after 100 requests dropped anywhere."""
    decode = gateway.cluster.first
    decode.plan.step_seconds = 0.002
    assert (await gateway.complete("plain")).status_code == 200
    await until_idle(gateway)
    before = len(asyncio.all_tasks())
    rng = random.Random(3)

    async def one() -> None:
        client = RawClient(gateway)
        body = {"prompt": "plain", "stream": rng.random() < 0.7, "n": rng.choice([1, 3])}
        await client.send("/v1/completions", body | {"max_tokens": 100})
        await asyncio.sleep(rng.uniform(0, 0.15))
        client.drop(hard=rng.random() < 0.5)

    for _ in range(10):
        await asyncio.gather(*(one() for _ in range(10)))
    await eventually(lambda: decode.num_running == 0)
    # One that was dropped a moment ago may not have got as far as a worker.
    await until_idle(gateway)
    await eventually(lambda: len(asyncio.all_tasks()) <= before)
    assert (await gateway.complete("plain")).status_code == 200


async def test_disconnects_are_counted(gateway: Gateway) -> None:
    async def counted() -> float:
        text = (await gateway.client.get("/metrics")).text
        name = 'epserve_requests_total{outcome="disconnected"} '
        lines = [line for line in text.splitlines() if line.startswith(name)]
        return float(lines[0].removeprefix(name)) if lines else 0.0

    gateway.cluster.first.plan.hang_after = 0
    before = await counted()
    task = asyncio.create_task(gateway.complete("plain"))
    await asyncio.wait_for(gateway.cluster.first.started.wait(), 20)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    async with asyncio.timeout(20):
        while await counted() != before + 1:
            await asyncio.sleep(0.02)
