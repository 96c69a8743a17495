"""A model folder without weights: all that a gateway reads of one."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS, USER, ASSISTANT = SPECIAL = ("<|bos|>", "<|eos|>", "<|User|>", "<|Assistant|>")
THINK = ("<think>", "</think>")
BOS_ID, EOS_ID = 0, 1

MAX_POSITION = 512
VOCAB_SIZE = 300  # a few more than the tokenizer has, as in padded checkpoints

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '<|Assistant|>' + message['content'] + eos_token }}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if 'refuse me' in messages[-1]['content'] %}{{ raise_exception('no') }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"
)

CONFIG = {
    "model_type": "deepseek_v3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
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
    "max_position_embeddings": MAX_POSITION,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE: special tokens, the 256 bytes, a few merges, and two think tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "the"), ("a", "n"), ("an", "d")]
    tokens = [*SPECIAL, *alphabet, *(left + right for left, right in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in THINK])
    return tokenizer


def make_model_folder(folder: Path, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    make_tokenizer().save(str(folder / "tokenizer.json"))
    fields = {
        "bos_token": {"content": BOS},
        "eos_token": EOS,
        "add_bos_token": True,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder
