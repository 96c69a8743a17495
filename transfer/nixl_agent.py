"""Transfers by NIXL: host or GPU memory, between processes and between machines.

Bytes move, and notifications arrive, only inside calls of this class: there is no background
thread, and an idle agent uses no CPU. So
- the sender calls `poll` until its transfers are over;
- the receiver calls `notifications` while it waits for a peer. Without these calls a first
  transfer never gets past its handshake (about 5 ms), nor, where UCX has to write through TCP,
  any other. One call takes in all that has arrived.
A call with nothing to do takes about 1 us, releases the GIL, and never waits. There is nothing
to sleep on: NIXL offers no file descriptor.

One thread uses an instance. With CUDA memory the caller first waits for the kernels that
write the source bytes.

Seen on 2 cores, host memory: 64 bytes and their notification reach the other process in about
20 us; a range costs 3 us; 1 GB/s at 4 KiB a range, 5 GB/s at 64 KiB, 9 GB/s from 1 MiB, copied
inside `submit`. Descriptor lists prepared once save under 10 us a transfer, and cannot merge
ranges: not used.

A peer that dies (SIGKILL) ends its transfers as FAILED at the next `poll`, and `submit` to it
raises. `release` is the way to give up on a peer that hangs.
NOTE: where UCX writes through TCP, bytes that had left when a live peer was released still
land when that peer next makes progress. A receiver that takes back pages calls
`notifications` once before it hands them out again.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from nixl._api import nixl_xfer_handle

from core.errors import TransferError
from core.log import get_logger
from transfer.api import AgentDescriptor, Completion, Copy, Notification, State, TransferId
from transfer.nixl_library import NIXL_ERRORS, create_agent
from transfer.ranges import merged_ranges

log = get_logger("transfer.nixl")

CREATION_ERRORS: tuple[type[Exception], ...] = (*NIXL_ERRORS, RuntimeError)
SEGMENTS = {"cpu": "DRAM", "cuda": "VRAM"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A posted transfer."""

    peer: str
    handle: nixl_xfer_handle


