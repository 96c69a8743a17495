"""Small random folders of public models of DeepSeek-V3's code, as their config.json spells them."""

import json
from pathlib import Path

from transformers import DeepseekV3ForCausalLM

from tests.model.reference import load_reference
from tests.tiny_checkpoint import make_tiny_checkpoint

PUBLIC: dict[str, dict[str, object]] = {
    "Kimi-K2-Instruct": {
        "model_type": "kimi_k2",
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 12,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 2.827,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 64, "type": "yarn",
        },
    },
    "GigaChat3": {
        "model_type": "deepseek_v3",
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "head_dim": 16,
        "routed_scaling_factor": 1,
        "rope_theta": 100000,
        "num_nextn_predict_layers": 1,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 32, "rope_type": "yarn",
            "type": "yarn",
        },
    },
}  # fmt: skip


def make_public_model(folder: Path, name: str, **overrides: object) -> DeepseekV3ForCausalLM:
    """`overrides` are other fields of config.json. Returns transformers' model of the folder, which
    knows config.json in its own spelling only."""
    fields = PUBLIC[name] | overrides
    ours = {key: value for key, value in fields.items() if key not in ("model_type", "head_dim")}
    ours["routed_scaling_factor"] = float(str(ours["routed_scaling_factor"]))
    reference = load_reference(make_tiny_checkpoint(folder, **ours))
    path = folder / "config.json"
    written = json.loads(path.read_text())
    del written["rope_parameters"]
    path.write_text(json.dumps(written | fields))
    return reference
