"""Messages between a worker's front process and its rank processes (msgpack, no pickle).

The front sends a `FrontBatch` when it has something to say; the rank answers with one
`RankBatch` a step (and one at least every second when idle). Requests are named by
`request_id`; each prefill attempt of a request by an `attempt_id` that is never used again.

    decode rank                             prefill rank
    -----------                             ------------
    Submit          -> Reserved             SubmitPrefill -> Prefilled | Failed
    Prefilled/Failed <- (front, from RPC)   Abort         -> Stopped
    -> Produced ... Produced(finish)
    Abort           -> Ended
    PrefillStopped  -> (pages leave quarantine)
"""

from enum import IntEnum

import msgspec

from core.token_ids import num_ids

# A reply carries alternatives for every token: a bound that no client has a use beyond.
MAX_TOP_LOGPROBS = 128
MAX_TOP_PROMPT_LOGPROBS = 20


class Frozen(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages: tagged with the class name. NOTE: msgspec does not inherit
    `kw_only`, and type checkers want to see `frozen`, so each message repeats both."""


class Finish(IntEnum):
    """Why a request ended; values equal `epserve.generate.v1.FinishReason`."""

    NONE = 0
    STOP = 1
    LENGTH = 2


class TokenOut(Frozen, frozen=True, kw_only=True):
    """One produced token. `logprob` is of the unmodified distribution (temperature 1)."""

    token_id: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


class PageRun(Frozen, frozen=True, kw_only=True):
    """`count` consecutive pages from page `first`."""

    first: int
    count: int


class KvTarget(Frozen, frozen=True, kw_only=True):
    """Where prefill writes: encoded `transfer.AgentDescriptor` and page runs in token order."""

    agent: bytes
    runs: tuple[PageRun, ...]
    kv_fingerprint: str


# ---- front to rank


class Submit(Frozen, frozen=True, kw_only=True):
    """Start a request on a decode rank. Token ids (`core.token_ids`) of the prompt come along where
    penalties or drafts look at them; those of the output are of tokens that earlier attempts
    elsewhere have produced. `last_token_id` is the last of both, from which drafts begin.
    `sampling` is a serialized `SamplingParams`. Higher `priority` goes first, equal ones in order
    of arrival."""

    request_id: str
    num_prompt_tokens: int
    prompt_token_ids: bytes = b""
    output_token_ids: bytes = b""
    last_token_id: int
    sampling: bytes
    priority: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + num_ids(self.output_token_ids)


class SubmitPrefill(Frozen, frozen=True, kw_only=True):
    """Start an attempt on a prefill rank: compute the KV of all `token_ids` (`core.token_ids`),
    prompt and output so far, and put it into `target`. The rest as in `Submit`."""

    request_id: str
    attempt_id: str
    token_ids: bytes
    num_prompt_tokens: int
    sampling: bytes
    target: KvTarget
    priority: int = 0

    @property
    def num_tokens(self) -> int:
        return num_ids(self.token_ids)


class Prefilled(Frozen, frozen=True, kw_only=True):
    """Prefill finished: the sampled token after `token_ids` (None for `max_tokens` 0), and
    figures for metrics. Sent by the prefill rank once every write is submitted; relayed to the
    decode rank, without `prompt_logprobs`, which the fronts pass on."""

    request_id: str
    attempt_id: str
    token: TokenOut | None
    num_cached_tokens: int
    num_computed_tokens: int
    kv_bytes: int
    queue_seconds: float
    compute_seconds: float
    transfer_seconds: float
    prompt_logprobs: tuple[TokenOut, ...] = ()


class Failed(Frozen, frozen=True, kw_only=True):
    """An attempt (prefill) or request (decode) failed. `code` is a gRPC status name."""

    request_id: str
    attempt_id: str = ""
    code: str
    message: str


class Abort(Frozen, frozen=True, kw_only=True):
    """Stop a request (decode) or an attempt (prefill). Unknown ids are not an error."""

    request_id: str = ""
    attempt_id: str = ""


class PrefillStopped(Frozen, frozen=True, kw_only=True):
    """The prefill peer of this attempt has confirmed that it will write no more, or is gone."""

    attempt_id: str


class Shutdown(Frozen, frozen=True, kw_only=True):
    """Leave the loop at a step boundary, with the whole EP group: once all its ranks are told."""


class ReportExperts(Frozen, frozen=True, kw_only=True):
    """To rank 0 of an EP group: answer with `ExpertReport`, over all ranks."""

    report_id: int


class MoveExperts(Frozen, frozen=True, kw_only=True):
    """To rank 0 of an EP group: have all ranks change these MoE layers (counted without the dense
    ones) to these experts by slot. Answered by `ExpertsMoving` now and then, and `ExpertsMoved`."""

    move_id: int
    layers: dict[int, tuple[int, ...]]


ExpertOrder = ReportExperts | MoveExperts


class LogLevel(Frozen, frozen=True, kw_only=True):
    """Log from this level on; the link obeys it, loops never see it."""

    level: str


# What a rank's loop hears; the link itself obeys a LogLevel.
LoopMessage = (
    Submit | SubmitPrefill | Prefilled | Failed | Abort | PrefillStopped | Shutdown | ExpertOrder
)
FrontMessage = LoopMessage | LogLevel


class FrontBatch(Frozen, frozen=True, kw_only=True):
    messages: tuple[FrontMessage, ...]


# ---- rank to front


class Ready(Frozen, frozen=True, kw_only=True):
    """First message of a rank: it is loaded, in its EP group, and registered for transfer."""

    rank: int
    device: str
    pid: int
    kv_fingerprint: str
    page_tokens: int
    max_model_len: int
    pages_total: int
    max_running: int
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    start_seconds: tuple[tuple[str, float], ...] = ()  # (phase of the start, how long it took)
    memory: tuple[tuple[str, int, int], ...] = ()  # (term, planned bytes, used bytes)
    moe_layers: tuple[int, ...] = ()  # layers of the model that have experts to choose from
    num_expert_groups: int = 1  # of a layer's experts, as the gate has them
    experts_per_token: int = 1


class Reserved(Frozen, frozen=True, kw_only=True):
    """Decode: pages are held for this attempt; the front may call prefill now. Also sent
    again, with a new attempt id, when a preempted request is to be prefilled once more: of the
    prompt and all tokens produced so far."""

    request_id: str
    attempt_id: str
    target: KvTarget


class Produced(Frozen, frozen=True, kw_only=True):
    """New tokens of a request, in order; the request is over when `finish` is set. All but the last
    are right ones of `num_proposed` drafts."""

    request_id: str
    tokens: tuple[TokenOut, ...]
    finish: Finish = Finish.NONE
    num_proposed: int = 0

    @property
    def num_accepted(self) -> int:
        return len(self.tokens) - 1 if self.num_proposed else 0


class Ended(Frozen, frozen=True, kw_only=True):
    """Answer to Abort on a decode rank: nothing more will be produced for this request."""

    request_id: str


class Quarantined(Frozen, frozen=True, kw_only=True):
    """Decode: pages of this attempt wait until prefill has stopped; the front must obtain
    `PrefillStopped` (Prefill.Abort, or the peer is gone)."""

    request_id: str
    attempt_id: str


class Stopped(Frozen, frozen=True, kw_only=True):
    """Prefill: no write of this attempt is in flight or ever will be."""

    attempt_id: str
    was_known: bool


class ExpertReport(Frozen, frozen=True, kw_only=True):
    """Experts of the whole group: the placement in force, and the tokens of all ranks."""

    report_id: int
    placement_version: int
    num_ranks: int
    slots_per_rank: int
    num_logical: int
    expert_bytes: int  # weights of one expert in one layer
    physical_to_logical: tuple[tuple[int, ...], ...]  # [MoE layers][slots], -1: empty
    tokens: bytes  # int64 [MoE layers, num_logical], (token, choice) pairs since start


class ExpertsMoving(Frozen, frozen=True, kw_only=True):
    """How far `MoveExperts` is; `num_bytes` have travelled, over all ranks."""

    move_id: int
    num_layers_done: int
    num_layers: int
    num_bytes: int


class ExpertsMoved(Frozen, frozen=True, kw_only=True):
    """End of `MoveExperts`. `outcome`: "done"; "restored", the old placement is in force; "broken",
    the old one in some layers and the new one in others; "refused", nothing was begun."""

    move_id: int
    outcome: str
    reason: str
    placement_version: int
    num_bytes: int


class RankStats(Frozen, frozen=True, kw_only=True):
    """Gauges as of this step and totals since start; the front turns them into metrics."""

    num_running: int = 0
    num_waiting: int = 0  # hold no pages
    num_transferring: int = 0  # prefill: computed, being sent; decode: KV not all here
    num_waiting_tokens: int = 0
    pages_total: int = 0
    pages_free: int = 0  # the cached ones included
    pages_owned: int = 0
    pages_cached: int = 0  # held by the prefix tree only
    pages_quarantined: int = 0
    num_steps: int = 0
    step_seconds: tuple[float, ...] = ()  # durations of the steps since the last batch
    batch_sizes: tuple[int, ...] = ()  # requests in each of these steps
    step_tokens: tuple[int, ...] = ()  # of the rank with most, in each of them
    tokens_computed_total: int = 0  # prompt tokens run through the model
    tokens_cached_total: int = 0  # prompt tokens found in the prefix tree
    tokens_transferred_total: int = 0  # prompt tokens whose KV arrived from a peer
    tokens_generated_total: int = 0
    kv_bytes_total: int = 0  # sent (prefill) or received (decode)
    kv_seconds: tuple[float, ...] = ()  # of requests whose KV arrived since the last batch
    kv_failures_total: int = 0  # requests whose KV could not be sent, or did not arrive
    preemptions_total: int = 0
    drafts_proposed_total: tuple[int, ...] = ()  # decode, by position after the token itself
    drafts_accepted_total: tuple[int, ...] = ()  # ... those that were right, as all before them
    step_gap_seconds_total: float = 0.0  # decode: its device waited, though there was work


ExpertAnswer = ExpertReport | ExpertsMoving | ExpertsMoved
RankMessage = (
    Ready | Reserved | Produced | Ended | Quarantined | Prefilled | Failed | Stopped | ExpertAnswer
)


class RankBatch(Frozen, frozen=True, kw_only=True):
    rank: int
    messages: tuple[RankMessage, ...]
    stats: RankStats