class NixlTransfer:
    """`Transfer` over one NIXL agent with one registered buffer and any number of peers."""

    def __init__(self, name: str, *, loopback: bool = False) -> None:
        """`name` is this agent's for ever: no later process may use it again. `loopback`: all
        peers are on this machine."""
        try:
            self._agent = create_agent(name, loopback=loopback)
        except CREATION_ERRORS as error:
            raise TransferError(f"cannot start NIXL agent {name}: {error}") from error
        self._name = name
        self._buffer: torch.Tensor | None = None
        self._own: AgentDescriptor | None = None
        self._registration: object = None
        self._peers: set[str] = set()
        self._flights: dict[TransferId, Flight] = {}
        self._ended: list[Completion] = []
        self._heard: list[Notification] = []
        self._ids = itertools.count(1)
        self._closed = False

    def register(self, buffer: torch.Tensor) -> None:
        """Takes about 0.5 ms a MB of host memory. ValueError unless contiguous, not empty, on
        cpu or cuda; TransferError when the library refuses it."""
        assert self._buffer is None, "one buffer an agent"
        if not buffer.is_contiguous() or not buffer.numel():
            raise ValueError("the buffer must be contiguous and not empty")
        if buffer.device.type not in SEGMENTS:
            raise ValueError(f"cannot transfer memory of device {buffer.device}")
        device_index = buffer.device.index or 0
        num_bytes = buffer.numel() * buffer.element_size()
        region = (buffer.data_ptr(), num_bytes, device_index, "")
        try:
            self._registration = self._agent.register_memory([region], SEGMENTS[buffer.device.type])
            metadata = self._agent.get_agent_metadata()
        except NIXL_ERRORS as error:
            raise TransferError(f"cannot register {num_bytes} bytes: {error}") from error
        self._buffer = buffer
        self._own = AgentDescriptor(
            name=self._name,
            backend="nixl",
            metadata=metadata,
            base_address=buffer.data_ptr(),
            num_bytes=num_bytes,
            device=buffer.device.type,
            device_index=device_index,
        )

    def describe(self) -> AgentDescriptor:
        return self._registered()

    def submit(self, peer: AgentDescriptor, copies: Sequence[Copy], message: bytes) -> TransferId:
        own = self._registered()
        if not copies or not message:  # the library would not deliver an empty message
            raise ValueError("a transfer needs at least one copy and a message")
        ranges = merged_ranges(copies, source_bytes=own.num_bytes, target_bytes=peer.num_bytes)
        if peer.backend != "nixl" or peer.device not in SEGMENTS or peer.name == own.name:
            raise TransferError(f"{peer.name} is no NIXL peer ({peer.backend}, {peer.device})")
        source = self._descriptors(own, ((begin, length) for begin, _, length in ranges))
        target = self._descriptors(peer, ((begin, length) for _, begin, length in ranges))
        try:
            self._connect(peer)
            handle = self._agent.initialize_xfer("WRITE", source, target, peer.name, message)
        except NIXL_ERRORS as error:
            raise TransferError(f"cannot address {peer.name}: {error}") from error
        try:
            state = self._agent.transfer(handle)
        except NIXL_ERRORS as error:
            self._lose(peer.name, str(error))
            raise TransferError(f"cannot write to {peer.name}: {error}") from error
        transfer = TransferId(next(self._ids))
        self._flights[transfer] = Flight(peer=peer.name, handle=handle)
        if state == "DONE":
            self._land(transfer)
        return transfer

    def poll(self) -> list[Completion]:
        for transfer, flight in list(self._flights.items()):
            if transfer not in self._flights:
                continue  # its peer was lost in this very loop
            try:
                state = self._agent.check_xfer_state(flight.handle)
            except NIXL_ERRORS as error:
                self._lose(flight.peer, str(error))
                continue
            if state == "DONE":
                self._land(transfer)
            elif state != "PROC":
                self._lose(flight.peer, f"transfer is in state {state}")
        if not self._flights:
            self._hear()  # only inside calls are connections closed that strangers have left
        ended, self._ended = self._ended, []
        return ended

    def notifications(self) -> list[Notification]:
        self._hear()
        heard, self._heard = self._heard, []
        return heard

    def _hear(self) -> None:
        try:
            arrived = self._agent.get_new_notifs()
        except NIXL_ERRORS as error:
            raise TransferError(f"cannot receive notifications: {error}") from error
        self._heard += [
            Notification(sender=sender, message=message)
            for sender, messages in arrived.items()
            for message in messages
        ]

    def release(self, peer_name: str) -> None:
        if peer_name in self._peers:
            self._lose(peer_name, "peer was released")

    def close(self) -> None:
        """Gives up outstanding transfers and unregisters the buffer; may be called again."""
        if self._closed:
            return
        self._closed = True
        for peer in list(self._peers):
            self._lose(peer, "agent was closed")
        if self._registration is not None:
            try:
                self._agent.deregister_memory(self._registration)
            except NIXL_ERRORS as error:
                log.warning("cannot unregister the buffer", error=str(error))
        # The library frees connections and threads in the agent's destructor.
        del self._agent
        self._own = None
        self._buffer = None

    def _registered(self) -> AgentDescriptor:
        assert self._own is not None, "no buffer is registered"
        return self._own

    def _descriptors(self, agent: AgentDescriptor, ranges: Iterable[tuple[int, int]]) -> object:
        """Ranges (offset, bytes) of an agent's buffer, in the library's form."""
        base, index = agent.base_address, agent.device_index
        rows = [(base + begin, length, index) for begin, length in ranges]
        return self._agent.get_xfer_descs(rows, SEGMENTS[agent.device])

    def _connect(self, peer: AgentDescriptor) -> None:
        """Makes a peer known; the handshake itself goes on in the background."""
        if peer.name in self._peers:
            return
        name = self._agent.add_remote_agent(peer.metadata)
        name = name.decode() if isinstance(name, bytes) else name
        self._peers.add(name)
        if name != peer.name:
            self._lose(name, "wrong name")
            raise TransferError(f"metadata of {peer.name} are those of {name}")

    def _land(self, transfer: TransferId) -> None:
        self._give_up(self._flights.pop(transfer))
        self._ended.append(Completion(transfer=transfer, state=State.DONE))

    def _lose(self, peer: str, reason: str) -> None:
        """Forgets a peer; what was in flight to it has failed."""
        for transfer, flight in list(self._flights.items()):
            if flight.peer == peer:
                self._give_up(self._flights.pop(transfer))
                self._ended.append(
                    Completion(transfer=transfer, state=State.FAILED, error=f"{peer}: {reason}")
                )
        if peer in self._peers:
            self._peers.discard(peer)
            try:
                self._agent.remove_remote_agent(peer)
            except NIXL_ERRORS as error:
                log.warning("cannot remove peer", peer=peer, error=str(error))

    def _give_up(self, flight: Flight) -> None:
        try:
            flight.handle.release()
        except NIXL_ERRORS as error:
            # The library keeps such a handle and frees it with the agent.
            log.warning("cannot release transfer", peer=flight.peer, error=str(error))
