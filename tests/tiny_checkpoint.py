"""Small random DeepSeek-V3 folders for tests, made with transformers' own model class.

What a folder holds is what public checkpoints hold: config.json, generation_config.json,
safetensors (one file, or several with an index), tokenizer.json and tokenizer_config.json with a
chat template. Weights are random but large enough that logits differ clearly, the gate's bias
and the norm weights are random too, so that no switch of the architecture is a no-op.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.modeling_layers import MtpModel

TINY_CONFIG: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "routed_scaling_factor": 1.5,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "num_nextn_predict_layers": 0,
}

SPECIAL_TOKENS = ("<|begin_of_sentence|>", "<|end_of_sentence|>", "<|User|>", "<|Assistant|>")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '<|Assistant|>' + message['content'] + eos_token }}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"
)

BLOCK = 128


def make_tiny_checkpoint(
    folder: str | Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    fp8: bool = False,
    num_shards: int = 1,
    **overrides: object,
) -> Path:
    """Writes a folder and returns its path.

    `overrides` are fields of the HF config, on top of TINY_CONFIG. `fp8` stores the projections
    in the public block-FP8 format. The tokenizer (one token a byte, after four special ones) is
    left out when `vocab_size` is too small for it.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = DeepseekV3Config(**{**TINY_CONFIG, **overrides})
    tensors = {name: value.to(dtype) for name, value in random_tensors(config, seed).items()}
    if fp8:
        tensors = quantise_projections(tensors)
    for name in tensors:
        if name.endswith("e_score_correction_bias"):
            tensors[name] = tensors[name].float()
    save_shards(folder, tensors, num_shards)
    save_config(folder, config, fp8=fp8, dtype=dtype)
    if config.vocab_size >= len(SPECIAL_TOKENS) + 256:
        save_tokenizer(folder, config.max_position_embeddings)
    return folder


def random_tensors(config: DeepseekV3Config, seed: int) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint by their public names, MTP layers included."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DeepseekV3ForCausalLM(config)
        state = dict(model.state_dict())
        if config.num_mtp_layers > 0:
            state |= mtp_state(model, config)
        for name, value in state.items():
            if name.endswith(("e_score_correction_bias", "_proj.bias", "_mqa.bias")):
                state[name] = 0.1 * torch.randn_like(value)
            elif name.endswith("norm.weight"):
                state[name] = 1 + 0.1 * torch.randn_like(value)
    if config.tie_word_embeddings:
        state.pop("lm_head.weight")
    tensors: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if value.numel() > 0:  # no shared experts: transformers has tensors of no elements
            tensors |= split_experts(name, value.detach())
    return tensors


def mtp_state(model: DeepseekV3ForCausalLM, config: DeepseekV3Config) -> dict[str, torch.Tensor]:
    """State of transformers' MTP layers, under the names of public checkpoints."""
    state: dict[str, torch.Tensor] = {}
    for name, value in MtpModel(model, config.num_mtp_layers).layers.state_dict().items():
        if ".experts." in name or name.endswith("gate.weight"):  # it leaves these unset
            value = config.initializer_range * torch.randn_like(value)
        depth, _, rest = name.partition(".")
        rest = rest.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        state[f"model.layers.{config.num_hidden_layers + int(depth)}.{rest}"] = value
    for depth in range(config.num_mtp_layers):
        prefix = f"model.layers.{config.num_hidden_layers + depth}"
        state[f"{prefix}.embed_tokens.weight"] = model.model.embed_tokens.weight
        state[f"{prefix}.shared_head.head.weight"] = model.lm_head.weight
    return state


def split_experts(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """transformers stacks the experts of a layer; on disk each has its own three matrices."""
    stem, _, kind = name.rpartition(".")
    if kind == "gate_up_proj":
        halves = value.chunk(2, dim=1)
        return {
            f"{stem}.{expert}.{half}.weight": halves[i][expert]
            for i, half in enumerate(("gate_proj", "up_proj"))
            for expert in range(value.shape[0])
        }
    if kind == "down_proj":
        return {f"{stem}.{expert}.down_proj.weight": one for expert, one in enumerate(value)}
    return {name: value}


def quantise_projections(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Block-FP8 for every projection; embeddings, heads, norms and gates stay as they are."""
    quantised: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        if name.endswith(("_proj.weight", "_with_mqa.weight")) and ".eh_proj." not in name:
            quantised[name], quantised[f"{name}_scale_inv"] = quantise_blocks(value.float())
        else:
            quantised[name] = value
    return quantised


def quantise_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] float32 -> [N, K] float8_e4m3fn, [ceil(N/128), ceil(K/128)] float32 scales by which
    the FP8 values are multiplied to get the weight back."""
    rows, columns = weight.shape
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            scales[i, j] = weight[block].abs().max().clamp(min=1e-12) / 448
            values[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
    return values, scales


def save_shards(folder: Path, tensors: dict[str, torch.Tensor], num_shards: int) -> None:
    """One `model.safetensors`, or several files (tensors dealt out in turn) and their index."""
    tensors = {name: value.contiguous().clone() for name, value in tensors.items()}
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(part, folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)
    total = sum(value.numel() * value.element_size() for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def save_config(folder: Path, config: DeepseekV3Config, *, fp8: bool, dtype: torch.dtype) -> None:
    fields = config.to_dict()
    fields |= {
        "architectures": ["DeepseekV3ForCausalLM"],
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "dtype": str(dtype).removeprefix("torch."),
    }
    if fp8:
        fields["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
        }
    (folder / "config.json").write_text(json.dumps(fields, indent=2))
    generation = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))


def save_tokenizer(folder: Path, max_length: int) -> None:
    """Byte-level: special tokens 0..3, then one token a byte; no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[1],
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(fields, indent=2))
