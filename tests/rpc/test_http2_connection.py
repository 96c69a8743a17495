"""Data frames of our own, against the library's connection at the other end."""

import random
from collections.abc import Iterator

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived
from h2.exceptions import ProtocolError

from rpc.http2_connection import STREAM, Http2Connection

WINDOW_BYTES = 2**17
HEADERS = [(":method", "POST"), (":scheme", "http"), (":path", "/a"), (":authority", "b")]


class Pair:
    """Both ends. What one writes, the other reads in parts of any size, and says that it did."""

    def __init__(self) -> None:
        self.ours = Http2Connection(WINDOW_BYTES)
        self.theirs = H2Connection(H2Configuration(client_side=False))
        self.sent_by_us = bytearray()
        self.sent_by_them = bytearray()
        self.source = random.Random()
        self.ours.open(HEADERS)
        self.theirs.initiate_connection()
        self.exchange()
        self.theirs.send_headers(STREAM, [(":status", "200")])
        self.exchange()

    def exchange(self) -> None:
        """Until neither has anything to say."""
        ours, theirs = self.ours.data_to_send(), self.theirs.data_to_send()
        while ours or theirs:
            self.they_hear(ours)
            self._we_hear(theirs)
            ours, theirs = self.ours.data_to_send(), self.theirs.data_to_send()

    def they_hear(self, content: bytes) -> None:
        for part in self._parts(content):
            for event in self.theirs.receive_data(part):
                if isinstance(event, DataReceived):
                    self.sent_by_us += event.data
                    self.theirs.acknowledge_received_data(event.flow_controlled_length, STREAM)

    def they_send(self, num_bytes: int) -> bytes:
        """In frames of any size, some of them padded."""
        content = self.source.randbytes(num_bytes)
        position = 0
        while position < num_bytes:
            pad_length = self.source.choice((None, None, 0, 255))
            room = self.theirs.local_flow_control_window(STREAM) - 256
            assert room > 0, "they were not told that we have read"
            size = min(self.source.randint(1, 9000), room, num_bytes - position)
            data = content[position : position + size]
            self.theirs.send_data(STREAM, data, pad_length=pad_length)
            position += size
            self.exchange()
        return content

    def we_send(self, num_bytes: int) -> bytes:
        content = self.source.randbytes(num_bytes)
        position = 0
        while position < num_bytes:
            assert self.ours.room > 0
            size = self.source.randint(1, self.ours.room)
            data = content[position : position + size]
            self.they_hear(self.ours.data_frame(data))
            position += len(data)
            if not self.ours.room or self.source.random() < 0.5:
                self.exchange()
        return content

    def _we_hear(self, content: bytes) -> None:
        for part in self._parts(content):
            for one in self.ours.receive(part):
                if isinstance(one, DataReceived):
                    self.sent_by_them += one.data
                    self.ours.acknowledge_received_data(one.flow_controlled_length, STREAM)
                elif isinstance(one, bytes):
                    self.sent_by_them += one
                    self.ours.on_read(len(one))

    def _parts(self, content: bytes) -> Iterator[bytes]:
        while content:
            size = self.source.choice((1, 5, 9, 10, 100, 70_000))
            yield content[:size]
            content = content[size:]


def test_many_windows_of_data_go_both_ways() -> None:
    pair = Pair()
    assert pair.they_send(20 * WINDOW_BYTES) == pair.sent_by_them
    assert pair.we_send(20 * WINDOW_BYTES) == pair.sent_by_us


def test_there_is_as_much_room_as_the_peer_has_given() -> None:
    pair = Pair()
    num_sent = 0
    while room := pair.ours.room:
        pair.ours.data_frame(bytes(room))
        num_sent += room
    assert num_sent == 65535  # what a peer gives that says nothing of it


@pytest.mark.parametrize(
    "content",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"\x00\x40\x01\x00\x00\x00\x00\x00\x01",  # a byte more than a frame may have
        b"\x00\x00\x01\x00\x08\x00\x00\x00\x01\x09",  # padding longer than its frame
        b"\x00\x00\x01\x00\x00\x00\x00\x00\x03a",  # another stream
    ],
)
def test_what_is_no_http2_is_refused(content: bytes) -> None:
    with pytest.raises(ProtocolError):
        Pair().ours.receive(content)
