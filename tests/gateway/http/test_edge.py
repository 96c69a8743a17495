"""Pings, priorities, and connections that bring nothing or take nothing."""

import asyncio
import json
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from core.errors import Overloaded
from gateway import server
from gateway.http import http_protocol
from tests.eventually import eventually
from tests.gateway.conftest import ANSWERS, MODEL, Gateway, running_gateway, tokens_of
from tests.gateway.fake_cluster import FakeCluster
from tests.gateway.model_folder import EOS_ID
from tests.gateway.stream import join

BODY = {"model": MODEL, "prompt": "plain", "temperature": 0, "max_tokens": 200}


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


async def test_pings_while_nothing_comes(model_folder: Path) -> None:
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        running_gateway(cluster, model_folder, ping_seconds=0.1) as gateway,
    ):
        release = asyncio.Event()

        async def wait(_request: Any) -> None:  # noqa: ANN401 - any will do
            await release.wait()

        cluster.router.before = wait
        reader, writer = await connect(gateway)
        await post(writer, BODY | {"stream": True})
        text = await asyncio.wait_for(reader.readuntil(b": ping\n\n"), 20)
        assert b"200 OK" in text
        assert b"text/event-stream" in text
        whole = asyncio.create_task(gateway.complete("plain"))
        for _ in range(2):
            text += await asyncio.wait_for(reader.readuntil(b": ping\n\n"), 20)
        release.set()
        text += await asyncio.wait_for(reader.readuntil(b"data: [DONE]"), 20)
        assert text.count(b": ping") >= 3
        assert (await whole).json()["choices"][0]["text"] == ANSWERS["plain"]
        writer.close()


async def test_pings_while_thoughts_are_left_out(model_folder: Path) -> None:
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        running_gateway(cluster, model_folder, ping_seconds=0.25) as gateway,
    ):
        cluster.first.plan.step_seconds = 0.06
        reply = await gateway.chat("think", include_reasoning=False, stream=True)
    assert ": ping" in reply.text
    assert "reasoning_content" not in reply.text


async def test_who_waits_in_the_queue_hears_nothing_and_is_refused_with_a_status(
    model_folder: Path,
) -> None:
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        running_gateway(
            cluster, model_folder, ping_seconds=0.05, max_inflight=1, max_queue_seconds=0.5
        ) as gateway,
    ):
        cluster.first.plan.hang_after = 3
        first = asyncio.create_task(gateway.complete("plain"))
        await asyncio.wait_for(cluster.first.started.wait(), 20)
        reply = await gateway.complete("plain", stream=True)
        assert reply.status_code == 429
        assert reply.headers["retry-after"] == "1"
        assert reply.json()["error"]["code"] == "overloaded"
        second = asyncio.create_task(gateway.complete("plain", stream=True))

        async def is_queued() -> bool:
            metrics = (await gateway.client.get("/metrics")).text
            return "epserve_gateway_num_waiting_requests 1.0" in metrics

        await eventually(is_queued)
        cluster.first.plan.hang_after = None
        first.cancel()
        reply = await asyncio.wait_for(second, 20)
        assert reply.status_code == 200
        assert reply.text.endswith("data: [DONE]\n\n")
        await asyncio.gather(first, return_exceptions=True)


async def test_refusals_behind_a_ping_are_events(model_folder: Path) -> None:
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        running_gateway(cluster, model_folder, ping_seconds=0.05) as gateway,
    ):

        async def refuse(_request: Any) -> None:  # noqa: ANN401 - any will do
            await asyncio.sleep(seconds)
            raise Overloaded("all decode workers are full", retry_after_seconds=3)

        cluster.router.before = refuse
        seconds = 1.5
        for _ in range(5):  # a machine that stands still for a second sends no ping before
            reply = await gateway.complete("plain", stream=True)
            if reply.status_code == 200:
                break
        assert reply.status_code == 200
        *_, last = reply.text.strip().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "overloaded"
        assert "[DONE]" not in reply.text
        seconds = 0.0
        refused = await gateway.complete("plain")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "3")


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


