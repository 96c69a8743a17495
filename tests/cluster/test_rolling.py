"""Every worker is restarted, one of each role at a time, under running streams: no request fails,
every stream is as it would have been, and nothing is left over."""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from proto import worker_pb2, worker_pb2_grpc
from tests.cluster.footprint import gateway_metric
from tests.cluster.harness import Cluster, wait_until
from tests.cluster.long_streams import StreamPool, long_streams
from tests.cluster.token_channel import token_channel

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

ROUTER = worker_pb2.ROLE_ROUTER
# Shorter than streams run: most of them are handed over.
GRACE_SECONDS = 0.3
CHUNK_TOKENS = 64


def find(cluster: Cluster, name: str) -> worker_pb2.WorkerStatus | None:
    return next((w for w in cluster.status().workers if w.identity.name == name), None)


def send_drain(cluster: Cluster, worker: worker_pb2.WorkerStatus, **fields: object) -> None:
    with token_channel(worker.identity.address, cluster.router) as peer:
        request = worker_pb2.DrainRequest(**fields)  # type: ignore[arg-type]
        worker_pb2_grpc.WorkerStub(peer).Drain(request, timeout=30)


def terminate(_cluster: Cluster, worker: worker_pb2.WorkerStatus) -> None:
    """SIGTERM, as an operator or a node that is shut down sends it."""
    os.kill(worker.identity.pid, signal.SIGTERM)


def drain_then_terminate(cluster: Cluster, worker: worker_pb2.WorkerStatus) -> None:
    """The worker is asked to drain, seen drained while the streams go on, and only then ended."""
    name, epoch = worker.identity.name, worker.identity.epoch
    send_drain(cluster, worker, grace_seconds=GRACE_SECONDS)

    def drained() -> bool:
        now = find(cluster, name)
        assert now is not None, f"{name} left by itself"
        assert now.identity.epoch == epoch, f"{name} was restarted before it was drained"
        return now.drained

    wait_until(drained, 120, f"{name} is drained")
    assert find(cluster, name).num_open == 0  # type: ignore[union-attr]
    os.kill(worker.identity.pid, signal.SIGTERM)


