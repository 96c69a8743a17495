"""Skewed routings, and what any dispatcher has to make of them: what one rank makes of the tokens
of all. For every dispatcher in every form, on CPUs and GPUs."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from ep.dispatch.dispatcher import (
    AlignedDispatcher,
    Computed,
    DispatchedAligned,
    Dispatcher,
    MaskedDispatcher,
    Payload,
)
from ep.dispatch.local import LocalDispatcher

# Relative, by norm, of what FP8 payload does to hidden states: half a step of e4m3 at most.
FP8_BOUND = 2**-4
# Of which whole numbers are exact; 3.5 is the largest value.
STATIC_SCALE = 2**-7
KINDS = ("random", "some elsewhere", "one expert", "one rank", "nobody")


@cache
def payloads(device: str = "cpu") -> tuple[Payload, ...]:
    """All that aligned dispatches know."""
    static = Payload(scale=torch.tensor(STATIC_SCALE, device=device))
    return Payload.PLAIN, Payload.FP8, static


@dataclass(frozen=True)
class Tokens:
    """Of one rank: hidden [T, H], topk_idx [T, K] int64 physical experts, distinct or -1,
    weights [T, K] float32."""

    hidden: torch.Tensor
    topk_idx: torch.Tensor
    weights: torch.Tensor

    def to(self, device: str, dtype: torch.dtype) -> "Tokens":
        hidden = self.hidden.to(device, dtype)
        return Tokens(hidden, self.topk_idx.to(device), self.weights.to(device))

    def padded(self, num_rows: int) -> "Tokens":
        """With rows behind that go to nobody, of numbers that would show."""
        missing = num_rows - len(self.hidden)
        hidden = self.hidden.new_full((missing, self.hidden.shape[1]), 1e3)
        nobody = self.topk_idx.new_full((missing, self.topk_idx.shape[1]), -1)
        return Tokens(
            torch.cat((self.hidden, hidden)),
            torch.cat((self.topk_idx, nobody)),
            torch.cat((self.weights, torch.ones_like(nobody, dtype=torch.float32))),
        )


@dataclass(frozen=True)
class RoutingCase:
    """`by_rank` are the tokens of each rank, of experts in `slots_per_rank` slots on each."""

    name: str
    slots_per_rank: int
    by_rank: tuple[Tokens, ...]
    known: dict[Payload, torch.Tensor] = field(default_factory=dict)

    @property
    def tokens_per_rank(self) -> tuple[int, ...]:
        return tuple(len(tokens.hidden) for tokens in self.by_rank)

    @property
    def has_nobody(self) -> bool:
        """Whether there are choices of no expert, which the contiguous form does not know."""
        return any(bool((tokens.topk_idx < 0).any()) for tokens in self.by_rank)

    def expected(self, rank: int, payload: Payload) -> torch.Tensor:
        """[T, H] of a rank: all tokens through a single rank that has all experts."""
        known_as = payload
        if known_as not in self.known:
            everybody = Tokens(
                *(torch.cat([getattr(tokens, name) for tokens in self.by_rank]) for name in FIELDS)
            )
            num_slots = self.slots_per_rank * len(self.by_rank)
            num_tokens = len(everybody.hidden)
            if payload.scale is not None:
                payload = replace(payload, scale=payload.scale.to(everybody.hidden.device))
            masked = LocalDispatcher(num_slots, max(1, num_tokens))
            known = through_masked(masked, everybody, payload, first_slot=0)
            self.known[known_as] = known
        return self.known[known_as].split(self.tokens_per_rank)[rank]


FIELDS = ("hidden", "topk_idx", "weights")


def routing_cases(
    num_ranks: int,
    slots_per_rank: int,
    num_choices: int,
    cap: int,
    width: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> Iterator[RoutingCase]:
    """All kinds of routing, with ranks that are full, have one token, or none."""
    sizes = {
        "uneven": [(cap, 0, 1, cap // 2)[rank % 4] for rank in range(num_ranks)],
        "full": [cap] * num_ranks,
        "idle": [0] * num_ranks,
        "one": [0] * (num_ranks - 1) + [1],
    }
    for kind in KINDS:
        for size, tokens_per_rank in sizes.items():
            if size in ("idle", "one") and kind not in ("random", "nobody"):
                continue
            generator = torch.Generator().manual_seed(len(kind) * 10 + len(size))
            yield RoutingCase(
                f"{kind}, {size}",
                slots_per_rank,
                tuple(
                    _tokens(
                        kind, n, num_ranks, slots_per_rank, num_choices, width, generator
                    ).to(device, dtype)
                    for n in tokens_per_rank
                ),
            )  # fmt: skip


def _tokens(
    kind: str, num_tokens: int, num_ranks: int, slots_per_rank: int, num_choices: int,
    width: int, generator: torch.Generator,
) -> Tokens:  # fmt: skip
    num_experts = num_ranks * slots_per_rank
    assert num_choices <= slots_per_rank, "all choices of a token must fit on a rank"
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    if kind == "one rank":  # the second, if there is one
        scores[:, slots_per_rank * min(1, num_ranks - 1) :][:, :slots_per_rank] += 1
    topk_idx = scores.topk(num_choices, dim=1).indices
    if kind == "some elsewhere":
        topk_idx[torch.rand(topk_idx.shape, generator=generator) < 0.4] = -1
    elif kind in ("one expert", "nobody"):
        topk_idx.fill_(-1)
        if kind == "one expert":
            topk_idx[:, num_choices // 2] = num_experts - 1
    return Tokens(
        torch.randn(num_tokens, width, generator=generator),
        topk_idx,
        torch.rand(num_tokens, num_choices, generator=generator),
    )


def expert(slot: int, x: torch.Tensor) -> torch.Tensor:
    """[N, H] -> [N, H] of a physical expert; element by element, so that bits do not depend on
    what else is there."""
    return (x * (0.5 + 0.25 * (slot % 7)) + 0.125 * (slot % 5)).clamp(-4, 4)


def opened(
    hidden: torch.Tensor, scales: torch.Tensor | None, payload: Payload, dtype: torch.dtype
) -> torch.Tensor:
    """[..., H] rows as hidden states again."""
    assert (hidden.dtype == torch.float8_e4m3fn) == payload.quantises
    if scales is None:
        return hidden if payload.scale is None else (hidden.float() * payload.scale).to(dtype)
    return (hidden.float().unflatten(-1, (-1, 128)) * scales.unsqueeze(-1)).flatten(-2).to(dtype)


def through_masked(
    dispatcher: MaskedDispatcher, tokens: Tokens, payload: Payload, first_slot: int
) -> torch.Tensor:
    """[T, H]; what means nothing is NaN, so that it shows if it does mean something."""
    beside: list[str] = []
    sent = dispatcher.dispatch_masked(
        tokens.hidden, tokens.topk_idx, tokens.weights, payload, lambda: beside.append("done")
    )
    assert beside == ["done"]
    rows = opened(sent.hidden, sent.scales, payload, tokens.hidden.dtype)
    out = torch.full_like(rows, float("nan"))
    for slot, count in enumerate(sent.counts.tolist()):
        out[slot, :count] = expert(first_slot + slot, rows[slot, :count])
    return dispatcher.combine_masked(out, sent.handle)


def through_aligned(
    dispatcher: AlignedDispatcher,
    tokens: Tokens,
    payload: Payload,
    alignment: int,
    first_slot: int,
    tokens_per_rank: tuple[int, ...],
) -> torch.Tensor:
    """The same over the aligned form, whose layout is checked."""

    def compute(sent: DispatchedAligned) -> Computed:
        return _checked(sent, payload, alignment, first_slot, tokens.hidden.dtype), sent.handle

    parts = dispatcher.dispatch_aligned(
        tokens.hidden, tokens.topk_idx, tokens.weights, tokens_per_rank, payload, alignment
    )
    return dispatcher.combine_aligned(map(compute, parts))


def _checked(
    sent: DispatchedAligned,
    payload: Payload,
    alignment: int,
    first_slot: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[M, H] of the experts."""
    num_scales = 0 if sent.scales is None else sent.scales.shape[1]
    assert num_scales == payload.num_scales(sent.hidden.shape[1])
    rows = opened(sent.hidden, sent.scales, payload, dtype)
    out = torch.full_like(rows, float("nan"))
    start = 0
    for slot, count in enumerate(sent.counts.tolist()):
        here = slice(start, start + count)
        assert sent.slot_of[here].eq(slot).all()
        assert int(sent.ends[slot]) == here.stop
        out[here] = expert(first_slot + slot, rows[here])
        start += -(-count // alignment) * alignment
    assert int((sent.slot_of >= 0).sum()) == int(sent.counts.sum())
    return out


def through_contiguous(
    dispatcher: Dispatcher, tokens: Tokens, first_slot: int, tokens_per_rank: tuple[int, ...]
) -> torch.Tensor:
    """The same over the contiguous form."""
    sent = dispatcher.dispatch(tokens.hidden, tokens.topk_idx, tokens.weights, tokens_per_rank)
    parts = sent.hidden.split(sent.expert_counts.tolist())
    outputs = [expert(first_slot + slot, rows) for slot, rows in enumerate(parts)]
    return dispatcher.combine(torch.cat(outputs), sent.handle)


def assert_as_expected(
    case: RoutingCase,
    rank: int,
    payload: Payload,
    got: torch.Tensor,
    *,
    exact: bool,
    loose: bool = False,
) -> None:
    """Of plain payload equal bits if `exact`, else as near as sums in another order; of FP8 the
    same against the same payload, unless `loose`, and as near to what was not quantised as FP8
    is."""
    want = case.expected(rank, payload)
    assert (got.shape, got.dtype) == (want.shape, want.dtype), case.name
    if loose:
        assert got.isfinite().all()
    elif exact:
        assert torch.equal(got, want), case.name
    else:
        step = 2**-7 if got.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(got, want, rtol=step, atol=step, msg=lambda m: case.name + m)
    if payload.quantises:
        plain = case.expected(rank, Payload.PLAIN).float()
        assert (got.float() - plain).norm() <= FP8_BOUND * plain.norm(), case.name
