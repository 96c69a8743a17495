"""Transfers to each peer in turn: so few at a time that some land every moment, however slow.

Over TCP transfers that are on their way together end together, with the last byte of all, so
that gigabytes submitted at once look like a peer that hangs. Here what is beyond a peer's room
waits until others have landed. Room is for LEAST_ROOM_BYTES at first, twice as much with every
transfer that lands within QUICK_SECONDS, and the least again with one that does not: 64 MiB are
on their way for 0.2 ms over NVLink, for 4 s at 16 MB/s.

What waits for a peer waits in flows, such as requests, which take turns: little is not kept
waiting by the gigabytes that came before it.
"""

import itertools
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from core.clock import Clock
from core.errors import TransferError
from transfer.api import AgentDescriptor, Completion, Copy, State, Transfer, TransferId

LEAST_ROOM_BYTES = 64 << 20
MOST_ROOM_BYTES = 1 << 30
QUICK_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parcel:
    """`transfer` is our name for it, not that of the transfer beneath."""

    transfer: TransferId
    peer: AgentDescriptor
    copies: Sequence[Copy]
    message: bytes
    num_bytes: int


@dataclass(slots=True)
class _Line:
    """What goes to one peer; `waiting` by flow, that whose turn is next in front."""

    room_bytes: int
    waiting: dict[Hashable, deque[_Parcel]] = field(default_factory=dict)
    num_in_flight: int = 0
    bytes_in_flight: int = 0

    def takes(self, parcel: _Parcel) -> bool:
        """One is always on its way, whatever its size."""
        fits = self.bytes_in_flight + parcel.num_bytes <= self.room_bytes
        return fits or not self.num_in_flight

    def pop_next(self) -> _Parcel | None:
        """Whose turn it is, if it has room; it waits no more, and its flow is the last."""
        flow, parcels = next(iter(self.waiting.items()), (None, None))
        if parcels is None or not self.takes(parcels[0]):
            return None
        del self.waiting[flow]
        parcel = parcels.popleft()
        if parcels:
            self.waiting[flow] = parcels
        return parcel


class PacedTransfer:
    """The sending half of a `Transfer`, over another one of its own. Transfers of
    one flow to a peer begin in the order of `submit`; when one fails, so does all that waits for
    the peer."""

    def __init__(self, transfer: Transfer, clock: Clock) -> None:
        self._transfer = transfer
        self._clock = clock
        self._lines: dict[str, _Line] = {}
        self._began: dict[TransferId, tuple[_Parcel, float]] = {}  # by the id beneath
        self._ended: list[Completion] = []
        self._ids = itertools.count(1)

    def submit(
        self,
        peer: AgentDescriptor,
        copies: Sequence[Copy],
        message: bytes,
        flow: Hashable = None,
    ) -> TransferId:
        """As `Transfer.submit`; of one that has to wait, the errors come as its completion."""
        parcel = _Parcel(
            transfer=TransferId(next(self._ids)),
            peer=peer,
            copies=copies,
            message=message,
            num_bytes=sum(copy.num_bytes for copy in copies),
        )
        line = self._lines.setdefault(peer.name, _Line(LEAST_ROOM_BYTES))
        if line.waiting or not line.takes(parcel):
            line.waiting.setdefault(flow, deque()).append(parcel)
        else:
            self._begin(line, parcel)
        return parcel.transfer

    def poll(self) -> list[Completion]:
        """As `Transfer.poll`; begins what has room by now."""
        for completion in self._transfer.poll():
            parcel, began_at = self._began.pop(completion.transfer)
            line = self._lines[parcel.peer.name]
            line.num_in_flight -= 1
            line.bytes_in_flight -= parcel.num_bytes
            self._end(parcel, completion.state, completion.error)
            if completion.state is State.FAILED:
                self._fail_waiting(line, completion.error)
            elif self._clock.now() - began_at <= QUICK_SECONDS:
                line.room_bytes = min(2 * line.room_bytes, MOST_ROOM_BYTES)
            else:
                line.room_bytes = LEAST_ROOM_BYTES
        for name, line in list(self._lines.items()):
            self._begin_waiting(line)
            if not line.num_in_flight:
                del self._lines[name]
        ended, self._ended = self._ended, []
        return ended

    def release(self, peer_name: str) -> None:
        """As `Transfer.release`, of what waits as well."""
        self._transfer.release(peer_name)
        if peer_name in self._lines:
            self._fail_waiting(self._lines[peer_name], f"{peer_name}: peer was released")

    def withdraw(self, flow: Hashable) -> list[TransferId]:
        """What waits in `flow`, whatever the peer: it never begins, and no completion comes."""
        waiting = [line.waiting.pop(flow, ()) for line in self._lines.values()]
        return [parcel.transfer for parcel in itertools.chain.from_iterable(waiting)]

    def _begin(self, line: _Line, parcel: _Parcel) -> None:
        transfer = self._transfer.submit(parcel.peer, parcel.copies, parcel.message)
        self._began[transfer] = (parcel, self._clock.now())
        line.num_in_flight += 1
        line.bytes_in_flight += parcel.num_bytes

    def _begin_waiting(self, line: _Line) -> None:
        while (parcel := line.pop_next()) is not None:
            try:
                self._begin(line, parcel)
            except TransferError as error:
                self._end(parcel, State.FAILED, error.message)
                self._fail_waiting(line, error.message)

    def _fail_waiting(self, line: _Line, error: str) -> None:
        for parcel in itertools.chain.from_iterable(line.waiting.values()):
            self._end(parcel, State.FAILED, error)
        line.waiting.clear()

    def _end(self, parcel: _Parcel, state: State, error: str) -> None:
        self._ended.append(Completion(transfer=parcel.transfer, state=state, error=error))
