"""config.json of public models, for plans and benches that have no checkpoint at hand. Torch-free.

known_config("/models/DeepSeek-R1-W4AFP8")      # what its config.json would say
"""

import re
from pathlib import PurePath
from typing import Any, Literal

WeightFormat = Literal["bf16", "fp8", "w4afp8", "w4afp8-static"]

DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
# Kimi-K2-Instruct; that of September (0905) is stretched to twice the context.
KIMI_K2: dict[str, Any] = DEEPSEEK_V3 | {
    "model_type": "kimi_k2",
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"beta_fast": 1, "beta_slow": 1, "factor": 32},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
KIMI_K2_0905: dict[str, Any] = KIMI_K2 | {
    "max_position_embeddings": 262144,
    "rope_scaling": KIMI_K2["rope_scaling"] | {"factor": 64},
}
QUANTIZATION: dict[WeightFormat, dict[str, Any] | None] = {
    "bf16": None,
    "fp8": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "w4afp8": {"quant_method": "w4afp8", "weight_block_size": [128, 128]},
    # As public checkpoints are served: one scale for all activations before a projection.
    "w4afp8-static": {
        "quant_method": "w4afp8",
        "weight_block_size": [128, 128],
        "moe_activation_scheme": "static",
    },
}
# V3.2, K2-Thinking's int4 in groups of 32 and distilled models are others.
_NAMES: dict[str, dict[str, Any]] = {
    r"deepseek-(?:v3(?:-base|-0324|\.1(?:-base|-terminus)?)?|r1(?:-0528|-zero)?)": DEEPSEEK_V3,
    r"kimi-k2-(?:instruct|base)": KIMI_K2,
    r"kimi-k2-instruct-0905": KIMI_K2_0905,
}
# By the end of a name; public checkpoints of these models are FP8 without one.
_FORMATS: dict[str | None, WeightFormat] = {
    None: "fp8", "fp8": "fp8", "bf16": "bf16", "w4afp8": "w4afp8", "w4a8": "w4afp8",
}  # fmt: skip


def known_config(folder: str) -> dict[str, Any] | None:
    """Fields of config.json for a checkpoint folder of this name: DeepSeek-V3, V3.1 or R1, or
    Kimi-K2-Instruct, as it is or with -BF16, -FP8, -W4AFP8 or -W4A8 behind it. None for any other.
    """
    for name, fields in _NAMES.items():
        match = re.fullmatch(rf"{name}(?:[-_](\w+))?", PurePath(folder).name, re.IGNORECASE)
        weights = _FORMATS.get(match[1] and match[1].lower()) if match else None
        if weights:
            return _in_format(fields, weights)
    return None


def full_size_config(weights: WeightFormat) -> dict[str, Any]:
    """DeepSeek-V3's, with its weights in this format."""
    return _in_format(DEEPSEEK_V3, weights)


def _in_format(fields: dict[str, Any], weights: WeightFormat) -> dict[str, Any]:
    quantization = QUANTIZATION[weights]
    return fields | ({"quantization_config": quantization} if quantization else {})
