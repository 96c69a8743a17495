"""What happens to a decode rank: the events of `decode_worker.state`, and fixed facts.

Events from the front are messages of `engine.link.messages`, those from the transfer KV notices;
the rest are the rank's own and are here.
"""

from dataclasses import dataclass

from core.errors import EpserveError
from engine.link.kv_notice import KvNotice
from engine.link.messages import Abort, Failed, Prefilled, PrefillStopped, Submit, TokenOut
from engine.sampling.history import Match


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What does not change while a rank lives. `agent` is the encoded descriptor of its KV
    pool, `attempt_prefix` makes attempt ids unique over all ranks of all workers."""

    num_layers: int
    page_tokens: int
    max_model_len: int
    max_running: int
    eos_token_ids: tuple[int, ...]
    kv_arrival_seconds: float
    agent: bytes
    kv_fingerprint: str
    attempt_prefix: str


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
    """A step has begun, which samples the next token of each of these running requests."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Landed:
    """The oldest step under way is over; a token for each of its requests, in their order, None
    where it was sampled in vain."""

    tokens: tuple[TokenOut | None, ...]


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
