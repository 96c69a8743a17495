"""CORS, TLS, pings, priorities, and connections that bring nothing or take nothing."""

import asyncio
import json
import shutil
import ssl
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway import http_protocol
from gateway.listener import listen_on
from gateway.served_model import ServedModel
from gateway.server import serve
from gateway.settings import GatewaySettings
from tests.gateway.conftest import ANSWERS, MODEL, Gateway, running_gateway, tokens_of
from tests.gateway.fake_cluster import FakeCluster
from tests.gateway.model_folder import EOS_ID
from tests.gateway.stream import join

BODY = {"model": MODEL, "prompt": "plain", "temperature": 0, "max_tokens": 200}


async def eventually(condition: Any, seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def connect(
    gateway: Gateway, limit: int = 2**16
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A reader that takes in twice `limit` bytes by itself."""
    host, port = gateway.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port), limit=limit)


async def post(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await writer.drain()


async def test_cors(model_folder: Path) -> None:
    page = {"origin": "https://page.example", "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type"}  # fmt: skip
    async with FakeCluster(tokens_of, EOS_ID) as cluster:
        async with running_gateway(cluster, model_folder) as gateway:
            reply = await gateway.client.options("/v1/completions", headers=page)
            assert reply.status_code == 405
            assert "access-control-allow-origin" not in reply.headers
        async with running_gateway(
            cluster, model_folder, cors_origins=("https://page.example",), api_keys="k"
        ) as gateway:
            reply = await gateway.client.options("/v1/completions", headers=page)
            assert reply.status_code == 200  # asked without a key
            assert reply.headers["access-control-allow-origin"] == "https://page.example"
            refused = await gateway.client.post("/v1/completions", json=BODY, headers=page)
            assert refused.status_code == 401
            assert "access-control-allow-origin" in refused.headers
            headers = page | {"authorization": "Bearer k"}
            reply = await gateway.client.post("/v1/completions", json=BODY, headers=headers)
            assert reply.status_code == 200
            assert "x-request-id" in reply.headers["access-control-expose-headers"]
            other = page | {"origin": "https://other.example"}
            reply = await gateway.client.options("/v1/completions", headers=other)
            assert "access-control-allow-origin" not in reply.headers


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
async def test_tls(model_folder: Path, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
         "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    async with FakeCluster(tokens_of, EOS_ID) as cluster:
        settings = GatewaySettings(
            router=cluster.router.server.address, model=model_folder, served_model_name=MODEL,
            tls_cert=cert, tls_key=key, grace_seconds=0.1,
        )  # fmt: skip
        listener = listen_on("127.0.0.1:0")
        stop = asyncio.Event()
        serving = asyncio.create_task(serve(settings, ServedModel.load(settings), listener, stop))
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        context = ssl.create_default_context(cafile=str(cert))
        try:
            async with httpx.AsyncClient(base_url=url, verify=context, timeout=30) as client:
                await asyncio.wait_for(cluster.router.announced.wait(), 20)
                reply = await client.post("/v1/completions", json=BODY | {"stream": True})
                assert join(reply, chat=False)[0][0].text == ANSWERS["plain"]
        finally:
            stop.set()
            await asyncio.wait_for(serving, 20)
    with pytest.raises(ValueError, match="belong together"):
        GatewaySettings(router="127.0.0.1:1", model=model_folder, tls_cert=cert)


async def test_pings_while_nothing_comes(model_folder: Path) -> None:
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        running_gateway(cluster, model_folder, ping_seconds=0.1, max_inflight=1) as gateway,
    ):
        cluster.first.plan.hang_after = 3
        first = asyncio.create_task(gateway.complete("plain", stream=True))
        await asyncio.wait_for(cluster.first.started.wait(), 20)
        # Waits in the gateway's queue, its stream kept alive meanwhile.
        reader, writer = await connect(gateway)
        await post(writer, BODY | {"stream": True})
        text = await asyncio.wait_for(reader.readuntil(b": ping\n\n"), 20)
        assert b"200 OK" in text
        assert b"text/event-stream" in text
        whole = asyncio.create_task(gateway.complete("plain"))
        for _ in range(2):
            text += await asyncio.wait_for(reader.readuntil(b": ping\n\n"), 20)
        cluster.first.plan.hang_after = None
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        text += await asyncio.wait_for(reader.readuntil(b"data: [DONE]"), 20)
        assert text.count(b": ping") >= 3
        assert (await whole).json()["choices"][0]["text"] == ANSWERS["plain"]
        writer.close()


async def test_refusals_behind_a_ping_are_events(model_folder: Path) -> None:
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        running_gateway(
            cluster, model_folder, ping_seconds=0.05, max_inflight=1, max_queue_seconds=1.5
        ) as gateway,
    ):
        cluster.first.plan.hang_after = 3
        first = asyncio.create_task(gateway.complete("plain"))
        await asyncio.wait_for(cluster.first.started.wait(), 20)
        for _ in range(5):  # a machine that stands still for a second sends no ping before
            reply = await gateway.complete("plain", stream=True)
            if reply.status_code == 200:
                break
        assert reply.status_code == 200
        *_, last = reply.text.strip().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "overloaded"
        assert "[DONE]" not in reply.text
        assert (await gateway.complete("plain")).status_code == 429
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def test_priorities_reach_router_and_worker(model_folder: Path) -> None:
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        running_gateway(cluster, model_folder) as gateway,
    ):
        for priority in (7, -100, None):
            assert (await gateway.complete("plain", priority=priority)).status_code == 200
            assert cluster.router.requests[-1].priority == (priority or 0)
            assert cluster.first.requests[-1].priority == (priority or 0)
        reply = await gateway.complete("plain", priority="high")
        assert reply.json()["error"]["param"] == "priority"


async def test_a_client_that_never_reads(model_folder: Path) -> None:
    """The worker is left within a bound, and little is held for the client meanwhile."""
    async with (
        FakeCluster(lambda _: [5] * 300_000, EOS_ID) as cluster,
        running_gateway(
            cluster, model_folder, reader_stall_seconds=0.5, request_timeout_seconds=60
        ) as gateway,
    ):
        cluster.router.max_model_len = 400_000
        async with asyncio.timeout(20):
            while (await gateway.client.get("/v1/models")).json()["data"][0][
                "max_model_len"
            ] != 400_000:
                await asyncio.sleep(0.05)
        cluster.first.plan.step_tokens = 100
        cluster.first.plan.step_seconds = 0.001
        reader, writer = await connect(gateway, limit=1024)
        await post(writer, BODY | {"stream": True, "max_tokens": 300_000, "logprobs": 5})
        await asyncio.wait_for(cluster.first.started.wait(), 20)
        await eventually(lambda: cluster.first.num_running == 0, 60)
        assert cluster.first.cancelled.is_set()

        async def outcomes() -> str:
            return (await gateway.client.get("/metrics")).text

        async with asyncio.timeout(20):
            while 'epserve_requests_total{outcome="slow_reader"} 1.0' not in await outcomes():
                await asyncio.sleep(0.05)
        assert "epserve_gateway_num_running_requests 0.0" in await outcomes()
        # The connection is cut: what the kernel had is all there is.
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(100 * 2**20), 20)
        writer.close()


async def test_connections_that_bring_nothing(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.3)
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        running_gateway(cluster, model_folder) as gateway,
    ):
        for start in (b"", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-slow: "):
            reader, writer = await connect(gateway)
            writer.write(start)
            with suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 20) == b""
            writer.close()
        # Nor may blank lines hold a connection that has had its answer.
        reader, writer = await connect(gateway)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(reader.readuntil(b"}"), 20)
        writer.write(b"\r\n")
        with suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()
        # A stream that lasts longer than a head may is not cut.
        cluster.first.plan.step_seconds = 0.03
        reply = await gateway.complete("plain", stream=True)
        assert join(reply, chat=False)[0][0].text == ANSWERS["plain"]


@pytest.mark.parametrize(
    "head",
    [b"nonsense\r\n\r\n", b"GET /health HTTP/1.1\r\nx: " + b"y" * 200_000 + b"\r\n\r\n"],
    ids=["no HTTP", "large"],
)
async def test_heads_that_are_refused(model_folder: Path, head: bytes) -> None:
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        running_gateway(cluster, model_folder) as gateway,
    ):
        reader, writer = await connect(gateway)
        writer.write(head)
        text = await asyncio.wait_for(reader.readuntil(b"}}"), 20)
        assert text.startswith(b"HTTP/1.1 400")
        error = json.loads(text.partition(b"\r\n\r\n")[2])["error"]
        assert set(error) == {"message", "type", "param", "code"}
        writer.close()


async def test_prompts_are_logged_only_when_asked_for(
    model_folder: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        running_gateway(cluster, model_folder, log_prompts=True) as gateway,
    ):
        await gateway.complete("plain words to be seen")
    out, err = capfd.readouterr()
    assert "plain words to be seen" in out + err + caplog.text
