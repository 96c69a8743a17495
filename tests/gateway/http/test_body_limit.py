"""Bodies that are too large or too slow, whatever way they are sent."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.gateway.conftest import MODEL, Gateway, running_gateway, tokens_of
from tests.gateway.fake_cluster import FakeCluster
from tests.gateway.model_folder import EOS_ID

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMIT = 4 * 2**20


def body_of(num_bytes: int) -> bytes:
    """Valid JSON of exactly that size."""
    frame = json.dumps({"model": MODEL, "prompt": "plain"}).encode()
    return frame[:-1] + b" " * (num_bytes - len(frame)) + frame[-1:]


async def chunks_of(content: bytes, size: int = 65536) -> AsyncIterator[bytes]:
    for start in range(0, len(content), size):
        yield content[start : start + size]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/nowhere"])
async def test_declared_length(gateway: Gateway, path: str) -> None:
    reply = await gateway.client.post(path, content=body_of(10_000_000))
    assert reply.status_code == 413
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == "request_too_large"
    assert str(LIMIT) in error["message"]
    assert reply.headers["x-request-id"]
    assert not gateway.cluster.router.requests


async def test_chunked(gateway: Gateway) -> None:
    reply = await gateway.client.post("/v1/completions", content=chunks_of(body_of(10_000_000)))
    assert reply.status_code == 413
    assert reply.json()["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("num_bytes", "status"), [(LIMIT, 200), (LIMIT + 1, 413)])
async def test_the_limit_itself(
    gateway: Gateway, num_bytes: int, status: int, chunked: bool
) -> None:
    content = body_of(num_bytes)
    reply = await gateway.client.post(
        "/v1/completions", content=chunks_of(content) if chunked else content
    )
    assert reply.status_code == status, reply.text


async def test_an_endless_body(gateway: Gateway) -> None:
    """The answer comes although the body never ends; then the connection is closed."""
    host, port = gateway.url.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    # Sockets, not streams: those forget what has come when they cannot write any more.
    with socket.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, (host, int(port)))

        async def pour() -> None:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            await loop.sock_sendall(client, head)
            while True:
                await loop.sock_sendall(client, b"10000\r\n" + b"x" * 65536 + b"\r\n")

        pouring = asyncio.create_task(pour())
        head = b""
        try:
            async with asyncio.timeout(60):
                while b"\r\n\r\n" not in head:
                    content = await loop.sock_recv(client, 65536)
                    assert content, head
                    head += content
        finally:
            pouring.cancel()
            await asyncio.gather(pouring, return_exceptions=True)
    assert head.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in head.lower()


async def test_a_body_that_does_not_come(model_folder: Path) -> None:
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        running_gateway(cluster, model_folder, body_timeout_seconds=0.3) as gateway,
    ):
        host, port = gateway.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        started = time.monotonic()
        writer.write(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{"mo')
        reply = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        assert reply.startswith(b"HTTP/1.1 408")
        assert b'"code":"request_timeout"' in reply
        assert time.monotonic() - started < 15
        # A running request is not bound by the time its body may take.
        cluster.first.plan.step_seconds = 0.02
        assert (await gateway.complete("plain", max_tokens=30)).status_code == 200


async def test_a_client_that_leaves_in_its_body(gateway: Gateway) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{"mo')
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await gateway.complete("plain")).status_code == 200
    assert len(gateway.cluster.router.requests) == 1
