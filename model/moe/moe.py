"""Mixture of experts: gate, dispatch to the ranks that hold them, combine, shared experts."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ep.dispatch.dispatcher import (
    AlignedDispatcher,
    Computed,
    DispatchedAligned,
    Dispatcher,
    MaskedDispatcher,
    Payload,
    Rows,
)
from ep.dispatch.expert_shard import ExpertShard
from ep.dispatch.local import LocalDispatcher
from ep.dispatch.split_dispatch import in_sub_steps
from ep.placement.placement_maps import LayerMaps
from kernels.elementwise.combine import Update, combined
from kernels.elementwise.rms_norm import rms_norms
from kernels.moe.gate import route
from model.config import ModelConfig
from model.mlp import Mlp
from model.moe.experts import Experts, load_experts
from model.moe.int4_experts import Int4Experts
from model.moe.side_work import SideWork
from model.projection import Quantised
from model.weights.weights import Weights


class NormedRows(NamedTuple):
    """Tokens in FP8 as a norm leaves them: for the shared expert, and as they are dispatched, where
    both take them from there."""

    shared: Quantised
    sent: Rows | None


# Of a decode step, up to which the shared expert begins before the gate, on a stream of its
# own; of more its products take all multiprocessors, for which the gate would wait. As it was
# fastest on an H200 with DeepSeek-V3's sizes; the results are the same.
SHARED_FIRST_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """gate_weight [E, H] float32, or bfloat16 where it and the model are; gate_bias [E] float32;
    counts [E] int64, of how many (token, choice) pairs of this rank each logical expert has been.
    `shared` is None where there is none, and where it is one of `experts`; with `fused` the routed
    ones are computed in one call, and nothing is dispatched.

    Tokens are dispatched as `masked` does it in `decode`, else by `aligned` if there is one, else
    by `dispatcher`, and by `masked` where neither is there; no more than `step_tokens` of a rank
    (0: any number) or than `masked` takes at once.
    """

    config: ModelConfig
    rank: int
    dispatcher: Dispatcher | None
    aligned: AlignedDispatcher | None
    masked: MaskedDispatcher | None
    step_tokens: int
    fused: bool
    maps: LayerMaps
    counts: torch.Tensor
    gate_weight: torch.Tensor
    gate_bias: torch.Tensor
    experts: Experts
    shared: Mlp | None

    @classmethod
    def load(
        cls, weights: Weights, config: ModelConfig, prefix: str, shard: ExpertShard, layer: int
    ) -> "Moe":
        """`layer` counts MoE layers only. ValueError for experts that cannot be what `shard` says
        of them."""
        experts = load_experts(
            weights, config, prefix, shard.local_experts(layer), fold_shared=shard.fold_shared
        )
        if shard.fused and isinstance(experts, Int4Experts):
            raise ValueError("there are no fused experts in int4")
        return cls(
            config=config,
            rank=shard.rank,
            dispatcher=shard.dispatcher,
            aligned=shard.aligned,
            masked=shard.masked,
            step_tokens=shard.step_tokens,
            fused=shard.fused,
            maps=shard.maps.layer(layer),
            counts=shard.counts[layer],
            gate_weight=_gate_weight(weights, f"{prefix}.gate.weight"),
            gate_bias=weights.get(f"{prefix}.gate.e_score_correction_bias", torch.float32),
            experts=experts,
            shared=(
                Mlp.load(weights, f"{prefix}.shared_experts")
                if config.num_shared_experts and not shard.fold_shared
                else None
            ),
        )

    @property
    def waits_for_no_rank(self) -> bool:
        """Whether `forward` needs no other rank and no look of the host at what the gate chose."""
        return self.fused or isinstance(self.aligned, LocalDispatcher)

    def forward(
        self,
        x: torch.Tensor,
        tokens_per_rank: tuple[int, ...],
        is_row: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, H] -> [T, H]; also with T = 0, for the tokens of other ranks. Of tokens that are none
        by `is_row` [T] bool, which only a rank that `waits_for_no_rank` may have, the result means
        nothing."""
        return combined(self.forward_parts(x, tokens_per_rank, is_row))

    def forward_parts(
        self,
        x: torch.Tensor,
        tokens_per_rank: tuple[int, ...],
        is_row: torch.Tensor | None = None,
        rows: NormedRows | None = None,
    ) -> Update:
        """The same, where it can be still to be combined. `rows`: what `add_normed` made beside
        x."""
        assert is_row is None or self.waits_for_no_rank, "other dispatchers take no padding"
        if is_row is not None or rows is not None:
            return self._forward(x, tokens_per_rank, is_row, rows)
        if self.dispatcher is None:
            assert self.masked is not None, "no dispatcher"
            through, cap = self._forward_masked, self.masked.max_tokens
        else:
            through, cap = self._forward_whole, self.step_tokens
        return in_sub_steps(through, x, tokens_per_rank, rank=self.rank, cap=cap)

    def _forward_whole(self, x: torch.Tensor, tokens_per_rank: tuple[int, ...]) -> torch.Tensor:
        return combined(self._forward(x, tokens_per_rank))

    def _forward_masked(self, x: torch.Tensor, tokens_per_rank: tuple[int, ...]) -> torch.Tensor:
        """As a step of fixed size, in which all ranks have as many rows as the longest."""
        if not any(tokens_per_rank):
            return x
        padding = x.new_zeros(max(tokens_per_rank) - len(x), x.shape[1])
        is_row = torch.arange(len(x) + len(padding), device=x.device) < len(x)
        return self.decode(torch.cat((x, padding)), is_row)[: len(x)]

    def _forward(
        self,
        x: torch.Tensor,
        tokens_per_rank: tuple[int, ...],
        is_row: torch.Tensor | None = None,
        rows: NormedRows | None = None,
    ) -> Update:
        physical, topk_weights = self._route(x, is_row)
        beside: list[torch.Tensor] = []  # what the shared expert makes of x

        def compute_shared() -> None:
            if self.shared is not None and len(x):
                beside.append(self.shared.forward(x if rows is None else rows.shared))
            elif self.experts.folds_shared and len(x) and (self.aligned or self.fused):
                beside.append(self.experts.forward_shared(x))

        told = x, physical, topk_weights, tokens_per_rank
        if self.fused:
            compute_shared()
            routed = self._fused(x, physical, topk_weights)
        elif self.aligned is not None:
            ready = None if rows is None else rows.sent
            wanted = self.experts.payload, self.experts.alignment
            parts = self.aligned.dispatch_aligned(*told, *wanted, compute_shared, ready)
            computed_parts = map(self._compute, parts)
            if isinstance(self.aligned, LocalDispatcher):
                (whole,) = computed_parts
                return self.aligned.combination_of(*whole, base=beside[0] if beside else None)
            routed = self.aligned.combine_aligned(computed_parts)
        else:
            assert self.dispatcher is not None, "nothing but masked steps"
            sent = self.dispatcher.dispatch(*told, meanwhile=compute_shared)
            counts = sent.expert_counts.tolist()
            if self.experts.folds_shared:
                both = self.experts.forward(torch.cat((sent.hidden, x)), [*counts, len(x)])
                computed, own = both.split((len(sent.hidden), len(x)))
                beside.append(own)
            else:
                computed = self.experts.forward(sent.hidden, counts)
            routed = self.dispatcher.combine(computed, sent.handle)
        return routed + beside[0] if beside else routed

    def add_normed(
        self, x: Update, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, decodes: bool
    ) -> tuple[torch.Tensor, NormedRows | None, torch.Tensor]:
        """(RMSNorm of x + residual, the same quantised where `forward_parts` takes it, or, if it
        `decodes`, `decode_parts`, x + residual)."""
        if decodes:
            is_local = isinstance(self.masked, LocalDispatcher) and not self.fused
            payload = self.experts.payload if is_local else Payload.PLAIN
            quantises = payload.quantises or self._shared_is_fp8
        else:
            payload, quantises = self.experts.payload, self.shares_rows
        scale = payload.scale if quantises else None
        out, values, scales, sent, total = rms_norms(
            x, residual, weight, eps, quantises=quantises, scale=scale
        )
        if not quantises:
            return out, None, total
        small = values, scales
        if scale is not None:
            return out, NormedRows(small, (sent, None)), total
        return out, NormedRows(small, small if payload.quantises else None), total

    def decode(self, x: torch.Tensor, is_row: torch.Tensor) -> torch.Tensor:
        """[B, H] -> [B, H], for the rows that `is_row` [B] bool names; what becomes of the others
        means nothing. B is the same on all ranks, and nothing waits for the device."""
        return combined(self.decode_parts(x, is_row))

    def decode_parts(
        self, x: torch.Tensor, is_row: torch.Tensor, rows: NormedRows | None = None
    ) -> Update:
        """The same, where it can be still to be combined. `rows`: what `add_normed` made beside
        x."""
        if self.masked is None:
            # A rank that is alone, on a device that the host may wait for.
            here = is_row.nonzero().squeeze(1)
            return torch.zeros_like(x).index_copy_(0, here, self.forward(x[here], (len(here),)))
        cap = self.masked.max_tokens
        if len(x) > cap:
            parts = zip(x.split(cap), is_row.split(cap), strict=True)
            return torch.cat([self.decode(*part) for part in parts])
        # The shared expert is computed while tokens travel, or beside the rest if they do not.
        travels = not isinstance(self.masked, LocalDispatcher)
        side, shared = SideWork(x.device, has_stream=not travels), self.shared

        def start_shared() -> None:
            if shared is not None:
                given = rows.shared if rows is not None and self._shared_is_fp8 else x
                side.start(lambda: shared.forward(given))
            elif self.experts.folds_shared:
                side.start(lambda: self.experts.forward_shared(x))

        is_first = len(x) <= SHARED_FIRST_TOKENS
        if is_first and not travels:
            start_shared()
        physical, topk_weights = self._route(x, is_row)
        if not is_first and not travels:
            start_shared()
        if self.fused:
            routed, base = self._fused(x, physical, topk_weights), side.join()
            return routed if base is None else routed + base
        told = (x, physical, topk_weights, self.experts.payload)
        if isinstance(self.masked, LocalDispatcher):
            sent = self.masked.dispatch_masked(*told, rows=None if rows is None else rows.sent)
            computed = self.experts.forward_masked(sent)
            return self.masked.combination_of(computed, sent.handle, base=side.join())
        sent = self.masked.dispatch_masked(*told, meanwhile=start_shared)
        computed = self.experts.forward_masked(sent)
        return self.masked.combine_masked(computed, sent.handle, base=side.join())

    def _compute(self, part: DispatchedAligned) -> Computed:
        return self.experts.forward_aligned(part), part.handle

    def _fused(
        self, x: torch.Tensor, physical: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H] of the routed experts."""
        assert not isinstance(self.experts, Int4Experts)
        return self.experts.forward_fused(x, physical, topk_weights)

    @property
    def shares_rows(self) -> bool:
        """Whether the shared expert and the dispatch of all tokens take them in FP8, beside what
        the gate wants."""
        is_whole = self.aligned is not None and not self.fused and not self.step_tokens
        return self._shared_is_fp8 and is_whole and self.experts.payload.quantises

    @property
    def _shared_is_fp8(self) -> bool:
        return self.shared is not None and self.shared.gate_up.is_fp8

    def _route(
        self, x: torch.Tensor, is_row: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Physical experts and weights [T, K]; counts them."""
        return route(
            x,
            self.gate_weight,
            self.gate_bias,
            self.maps.physical,
            self.maps.num_replicas,
            self.counts,
            first=self.rank,
            is_row=is_row,
            num_groups=self.config.num_groups,
            groups_per_token=self.config.groups_per_token,
            experts_per_token=self.config.experts_per_token,
            norm_topk=self.config.norm_topk,
            scaling=self.config.routed_scaling,
        )


def _gate_weight(weights: Weights, name: str) -> torch.Tensor:
    """In bfloat16 where that loses nothing and a GPU multiplies it faster."""
    stored = weights.checkpoint.stored.get(name)
    is_half = stored is not None and stored.dtype == "BF16" and weights.dtype == torch.bfloat16
    dtype = torch.bfloat16 if is_half and weights.device.type == "cuda" else torch.float32
    return weights.get(name, dtype)
