"""Moving bytes between registered buffers of two processes: five verbs, no requests, no layers.

register -> describe ... (descriptor travels to the peer) ... submit -> poll -> release
"""

from collections.abc import Sequence
from enum import Enum
from typing import NewType, Protocol

import msgspec
import torch

TransferId = NewType("TransferId", int)


class AgentDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """All that a peer needs in order to write into this agent's buffer.

    name          unique for ever: it carries the epoch, so a restarted process is another peer
    backend       "nixl"; the twin in tests says "memory"
    metadata      backend's own connection blob
    base_address  address of byte 0 of the registered buffer in the owner's process
    num_bytes     of the buffer
    device        "cpu" or "cuda"
    device_index  0 on cpu
    """

    name: str
    backend: str
    metadata: bytes
    base_address: int
    num_bytes: int
    device: str
    device_index: int


class Copy(msgspec.Struct, frozen=True):
    """`num_bytes` from `source_offset` in our buffer to `target_offset` in the peer's."""

    source_offset: int
    target_offset: int
    num_bytes: int


class State(Enum):
    DONE = "done"
    FAILED = "failed"


class Completion(msgspec.Struct, frozen=True):
    """`transfer` is over: its memory is not touched any more."""

    transfer: TransferId
    state: State
    error: str = ""


class Notification(msgspec.Struct, frozen=True):
    """`message` of a transfer whose bytes have all landed in our buffer."""

    sender: str
    message: bytes


class Transfer(Protocol):
    def register(self, buffer: torch.Tensor) -> None:
        """Makes a contiguous buffer readable and writable for peers; once per agent."""

    def describe(self) -> AgentDescriptor: ...

    def submit(self, peer: AgentDescriptor, copies: Sequence[Copy], message: bytes) -> TransferId:
        """Starts writing; `message` is delivered at the peer after the bytes. Adjacent copies
        are merged. Never blocks on the peer. Raises TransferError for a peer that cannot be
        reached and ValueError for a range outside either buffer, no copies or no message.
        The source bytes must not change before the transfer is over."""

    def poll(self) -> list[Completion]:
        """Transfers of ours that ended since the last call, failed ones included."""

    def notifications(self) -> list[Notification]:
        """Messages that arrived since the last call, in order of arrival per sender: of
        transfers in flight together any may arrive first."""

    def release(self, peer_name: str) -> None:
        """Forgets a peer, known or not; its outstanding transfers are reported FAILED. Meant
        for a peer that is gone or hangs: see the backend on bytes already on their way."""

    def close(self) -> None: ...
