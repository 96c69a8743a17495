"""`--workers`: one port, several processes, one set of numbers and limits."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from core.address import Address
from gateway.base.settings import GatewaySettings
from gateway.worker import CANNOT_START
from gateway.workers import _Workers
from tests.eventually import eventually
from tests.gateway.conftest import ANSWERS, MODEL, tokens_of
from tests.gateway.fake_cluster import FakeCluster
from tests.gateway.model_folder import EOS_ID, make_model_folder
from tests.gateway.test_process import gateway_process, is_ready, run_gateway

BODY = {"model": MODEL, "prompt": "plain", "temperature": 0, "max_tokens": 200}


def children(pid: int) -> set[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return {int(child) for child in text.split()}


async def ask(client: httpx.AsyncClient) -> httpx.Response:
    # A connection of its own: that is what is spread over the processes.
    headers = {"connection": "close", "authorization": "Bearer secret"}
    return await client.post("/v1/completions", json=BODY, headers=headers)


async def metric(client: httpx.AsyncClient, line: str) -> float:
    text = (await client.get("/metrics")).text
    return sum(float(one.rpartition(" ")[2]) for one in text.splitlines() if one.startswith(line))


async def until_metric(client: httpx.AsyncClient, line: str, value: float) -> None:
    async with asyncio.timeout(30):
        while await metric(client, line) < value:
            await asyncio.sleep(0.02)


async def admitted(
    client: httpx.AsyncClient, started: asyncio.Event
) -> asyncio.Task[httpx.Response]:
    """A running request. Each process reads the keys again in its own time: one that still counts
    by the old ones refuses, and the next try may meet it again."""
    async with asyncio.timeout(20):
        while True:
            request = asyncio.create_task(ask(client))
            begun = asyncio.create_task(started.wait())
            await asyncio.wait([request, begun], return_when=asyncio.FIRST_COMPLETED)
            if begun.done():
                return request
            begun.cancel()
            assert request.result().status_code == 429
            await asyncio.sleep(0.1)


async def test_one_gateway_of_two_processes(model_folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret requests_per_minute=41\n")
    flags = ("--workers", "2", "--api-keys-file", str(keys))
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        gateway_process(cluster, model_folder, *flags) as (process, client),
    ):
        names = set()
        async with asyncio.timeout(60):
            while len(names) < 2:
                await asyncio.sleep(0.05)
                names = {one.identity.name for one in cluster.router.announcements}
        assert names == {"gateway-0", "gateway-1"}
        started_at = time.monotonic()
        replies = await asyncio.gather(*(ask(client) for _ in range(40)))
        assert {one.json()["choices"][0]["text"] for one in replies} == {ANSWERS["plain"]}
        # A request is counted a moment after its reply.
        ended = 'epserve_requests_total{outcome="ok"}'
        await until_metric(client, ended, 40)
        # Whoever is asked tells the sum, and counts what all have let in.
        for _ in range(6):
            assert await metric(client, ended) == 40
            assert await metric(client, "epserve_gateway_num_running_requests") == 0
        # A bucket fills again meanwhile, by less than one request a second.
        num_done = 40
        while (await ask(client)).status_code == 200:
            num_done += 1
        assert 41 <= num_done <= 42 + (time.monotonic() - started_at) * 41 / 60
        await until_metric(client, ended, num_done)

        # One that dies is started again; the other serves meanwhile.
        before = children(process.pid)
        assert len(before) == 2
        os.kill(min(before), signal.SIGKILL)
        async with asyncio.timeout(60):
            while len(children(process.pid) - before) < 1 or not await is_ready(client):
                await asyncio.sleep(0.05)
        assert await metric(client, ended) == num_done

        # A stop lets streams finish, and leaves nobody behind.
        everybody = children(process.pid)
        keys.write_text("secret\n")
        cluster.first.plan.step_seconds = 0.02
        cluster.first.started.clear()
        running = await admitted(client, cluster.first.started)
        process.terminate()
        assert (await running).json()["choices"][0]["text"] == ANSWERS["plain"]
        assert await asyncio.wait_for(process.wait(), 60) == 0
        assert not [pid for pid in everybody if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_that_everybody_gets(model_folder: Path, number: signal.Signals) -> None:
    """As from a terminal's Ctrl-C, or of a service manager that tells a whole control group: it
    is one wish, of which the processes hear again from the one that started them."""
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        gateway_process(cluster, model_folder, "--workers", "2", "--grace-seconds", "300") as (
            process,
            client,
        ),
    ):
        cluster.first.plan.step_seconds = 0.1
        running = asyncio.create_task(ask(client))
        await asyncio.wait_for(cluster.first.started.wait(), 30)
        for pid in (*children(process.pid), process.pid):
            os.kill(pid, number)
        assert (await running).json()["choices"][0]["text"] == ANSWERS["plain"]
        assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_a_second_signal_ends_who_shares_a_folder_without_a_parent(
    model_folder: Path, tmp_path: Path
) -> None:
    flags = ("--shared-folder", str(tmp_path), "--grace-seconds", "300")
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        gateway_process(cluster, model_folder, *flags) as (process, client),
    ):
        cluster.first.plan.hang_after = 1
        running = asyncio.create_task(ask(client))
        await asyncio.wait_for(cluster.first.started.wait(), 30)
        process.terminate()
        async with asyncio.timeout(30):
            while (await client.get("/ready")).status_code == 200:
                await asyncio.sleep(0.02)
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 30) == -signal.SIGTERM
        await asyncio.gather(running, return_exceptions=True)


def test_processes_that_cannot_start(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    result = run_gateway(
        "--router", "127.0.0.1:1", "--model", str(folder), "--workers", "2",
        "--listen", "127.0.0.1:0",
    )  # fmt: skip
    assert result.returncode == 1
    assert "tokenizer.json" in result.stderr
    assert "Traceback" not in result.stderr


class Running(_Workers):
    """Every process runs one piece of code."""

    def __init__(self, folder: Path, code: str) -> None:
        super().__init__(GatewaySettings.model_construct(), Address("127.0.0.1", 1), folder)
        self.num_started = 0
        self._code = code

    async def _start(self, index: int) -> asyncio.subprocess.Process:
        self.num_started += 1
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", self._code)
        self._processes[index] = process
        return process


@pytest.mark.parametrize("status", [1, 2, CANNOT_START])
async def test_who_crashes_is_started_again_and_its_siblings_stay(
    tmp_path: Path, status: int
) -> None:
    """1 is also what Python ends with behind an exception that nobody has caught."""
    workers = Running(tmp_path, f"raise SystemExit({status})")
    keeping = asyncio.create_task(workers._keep(0))
    await eventually(lambda: workers.num_started >= 3 or keeping.done(), 30)
    assert (workers.num_started, keeping.done()) == (
        (1, True) if status == CANNOT_START else (3, False)
    )
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await workers._end_all()


# Its event loop turns for a while, then something holds it up.
STUCK = """
import asyncio, time
from pathlib import Path
import gateway.beats
gateway.beats.BEAT_SECONDS = 0.05
async def main():
    beating = asyncio.create_task(gateway.beats.beat(Path(FOLDER)))
    await asyncio.sleep(3)
    time.sleep(60)
asyncio.run(main())
"""


async def test_who_is_stuck_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    monkeypatch.setattr("gateway.beats.BEAT_SECONDS", 0.5)
    monkeypatch.setattr("gateway.beats.NUM_MISSED", 3)
    workers = Running(tmp_path, STUCK.replace("FOLDER", repr(str(tmp_path))))
    keeping = asyncio.create_task(workers._keep(0))
    with capture_logs() as lines:
        await eventually(lambda: workers.num_started >= 2, 60)
    events = [(line["event"], line.get("status")) for line in lines]
    assert events[:2] == [("worker process does nothing", None), ("worker process ended", -9)]
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await workers._end_all()
