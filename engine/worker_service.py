"""What a role adds to a worker's front: the books behind its gRPC service."""

from typing import NamedTuple, Protocol

from core.errors import EpserveError
from engine.messages import RankMessage


class Load(NamedTuple):
    """What a front knows of one rank before the rank does: requests it has handed out."""

    num_open: int  # accepted and not over
    num_waiting_tokens: int  # prompt tokens not computed yet; 0 where that has no meaning


class WorkerService(Protocol):
    """Prefill's and decode's half of `engine.worker_server`; also the servicer itself."""

    num_accepted_total: int

    def on_message(self, rank: int, message: RankMessage) -> None:
        """A rank said something. Must not block."""
        ...

    def load(self, rank: int) -> Load: ...

    def fail_all(self, error: EpserveError) -> None:
        """Ends every open request with `error`, now."""
        ...

    async def drained(self) -> None:
        """Returns when no request is open."""
        ...

    async def close(self) -> None:
        """Ends whatever tasks are left."""
        ...
