"""Transfers of KV that land when, and in which order, the explorer says so.

Bytes that had left when their sender gave up, or died, still land: when the receiver looks next,
as `transfer.nixl_agent` notes. Every landing is checked against who has the pages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from core.errors import TransferError
from engine.link.kv_notice import KvNotice, decode_notices
from tests.protocol.process import Process
from transfer.api import AgentDescriptor, Completion, Copy, Notification, State, TransferId

Check = Callable[[Sequence[KvNotice], set[int]], None]


@dataclass(frozen=True, eq=False)
class Parcel:
    name: str
    transfer: TransferId
    sender: "FabricTransfer"
    peer: str
    copies: Sequence[Copy]
    message: bytes

    @property
    def receiver_is_frozen(self) -> bool:
        receiver = self.sender._fabric.agents.get(self.peer)
        return receiver is not None and receiver.owner.is_frozen


class Fabric:
    """All agents that live, and what is on its way. `hanging` parcels do not land before their
    sender gives them up."""

    def __init__(self) -> None:
        self.hanging: list[Parcel] = []
        self.agents: dict[str, FabricTransfer] = {}
        self.parcels: list[Parcel] = []

    def land(self, parcel: Parcel, *, is_told: bool = True) -> None:
        """`is_told`: the receiver hears of it."""
        self.parcels.remove(parcel)
        parcel.sender.ended.append(Completion(parcel.transfer, State.DONE))
        receiver = self.agents.get(parcel.peer)
        if receiver is not None:
            receiver.take(parcel)
            if is_told:
                receiver.heard.append(Notification(parcel.sender.name, parcel.message))


class FabricTransfer:
    """`Transfer` of one agent. `check(notices, pages)` is called when pages are written; a page of
    `buffer` [1, pages, page_tokens, 1] is `page_bytes` long."""

    def __init__(self, fabric: Fabric, owner: Process, buffer: torch.Tensor, check: Check) -> None:
        self.owner = owner
        self.name = owner.name
        self.ended: list[Completion] = []
        self.heard: list[Notification] = []
        self._strays: list[Parcel] = []
        self._fabric = fabric
        self._bytes = buffer.view(-1).view(torch.uint8)
        self._page_bytes = buffer[0, 0].numel() * buffer.element_size()
        self._check = check
        self._num_parcels = 0
        fabric.agents[self.name] = self

    def register(self, buffer: torch.Tensor) -> None: ...

    def describe(self) -> AgentDescriptor:
        return AgentDescriptor(
            name=self.name,
            backend="fabric",
            metadata=b"",
            base_address=0,
            num_bytes=self._bytes.numel(),
            device="cpu",
            device_index=0,
        )

    def submit(self, peer: AgentDescriptor, copies: Sequence[Copy], message: bytes) -> TransferId:
        if peer.name not in self._fabric.agents:
            raise TransferError(f"cannot write to {peer.name}: no such agent")
        self._num_parcels += 1
        transfer = TransferId(self._num_parcels)
        name = f"KV {self._num_parcels} of {self.name}"
        self._fabric.parcels.append(Parcel(name, transfer, self, peer.name, copies, message))
        return transfer

    def poll(self) -> list[Completion]:
        for parcel in self._own():
            if parcel.peer not in self._fabric.agents:
                self._give_up(parcel)
        ended, self.ended = self.ended, []
        return ended

    def notifications(self) -> list[Notification]:
        strays, self._strays = self._strays, []
        for parcel in strays:
            self.take(parcel)
        heard, self.heard = self.heard, []
        return heard

    def release(self, peer_name: str) -> None:
        for parcel in self._own():
            if parcel.peer == peer_name:
                self._give_up(parcel)

    def close(self) -> None:
        self._fabric.agents.pop(self.name, None)
        for parcel in self._own():
            self._give_up(parcel)

    # ----

    @property
    def has_news(self) -> bool:
        """Whether one of the calls above would tell something."""
        lost = any(parcel.peer not in self._fabric.agents for parcel in self._own())
        return bool(self.ended or self.heard or self._strays or lost)

    def take(self, parcel: Parcel) -> None:
        """Its bytes land here."""
        pages: set[int] = set()
        for copy in parcel.copies:
            source = parcel.sender._bytes[copy.source_offset :][: copy.num_bytes]
            self._bytes[copy.target_offset :][: copy.num_bytes] = source
            first = copy.target_offset // self._page_bytes
            pages.update(range(first, first + copy.num_bytes // self._page_bytes))
        self._check(decode_notices(parcel.message), pages)

    def _own(self) -> list[Parcel]:
        return [parcel for parcel in self._fabric.parcels if parcel.sender is self]

    def _give_up(self, parcel: Parcel) -> None:
        self._fabric.parcels.remove(parcel)
        error = f"{parcel.peer}: lost"
        self.ended.append(Completion(parcel.transfer, State.FAILED, error))
        if (receiver := self._fabric.agents.get(parcel.peer)) is not None:
            receiver._strays.append(parcel)
