"""Half a minute in the life of a small cluster, in which everything happens once."""

import asyncio
import re
from typing import Any

import grpc
import httpx

from proto import worker_pb2, worker_pb2_grpc
from tests.cluster.harness import Cluster, wait_until

# Few places and few pages: what is scarce in a large cluster under load is scarce here at once.
OPTIONS = (
    "--decode-workers", "2", "--decode-ranks", "2", "--max-running", "2",
    "--set", "decode.kv-pages=6",
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

    wait_until(lambda: len(told()) == NUM_PROCESSES, 60, "the table of processes")
    return told()


async def play(cluster: Cluster) -> None:
    """All of it; returns when every request has ended."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60, limits=limits) as client:
        scenes = Scenes(cluster, client)
        await scenes.ordinary_requests()
        await scenes.wrong_requests()
        await scenes.client_leaves()
        await scenes.too_many_at_once()
        await scenes.drained_worker()
        await scenes.killed_worker()
        await scenes.ordinary_requests()


class Scenes:
    def __init__(self, cluster: Cluster, client: httpx.AsyncClient) -> None:
        self._cluster = cluster
        self._client = client

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
        """One that has work, for two scrapes at least."""
        streams = [asyncio.create_task(self._stream(**self._long())) for _ in range(4)]
        await asyncio.sleep(0.3)
        worker = self._cluster.workers(worker_pb2.ROLE_DECODE)[1]
        await self._drain(worker, grace_seconds=60.0)
        await asyncio.sleep(2.5)
        await self._drain(worker, undo=True)
        await asyncio.gather(*streams)

    async def killed_worker(self) -> None:
        """Its streams go on elsewhere."""
        streams = [asyncio.create_task(self._stream(**self._long())) for _ in range(6)]
        await asyncio.sleep(0.7)
        self._cluster.kill(self._cluster.workers(worker_pb2.ROLE_DECODE)[0])
        await asyncio.gather(*streams)

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
        assert reply.status_code != 200 or b"error" not in content, content[-500:]
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
        async with grpc.aio.insecure_channel(worker.identity.address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            await stub.Drain(worker_pb2.DrainRequest(**fields), timeout=5)
