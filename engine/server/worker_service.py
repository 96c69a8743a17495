"""What a role adds to a worker's front: the books of its gRPC service."""

from typing import NamedTuple, Protocol

from core.errors import EpserveError
from engine.link.messages import RankMessage
from engine.server.request_records import RequestRecords


class Load(NamedTuple):
    """What a front knows of one rank before the rank does: requests it has handed out."""

    num_open: int  # accepted and not over
    num_waiting_tokens: int  # prompt tokens not computed yet; 0 where that has no meaning


class WorkerService(Protocol):
    """Prefill's and decode's half of `engine.server.worker_server`; also the servicer itself."""

    num_accepted_total: int
    records: RequestRecords

    def on_message(self, rank: int, message: RankMessage) -> None:
        """A rank said something. Must not block."""
        ...

    def load(self, rank: int) -> Load: ...

    @property
    def num_open(self) -> int:
        """Requests accepted and not over."""
        ...

    @property
    def is_quiet(self) -> bool:
        """No request is open, no rank has one, and no peer is still to be told or asked anything
        about one. `front.on_change` is called when this becomes true."""
        ...

    def hand_over(self, error: EpserveError) -> None:
        """Ends every open request with `error` as soon as no page of it can be written or read
        any more, so that it is carried on elsewhere."""
        ...

    def fail_all(self, error: EpserveError) -> None:
        """Ends every open request with `error`, now; ranks that live are told to stop."""
        ...

    async def close(self) -> None:
        """Ends whatever tasks are left."""
        ...