async def test_a_whole_reply_that_is_never_read(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection is cut, also behind the end of the response."""
    monkeypatch.setattr(server, "UNREAD_SECONDS", 0.3)
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        running_gateway(cluster, model_folder, reader_stall_seconds=0.2) as gateway,
    ):
        body = json.dumps({"prompt": "ab" * 100_000, "return_token_strs": True}).encode()
        head = f"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            host, port = gateway.url.removeprefix("http://").split(":")
            await asyncio.to_thread(client.connect, (host, int(port)))
            await asyncio.to_thread(client.sendall, head.encode() + body)
            client_port = client.getsockname()[1]
            await eventually(
                lambda: (
                    not any(
                        one.laddr.port == int(port) and one.raddr and one.raddr.port == client_port
                        for one in psutil.net_connections("tcp")
                    )
                )
            )
            client.settimeout(5)

            def read_on() -> None:
                while client.recv(2**20):
                    pass

            # What was on its way is all there is.
            with pytest.raises(ConnectionError):
                await asyncio.to_thread(read_on)


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


async def test_heads_without_bodies(model_folder: Path) -> None:
    """HEAD, as monitors send it, is answered as GET is; and the connection stays usable."""
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        running_gateway(cluster, model_folder) as gateway,
    ):
        for path, status in (
            ("/health", 200), ("/ready", 200), ("/v1/models", 200), ("/v1/models/other", 404),
            ("/nowhere", 404), ("/v1/completions", 405),
        ):  # fmt: skip
            reply, whole = await gateway.client.head(path), await gateway.client.get(path)
            assert (reply.status_code, whole.status_code) == (status, status)
            assert reply.content == b""
            assert reply.headers["content-length"] == str(len(whole.content))


async def test_a_gateway_that_stops_lets_connections_go(model_folder: Path) -> None:
    """Who tries again over the same one would only meet it again."""
    stop = asyncio.Event()
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        running_gateway(cluster, model_folder, stop=stop, grace_seconds=20) as gateway,
    ):
        cluster.first.plan.step_seconds = 0.02
        assert "connection" not in (await gateway.client.get("/ready")).headers
        running = asyncio.create_task(gateway.complete("plain"))
        await asyncio.wait_for(cluster.first.started.wait(), 20)
        stop.set()

        async def stops() -> bool:
            return (await gateway.client.get("/ready")).status_code == 503

        await eventually(stops)
        for path in ("/ready", "/v1/models"):
            reply = await gateway.client.get(path)
            assert reply.headers["connection"] == "close"
        refused = await gateway.complete("plain")
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        reply = await running
        assert reply.json()["choices"][0]["text"] == ANSWERS["plain"]
        assert reply.headers["connection"] == "close"


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_wish_for_another_protocol_costs_no_body(
    model_folder: Path, is_chunked: bool
) -> None:
    """Java's HTTP client and `curl --http2` ask for HTTP/2 in passing, with each request."""
    content = json.dumps(BODY).encode()
    length = b"transfer-encoding: chunked" if is_chunked else b"content-length: %d" % len(content)
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(content), content) if is_chunked else content
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\n"
        b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQBAAAAAAIAAAAA\r\n%s\r\n\r\n%s" % (length, body)
    )
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        running_gateway(cluster, model_folder) as gateway,
    ):
        reader, writer = await connect(gateway)
        for cut in (0, 40, len(request) - len(body), len(request) - 20):
            writer.write(request[:cut])
            await asyncio.sleep(0.02)
            writer.write(request[cut:])
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
            assert head.startswith(b"HTTP/1.1 200"), head
            reply = await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
            assert json.loads(reply)["choices"][0]["text"] == ANSWERS["plain"]
        writer.write(b"CONNECT x:80 HTTP/1.1\r\nHost: x:80\r\n\r\n")  # a tunnel there is not
        assert (await asyncio.wait_for(reader.readuntil(b"}}"), 20)).startswith(b"HTTP/1.1 4")
        writer.close()


async def test_what_comes_behind_a_last_request_is_left_out(model_folder: Path) -> None:
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        running_gateway(cluster, model_folder) as gateway,
    ):
        for wish in (b"close", b"close, Upgrade\r\nUpgrade: h2c"):
            reader, writer = await connect(gateway)
            request = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: %s\r\n\r\n" % wish
            writer.write(request * 2)
            reply = await asyncio.wait_for(reader.read(), 20)
            assert reply.startswith(b"HTTP/1.1 200"), reply
            assert reply.count(b"HTTP/1.1") == 1
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


async def test_idle_connections_are_kept_for_a_while(
    model_folder: Path,
) -> None:
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        running_gateway(cluster, model_folder, keep_alive_seconds=2) as gateway,
    ):
        host, port = gateway.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        for pause in (0.0, 0.5):
            await asyncio.sleep(pause)
            writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            while (line := await reader.readline()) != b"\r\n":
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            await reader.readexactly(length)
        asked = asyncio.get_running_loop().time()
        assert await asyncio.wait_for(reader.read(), 20) == b""
        assert asyncio.get_running_loop().time() - asked > 1.5
        writer.close()
