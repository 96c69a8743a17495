"""Half a minute in the life of a small cluster, in which everything happens once."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx

from proto import worker_pb2, worker_pb2_grpc
from tests.cluster.harness import Cluster, wait_until
from tests.cluster.token_channel import token_channel
from tests.observability.prometheus import Prometheus

# Few places and few pages: what is scarce in a large cluster under load is scarce here at once.
OPTIONS = (
    "--decode-workers", "2", "--decode-ranks", "2", "--max-running", "2",
    "--speculative-tokens", "1",
    "--set", "decode.kv-pages=5",
    "--set", "decode.num-redundant-experts=2",
    "--set", "decode.expert-load-window-seconds=4",
    "--set", "decode.rebalance-interval-seconds=2",
    "--set", "decode.rebalance-threshold=1", "--set", "router.max-wait-seconds=60",
    "--set", "gateway.max-inflight=10", "--set", "gateway.max-queued=2",
)  # fmt: skip
NUM_PROCESSES = 5
LONG_TEXT = "Count the apples and tell how many there are. " * 7
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}},
    "required": ["answer"],
    "additionalProperties": False,
}


def metrics_targets(cluster: Cluster) -> dict[str, str]:
    """Process name to host:port, as `ctl up` shows them once all are up."""

    def told() -> dict[str, str]:
        row = r"((?:gateway|router|prefill|decode)[\w-]*) .*?http://(\S+?)/metrics"
        return dict(re.findall(row, cluster.output()))

    wait_until(lambda: len(told()) == NUM_PROCESSES, 240, "the table of processes")
    return told()


# Above 0 for moments only, which a scrape may miss: what brings them about is done again then.
OF_OVERLOAD = (
    "epserve_gateway_num_waiting_requests",
    "epserve_router_num_waiting_requests",
    "epserve_num_waiting_requests",
    "epserve_num_waiting_tokens",
    "epserve_num_transferring_requests",
    "epserve_preemptions_total",
)
OF_A_DRAIN = ("epserve_worker_draining",)
OF_A_DEATH = ('epserve_gateway_moves_total{reason="unavailable"}',)
OF_BALANCING = (
    "epserve_expert_moved_bytes_total",
    "epserve_expert_placement_version",
    'epserve_expert_rebalances_total{outcome="done"}',
)
SCENE_SECONDS = 180.0


async def play(cluster: Cluster, prometheus: Prometheus) -> None:
    """All of it; returns when every request has ended and Prometheus has seen it."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120, limits=limits) as client:
        scenes = Scenes(cluster, client, prometheus)
        await scenes.ordinary_requests()
        await scenes.wrong_requests()
        await scenes.client_leaves()
        for scene, metrics in (
            (scenes.too_many_at_once, OF_OVERLOAD),
            (scenes.drained_worker, OF_A_DRAIN),
            (scenes.killed_worker, OF_A_DEATH),
            (scenes.ordinary_requests, OF_BALANCING),
        ):
            await until_seen(scene, prometheus, metrics)


async def until_seen(
    scene: Callable[[], Awaitable[None]], prometheus: Prometheus, metrics: Sequence[str]
) -> None:
    """Plays the scene, again and again until each metric has been above 0."""
    until = time.monotonic() + SCENE_SECONDS
    while True:
        await scene()
        missing = [name for name in metrics if not await seen(prometheus, name)]
        if not missing:
            return
        assert time.monotonic() < until, f"not seen within {SCENE_SECONDS} s: {missing}"


async def seen(prometheus: Prometheus, name: str) -> bool:
    return await asyncio.to_thread(prometheus.largest, name) > 0


