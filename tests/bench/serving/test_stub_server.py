"""The stub of a gRPC server lets peers come and go."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, PingAckReceived

from bench.serving.stub_server import Send, StubServer

PATH = "/service/method"
HEADERS = [(":method", "POST"), (":scheme", "http"), (":path", PATH), (":authority", "stub")]
MESSAGE = b"\0\0\0\0\5hello"


class Peer:
    """A client of one stream, number 1, on which it has said hello."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.http = H2Connection(H2Configuration(client_side=True))
        self.http.initiate_connection()
        self.http.send_headers(1, HEADERS)
        self.http.send_data(1, MESSAGE)

    def write_out(self) -> None:
        self.writer.write(self.http.data_to_send())

    async def hear(self) -> bytes:
        """The next message; empty at the connection's end."""
        while data := await self.reader.read(1 << 16):
            for event in self.http.receive_data(data):
                if isinstance(event, DataReceived):
                    return bytes(event.data)
            self.write_out()
        return b""

    async def is_heard(self) -> bool:
        """Whether the server has read all that was said; false if it has hung up on that."""
        self.http.ping(b"12345678")
        self.write_out()
        while data := await self.reader.read(1 << 16):
            if any(isinstance(event, PingAckReceived) for event in self.http.receive_data(data)):
                return True
        return False


def reset(peer: Peer) -> None:
    peer.http.reset_stream(1)


def end_and_reset(peer: Peer) -> None:
    peer.http.end_stream(1)
    peer.http.reset_stream(1)


def leave(peer: Peer) -> None:
    """A frame is behind the farewell, as from a peer that had more under way."""
    peer.http.ping(b"12345678")
    ping = peer.http.data_to_send()
    farewell = H2Connection(H2Configuration(client_side=True))
    farewell.close_connection()
    peer.writer.write(farewell.data_to_send() + ping)


@pytest.mark.parametrize("go", [reset, end_and_reset, leave])
async def test_a_peer_may_go_while_it_is_answered(go: Callable[[Peer], None]) -> None:
    failures: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(context))
    sends: list[Send] = []

    def method(send: Send) -> Callable[[bytes], None]:
        sends.append(send)
        return lambda request: send(request.upper())

    server, address = await StubServer.listen({PATH: method}, streaming=frozenset({PATH}))
    async with server:
        peers = []
        for _ in range(2):
            peer = Peer(*await asyncio.open_connection(*address.split(":")))
            peer.write_out()
            assert await peer.hear() == MESSAGE.upper()
            peers.append(peer)
        gone, other = peers
        go(gone)
        assert await gone.is_heard() == (go is not leave)
        for send in sends:
            send(b"more")
        assert await other.hear() == b"\0\0\0\0\4more"
        for peer in peers:
            peer.writer.close()
    assert not failures
