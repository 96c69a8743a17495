"""One rank of a group that does not exist: its share of a full-size model, and its share of the
group's tokens at perfect balance.

A rank of R holds every R-th part of the experts and keeps what attention and the other layers need
for its own requests. From R ranks with T tokens each, T * K rows reach its experts. Here each of
its own T tokens goes to K of them in turn, which are as many rows; nothing is sent. The gate
computes as ever, its choices are counted and its weights used, but not its experts.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.ranks.deepseek_v3_config import write_config
from engine.sampling.sampler import SampleRow
from engine.sampling.sampling_params import Sampling
from engine.step.sequence_chunk import SequenceChunk
from ep.dispatch.expert_shard import ExpertShard
from ep.dispatch.local import LocalDispatcher
from ep.placement.placement import Placement
from model.batch import AttentionForm
from model.config import ModelConfig
from model.deepseek import DeepseekV3
from model.known_models import WeightFormat
from model.weights.dummy_checkpoint import DummyCheckpoint

NUM_RANKS = 8
PAGE_TOKENS = 64


class InTurn:
    """Slots for T tokens and K choices, K of them in turn to each token; made once for each T, so
    that a step does not pay for them."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._slots: dict[tuple[int, ...], torch.Tensor] = {}

    def like(self, topk_idx: torch.Tensor) -> torch.Tensor:
        """[T, K]."""
        shape = tuple(topk_idx.shape)
        assert shape[1] <= self._num_slots, "a token's slots would not be distinct"
        if shape not in self._slots:
            every = torch.arange(topk_idx.numel(), device=topk_idx.device) % self._num_slots
            self._slots[shape] = every.view(shape).to(topk_idx.dtype)
        return self._slots[shape]


def balanced(dispatcher: LocalDispatcher, num_slots: int) -> LocalDispatcher:
    """Whatever is dispatched goes to slots in turn, not to what the gate says."""
    in_turn = InTurn(num_slots)

    def to_slots_in_turn(method: str) -> None:
        dispatch = getattr(dispatcher, method)

        def dispatch_in_turn(
            hidden: torch.Tensor, topk_idx: torch.Tensor, *others: object, **named: object
        ) -> object:
            return dispatch(hidden, in_turn.like(topk_idx), *others, **named)

        setattr(dispatcher, method, dispatch_in_turn)

    for method in ("dispatch", "dispatch_aligned", "dispatch_masked"):
        to_slots_in_turn(method)
    return dispatcher


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedRank:
    """kv_cache [L, pages, page_tokens, kv_dim] of random latents, an MTP layer's included."""

    model: DeepseekV3
    kv_cache: torch.Tensor
    weights: WeightFormat
    num_slots: int

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        weights: WeightFormat,
        device: torch.device,
        max_tokens: int,
        num_pages: int,
        form: AttentionForm = AttentionForm.PLAIN,
        num_layers: int | None = None,
        sizes: dict[str, Any] | None = None,
        mtp: bool = False,
    ) -> "EmulatedRank":
        """`folder` gets a config.json; weights are made up. `max_tokens` of a decode step."""
        write_config(folder, weights=weights, num_layers=num_layers, sizes=sizes, mtp=mtp)
        config = replace(ModelConfig.from_folder(folder), mtp="whole" if mtp else "none")
        on_gpu = device.type == "cuda"
        dtype = torch.bfloat16 if on_gpu else torch.float32
        placement = Placement.trivial(config.num_moe_layers, config.num_experts, NUM_RANKS)
        num_slots = placement.slots_per_rank
        local = balanced(LocalDispatcher(num_slots, max_tokens), num_slots)
        experts = ExpertShard.build(
            placement,
            0,
            local,
            device,
            aligned=local if on_gpu else None,
            masked=local,
        )
        source = DummyCheckpoint(folder, device)
        model = DeepseekV3.load(
            folder,
            device=device,
            dtype=dtype,
            config=config,
            experts=experts,
            form=form,
            source=source,
        )
        shape = (config.num_kv_layers, num_pages, PAGE_TOKENS, config.kv_dim)
        kv_cache = torch.empty(shape, dtype=dtype, device=device)
        for layer in kv_cache:
            layer.normal_()
        return cls(model=model, kv_cache=kv_cache, weights=weights, num_slots=num_slots)

    @property
    def format_name(self) -> str:
        """Of the weights, for cases of records."""
        return self.weights.replace("-static", " static scales")

    def decode_pieces(self, batch: int, context: int, num_drafts: int = 0) -> list[SequenceChunk]:
        """One token each of `batch` requests, and drafts behind it; `context` others are before the
        last of them, on pages from all over."""
        start, vocab_size = context - num_drafts, self.model.config.vocab_size
        pages_each = context // PAGE_TOKENS + 1
        pages = random.Random(0).sample(range(self.kv_cache.shape[1]), batch * pages_each)
        return [
            SequenceChunk(
                token_ids=[7 * (row + index) % vocab_size for index in range(num_drafts + 1)],
                start=start,
                pages=pages[row * pages_each : (row + 1) * pages_each],
                sample=SampleRow(sampling=Sampling(), position=context + 1),
                checks=tuple(
                    SampleRow(sampling=Sampling(), position=start + 1 + index)
                    for index in range(num_drafts)
                ),
            )
            for row in range(batch)
        ]

    def prefill_pieces(self, num_tokens: int) -> list[SequenceChunk]:
        num_pages = -(-num_tokens // PAGE_TOKENS)
        vocab_size = self.model.config.vocab_size
        return [
            SequenceChunk(
                token_ids=[7 * position % vocab_size for position in range(num_tokens)],
                start=0,
                pages=random.Random(0).sample(range(self.kv_cache.shape[1]), num_pages),
                sample=SampleRow(sampling=Sampling(), position=num_tokens),
            )
        ]


def pages_for(batches: Sequence[int], context: int) -> int:
    return max(batches) * (context // PAGE_TOKENS + 1)
