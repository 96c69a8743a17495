"""What a model's weights take on a device: before they are loaded, and once they are.

    planned_weights(weights, config, num_slots=33, fold_shared=False)   # from headers alone
    held_weights(model)                                                  # the same terms

Scales of FP8 matrices are a term of their own; those of int4 ones lie among their values.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass

import torch

from core.memory_term import MemoryTerm
from kernels.gemm.block_dequantise import BLOCK
from kernels.moe.w4a8_grouped_gemm_packing import BLOCK_BYTES, BLOCK_ROWS, GROUP
from model.config import ModelConfig
from model.deepseek import DeepseekV3
from model.moe.fp8_experts import stay_fp8
from model.moe.int4_experts import are_int4
from model.weights.tensor_names import HEAD, attention_tensors, layer_prefix, mlp_tensors
from model.weights.weights import Weights

ATTENTION = "weights: attention"
DENSE = "weights: dense and shared MLPs"
EXPERTS = "weights: routed experts"
VOCABULARY = "weights: embedding and head"
SCALES = "weights: FP8 scales"
OTHER = "weights: norms, gates, rotations"
TERMS = (ATTENTION, DENSE, EXPERTS, VOCABULARY, SCALES, OTHER)
# Fields of a MoE layer that belong to the whole group, and to no layer.
GROUP_FIELDS = ("config", "rank", "dispatcher", "aligned", "masked", "maps", "counts")
OTHER_FIELDS = ("gate_weight", "gate_bias", "rotation_table", "input_scales")
FLOAT32 = 4
COMPLEX64 = 8
Path = tuple[str, ...]  # names of fields, from the model down


def planned_weights(
    weights: Weights, config: ModelConfig, *, num_slots: int, fold_shared: bool = False
) -> tuple[MemoryTerm, ...]:
    """Of what `config` says is computed, with `num_slots` experts a layer on this rank. Reads no
    weights."""
    plan = _Plan(weights)
    hidden, itemsize = config.hidden_size, weights.dtype.itemsize
    plan.plain(VOCABULARY, config.vocab_size * hidden)
    if not config.tie_word_embeddings:
        plan.matrices(VOCABULARY, {HEAD: (config.vocab_size, hidden)})
    elif weights.device.type == "cpu":
        plan.plain(VOCABULARY, config.vocab_size * hidden)  # laid out anew
    plan.plain(OTHER, hidden)
    plan.add(OTHER, COMPLEX64 * config.max_position * (config.qk_rope_head_dim // 2))
    for layer in range(config.num_kv_layers):
        prefix = layer_prefix(layer)
        plan.plain(OTHER, 2 * hidden)
        _plan_attention(plan, config, f"{prefix}.self_attn")
        if layer == config.num_layers:
            plan.plain(OTHER, 3 * hidden)
            plan.matrices(DENSE, {f"{prefix}.eh_proj.weight": (hidden, 2 * hidden)})
            if config.mtp == "kv":
                continue
        if config.is_dense(layer):
            plan.mlp(f"{prefix}.mlp", hidden, config.intermediate_size)
            continue
        gate = weights.checkpoint.stored.get(f"{prefix}.mlp.gate.weight")
        on_gpu = weights.device.type == "cuda" and weights.dtype == torch.bfloat16
        gate_itemsize = itemsize if on_gpu and gate and gate.dtype == "BF16" else FLOAT32
        plan.add(OTHER, config.num_experts * (hidden * gate_itemsize + FLOAT32))
        _plan_experts(plan, config, f"{prefix}.mlp", num_slots, fold_shared)
    return plan.terms()


def held_weights(model: DeepseekV3) -> tuple[MemoryTerm, ...]:
    """Of the tensors that the model has; what several share counts once."""
    held = dict.fromkeys(TERMS, 0)
    seen: set[int] = set()
    for path, tensor in _tensors(model, ()):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            held[_term_of(path)] += storage.nbytes()
    return tuple(MemoryTerm(name=name, num_bytes=held[name]) for name in TERMS)


class _Plan:
    """Adds up terms by how `Weights` makes tensors of what is stored."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self._sums = dict.fromkeys(TERMS, 0)

    def terms(self) -> tuple[MemoryTerm, ...]:
        return tuple(MemoryTerm(name=name, num_bytes=n) for name, n in self._sums.items())

    def add(self, term: str, num_bytes: int) -> None:
        self._sums[term] += num_bytes

    def plain(self, term: str, num_values: int) -> None:
        """In the type that the model computes with."""
        self.add(term, num_values * self.weights.dtype.itemsize)

    def matrices(self, term: str, shapes: Mapping[str, Sequence[int]]) -> None:
        """Of one projection, below each other."""
        if self.weights.keeps_fp8 and self.weights.fits_fp8(tuple(shapes)):
            for rows, columns in shapes.values():
                self.add(term, rows * columns)
                self.add(SCALES, FLOAT32 * -(-rows // BLOCK) * -(-columns // BLOCK))
        else:
            self.plain(term, sum(math.prod(shape) for shape in shapes.values()))

    def mlp(self, prefix: str, hidden: int, width: int) -> None:
        *inner, down = mlp_tensors(prefix, hidden, width).items()
        self.matrices(DENSE, dict(inner))
        self.matrices(DENSE, dict([down]))


def _plan_attention(plan: _Plan, config: ModelConfig, prefix: str) -> None:
    shapes = attention_tensors(config, prefix)
    first = {
        f"{prefix}.{name}.weight": shapes.pop(f"{prefix}.{name}.weight")
        for name in ("q_proj" if config.q_lora_rank is None else "q_a_proj", "kv_a_proj_with_mqa")
    }
    plan.matrices(ATTENTION, first)
    if config.attention_bias and config.q_lora_rank is None:
        plan.plain(ATTENTION, config.num_heads * config.qk_head_dim)  # zeros
    for name, shape in shapes.items():
        if name.endswith(("q_b_proj.weight", "o_proj.weight")):
            plan.matrices(ATTENTION, {name: shape})
        else:
            plan.plain(OTHER if "norm" in name else ATTENTION, math.prod(shape))
        if name.endswith("kv_b_proj.weight") and plan.weights.expands_fp8(name):
            plan.matrices(ATTENTION, {name: shape})


def _plan_experts(
    plan: _Plan, config: ModelConfig, prefix: str, num_slots: int, fold_shared: bool
) -> None:
    hidden, width = config.hidden_size, config.moe_intermediate_size
    values = 3 * hidden * width
    slots = num_slots + fold_shared
    if are_int4(plan.weights, prefix):
        plan.add(EXPERTS, slots * values // (BLOCK_ROWS * GROUP) * BLOCK_BYTES)
        if config.static_expert_inputs:
            plan.add(OTHER, 2 * FLOAT32)
    elif stay_fp8(plan.weights, config, prefix):
        plan.add(EXPERTS, slots * values)
        plan.add(SCALES, FLOAT32 * slots * values // (BLOCK * BLOCK))
    else:
        plan.plain(EXPERTS, slots * values)
    if config.num_shared_experts and not fold_shared:
        plan.mlp(f"{prefix}.shared_experts", hidden, width * config.num_shared_experts)


def _tensors(value: object, path: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    """All tensors of a dataclass's fields, and where they are."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _tensors(item, (*path, str(index)))
    elif is_dataclass(value):
        for each in fields(value):
            is_shard = isinstance(value, DeepseekV3) and each.name == "experts"
            if each.name not in GROUP_FIELDS and not is_shard:
                yield from _tensors(getattr(value, each.name), (*path, each.name))


def _term_of(path: Path) -> str:
    if any("norm" in part or part in OTHER_FIELDS for part in path):
        return OTHER
    if any(part == "scale" or part.endswith("_scale") for part in path):
        return SCALES
    if path[0] in ("embedding", "head"):
        return VOCABULARY
    if "attention" in path:
        return ATTENTION
    return EXPERTS if "experts" in path else DENSE
