"""`python -m gateway` as a process: start, stop by signal, exit status."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from gateway.base.settings import GatewaySettings
from tests.eventually import eventually
from tests.free_ports import free_port
from tests.gateway.conftest import ANSWERS, MODEL, tokens_of
from tests.gateway.fake_cluster import FakeCluster
from tests.gateway.model_folder import EOS_ID, make_model_folder

REPOSITORY = Path(__file__).resolve().parents[2]


@asynccontextmanager
async def gateway_process(
    cluster: FakeCluster, folder: Path, *flags: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, httpx.AsyncClient]]:
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", "--listen", f"127.0.0.1:{port}",
        "--router", cluster.router.server.address, "--model", str(folder),
        "--served-model-name", MODEL, *flags,
        cwd=REPOSITORY, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            await eventually(lambda: is_ready(client), 60)
            yield process, client
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == 200
    except httpx.TransportError:
        return False


BODY = {"model": MODEL, "prompt": "unicode", "temperature": 0, "max_tokens": 200}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_serves_and_stops(model_folder: Path, number: signal.Signals) -> None:
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        gateway_process(
            cluster, model_folder, "--log-format", "json", "--grace-seconds", "300"
        ) as (process, client),
    ):
        headers = {"x-request-id": "the-id"}
        replies = await asyncio.gather(
            *(client.post("/v1/completions", json=BODY, headers=headers) for _ in range(20))
        )
        assert {r.json()["choices"][0]["text"] for r in replies} == {ANSWERS["unicode"]}
        process.send_signal(number)
        _, errors = await asyncio.wait_for(process.communicate(), 60)  # nothing was running
        assert process.returncode == 0
        lines = [json.loads(line) for line in errors.decode().splitlines()]
        ended = [line for line in lines if line["event"] == "generation ended"]
        assert len(ended) == 20
        assert {line["request_id"] for line in ended} == {"the-id"}
        assert {line["role"] for line in lines} == {"gateway"}
        assert not [line for line in lines if line["level"] in ("error", "warning")]


async def test_stop_with_a_stream_that_does_not_end(model_folder: Path) -> None:
    """Readiness off at once, new requests refused, the stream told, exit in time."""
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        gateway_process(cluster, model_folder, "--grace-seconds", "6") as (process, client),
    ):
        cluster.first.plan.hang_after = 3
        stream = asyncio.create_task(client.post("/v1/completions", json=BODY | {"stream": True}))
        whole = asyncio.create_task(client.post("/v1/completions", json=BODY))
        await eventually(lambda: cluster.first.num_running >= 2)
        process.terminate()
        async with asyncio.timeout(20):
            while (await client.get("/ready")).status_code == 200:
                await asyncio.sleep(0.01)
        refused = await client.post("/v1/completions", json=BODY)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        text = (await stream).text
        assert '"code":"unavailable"' in text.split("\n\n")[-2]
        assert "[DONE]" not in text
        assert (await whole).status_code == 503
        assert await asyncio.wait_for(process.wait(), 60) == 0
        await asyncio.wait_for(cluster.first.cancelled.wait(), 20)


def run_gateway(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gateway", *flags],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=90,
    )  # fmt: skip


def test_wrong_flags(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    router, model = ("--router", "127.0.0.1:1"), ("--model", str(model_folder))
    for flags, words in (
        ((*model,), "--router"),
        ((*router,), "--model"),
        ((*router, "--model", str(tmp_path)), "config.json"),
        ((*router, *model, "--max-attempts", "0"), "--max-attempts"),
        ((*router, *model, "--listen", "nowhere"), "--listen"),
        ((*router, *model, "--surprise", "1"), "surprise"),
    ):
        with pytest.raises(SystemExit) as exit_:
            GatewaySettings.parse(flags)
        assert exit_.value.code == 2
        assert words in capsys.readouterr().err


def test_bad_model_folder(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    result = run_gateway("--router", "127.0.0.1:1", "--model", str(folder))
    assert result.returncode == 1
    assert "tokenizer.json" in result.stderr
    assert "Traceback" not in result.stderr


def test_port_in_use(model_folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = ("--router", "127.0.0.1:1", "--model", str(model_folder), "--listen", listen)
        result = run_gateway(*flags)
    assert result.returncode == 1
    assert listen in result.stderr
    assert "Traceback" not in result.stderr


def test_needs_no_torch() -> None:
    code = "import sys, gateway.__main__; sys.exit('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
