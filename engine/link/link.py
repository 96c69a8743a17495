"""The line between a worker's front and one of its ranks: zmq PAIR over ipc, msgpack.

`FrontLink` is for the front's event loop, `RankLink` for the rank's synchronous loop. The
front binds before it starts the rank; a rank's death is seen by the front from the process,
never from the socket.
"""

import asyncio
from collections.abc import Callable

import msgspec
import zmq

from core.log import set_level
from engine.link.messages import (
    FrontBatch,
    FrontMessage,
    LogLevel,
    LoopMessage,
    RankBatch,
    RankMessage,
    RankStats,
)

# Batches in flight per direction. Both sides read continuously, so that this many unread ones
# mean a peer that is stuck, not one that is busy.
HIGH_WATER_BATCHES = 10_000
SEND_TIMEOUT_SECONDS = 10.0

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


class LinkError(Exception):
    """The other side does not read any more, or speaks something else."""


class FrontLink:
    """The front's end; all calls from the event loop's thread.

    `on_batch` gets each batch as it arrives. `on_error` is called once, at most: the rank
    does not keep up or sent garbage, and has to be given up.

    NOTE: messages are held back until the rank's first batch, since a PAIR socket takes none
    before its peer has connected. A zmq descriptor is edge-triggered and any call on the
    socket may consume the edge, hence the drain after every send.
    """

    def __init__(
        self,
        context: Context,
        endpoint: str,
        on_batch: Callable[[RankBatch], None],
        on_error: Callable[[LinkError], None],
    ) -> None:
        self._on_batch = on_batch
        self._on_error = on_error
        self._decoder = msgspec.msgpack.Decoder(RankBatch)
        self._encoder = msgspec.msgpack.Encoder()
        self._outbox: list[FrontMessage] = []
        self._closed = False
        self._connected = False
        self._socket = _pair(context)
        self._socket.bind(endpoint)
        self._loop = asyncio.get_running_loop()
        descriptor = self._socket.getsockopt(zmq.FD)
        assert isinstance(descriptor, int)
        self._descriptor = descriptor
        self._loop.add_reader(descriptor, self._drain)

    def send(self, message: FrontMessage) -> None:
        """Queues a message; all of one turn of the event loop leave as one batch."""
        if self._closed:
            return
        if self._connected and not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(message)

    def close(self) -> None:
        """Drops what is not sent yet; calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=0)

    def _flush(self) -> None:
        if self._closed or not self._outbox:
            return
        batch = FrontBatch(messages=tuple(self._outbox))
        self._outbox.clear()
        try:
            self._socket.send(self._encoder.encode(batch), zmq.NOBLOCK)
        except zmq.Again:
            self._fail(LinkError(f"{HIGH_WATER_BATCHES} batches are unread by the rank"))
            return
        self._drain()

    def _drain(self) -> None:
        while not self._closed:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                batch = self._decoder.decode(frame)
            except msgspec.DecodeError as error:
                self._fail(LinkError(f"malformed batch from the rank: {error}"))
                return
            if not self._connected:
                self._connected = True
                self._loop.call_soon(self._flush)
            self._on_batch(batch)

    def _fail(self, error: LinkError) -> None:
        self.close()
        self._on_error(error)


class RankLink:
    """The rank's end; one thread. `socket` is readable when the front has said something."""

    def __init__(self, endpoint: str, rank: int) -> None:
        self._rank = rank
        self._decoder = msgspec.msgpack.Decoder(FrontBatch)
        self._encoder = msgspec.msgpack.Encoder()
        self._context = Context()
        self.socket = _pair(self._context)
        self.socket.setsockopt(zmq.SNDTIMEO, int(SEND_TIMEOUT_SECONDS * 1000))
        self.socket.connect(endpoint)

    def drain(self) -> list[LoopMessage]:
        """All messages that have arrived, in order; never blocks. Raises LinkError."""
        messages: list[LoopMessage] = []
        while True:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                batch = self._decoder.decode(frame)
            except msgspec.DecodeError as error:
                raise LinkError(f"malformed batch from the front: {error}") from error
            for message in batch.messages:
                if isinstance(message, LogLevel):
                    set_level(message.level)
                else:
                    messages.append(message)

    def send(self, messages: list[RankMessage], stats: RankStats) -> None:
        """Raises LinkError when the front has stopped reading for SEND_TIMEOUT_SECONDS."""
        batch = RankBatch(rank=self._rank, messages=tuple(messages), stats=stats)
        try:
            self.socket.send(self._encoder.encode(batch))
        except zmq.Again as error:
            raise LinkError("the front does not read any more") from error

    def close(self) -> None:
        """Gives what is queued a moment to leave; calling it again does nothing."""
        self.socket.close(linger=500)
        self._context.term()


def _pair(context: Context) -> Socket:
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_BATCHES)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_BATCHES)
    return socket
