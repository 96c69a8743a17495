"""Bytes as clients and proxies of all sorts send them, and as nobody should."""

import asyncio
import json
from contextlib import suppress
from pathlib import Path

import pytest

from gateway.http import http_protocol
from tests.eventually import eventually
from tests.gateway.conftest import ANSWERS, MODEL, Gateway, running_gateway, tokens_of
from tests.gateway.fake_cluster import FakeCluster
from tests.gateway.model_folder import EOS_ID

pytestmark = pytest.mark.asyncio(loop_scope="module")


def post(body: str, *lines: str, version: str = "1.1") -> bytes:
    head = [f"POST /v1/completions HTTP/{version}", "Host: x", *lines]
    return "\r\n".join([*head, f"Content-Length: {len(body)}", "", body]).encode()


def request(**fields: object) -> str:
    return json.dumps({"model": MODEL, "prompt": "plain", "temperature": 0} | fields)


WHOLE = post(request(max_tokens=200))
STREAM = post(request(max_tokens=200, stream=True))
CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
CLOSE = b"Connection: close\r\nHost"
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


async def connect(gateway: Gateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = gateway.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port), limit=2**20)


async def exchange(gateway: Gateway, data: bytes, *, half_close: bool = False) -> bytes:
    """All that comes until the server closes."""
    reader, writer = await connect(gateway)
    writer.write(data)
    if half_close:
        writer.write_eof()
    try:
        async with asyncio.timeout(20):
            return await reader.read(-1)
    finally:
        writer.close()


def statuses(replies: bytes) -> list[int]:
    """Of final responses."""
    return [
        int(part[2:5]) for part in replies.split(b"HTTP/1.")[1:] if not part.startswith(b"1 100")
    ]


REFUSED = {
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "a host that is none": b"GET /health HTTP/1.1\r\nHost: a/b@c\r\n\r\n",
    "0.9": b"GET /health\r\n",
    "0.9 and a blank line": b"GET /health\r\n\r\n",
    "0.9, said": b"GET /health HTTP/0.9\r\nHost: x\r\n\r\n",
    "1.2": b"GET /health HTTP/1.2\r\nHost: x\r\n\r\n",
    "2.0": b"GET /health HTTP/2.0\r\nHost: x\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "many headers": b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 200 + b"\r\n",
    "other transfer": b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
    "two transfers": b"POST /tokenize HTTP/1.1\r\nHost: x\r\n"
    b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunks of 1.0": b"POST /tokenize HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "length twice": b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n"
    b"Content-Length: 2\r\n\r\nab",
    "a length that is none": b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
async def test_what_is_no_request(gateway: Gateway, data: bytes) -> None:
    for half_close in (False, True):
        assert statuses(await exchange(gateway, data, half_close=half_close)) == [400]


ENDLESS = {
    "name": b"GET /health HTTP/1.1\r\nHost: x\r\n",
    "value": b"GET /health HTTP/1.1\r\nHost: x\r\na: ",
    "target": b"GET /",
    "method": b"",
    "trailer": CHUNKED + b"1\r\n{\r\n0\r\na: ",
    "chunk extension": CHUNKED + b"1;",
}


@pytest.mark.parametrize("start", ENDLESS.values(), ids=ENDLESS)
async def test_bytes_without_an_end(gateway: Gateway, start: bytes) -> None:
    """Cut off after a bound, not kept."""
    reader, writer = await connect(gateway)
    writer.write(start)
    with suppress(ConnectionError):
        for _ in range(1000):
            writer.write(b"x" * 65536)
            await asyncio.wait_for(writer.drain(), 20)
            if reader.at_eof() or writer.transport.is_closing():
                break
        else:
            pytest.fail("64 MB were taken")
    writer.close()


async def test_trailers_are_no_headers(gateway: Gateway) -> None:
    body = request(max_tokens=200)
    lines = "POST /v1/completions HTTP/1.1", "Host: x", "Transfer-Encoding: chunked", "", ""
    chunks = f"{len(body):x}\r\n{body}\r\n0\r\nx-request-id: smuggled\r\n\r\n"
    reply = await exchange(gateway, ("\r\n".join(lines) + chunks).encode(), half_close=True)
    assert statuses(reply) == [200]
    assert b"smuggled" not in reply


async def test_old_clients_get_no_chunks(gateway: Gateway) -> None:
    for is_stream in (False, True):
        body = request(max_tokens=200, stream=is_stream)
        reply = await exchange(gateway, post(body, "Expect: 100-continue", version="1.0"))
        head, _, content = reply.partition(b"\r\n\r\n")
        assert statuses(reply) == [200]
        assert b"100 Continue" not in reply
        assert b"connection: close" in head
        assert b"transfer-encoding" not in head
        if is_stream:
            assert content.startswith(b"data: {")
            assert content.endswith(b"data: [DONE]\n\n")
        else:
            assert json.loads(content)["choices"][0]["text"] == ANSWERS["plain"]
    assert statuses(await exchange(gateway, b"HEAD /health HTTP/1.0\r\n\r\n")) == [200]


@pytest.mark.parametrize("data", [WHOLE, STREAM, HEALTH], ids=["whole", "stream", "health"])
@pytest.mark.parametrize("rest", [b"", b"garbage\r\n\r\n", b"POST / HT"])
async def test_a_client_that_closes_its_half_is_answered(
    gateway: Gateway, data: bytes, rest: bytes
) -> None:
    gateway.cluster.first.plan.step_seconds = 0.01
    reply = await exchange(gateway, data + rest, half_close=True)
    assert statuses(reply) == ([200, 400] if rest else [200])
    if data == WHOLE:
        assert json.dumps(ANSWERS["plain"]).encode() in reply
    if data == STREAM:
        assert b"data: [DONE]" in reply


async def test_garbage_behind_requests_is_refused_after_their_answers(gateway: Gateway) -> None:
    gateway.cluster.first.plan.step_seconds = 0.01
    broken = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nnone\r\n"
    for garbage in (b"\x00\x01\x02", b"GET / HTTP/9\r\n\r\n", b"x" * 200_000, broken):
        for requests in ([WHOLE], [STREAM], [WHOLE, HEALTH]):
            reply = await exchange(gateway, b"".join(requests) + garbage)
            assert statuses(reply) == [200] * len(requests) + [400], garbage[:20]
    assert statuses(await exchange(gateway, HEALTH * 5000)) == [200] * 33 + [400]


async def test_half_a_head_behind_a_request_does_not_cut_its_answer(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.1)
    async with (
        FakeCluster(tokens_of, EOS_ID) as cluster,
        running_gateway(cluster, model_folder) as gateway,
    ):
        cluster.first.plan.step_seconds = 0.02
        reply = await exchange(gateway, STREAM + b"GET")
        assert b"data: [DONE]" in reply
        assert statuses(reply) == [200, 400]


async def test_who_waits_for_a_go_ahead(gateway: Gateway) -> None:
    """Is refused at once, or told to go on."""
    reader, writer = await connect(gateway)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
    writer.write(head + b"Content-Length: 99999999\r\n\r\n")
    reply = await asyncio.wait_for(reader.read(), 20)
    assert reply.startswith(b"HTTP/1.1 413")
    assert b"100 Continue" not in reply
    writer.close()
    reader, writer = await connect(gateway)
    body = request(max_tokens=200).encode()
    writer.write(head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body))
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20) == http_protocol.PROBE
    writer.write(body)
    assert statuses(await asyncio.wait_for(reader.read(), 20)) == [200]
    writer.close()


