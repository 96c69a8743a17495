"""Names and shapes of all tensors of a DeepSeek-V3 checkpoint. Torch-free."""

from collections.abc import Iterable

from model.config import ModelConfig
from model.w4afp8 import weight_of_input_scale

Shapes = dict[str, tuple[int, ...]]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
# Behind a matrix's name: what belongs to it. The last two are of packed int4 matrices only.
SCALE_SUFFIX = "_scale_inv"
ZERO_SUFFIX = "_zero_point"
ORDER_SUFFIX = "_g_idx"
COMPANIONS = (SCALE_SUFFIX, ZERO_SUFFIX, ORDER_SUFFIX)


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}"


def weight_of(name: str) -> str:
    """The matrix that a tensor belongs to; any other stays as it is."""
    for suffix in COMPANIONS:
        name = name.removesuffix(suffix)
    return weight_of_input_scale(name)


def main_tensors(config: ModelConfig) -> Shapes:
    """Everything but the MTP layers; all experts."""
    shapes: Shapes = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        FINAL_NORM: (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        prefix = layer_prefix(layer)
        shapes |= block_tensors(config, prefix, dense=config.is_dense(layer))
    return shapes


def mtp_tensors(
    config: ModelConfig, depth: int, experts: Iterable[int] | None = None
) -> tuple[Shapes, Shapes]:
    """(needed, optional) tensors of MTP layer `depth`; of its routed experts those, or all. It is
    stored after the last layer; its copies of the embedding and the head may be left out, the main
    model's serve in any case."""
    prefix = layer_prefix(config.num_layers + depth)
    hidden = config.hidden_size
    needed: Shapes = {
        f"{prefix}.enorm.weight": (hidden,),
        f"{prefix}.hnorm.weight": (hidden,),
        f"{prefix}.eh_proj.weight": (hidden, 2 * hidden),
        f"{prefix}.shared_head.norm.weight": (hidden,),
    }
    needed |= block_tensors(config, prefix, dense=False, experts=experts)
    optional: Shapes = {
        f"{prefix}.embed_tokens.weight": (config.vocab_size, hidden),
        f"{prefix}.shared_head.head.weight": (config.vocab_size, hidden),
    }
    return needed, optional


def block_tensors(
    config: ModelConfig, prefix: str, *, dense: bool, experts: Iterable[int] | None = None
) -> Shapes:
    """One decoder layer; of its routed experts those, or all."""
    hidden = config.hidden_size
    shapes: Shapes = {
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
    }
    shapes |= attention_tensors(config, f"{prefix}.self_attn")
    mlp = f"{prefix}.mlp"
    if dense:
        return shapes | mlp_tensors(mlp, hidden, config.intermediate_size)
    shapes[f"{mlp}.gate.weight"] = (config.num_experts, hidden)
    shapes[f"{mlp}.gate.e_score_correction_bias"] = (config.num_experts,)
    for expert in range(config.num_experts) if experts is None else experts:
        shapes |= mlp_tensors(f"{mlp}.experts.{expert}", hidden, config.moe_intermediate_size)
    if config.num_shared_experts:
        width = config.moe_intermediate_size * config.num_shared_experts
        shapes |= mlp_tensors(f"{mlp}.shared_experts", hidden, width)
    return shapes


def attention_tensors(config: ModelConfig, prefix: str) -> Shapes:
    hidden, heads = config.hidden_size, config.num_heads
    query_width = heads * config.qk_head_dim
    shapes: Shapes = {
        f"{prefix}.kv_a_proj_with_mqa.weight": (config.kv_dim, hidden),
        f"{prefix}.kv_a_layernorm.weight": (config.kv_lora_rank,),
        f"{prefix}.kv_b_proj.weight": (
            heads * (config.qk_nope_head_dim + config.v_head_dim),
            config.kv_lora_rank,
        ),
        f"{prefix}.o_proj.weight": (hidden, heads * config.v_head_dim),
    }
    if config.q_lora_rank is None:
        shapes[f"{prefix}.q_proj.weight"] = (query_width, hidden)
    else:
        shapes[f"{prefix}.q_a_proj.weight"] = (config.q_lora_rank, hidden)
        shapes[f"{prefix}.q_a_layernorm.weight"] = (config.q_lora_rank,)
        shapes[f"{prefix}.q_b_proj.weight"] = (query_width, config.q_lora_rank)
    if config.attention_bias:
        shapes[f"{prefix}.kv_a_proj_with_mqa.bias"] = (config.kv_dim,)
        shapes[f"{prefix}.o_proj.bias"] = (hidden,)
        if config.q_lora_rank is not None:
            shapes[f"{prefix}.q_a_proj.bias"] = (config.q_lora_rank,)
    return shapes


def mlp_tensors(prefix: str, hidden: int, width: int) -> Shapes:
    return {
        f"{prefix}.gate_proj.weight": (width, hidden),
        f"{prefix}.up_proj.weight": (width, hidden),
        f"{prefix}.down_proj.weight": (hidden, width),
    }
