"""What happens to a decode rank: the events of `decode_worker.state`, and fixed facts.

Events from the front are messages of `engine.link.messages`, those from the transfer KV notices;
the rest are the rank's own and are here.
"""

from dataclasses import dataclass, field

from core.errors import EpserveError
from engine.link.kv_notice import KvNotice
from engine.link.messages import Abort, Failed, Prefilled, PrefillStopped, Submit, TokenOut
from engine.process.draft_count import FIRST_SHARE, OF_RANK, share_after
from engine.sampling.history import Match


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What does not change while a rank lives. `agent` is the encoded descriptor of its KV
    pool, `attempt_prefix` makes attempt ids unique over all ranks of all workers.
    `speculative_tokens` are drafted for each request in a step at most; by looking them up, if it
    `looks_up`."""

    num_layers: int
    page_tokens: int
    max_model_len: int
    max_running: int
    eos_token_ids: tuple[int, ...]
    kv_arrival_seconds: float
    agent: bytes
    kv_fingerprint: str
    attempt_prefix: str
    speculative_tokens: int = 0
    looks_up: bool = False


@dataclass(frozen=True, slots=True)
class Admit:
    request_id: str


@dataclass(frozen=True, slots=True)
class Grow:
    request_id: str


@dataclass(frozen=True, slots=True)
class Preempt:
    request_id: str


@dataclass(frozen=True, slots=True)
class Launched:
    """A step has begun, which samples what follows each of these running requests."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step has made of a request: its next tokens, one more than drafts of it were right of
    `num_proposed`; none where they were sampled in vain. `drafts` of those that may follow."""

    tokens: tuple[TokenOut, ...] = ()
    num_proposed: int = 0
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Landed:
    """The oldest step under way is over; an outcome for each of its requests, in their order."""

    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class GrammarReady:
    """The request's grammar is compiled; `match` is at the begin of the output. Or there is no
    such grammar, and `error` says why."""

    request_id: str
    match: Match | None
    error: EpserveError | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Submit
    | Prefilled
    | Failed
    | Abort
    | PrefillStopped
    | KvNotice
    | Admit
    | Grow
    | Preempt
    | Launched
    | Landed
    | GrammarReady
    | Tick
)


@dataclass(slots=True)
class Totals:
    """Counters since start; meanings as in `engine.link.messages.RankStats`."""

    tokens_transferred: int = 0
    tokens_generated: int = 0
    kv_bytes: int = 0
    kv_failures: int = 0
    preemptions: int = 0
    drafts_proposed: list[int] = field(default_factory=list)  # by position
    drafts_accepted: list[int] = field(default_factory=list)
    draft_share: float = FIRST_SHARE  # lately, as of a request; with it the next one begins

    def count_drafts(self, num_proposed: int, num_accepted: int) -> None:
        """Of one request in a step."""
        self.draft_share = share_after(self.draft_share, num_proposed, num_accepted, OF_RANK)
        missing = [0] * (num_proposed - len(self.drafts_proposed))
        self.drafts_proposed += missing
        self.drafts_accepted += missing
        for position in range(num_proposed):
            self.drafts_proposed[position] += 1
            self.drafts_accepted[position] += position < num_accepted
