"""Routed experts of a `w4afp8` checkpoint: int4 weights, FP8 activations."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from core.errors import CheckpointError
from ep.dispatch.dispatcher import DispatchedAligned, DispatchedMasked, Payload, Rows
from ep.dispatch.masked_rows import as_payload
from kernels.elementwise.rescale import rescale
from kernels.elementwise.silu_mul import silu_mul_quantise
from kernels.moe.w4a8_grouped_gemm import (
    w4a8_grouped_gemm_contiguous,
    w4a8_grouped_gemm_gated,
    w4a8_grouped_gemm_masked,
)
from kernels.moe.w4a8_grouped_gemm_packing import (
    BLOCK_BYTES,
    BLOCK_ROWS,
    GROUP,
    PackedWeights,
    pack_blocks,
)
from model.config import ModelConfig
from model.w4afp8 import input_scale_name
from model.weights.slot_loading import Parts, load_slots
from model.weights.weights import Weights

# Of an expert, up to which down takes each multiprocessor as soon as gate_up leaves it. The shared
# expert, computed beside both, waits for it then: of more rows for longer than that saves.
LEADING_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Experts:
    """gate_up (2 I x H, gate half first) and down (H x I) of S slots; what an empty slot holds is
    not used. The model computes in `dtype`.

    Activations have a scale for each 128 values; or, where `input_scales` says so, all of them one
    before gate_up and one before down ([] float32 each), the same on all ranks, with
    which they are quantised at once. What DeepEP sends in decode steps is rounded to that once
    more.
    """

    gate_up: PackedWeights
    down: PackedWeights
    input_scales: tuple[torch.Tensor, torch.Tensor] | None
    dtype: torch.dtype

    alignment = 1

    @classmethod
    def load(
        cls, weights: Weights, config: ModelConfig, prefix: str, experts: Sequence[int]
    ) -> "Int4Experts":
        """`experts` by slot, as `load_slots` has them. CheckpointError when not all are int4, or
        `pack_blocks` can make nothing of one."""

        unfit: list[torch.Tensor] = []  # looked at in the end: nothing waits for the device

        def read(name: str) -> Parts:
            values, scales = weights.checkpoint.read_int4(name)
            return values, scales.float()

        def made(stored: Sequence[Parts]) -> Iterable[Parts]:
            values, scales = zip(*stored, strict=True)
            blocks, is_unfit = pack_blocks(values, scales, weights.device)
            unfit.append(is_unfit.any())
            return ((block,) for block in blocks)

        def empty(num_slots: int, rows: int, columns: int) -> Parts:
            shape = (num_slots, rows // BLOCK_ROWS, columns // GROUP, BLOCK_BYTES)
            return (torch.zeros(shape, dtype=torch.uint8, device=weights.device),)

        (gate_up,), (down,) = load_slots(read, empty, config, prefix, experts, made=made)
        if unfit and bool(torch.stack(unfit).any()):
            folder = weights.checkpoint.folder
            raise CheckpointError(f"{folder}: {prefix}: int4 weights of -8 with a negative scale")
        return cls(
            gate_up=PackedWeights(gate_up),
            down=PackedWeights(down),
            input_scales=(
                _input_scales(weights, config, prefix) if config.static_expert_inputs else None
            ),
            dtype=weights.dtype,
        )

    @property
    def payload(self) -> Payload:
        return Payload.FP8 if self.input_scales is None else Payload(scale=self.input_scales[0])

    @property
    def num_slots(self) -> int:
        return self.gate_up.num_experts

    @property
    def slot_tensors(self) -> tuple[torch.Tensor, ...]:
        """All that a routed expert consists of: tensors [num_slots, ...], row s is slot s."""
        return self.gate_up.blocks, self.down.blocks

    @property
    def folds_shared(self) -> bool:
        return False

    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """[N, H] grouped by slot -> [N, H]; `counts` are the rows of each slot."""
        on_device = torch.tensor(counts[: self.num_slots], dtype=torch.int32, device=rows.device)
        return self._contiguous(as_payload(rows, self.payload), on_device).to(rows.dtype)

    def forward_shared(self, x: torch.Tensor) -> torch.Tensor:
        """There is none among these."""
        raise AssertionError("int4 experts have no shared one among them")

    def forward_aligned(self, sent: DispatchedAligned) -> torch.Tensor:
        """[M, H] -> [M, H]."""
        return self._contiguous((sent.hidden, sent.scales), sent.counts).to(self.dtype)

    def forward_masked(self, sent: DispatchedMasked) -> torch.Tensor:
        """[S, C, H] -> [S, C, H]."""
        counts, rows = sent.counts, sent.expected_rows or sent.hidden.shape[1]
        before_up, before_down = self.input_scales or (None, None)
        values, scales = sent.hidden, sent.scales
        if before_up is not None:
            if scales is not None:
                expected = sent.expected_rows
                values = rescale(values, scales, before_up, counts, expected_rows=expected)
            scales = before_up
        assert scales is not None
        activated = w4a8_grouped_gemm_gated(
            values, scales, self.gate_up, counts, out_scale=before_down, expected_rows=rows,
            leads=rows <= LEADING_ROWS,
        )  # fmt: skip
        outer = w4a8_grouped_gemm_masked(
            *activated, self.down, counts, expected_rows=rows, early=True
        )
        return outer.to(self.dtype)

    def _contiguous(self, sent: Rows, counts: torch.Tensor) -> torch.Tensor:
        """[N, H] without gaps, counts [S] int32 on the device -> [N, H] bfloat16."""
        before_up, before_down = self.input_scales or (None, None)
        scales = before_up if sent[1] is None else sent[1]
        assert scales is not None
        inner = w4a8_grouped_gemm_contiguous(sent[0], scales, self.gate_up, counts)
        activated = silu_mul_quantise(inner, scale=before_down)
        return w4a8_grouped_gemm_contiguous(*activated, self.down, counts)


def are_int4(weights: Weights, prefix: str) -> bool:
    """Whether the experts of a layer are; one stands for all."""
    return weights.checkpoint.is_int4(f"{prefix}.experts.0.gate_proj.weight")


def _input_scales(
    weights: Weights, config: ModelConfig, prefix: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of all experts of the layer, before gate_up and of down."""

    def largest(*projections: str) -> torch.Tensor:
        names = [
            input_scale_name(f"{prefix}.experts.{expert}.{projection}.weight")
            for expert in range(config.num_experts)
            for projection in projections
        ]
        scales = [weights.checkpoint.read(name, torch.float32) for name in names]
        value = float(torch.stack(scales).max())
        if not 0 < value < float("inf"):
            raise CheckpointError(f"{weights.checkpoint.folder}: {names[0]} and others are {value}")
        return torch.tensor(value, dtype=torch.float32, device=weights.device)

    return largest("gate_proj", "up_proj"), largest("down_proj")
