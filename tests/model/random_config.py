"""Random DeepSeek-V3 configurations that between them turn every switch both ways."""

import random
from typing import Any

NUM_CONFIGS = 24

YARN_VARIANTS: tuple[dict[str, Any] | None, ...] = (
    None,
    {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"factor": 8.0},
    {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 16.0, "beta_slow": 2.0},
    {"factor": 2.5, "mscale_all_dim": 0.5},
    {"factor": 4.0, "attention_factor": 1.3, "truncate": False},
)


def random_config(index: int) -> dict[str, Any]:
    """Fields of an HF config. Switches follow the bits of `index`, sizes are random and odd."""
    rng = random.Random(index)
    num_heads = rng.choice((1, 2, 3, 5))
    num_groups = rng.choice((1, 2, 4))
    group_size = rng.randint(2, 5)
    groups_per_token = rng.randint(1, num_groups)
    num_layers = rng.randint(2, 4)
    yarn = YARN_VARIANTS[index % len(YARN_VARIANTS)]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": rng.choice((1e4, 5e5))}
    if yarn is not None:
        rope |= yarn | {"rope_type": "yarn", "original_max_position_embeddings": 128}
    return {
        "vocab_size": rng.randint(150, 400),
        "hidden_size": rng.randint(20, 90),
        "intermediate_size": rng.randint(20, 150),
        "moe_intermediate_size": rng.randint(9, 40),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "q_lora_rank": None if index & 1 else rng.randint(11, 50),
        "kv_lora_rank": rng.randint(8, 48),
        "qk_nope_head_dim": rng.randint(5, 33),
        "qk_rope_head_dim": 2 * rng.randint(2, 12),
        "v_head_dim": rng.randint(5, 60),
        "n_routed_experts": num_groups * group_size,
        "n_group": num_groups,
        "topk_group": groups_per_token,
        "num_experts_per_tok": rng.randint(1, min(6, groups_per_token * group_size)),
        "n_shared_experts": index % 3,
        "first_k_dense_replace": (index // 3) % (num_layers + 1),
        "norm_topk_prob": index & 2 == 0,
        "routed_scaling_factor": rng.choice((1.0, 2.5)),
        "rope_interleave": index & 4 == 0,
        "rope_parameters": rope,
        "tie_word_embeddings": index & 8 != 0,
        "attention_bias": index % 5 == 0,
        "rms_norm_eps": rng.choice((1e-6, 1e-4)),
        "max_position_embeddings": 512,
    }


def prompt_lengths(index: int) -> tuple[int, ...]:
    """Three lengths in 1 .. 300; both ends and the edges of pages occur."""
    rng = random.Random(1000 + index)
    special = (1, 300, 2, 15, 16, 17, 32, 33, 64)
    return (special[index % len(special)], rng.randint(1, 60), rng.randint(60, 300))
