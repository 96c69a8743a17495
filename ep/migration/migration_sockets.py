"""Carries experts between ranks over TCP connections of its own, beside the group's steps.

A round is what the ranks of a group send each other of one layer, known to all beforehand. It
opens with a header on each connection (magic, number of the round, bytes), so that ranks that
are out of step notice before they write into each other's memory.
"""

import selectors
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from core.errors import TransferError

HEADER = struct.Struct("<8sQQ")
MAGIC = b"epmoves1"
# Large, since each costs some time with the interpreter's lock, which the steps need.
CHUNK_BYTES = 1 << 20
BUFFER_BYTES = 4 << 20  # asked of the kernel each way; it may grant less
# How often a round looks whether it is still wanted.
LOOK_SECONDS = 0.2

Span = tuple[int, torch.Tensor]  # the other rank, 1-D uint8 on the CPU


class SocketCarrier:
    """One migration's connections; one thread uses it. TransferError ends it for good."""

    def __init__(
        self,
        peers: Mapping[int, socket.socket],
        *,
        bytes_per_second: float,
        silence_seconds: float,
        is_wanted: Callable[[], bool],
    ) -> None:
        self._peers = dict(peers)
        self._seconds_per_byte = 1 / bytes_per_second
        # Whoever is allowed little says a little now and then: he is not to be taken for silent.
        self._chunk_bytes = max(1, min(CHUNK_BYTES, int(bytes_per_second * LOOK_SECONDS)))
        self._silence_seconds = silence_seconds
        self._is_wanted = is_wanted
        self._num_rounds = 0
        self._free_at = 0.0  # when more may be sent
        for connection in self._peers.values():
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)

    def carry(self, sends: Sequence[Span], receives: Sequence[Span]) -> None:
        """Returns when all `sends` have left and all `receives` are filled; spans of a pair of
        ranks in the same order on both. TransferError otherwise."""
        self._num_rounds += 1
        outgoing = {rank: _spans(sends, rank) for rank in self._peers}
        incoming = {rank: _spans(receives, rank) for rank in self._peers}
        headers = {}
        for spans in outgoing.values():
            if spans:
                spans.insert(0, memoryview(self._header(spans)))
        for rank, spans in incoming.items():
            if spans:
                headers[rank] = (bytearray(HEADER.size), self._header(spans))
                spans.insert(0, memoryview(headers[rank][0]))
        try:
            self._exchange(outgoing, incoming, headers)
        except OSError as error:
            raise TransferError(f"experts cannot be moved: {error}") from error

    def meet(self) -> None:
        """Returns when all ranks have called it; a round like any other."""
        byte = torch.zeros(1, dtype=torch.uint8)
        self.carry(
            [(rank, byte) for rank in self._peers],
            [(rank, torch.empty_like(byte)) for rank in self._peers],
        )

    def close(self) -> None:
        for connection in self._peers.values():
            connection.close()

    def _header(self, spans: Sequence[memoryview]) -> bytes:
        return HEADER.pack(MAGIC, self._num_rounds, sum(map(len, spans)))

    def _exchange(
        self,
        outgoing: dict[int, list[memoryview]],
        incoming: dict[int, list[memoryview]],
        headers: Mapping[int, tuple[bytearray, bytes]],
    ) -> None:
        moved_at = time.monotonic()
        with selectors.DefaultSelector() as selector:
            while any(outgoing.values()) or any(incoming.values()):
                now = time.monotonic()
                if not self._is_wanted():
                    raise TransferError("the migration was given up")
                if now - moved_at > self._silence_seconds:
                    raise TransferError(f"nothing moves for {self._silence_seconds:g} s")
                pause = self._free_at - now
                self._register(selector, outgoing if pause <= 0 else {}, incoming)
                ready = selector.select(LOOK_SECONDS if pause <= 0 else min(pause, LOOK_SECONDS))
                for key, events in ready:
                    rank = int(key.data)
                    if events & selectors.EVENT_READ:
                        self._receive(rank, incoming[rank], headers)
                    if events & selectors.EVENT_WRITE:
                        self._send(rank, outgoing[rank])
                if ready:
                    moved_at = time.monotonic()

    def _register(
        self,
        selector: selectors.BaseSelector,
        outgoing: Mapping[int, Sequence[memoryview]],
        incoming: Mapping[int, Sequence[memoryview]],
    ) -> None:
        registered = selector.get_map()
        for rank, connection in self._peers.items():
            events = selectors.EVENT_READ if incoming.get(rank) else 0
            events |= selectors.EVENT_WRITE if outgoing.get(rank) else 0
            known = registered.get(connection)
            if events and known is None:
                selector.register(connection, events, rank)
            elif events and known is not None and known.events != events:
                selector.modify(connection, events, rank)
            elif not events and known is not None:
                selector.unregister(connection)

    def _send(self, rank: int, spans: list[memoryview]) -> None:
        num_sent = self._peers[rank].send(spans[0][: self._chunk_bytes])
        _consume(spans, num_sent)
        begin = max(self._free_at, time.monotonic())
        self._free_at = begin + num_sent * self._seconds_per_byte

    def _receive(
        self, rank: int, spans: list[memoryview], headers: Mapping[int, tuple[bytearray, bytes]]
    ) -> None:
        num_received = self._peers[rank].recv_into(spans[0][:CHUNK_BYTES])
        if not num_received:
            raise TransferError(f"rank {rank} has closed its connection")
        in_header = spans[0].obj is headers[rank][0]
        _consume(spans, num_received)
        got, due = headers[rank]
        if in_header and (not spans or spans[0].obj is not got) and got != due:
            raise TransferError(f"rank {rank} is out of step: {HEADER.unpack(got)}")


def _consume(spans: list[memoryview], num_bytes: int) -> None:
    spans[0] = spans[0][num_bytes:]
    if not spans[0]:
        del spans[0]


def _spans(spans: Sequence[Span], rank: int) -> list[memoryview]:
    """What is for, or of, one rank."""
    return [memoryview(tensor.numpy()) for peer, tensor in spans if peer == rank]
