"""One prefill attempt and the phases of its life; `state` has the diagram."""

from dataclasses import dataclass
from enum import Enum

from engine.link.messages import Failed, SubmitPrefill


class AttemptPhase(Enum):
    WAITING = "waiting"  # queued, holds nothing
    RUNNING = "running"  # holds pages; is computed and pushed
    PUSHING = "pushing"  # computed and answered; transfers are in flight
    STOPPING = "stopping"  # aborted or failed; transfers are in flight


@dataclass(slots=True, weakref_slot=True)
class Peer:
    """What attempts that push to the same agent share. `moved_at`: when one of their transfers
    landed last, as `Attempt.still_since`."""

    moved_at: float = 0.0


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One attempt; times in seconds of the caller's clock. Only `PrefillState` writes to it."""

    submit: SubmitPrefill
    peer: Peer
    arrived_at: float
    phase: AttemptPhase = AttemptPhase.WAITING
    started_at: float = 0.0
    num_cached_tokens: int = 0
    num_done_tokens: int = 0  # cached ones included
    compute_seconds: float = 0.0
    num_in_flight: int = 0  # transfers
    first_push_at: float | None = None
    still_since: float = 0.0  # the last event of a transfer, in seconds of looking after them
    kv_bytes: int = 0
    peer_released: bool = False
    stop_asked: bool = False
    failure: Failed | None = None

    @property
    def num_left_tokens(self) -> int:
        return self.submit.num_tokens - self.num_done_tokens
