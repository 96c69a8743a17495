"""Requests given up at random points leave nothing behind on any worker."""

import asyncio
import contextlib
import random
from pathlib import Path

import httpx
import pytest

from tests.cluster.harness import SMALL_CHUNKS, Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

NUM_IN_SHORT, NUM_REQUESTS = 80, 300


async def start_and_leave(client: httpx.AsyncClient, cluster: Cluster, rng: random.Random) -> int:
    """One streamed request, left after a random time or number of chunks; chunks seen."""
    body = {
        "model": cluster.model,
        "prompt": [rng.randrange(3, 300) for _ in range(rng.choice((5, 70, 400, 1500)))],
        "max_tokens": rng.choice((5, 50, 300)),
        "ignore_eos": True,
        "stream": True,
        "temperature": 1.0,
    }
    chunks_wanted = rng.choice((0, 0, 1, 5, 20))
    num_chunks = 0

    async def read() -> None:
        nonlocal num_chunks
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                num_chunks += line.startswith("data: {")
                if chunks_wanted and num_chunks >= chunks_wanted:
                    return

    patience = rng.uniform(0.0, 0.3) if not chunks_wanted else 30.0
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(read(), patience)
    return num_chunks


async def leave_all(cluster: Cluster, num_requests: int) -> list[int]:
    rng = random.Random(11)
    gate = asyncio.Semaphore(32)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:

        async def bounded() -> int:
            async with gate:
                return await start_and_leave(client, cluster, rng)

        return list(await asyncio.gather(*(bounded() for _ in range(num_requests))))


def check_aborts(cluster: Cluster, num_requests: int) -> None:
    before = [rank.pages_total for w in cluster.status().workers for rank in w.ranks]
    seen = asyncio.run(leave_all(cluster, num_requests))
    assert len(seen) == num_requests
    assert any(seen), "no request got as far as its first token"
    assert not all(seen), "no request was left before its first token"
    cluster.assert_nothing_held()
    after = [rank.pages_total for w in cluster.status().workers for rank in w.ranks]
    assert after == before
    assert cluster.complete([5, 6, 7], 4)["usage"]["completion_tokens"] <= 4


def test_aborts_free_every_page(served: Cluster) -> None:
    check_aborts(served, NUM_IN_SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["false", "true"])
def test_many_aborts_free_every_page(tmp_path: Path, overlap: str) -> None:
    schedule = f"decode.overlap-schedule={overlap}"
    with Cluster(tmp_path, *SMALL_CHUNKS, "--set", schedule) as cluster:
        check_aborts(cluster, NUM_REQUESTS)