Restart = Callable[[Cluster, worker_pb2.WorkerStatus], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every worker is restarted `num_rounds` times, the ways by turns."""

    num_workers: int  # of each role
    num_streams: int
    num_tokens: int
    num_rounds: int = 1
    with_router: bool = False  # it is restarted as well, behind the workers
    overlap: bool = False  # decode's schedule


WAYS: tuple[Restart, ...] = (terminate, drain_then_terminate)


def restart_one(cluster: Cluster, name: str, way: Restart) -> float:
    """Returns once its successor is ready; how many seconds that took."""
    before = find(cluster, name)
    assert before is not None, name
    begun = time.monotonic()
    way(cluster, before)

    def is_back() -> bool:
        now = find(cluster, name)
        return now is not None and now.ready and now.identity.epoch != before.identity.epoch

    wait_until(is_back, 240, f"{name} is back")
    return time.monotonic() - begun


def restart_all(cluster: Cluster, role: str, plan: Plan) -> list[float]:
    """One worker of the role after the other; how long each restart took."""
    return [
        restart_one(cluster, f"{role}-{index}", WAYS[(index + number) % len(WAYS)])
        for number in range(plan.num_rounds)
        for index in range(plan.num_workers)
    ]


def restart_router(cluster: Cluster, plan: Plan) -> None:
    before = next(p for p in cluster.status().processes if p.role == ROUTER)
    os.kill(before.pid, signal.SIGTERM)

    def is_back() -> bool:
        try:
            status = cluster.status()
        except grpc.RpcError:
            return False
        epochs = [p.epoch for p in status.processes if p.role == ROUTER]
        num_ready = sum(worker.ready for worker in status.workers)
        return before.epoch not in epochs and num_ready == 2 * plan.num_workers

    wait_until(is_back, 180, "the router is back and knows all workers")


def ask_all_the_time(cluster: Cluster, stop: threading.Event) -> int:
    """Whoever comes anew is answered as well, whatever is being restarted; how many were."""
    num_answered = 0
    while not stop.wait(0.1):
        cluster.complete([9, 8, 7 + num_answered % 500], 2)
        num_answered += 1
    return num_answered


async def roll(pool: StreamPool, cluster: Cluster, plan: Plan) -> tuple[list[float], int]:
    """Restarts the workers while the streams run; how long each restart took, and how many
    others were answered meanwhile."""
    running = asyncio.create_task(pool.run())
    stop = threading.Event()
    newcomers = asyncio.create_task(asyncio.to_thread(ask_all_the_time, cluster, stop))
    try:
        await asyncio.to_thread(
            wait_until, lambda: pool.tally.num_running > plan.num_streams // 2, 120, "streams run"
        )
        decode, prefill = await asyncio.gather(
            asyncio.to_thread(restart_all, cluster, "decode", plan),
            asyncio.to_thread(restart_all, cluster, "prefill", plan),
        )
        if plan.with_router:
            await asyncio.to_thread(restart_router, cluster, plan)
    finally:
        stop.set()
        pool.stop.set()
        await running
        num_answered = await newcomers
    return decode + prefill, num_answered


async def play(cluster: Cluster, plan: Plan) -> dict[str, Any]:
    """The whole story; what it came to, in numbers."""
    streams = long_streams(
        plan.num_streams, cluster.model, num_tokens=plan.num_tokens, prompt_tokens=150
    )
    pool = StreamPool(streams, cluster.url)
    try:
        await pool.learn()
        begun = time.monotonic()
        restarts, num_newcomers = await roll(pool, cluster, plan)
        seconds = time.monotonic() - begun
    finally:
        await pool.close()
    tally = pool.tally
    assert not tally.faults, f"{len(tally.faults)} of {tally.num_complete}: {tally.faults[:5]}"
    await asyncio.to_thread(cluster.assert_nothing_held)
    return {
        "restarts": len(restarts),
        "longest restart (s)": round(max(restarts), 1),
        "streams at once": plan.num_streams,
        "complete and equal": tally.num_complete,
        "told to come back": tally.num_told_to_wait + tally.num_turned_away,
        "others answered": num_newcomers,
        "moved choices": int(gateway_metric(cluster, "epserve_gateway_moves_total")),
        "longest stream (s)": round(tally.longest_seconds, 1),
        "seconds": round(seconds, 1),
    }


SHORT = Plan(num_workers=2, num_streams=32, num_tokens=60)
LONG = Plan(num_workers=2, num_streams=32, num_tokens=200, num_rounds=4, with_router=True)
# While its only worker is away, whoever asks waits for it.
ALONE = Plan(num_workers=1, num_streams=16, num_tokens=60, num_rounds=2, with_router=True)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(SHORT, id="two of each"),
        pytest.param(LONG, id="two of each, long", marks=pytest.mark.slow),
        pytest.param(ALONE, id="one of each", marks=pytest.mark.slow),
        pytest.param(
            replace(SHORT, overlap=True), id="two of each, overlapped", marks=pytest.mark.slow
        ),
    ],
)
def test_no_request_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str], plan: Plan) -> None:
    options = [f"--{role}-workers={plan.num_workers}" for role in ("prefill", "decode")]
    options += ["--decode-ranks=1", "--threads=1"]
    options += ["--set", f"decode.overlap-schedule={str(plan.overlap).lower()}"]
    # Too few pages to remember all prompts: prefill has work to hand over, too.
    options += ["--set", "prefill.kv-pages=48", "--set", f"prefill.chunk-tokens={CHUNK_TOKENS}"]
    for role in ("prefill", "decode"):
        options += ["--set", f"{role}.stop-grace-seconds={GRACE_SECONDS}"]
    with Cluster(tmp_path, *options) as cluster:
        numbers = asyncio.run(play(cluster, plan))
    with capsys.disabled():
        sys.stdout.write(f"\nrolling restart: {numbers}\n")
    assert numbers["told to come back"] == 0
    assert numbers["complete and equal"] >= plan.num_streams
    assert numbers["others answered"] > 0
    assert numbers["moved choices"] > 0
