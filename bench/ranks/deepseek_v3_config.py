"""DeepSeek-V3's config.json, for benches that make its weights up.

folder = write_config(path, num_layers=10, weights="w4afp8")
"""

import json
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from core.byte_level import BYTE_OF_CHARACTER

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
# Of the same make, but computed by a CPU in a moment: sizes in place of its own.
SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
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


def write_config(
    folder: Path,
    *,
    weights: WeightFormat,
    num_layers: int | None = None,
    sizes: dict[str, Any] | None = None,
) -> Path:
    """A folder that `--load-format dummy` can serve; of the first `num_layers` layers, and with
    other `sizes` where some are given. MTP layers are left out."""
    fields = DEEPSEEK_V3 | {"num_nextn_predict_layers": 0} | (sizes or {})
    if num_layers is not None:
        fields["num_hidden_layers"] = num_layers
    quantization = QUANTIZATION[weights]
    if quantization is not None:
        fields["quantization_config"] = quantization
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields, indent=2), encoding="utf-8")
    return folder


def write_tokenizer(folder: Path) -> None:
    """For a gateway: a byte is a token, and after those every id of the vocabulary is a word of
    its own, so that each token that is generated shows."""
    vocab_size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    alphabet = sorted(set(BYTE_OF_CHARACTER))
    words = [*alphabet, *(f"<{index}>" for index in range(len(alphabet), vocab_size))]
    vocabulary = {word: index for index, word in enumerate(words[:vocab_size])}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.save(str(folder / "tokenizer.json"))
