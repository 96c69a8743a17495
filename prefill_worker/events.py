"""What happens to prefill attempts, and what is to be done about it; see `state`."""

from dataclasses import dataclass

from engine.link.messages import Failed, Prefilled, Stopped, SubmitPrefill, TokenOut

# ---- events


@dataclass(frozen=True, slots=True)
class Arrived:
    submit: SubmitPrefill


@dataclass(frozen=True, slots=True)
class AbortAsked:
    attempt_id: str


@dataclass(frozen=True, slots=True)
class Refused:
    """There can be no token after this prompt; `code` is a gRPC status name."""

    attempt_id: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Started:
    """Its pages are reserved; `num_cached_tokens` are known already."""

    attempt_id: str
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class PushBegan:
    """One more transfer is in flight for this attempt."""

    attempt_id: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PushFailed:
    """A transfer could not even begin."""

    attempt_id: str
    message: str


@dataclass(frozen=True, slots=True)
class PushEnded:
    """One transfer is over; `error` is empty when its bytes have landed."""

    attempt_id: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class PushWithdrawn:
    """One transfer, which waited in line, is never to begin."""

    attempt_id: str


@dataclass(frozen=True, slots=True)
class Advanced:
    """A step has computed tokens up to `num_done_tokens`, and submitted all their pages."""

    attempt_id: str
    num_done_tokens: int
    step_seconds: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """The whole prompt is computed and submitted; this is the token after it (None: none is
    wanted) and, where asked for, what the prompt's own tokens had for log-probabilities."""

    attempt_id: str
    token: TokenOut | None
    prompt_logprobs: tuple[TokenOut, ...] = ()


@dataclass(frozen=True, slots=True)
class Ticked:
    """Some time has passed."""


Event = (
    Arrived
    | AbortAsked
    | Refused
    | Started
    | PushBegan
    | PushFailed
    | PushEnded
    | PushWithdrawn
    | Advanced
    | Sampled
    | Ticked
)


# ---- actions


@dataclass(frozen=True, slots=True)
class Send:
    message: Prefilled | Failed | Stopped


@dataclass(frozen=True, slots=True)
class Release:
    """Give back what the attempt holds: pages, lease, target. It is over."""

    attempt_id: str


@dataclass(frozen=True, slots=True)
class Withdraw:
    """The attempt is given up: what of it waits in line for its peer needs no sending."""

    attempt_id: str


@dataclass(frozen=True, slots=True)
class ReleasePeer:
    """Give up the peer that this attempt pushes to: it makes no progress."""

    attempt_id: str


@dataclass(frozen=True, slots=True)
class Die:
    """Transfers do not even end when their peer is given up: only the end of this process
    makes sure that nothing is written any more."""

    message: str


Action = Send | Release | Withdraw | ReleasePeer | Die
