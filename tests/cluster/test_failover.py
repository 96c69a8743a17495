"""Processes are killed under running streams: every stream ends complete and as it would have
without, and nothing is left over."""

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from proto import router_pb2, worker_pb2
from tests.cluster.footprint import Footprint, footprint, gateway_metric, grown
from tests.cluster.harness import Cluster, wait_until
from tests.cluster.long_streams import StreamPool, long_streams

pytestmark = [pytest.mark.cluster]

# A worker that is back holds connections that others opened a moment later or earlier.
HELD_TO_AND_FRO = 6
# How long to look for a worker that is at work before an idle one is killed.
BUSY_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`num_kills` times one process is killed, of these roles in turn, `pause_seconds` apart at
    least."""

    roles: "tuple[worker_pb2.Role.ValueType, ...]"
    num_streams: int
    num_kills: int
    num_tokens: int = 400
    prompt_tokens: int = 40
    pause_seconds: float = 3.0


DECODE, PREFILL, ROUTER = (
    worker_pb2.ROLE_DECODE, worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_ROUTER,
)  # fmt: skip


class Killer:
    """Kills with SIGKILL what is up and, where that can be seen in time, at work."""

    def __init__(self, cluster: Cluster, plan: Plan) -> None:
        self._cluster = cluster
        self._roles = plan.roles
        self._rng = random.Random(len(plan.roles))
        self.num_at_work = 0  # killed while requests were on them

    def kill_one(self, number: int) -> None:
        """Waits for a victim, and for another one that can take over."""
        role = self._roles[number % len(self._roles)]
        if role == ROUTER:
            status = wait_until(self._router_status, 180, "the router is up")
            router = next(p for p in status.processes if p.role == ROUTER)
            os.kill(router.pid, signal.SIGKILL)
            return
        wait_until(lambda: len(self._ready(role)) >= 2, 180, "two workers are up")
        patience = time.monotonic() + BUSY_SECONDS
        while not (busy := self._busy(role)) and time.monotonic() < patience:
            pass
        self.num_at_work += bool(busy)
        victim = self._rng.choice(busy or self._ready(role))
        # Now the front, now one of its ranks: either is the end of the whole worker.
        pids = [victim.identity.pid, self._rng.choice(victim.ranks).pid]
        os.kill(pids[number % 2], signal.SIGKILL)

    def _ready(self, role: "worker_pb2.Role.ValueType") -> list[worker_pb2.WorkerStatus]:
        status = self._router_status()
        workers = status.workers if status is not None else []
        return [w for w in workers if w.identity.role == role and w.ready and not w.draining]

    def _busy(self, role: "worker_pb2.Role.ValueType") -> list[worker_pb2.WorkerStatus]:
        return [w for w in self._ready(role) if any(rank.num_running for rank in w.ranks)]

    def _router_status(self) -> router_pb2.GetStatusResponse | None:
        try:
            status = self._cluster.status()
        except grpc.RpcError:
            return None
        return status if len(status.workers) >= 2 else None


def everybody_is_back(cluster: Cluster, num_workers: int) -> Callable[[], bool]:
    def ask() -> bool:
        try:
            workers = cluster.status().workers
        except grpc.RpcError:
            return False
        return len([w for w in workers if w.ready]) == num_workers

    return ask


async def disturb(pool: StreamPool, killer: Killer, plan: Plan) -> int:
    """The kills, while the streams run; how many of these ran at each kill, summed up."""
    running = asyncio.create_task(pool.run())
    num_running = 0
    try:
        for number in range(plan.num_kills):
            await asyncio.sleep(plan.pause_seconds)
            await asyncio.to_thread(killer.kill_one, number)
            num_running += pool.tally.num_running
            if running.done():
                break
        await asyncio.sleep(plan.pause_seconds)
    finally:
        pool.stop.set()
        await running
    return num_running


def settled(cluster: Cluster, before: Footprint) -> Footprint:
    """The footprint once it is no larger than before, or after a while as it is."""
    deadline = time.monotonic() + 60
    while True:
        after = footprint(cluster)
        at_most = max(grown(before, after).values())
        if at_most <= HELD_TO_AND_FRO or time.monotonic() > deadline:
            return after
        time.sleep(0.5)


async def play(cluster: Cluster, plan: Plan) -> dict[str, Any]:
    """The whole story; what it came to, in numbers."""
    streams = long_streams(
        plan.num_streams, cluster.model, num_tokens=plan.num_tokens,
        prompt_tokens=plan.prompt_tokens,
    )  # fmt: skip
    num_workers = len(cluster.status().workers)
    pool = StreamPool(streams, cluster.url)
    killer = Killer(cluster, plan)
    try:
        await pool.learn()
        await pool.close()
        await asyncio.to_thread(cluster.assert_nothing_held)
        before = await asyncio.to_thread(footprint, cluster)
        pool = StreamPool(streams, cluster.url)
        begun = time.monotonic()
        num_running = await disturb(pool, killer, plan)
        seconds = time.monotonic() - begun
    finally:
        await pool.close()
    tally = pool.tally
    assert not tally.faults, f"{len(tally.faults)} of {tally.num_complete}: {tally.faults[:5]}"
    back = everybody_is_back(cluster, num_workers)
    await asyncio.to_thread(wait_until, back, 180, "all workers are back")
    await asyncio.to_thread(cluster.assert_nothing_held)
    after = await asyncio.to_thread(settled, cluster, before)
    assert max(grown(before, after).values()) <= HELD_TO_AND_FRO, (before, after)
    assert after.num_processes == before.num_processes
    assert gateway_metric(cluster, "epserve_gateway_num_running_requests") == 0
    return {
        "kills": plan.num_kills,
        "of busy ones": killer.num_at_work,
        "streams at once": plan.num_streams,
        "running at a kill": round(num_running / plan.num_kills, 1),
        "complete and equal": tally.num_complete,
        "told to come back": tally.num_told_to_wait,
        "turned away by full workers": tally.num_turned_away,
        "moved choices": int(gateway_metric(cluster, "epserve_gateway_moves_total")),
        "longest stream (s)": round(tally.longest_seconds, 1),
        "seconds": round(seconds, 1),
        "before": before,
        "after": after,
    }


# Kills of prefill workers count where prompts are long and answers short.
LONG = {
    "decode": Plan(roles=(DECODE,), num_streams=64, num_kills=8),
    "prefill": Plan(
        roles=(PREFILL,), num_streams=64, num_kills=8, num_tokens=100, prompt_tokens=300,
    ),
    "router": Plan(roles=(ROUTER,), num_streams=64, num_kills=8),
}  # fmt: skip
SHORT = Plan(
    roles=(DECODE, PREFILL, ROUTER), num_streams=21, num_kills=3, num_tokens=150, prompt_tokens=200,
)  # fmt: skip


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(SHORT, id="all in turn"),
        *(pytest.param(plan, id=name, marks=pytest.mark.slow) for name, plan in LONG.items()),
    ],
)
def test_streams_survive(tmp_path: Path, capsys: pytest.CaptureFixture[str], plan: Plan) -> None:
    workers = ["--decode-workers", "3", "--decode-ranks", "1", "--prefill-workers", "2"]
    with Cluster(tmp_path, *workers, "--threads", "1") as cluster:
        numbers = asyncio.run(play(cluster, plan))
    killed = ", ".join(worker_pb2.Role.Name(role).removeprefix("ROLE_") for role in plan.roles)
    with capsys.disabled():
        sys.stdout.write(f"\n{killed} killed: {numbers}\n")
    assert numbers["complete and equal"] >= plan.num_streams
    # Whoever has not begun may be refused while the workers that are left are full; the more
    # seldom, the faster the machine.
    assert numbers["turned away by full workers"] <= numbers["complete and equal"] // 10
    if ROUTER not in plan.roles:
        assert numbers["told to come back"] == 0, "there was always a worker"
    if DECODE in plan.roles:
        assert numbers["moved choices"] >= plan.num_kills // len(plan.roles)
