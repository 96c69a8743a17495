"""Settings of the demo model.

Its sizes and how it is trained. The values that were used are in settings.json.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

SETTINGS_PATH = Path(__file__).parent / "settings.json"
CHECKPOINT_PATH = Path(__file__).parents[1] / "checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Dimensions, by the names of config.json.

    Weights split into 128 x 128 blocks, every inner dimension exactly.
    """

    vocab_size: int = 768
    hidden_size: int = 256
    num_hidden_layers: int = 4
    first_k_dense_replace: int = 1
    intermediate_size: int = 512
    moe_intermediate_size: int = 128
    n_routed_experts: int = 16
    n_shared_experts: int = 1
    num_experts_per_tok: int = 4
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 2.5
    num_attention_heads: int = 8
    num_key_value_heads: int = 8
    q_lora_rank: int = 128
    kv_lora_rank: int = 128
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    max_position_embeddings: int = 4096
    original_max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    initializer_range: float = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How the model is trained.

    The schedule runs over wall-clock time, so that a run ends when it was told to.
    """

    seconds: float = 270.0
    max_steps: int = 1_000_000
    rows: int = 160
    row_tokens: int = 384
    long_share: float = 0.3
    chatter_share: float = 0.14
    learning_rate: float = 1.5e-3
    final_learning_rate: float = 1e-5
    warmup_steps: int = 150
    weight_decay: float = 0.05
    clip_norm: float = 1.0
    mtp_weight: float = 0.2
    bias_rate: float = 1e-3
    bias_until: float = 0.85
    quantise_from: float = 0.5
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything in settings.json."""

    sizes: ModelSizes = ModelSizes()
    training: Training = Training()

    @classmethod
    def load(cls, path: Path = SETTINGS_PATH) -> "Settings":
        """Read a settings file. Raises ValueError on an unknown name."""
        values = json.loads(path.read_text(encoding="utf-8"))
        try:
            return cls(sizes=ModelSizes(**values["sizes"]), training=Training(**values["training"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from error

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")
