"""The twin of `NixlTransfer` inside one process, with switches for what can go wrong.

A name stands for a process: `MemoryTransfer(name)` enters a table that all instances share,
`kill` removes it as SIGKILL would. Bytes are read at the moment of delivery, not of
submission, so that a source changed too early shows in a test.

    held          True: transfers stay in flight until the sender's `deliver`
    drop_next(n)  the next n transfers to land never do: in flight until the peer is released
    kill()        this agent dies: peers' transfers to it fail, `submit` to it raises
"""

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from core.errors import TransferError
from transfer.api import (
    AgentDescriptor,
    Completion,
    Copy,
    Notification,
    State,
    TransferId,
)
from transfer.ranges import Range, merged_ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """A transfer on its way."""

    transfer: TransferId
    peer: str
    ranges: list[Range]
    message: bytes


class MemoryTransfer:
    """`Transfer` between buffers of one process; safe to use from several threads."""

    _lock: ClassVar[threading.RLock] = threading.RLock()
    _alive: ClassVar[dict[str, "MemoryTransfer"]] = {}

    def __init__(self, name: str, *, held: bool = False) -> None:
        """ValueError for a name that is in use."""
        self._name = name
        self.held = held
        self._buffer: torch.Tensor | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._parcels: list[Parcel] = []
        self._ended: list[Completion] = []
        self._inbox: list[Notification] = []
        self._num_to_drop = 0
        self._dropped: set[TransferId] = set()
        self._ids = itertools.count(1)
        with self._lock:
            if name in self._alive:
                raise ValueError(f"agent {name} exists already")
            self._alive[name] = self

    def register(self, buffer: torch.Tensor) -> None:
        assert self._buffer is None, "one buffer an agent"
        if not buffer.is_contiguous() or not buffer.numel():
            raise ValueError("the buffer must be contiguous and not empty")
        self._buffer = buffer
        self._bytes = buffer.view(-1).view(torch.uint8)

    def describe(self) -> AgentDescriptor:
        assert self._buffer is not None, "no buffer is registered"
        return AgentDescriptor(
            name=self._name,
            backend="memory",
            metadata=b"",
            base_address=self._buffer.data_ptr(),
            num_bytes=self._bytes.numel(),
            device=self._buffer.device.type,
            device_index=self._buffer.device.index or 0,
        )

    def submit(self, peer: AgentDescriptor, copies: Sequence[Copy], message: bytes) -> TransferId:
        assert self._buffer is not None, "no buffer is registered"
        if not copies or not message:
            raise ValueError("a transfer needs at least one copy and a message")
        ranges = merged_ranges(
            copies, source_bytes=self._bytes.numel(), target_bytes=peer.num_bytes
        )
        with self._lock:
            if peer.backend != "memory" or peer.name not in self._alive:
                raise TransferError(f"cannot write to {peer.name}: no such agent")
            transfer = TransferId(next(self._ids))
            self._parcels.append(
                Parcel(transfer=transfer, peer=peer.name, ranges=ranges, message=message)
            )
            if not self.held:
                self.deliver()
            return transfer

    def poll(self) -> list[Completion]:
        with self._lock:
            for peer in {parcel.peer for parcel in self._parcels}:
                if peer not in self._alive:
                    self._fail(peer, "peer died")
            ended, self._ended = self._ended, []
            return ended

    def notifications(self) -> list[Notification]:
        with self._lock:
            arrived, self._inbox = self._inbox, []
            return arrived

    def release(self, peer_name: str) -> None:
        with self._lock:
            self._fail(peer_name, "peer was released")

    def close(self) -> None:
        self.kill()

    # ---- switches for tests

    @property
    def num_in_flight(self) -> int:
        return len(self._parcels)

    def deliver(self, num_transfers: int | None = None) -> int:
        """Lands the oldest transfers in flight (None: all); returns how many landed."""
        with self._lock:
            waiting = [p for p in self._parcels if p.transfer not in self._dropped]
            landed = 0
            for parcel in waiting[:num_transfers]:
                receiver = self._alive.get(parcel.peer)
                if receiver is None:
                    continue
                if self._num_to_drop:
                    self._num_to_drop -= 1
                    self._dropped.add(parcel.transfer)
                    continue
                self._parcels.remove(parcel)
                self._land(parcel, receiver)
                landed += 1
            return landed

    def drop_next(self, num_transfers: int) -> None:
        with self._lock:
            self._num_to_drop = num_transfers

    def kill(self) -> None:
        with self._lock:
            if self._alive.get(self._name) is self:
                del self._alive[self._name]
            self._parcels.clear()

    # ----

    def _land(self, parcel: Parcel, receiver: "MemoryTransfer") -> None:
        for source, target, num_bytes in parcel.ranges:
            receiver._bytes[target : target + num_bytes] = self._bytes[source : source + num_bytes]
        receiver._inbox.append(Notification(sender=self._name, message=parcel.message))
        self._ended.append(Completion(transfer=parcel.transfer, state=State.DONE))

    def _fail(self, peer: str, reason: str) -> None:
        for parcel in [p for p in self._parcels if p.peer == peer]:
            self._parcels.remove(parcel)
            self._ended.append(
                Completion(transfer=parcel.transfer, state=State.FAILED, error=f"{peer}: {reason}")
            )
