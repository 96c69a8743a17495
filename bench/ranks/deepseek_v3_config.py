"""DeepSeek-V3's config.json, for benches that make its weights up.

folder = write_config(path, num_layers=10, weights="w4afp8")
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from core.byte_level import BYTE_OF_CHARACTER
from model.known_models import WeightFormat, full_size_config

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


def write_config(
    folder: Path,
    *,
    weights: WeightFormat,
    num_layers: int | None = None,
    sizes: dict[str, Any] | None = None,
    mtp: bool = False,
) -> Path:
    """A folder that `--load-format dummy` can serve; of the first `num_layers` layers, and with
    other `sizes` where some are given; with an MTP layer or without."""
    fields = full_size_config(weights) | {"num_nextn_predict_layers": int(mtp)} | (sizes or {})
    if num_layers is not None:
        fields["num_hidden_layers"] = num_layers
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
