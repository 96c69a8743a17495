"""Connections to decode workers: kept while they are of use."""

import asyncio

from gateway.cluster.channels import ChannelPool
from proto.router_pb2 import WorkerRef


async def use(pool: ChannelPool, worker: WorkerRef, begun: asyncio.Barrier) -> None:
    """A call, which nobody answers, on a connection that all who came together use at once."""
    async with pool.lease(worker) as calls:
        with calls.call("/test.Test/Test", b"", timeout_seconds=60):
            await begun.wait()


async def use_all(pool: ChannelPool, epoch: str) -> None:
    """Two workers, both of this epoch."""
    begun = asyncio.Barrier(2)
    workers = [WorkerRef(address=f"127.0.0.1:{port}", epoch=epoch) for port in (1, 2)]
    await asyncio.gather(*(use(pool, worker, begun) for worker in workers))


async def test_workers_that_were_restarted_together_lose_their_old_connections() -> None:
    pool = ChannelPool()
    await use_all(pool, "old")
    assert len(pool) == 2
    await use_all(pool, "new")  # both calls end at once, and find the same connections stale
    assert len(pool) == 2
    await pool.close()
    assert len(pool) == 0
