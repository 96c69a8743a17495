"""`python -m router` with workers that discovery finds: from an API server to a pair and back."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from core.address import parse_address
from core.errors import EpserveError
from proto.router_pb2 import AssignRequest, AssignResponse
from proto.router_pb2_grpc import RouterStub
from router.discovery.choice import make_discovery
from router.discovery.members import DiscoveryError
from router.settings import RouterSettings
from rpc.client import channel, to_error
from tests.router.fake_kubernetes import FakeKubernetes
from tests.router.fake_worker import FakeWorker

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_SECONDS = 40.0
REQUEST = AssignRequest(model="demo", num_prompt_tokens=100)


class Router:
    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process = process
        self.address = address
        self._channel = channel(address)
        self._router = RouterStub(self._channel)

    async def assign(self) -> AssignResponse | EpserveError:
        try:
            return await self._router.Assign(REQUEST, timeout=PATIENCE_SECONDS)
        except grpc.aio.AioRpcError as error:
            return to_error(error)

    async def until_pair(self, prefill: str, decode: str) -> None:
        """Waits for a pair of these epochs."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                answer = await self.assign()
                if isinstance(answer, AssignResponse):
                    found = answer.prefill.epoch, answer.decode.epoch
                    if found == (prefill, decode):
                        return
                await asyncio.sleep(0.02)

    async def until_refused(self, reason: str) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                answer = await self.assign()
                if isinstance(answer, EpserveError) and reason in answer.message:
                    return
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        await self._channel.close(None)


@asynccontextmanager
async def router(*flags: str) -> AsyncIterator[Router]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", "--log-format", "json", *flags,
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        started: dict[str, Any] = json.loads(await process.stderr.readline())
        draining = asyncio.create_task(process.stderr.read())
        running = Router(process, started["address"])
        yield running
        await running.close()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    await draining


def add_pod(api: FakeKubernetes, name: str, worker: FakeWorker, role: str) -> None:
    ip, port = parse_address(worker.address)
    api.create(name, ip=ip, port=port, role=role, ready=True)


async def test_pods_come_and_go_and_come_back_as_others() -> None:
    async with (
        FakeKubernetes(namespace="serving") as api,
        FakeWorker("prefill", "p-1") as prefill,
        FakeWorker("decode", "d-1") as first,
        router(
            "--discovery", "kubernetes", "--kubernetes-api", api.url,
            "--kubernetes-namespace", "serving",
        ) as running,
    ):  # fmt: skip
        await running.until_refused("no worker is up")  # it starts with empty pools
        add_pod(api, "prefill-0", prefill, "prefill")
        add_pod(api, "decode-0", first, "decode")
        await running.until_pair("p-1", "d-1")

        api.terminate("decode-0")  # it still says that it is ready
        await running.until_refused("no decode worker is ready")
        api.delete("decode-0")
        api.drop_connections()
        await first.kill()
        async with FakeWorker("decode", "d-2", listen=first.address) as second:
            add_pod(api, "decode-0", second, "decode")  # same name, same IP, same port
            await running.until_pair("p-1", "d-2")

        api.delete("prefill-0")
        await running.until_refused("no")
        running.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(running.process.wait(), PATIENCE_SECONDS) == 0


async def test_names_are_looked_up() -> None:
    async with FakeWorker("prefill", "p") as prefill, FakeWorker("decode", "d") as decode:
        ports = [parse_address(worker.address).port for worker in (prefill, decode)]
        flags = ("--prefill-dns", f"localhost:{ports[0]}", "--decode-dns", f"localhost:{ports[1]}")
        async with router("--discovery", "dns", *flags) as running:
            await running.until_pair("p", "d")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--discovery", "dns"), "error: --discovery dns needs --prefill-dns and --decode-dns"),
        (
            ("--discovery", "kubernetes", "--decode", "h:1"),
            "error: --prefill and --decode need --discovery static, not kubernetes",
        ),
        (("--decode-dns", "h:1"), "need --discovery dns, not static"),
        (("--decode", "h:1", "--prefill", "h:1"), "error: h:1 cannot be both"),
        (("--discovery", "nonsense"), "error: --discovery: "),
        (("--kubernetes-api", "kube"), "error: --kubernetes-api: no http"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(
    flags: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        RouterSettings.parse(flags)
    assert complaint in capsys.readouterr().err


def test_without_the_client_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("router.discovery.kubernetes")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    settings = RouterSettings(discovery="kubernetes")
    with pytest.raises(DiscoveryError, match=r"pip install 'epserve\[kubernetes\]'"):
        make_discovery(settings, lambda: None)
