"""Which tensors a rank loads, in the order in which the model asks for them.

What is kept twice in two forms is named once. An order that is wrong, or a name too many, costs
time or memory and nothing else.
"""

from collections.abc import Iterator, Mapping, Sequence

from ep.placement.placement import EMPTY
from model.config import ModelConfig
from model.w4afp8 import input_scale_name
from model.weights.tensor_names import (
    COMPANIONS,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    block_tensors,
    layer_prefix,
    mlp_tensors,
    mtp_tensors,
)


def loaded_tensors(
    stored: Mapping[str, object], config: ModelConfig, experts: Sequence[Sequence[int]]
) -> Iterator[str]:
    """Of what `config` says is computed, with all scales; `experts` by slot for each MoE layer."""
    for name in _unscaled(config, experts):
        belonging = (name, *(name + suffix for suffix in COMPANIONS))
        yield from (each for each in belonging if each in stored)


def _unscaled(config: ModelConfig, experts: Sequence[Sequence[int]]) -> Iterator[str]:
    yield EMBEDDING
    held = [[each for each in dict.fromkeys(slots) if each != EMPTY] for slots in experts]
    for layer in range(config.num_layers):
        prefix, moe_layer = layer_prefix(layer), config.moe_layer(layer)
        of_layer = () if moe_layer is None else held[moe_layer]
        yield from block_tensors(config, prefix, dense=moe_layer is None, experts=of_layer)
        if config.static_expert_inputs and moe_layer is not None:
            yield from _input_scales(config, f"{prefix}.mlp")
    yield FINAL_NORM
    if not config.tie_word_embeddings:
        yield HEAD
    if config.mtp != "none":
        is_whole, mlp = config.mtp == "whole", f"{layer_prefix(config.num_layers)}.mlp"
        needed, _ = mtp_tensors(config, 0, held[-1] if is_whole else ())
        yield from (name for name in needed if is_whole or not name.startswith(mlp))
        if config.static_expert_inputs and is_whole:
            yield from _input_scales(config, mlp)


def _input_scales(config: ModelConfig, mlp: str) -> Iterator[str]:
    """Of all experts of a layer, whose largest is the layer's: before gate and up, then of down."""
    experts = (f"{mlp}.experts.{expert}" for expert in range(config.num_experts))
    names = [[*map(input_scale_name, mlp_tensors(expert, 0, 0))] for expert in experts]
    for gate, up, _ in names:
        yield from (gate, up)
    yield from (down for *_, down in names)