async def test_no_path_leads_elsewhere(gateway: Gateway) -> None:
    for path in ("/v1/models/", "/health/", "/v1/completions/", "//evil.example/"):
        reply = await gateway.client.get(gateway.url + path, headers={"host": "evil.example"})
        assert reply.status_code == 404
        assert "location" not in reply.headers
        assert "evil.example" not in reply.text.replace(path, "")


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "x"])
async def test_encodings_are_not_decoded(gateway: Gateway, encoding: str) -> None:
    for path in ("/v1/completions", "/tokenize"):
        headers = {"content-encoding": encoding}
        reply = await gateway.client.post(path, content=b"\x1f\x8b", headers=headers)
        assert reply.status_code == 415
        assert reply.json()["error"]["code"] == "unsupported_media_type"
    twice = [("content-encoding", "identity"), ("content-encoding", encoding)]
    reply = await gateway.client.post("/tokenize", content=request(), headers=twice)
    assert reply.status_code == 415
    reply = await gateway.client.post(
        "/v1/completions", content=request(), headers={"content-encoding": "identity"}
    )
    assert reply.status_code == 200


FOREIGN = [{"origin": "https://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}]
FORM = "application/x-www-form-urlencoded"
UNASKED = [{"content-type": kind} for kind in ("text/plain", "Text/plain;charset=UTF-8", FORM)]


async def test_pages_of_other_sites(model_folder: Path) -> None:
    """May not have browsers send what needs no asking; JSON needs it."""
    async with FakeCluster(tokens_of, EOS_ID) as cluster:

        async def status(gateway: Gateway, headers: dict[str, str]) -> int:
            posted = gateway.client.post("/v1/completions", content=request(), headers=headers)
            return (await posted).status_code

        async with running_gateway(cluster, model_folder) as gateway:
            for site in FOREIGN:
                for kind in (*UNASKED, {}):
                    assert await status(gateway, site | kind) == 415
                assert await status(gateway, site | {"content-type": "application/json"}) == 200
            for kind in UNASKED:  # curl's, and those of pages of our own
                assert await status(gateway, kind) == 200
                assert await status(gateway, {"origin": gateway.url} | kind) == 200
        named: dict[str, object] = {"cors_origins": ("https://evil.example",)}
        for fields in (named, {"allow_cross_site_forms": True}):
            async with running_gateway(cluster, model_folder, **fields) as gateway:
                assert await status(gateway, FOREIGN[0] | UNASKED[0]) == 200


async def test_connections_past_the_bound(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "_max_connections", lambda: 2)
    held = [await connect(gateway) for _ in range(2)]
    await asyncio.sleep(0)
    assert statuses(await exchange(gateway, b"")) == [503]
    for _, writer in held:
        writer.close()

    async def is_answered() -> bool:
        with suppress(ConnectionError):
            return statuses(await exchange(gateway, HEALTH.replace(b"Host", CLOSE))) == [200]
        return False

    await eventually(is_answered)
