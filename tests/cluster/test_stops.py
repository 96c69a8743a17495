"""Processes are stopped (SIGSTOP) under running streams, and go on later. Others carry on
meanwhile, every stream ends complete and as it would have without, and nothing is left over."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path

import httpx
import pytest

from ctl.base.cluster_access import find_token
from proto import worker_pb2
from tests.cluster.harness import DEMO_MODEL, REPOSITORY, Cluster, wait_until
from tests.cluster.long_streams import StreamPool, long_streams
from tests.free_ports import free_port

# What CI sees of stops is in test_chaos.py: here each is waited for, which takes half a minute.
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_STREAMS = 7
NUM_TOKENS, PROMPT_TOKENS = 60, 60
# Of a busy machine; a stream that nothing moves waits for much longer.
PATIENCE_SECONDS = 60.0
NUM_WORKERS = 4
OPTIONS = ["--prefill-workers", "2", "--decode-workers", "2", "--threads", "1"]
OPTIONS += ["--set", "router.silence-seconds=3"]
for role in ("prefill", "decode"):
    OPTIONS += ["--set", f"{role}.stall-seconds=3", "--set", f"{role}.step-timeout-seconds=120"]
ROLES = {"prefill": worker_pb2.ROLE_PREFILL, "decode": worker_pb2.ROLE_DECODE}
KINDS = ("decode rank", "decode front", "prefill rank", "prefill front", "router", "gateway")


class Stage:
    """A cluster, and beside it a second router and a gateway that asks both."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self._folder = folder
        router, gateway = (f"127.0.0.1:{free_port()}" for _ in range(2))
        lists = [
            f"--{name}=" + ",".join(one.identity.address for one in self._workers(name))
            for name in ROLES
        ]
        self.url = f"http://{gateway}"
        self.processes = {
            "router": self._start("router", router, *lists),
            "gateway": self._start(
                "gateway", gateway, f"--router={cluster.router},{router}", f"--model={DEMO_MODEL}"
            ),
        }

    def pid_of(self, kind: str) -> int:
        """Of a process of this kind that has something to do, should there be one."""
        role, _, part = kind.partition(" ")
        if role in self.processes:
            return self.processes[role].pid
        worker = max(
            (one for one in self._workers(role) if one.ready),
            key=lambda one: sum(rank.num_running for rank in one.ranks),
        )
        return worker.identity.pid if part == "front" else worker.ranks[-1].pid

    def num_ready(self) -> int:
        return sum(one.ready for role in ROLES for one in self._workers(role))

    def is_idle(self) -> bool:
        return self.cluster.num_open_requests() == 0

    def epochs(self) -> set[str]:
        return {one.identity.epoch for role in ROLES for one in self._workers(role)}

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=2).is_success
        except httpx.TransportError:
            return False

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def _workers(self, role: str) -> list[worker_pb2.WorkerStatus]:
        return self.cluster.workers(ROLES[role])

    def _start(self, module: str, address: str, *flags: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", module, f"--name=second-{module}", f"--listen={address}"]
        command.append(f"--cluster-token-file={find_token(self.cluster.router)}")
        with (self._folder / f"second-{module}.log").open("wb") as log:
            return subprocess.Popen([*command, *flags], cwd=REPOSITORY, stdout=log, stderr=log)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("stops")
    with ExitStack() as stack:
        stage = Stage(stack.enter_context(Cluster(folder, *OPTIONS)), folder)
        stack.callback(stage.close)
        wait_until(stage.is_ready, 60, "the second gateway is ready")
        yield stage


async def stop_some(stage: Stage, pool: StreamPool, kinds: Sequence[str]) -> None:
    """Stops one process of each kind, and has them go on when others have done without."""
    pids = [await asyncio.to_thread(stage.pid_of, kind) for kind in kinds]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        if "gateway" in kinds:
            await asyncio.to_thread(wait_until, stage.is_idle, PATIENCE_SECONDS, "no request")
        else:
            await pool.turn_over(PATIENCE_SECONDS)
        num_left = NUM_WORKERS - sum(kind.split()[0] in ROLES for kind in kinds)
        await asyncio.to_thread(
            wait_until, lambda: stage.num_ready() == num_left, PATIENCE_SECONDS, "it is noticed"
        )
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    await asyncio.to_thread(
        wait_until, lambda: stage.num_ready() == NUM_WORKERS, PATIENCE_SECONDS, "all are ready"
    )


async def play(stage: Stage, stops: Sequence[Sequence[str]]) -> None:
    epochs = stage.epochs()
    streams = long_streams(
        NUM_STREAMS, stage.cluster.model, num_tokens=NUM_TOKENS, prompt_tokens=PROMPT_TOKENS
    )
    pool = StreamPool(streams, stage.url)
    try:
        await pool.learn()
        running = asyncio.create_task(pool.run())
        try:
            for kinds in stops:
                await pool.turn_over(PATIENCE_SECONDS)
                await stop_some(stage, pool, kinds)
        finally:
            pool.stop.set()
            await running
    finally:
        await pool.close()
    assert not pool.tally.faults, pool.tally.faults[:5]
    assert pool.tally.num_complete >= NUM_STREAMS * len(stops)
    assert stage.epochs() == epochs, "none was restarted"
    stage.cluster.assert_nothing_held()


def test_one_process_of_each_kind_in_turn(stage: Stage) -> None:
    asyncio.run(play(stage, [[kind] for kind in KINDS]))


def test_two_processes_at_once(stage: Stage) -> None:
    def can_do_without(first: str, second: str) -> bool:
        return first.split()[0] != second.split()[0]

    pairs = [list(pair) for pair in combinations(KINDS, 2) if can_do_without(*pair)]
    asyncio.run(play(stage, pairs))
