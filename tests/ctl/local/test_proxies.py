"""Proxies between processes: whatever is sent arrives, but for what a rule holds up."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from core.address import Address
from ctl.base.ports import PROXY_HOST
from ctl.local.own_cluster import OwnCluster
from ctl.local.proxies import Rule, control_path, proxies, ruled
from tests.free_ports import free_port

# A cluster of two processes: who connects here is found by its socket.
ENDS = ("gateway", "router")
A_WHILE = 0.3


@pytest.fixture
async def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """Of a process that says everything twice, behind a proxy."""

    async def say_twice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.CancelledError):
            while data := await reader.read(1000):
                writer.write(2 * data)
        writer.close()

    monkeypatch.setattr(OwnCluster, "connected_from", lambda *_: ENDS[0])
    address = Address("127.0.0.1", free_port())
    server = await asyncio.start_server(say_twice, *address)
    async with proxies(tmp_path, {ENDS[1]: address}):
        yield address.port
    server.close()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(PROXY_HOST, port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def test_all_bytes_pass_and_so_does_an_end(port: int) -> None:
    data = random.Random(3).randbytes(300_000)
    async with connected(port) as (reader, writer):
        writer.write(data)
        got = await reader.readexactly(2 * len(data))
        assert sorted(got) == sorted(2 * data)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 30) == b""


async def test_a_partition_holds_everything_until_it_is_over(port: int, tmp_path: Path) -> None:
    async with connected(port) as (reader, writer), AsyncExitStack() as stack:
        writer.write(b"a")
        assert await reader.readexactly(2) == b"aa"
        async with ruled(tmp_path, Rule(between=(ENDS[1], ENDS[0]), delay_seconds=None)):
            writer.write(b"b")
            new, to_new = await stack.enter_async_context(connected(port))
            to_new.write(b"c")
            for each in (reader, new):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(each.read(1), A_WHILE)
        assert await reader.readexactly(2) == b"bb"
        assert await new.readexactly(2) == b"cc"


async def test_a_delay(port: int, tmp_path: Path) -> None:
    rule = Rule(between=ENDS, delay_seconds=A_WHILE)
    async with connected(port) as (reader, writer), ruled(tmp_path, rule):
        began = time.monotonic()
        writer.write(b"a")
        await reader.readexactly(2)
        assert time.monotonic() - began >= 2 * A_WHILE  # there and back


async def test_others_are_not_held_up(port: int, tmp_path: Path) -> None:
    async with connected(port) as (reader, writer):
        for others in (("prefill-0", ENDS[1]), (ENDS[0], "decode-0")):
            async with ruled(tmp_path, Rule(between=others, delay_seconds=None)):
                writer.write(b"a")
                assert await asyncio.wait_for(reader.readexactly(2), 30) == b"aa"


async def test_a_process_that_is_not_there(port: int, tmp_path: Path) -> None:
    nowhere = Address("127.0.0.1", free_port())
    (tmp_path / "other").mkdir()
    proxied = proxies(tmp_path / "other", {ENDS[1]: nowhere})
    async with proxied, connected(nowhere.port) as (reader, _):
        with suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 30) == b""


async def test_strange_rules_are_refused(port: int, tmp_path: Path) -> None:
    for line in (b"", b"{", b'{"between":["a"]}', b'{"between":["a","b"],"delay_seconds":-1}'):
        reader, writer = await asyncio.open_unix_connection(control_path(tmp_path))
        writer.write(line + b"\n")
        assert (await reader.readline()).strip()
        writer.close()
        await writer.wait_closed()