class Scenes:
    def __init__(self, cluster: Cluster, client: httpx.AsyncClient, prometheus: Prometheus) -> None:
        self._cluster = cluster
        self._client = client
        self._prometheus = prometheus

    async def ordinary_requests(self) -> None:
        """Streamed and not, of both endpoints, with a common prefix, a schema, several choices."""
        for _ in range(2):  # the second time, prefixes are known
            await asyncio.gather(
                self._complete(max_tokens=8),
                self._complete(max_tokens=8, n=2, temperature=1, logprobs=2),
                self._stream(max_tokens=8),
                self._chat(max_tokens=8),
                self._chat(
                    max_tokens=40,
                    response_format={
                        "type": "json_schema",
                        "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
                    },
                ),
            )

    async def wrong_requests(self) -> None:
        for path, body, status in (
            ("/v1/completions", {"prompt": "x", "max_tokens": -1}, 400),
            ("/v1/completions", {"prompt": "x " * 100_000}, 400),
            ("/v1/completions", {"prompt": "x", "model": "another"}, 404),
            ("/v1/nothing", {}, 404),
        ):
            reply = await self._client.post(path, json={"model": self._cluster.model} | body)
            assert reply.status_code == status, reply.text

    async def client_leaves(self) -> None:
        async with self._client.stream("POST", "/v1/completions", json=self._long()) as reply:
            async for _ in reply.aiter_lines():
                break

    async def too_many_at_once(self) -> None:
        """Some run, some wait for pages, for workers and in the gateway; some are refused, and
        ranks run out of pages in mid-reply."""
        statuses = await asyncio.gather(*(self._status_of(self._long()) for _ in range(18)))
        assert set(statuses) == {200, 429}, statuses

    async def drained_worker(self) -> None:
        """One that has work."""
        streams = [asyncio.create_task(self._stream(**self._long())) for _ in range(4)]
        worker = await self._busy_worker()
        await self._drain(worker, grace_seconds=60.0)
        for _ in range(40):
            if await seen(self._prometheus, *OF_A_DRAIN):
                break
            await asyncio.sleep(0.2)
        await self._drain(worker, undo=True)
        await asyncio.gather(*streams)

    async def killed_worker(self) -> None:
        """One that has streams: they go on elsewhere."""
        while len(await self._ready_workers()) < 2:  # the one killed last is back
            await asyncio.sleep(0.1)
        streams = [asyncio.create_task(self._stream(**self._long())) for _ in range(6)]
        self._cluster.kill(await self._busy_worker())
        await asyncio.gather(*streams)

    async def _ready_workers(self) -> list[worker_pb2.WorkerStatus]:
        workers = await asyncio.to_thread(self._cluster.workers, worker_pb2.ROLE_DECODE)
        return [worker for worker in workers if worker.ready and not worker.draining]

    async def _busy_worker(self) -> worker_pb2.WorkerStatus:
        """A decode worker that generates tokens."""
        until = time.monotonic() + SCENE_SECONDS
        while time.monotonic() < until:
            for worker in await self._ready_workers():
                if any(rank.num_running for rank in worker.ranks):
                    return worker
            await asyncio.sleep(0.02)
        raise AssertionError("no decode worker has begun to work")

    async def _complete(self, **fields: Any) -> None:
        body = {"model": self._cluster.model, "prompt": LONG_TEXT} | fields
        reply = await self._client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text

    async def _stream(self, **fields: Any) -> None:
        body = {"model": self._cluster.model, "prompt": LONG_TEXT, "stream": True} | fields
        assert await self._status_of(body) == 200

    async def _chat(self, **fields: Any) -> None:
        body = {"model": self._cluster.model, "temperature": 0} | fields
        body["messages"] = [{"role": "user", "content": LONG_TEXT}]
        reply = await self._client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text

    async def _status_of(self, body: dict[str, Any]) -> int:
        """Reads all of it; AssertionError for a stream that ends with an error."""
        async with self._client.stream("POST", "/v1/completions", json=body) as reply:
            content = await reply.aread()
        assert reply.status_code != 200 or b'"error":' not in content, content[-500:]
        return reply.status_code

    def _long(self) -> dict[str, Any]:
        """Two of these need more pages than a rank has."""
        return {
            "model": self._cluster.model,
            "prompt": LONG_TEXT,
            "max_tokens": 110,
            "ignore_eos": True,
            "temperature": 1,
            "stream": True,
        }

    async def _drain(self, worker: worker_pb2.WorkerStatus, **fields: Any) -> None:
        def drain() -> None:
            with token_channel(worker.identity.address, self._cluster.router) as channel:
                stub = worker_pb2_grpc.WorkerStub(channel)
                stub.Drain(worker_pb2.DrainRequest(**fields), timeout=30)

        await asyncio.to_thread(drain)
