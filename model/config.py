"""A DeepSeek-V3 architecture's sizes and switches, read from a folder's config.json.

Torch-free. Names are ours where HF's are misleading; `from_folder` shows which is which.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from core.errors import CheckpointError
from model.checkpoint_formats import format_problem
from model.harmless_fields import HARMLESS
from model.w4afp8 import has_static_inputs

# Kimi K2 is the same code in another name.
MODEL_TYPES = ("deepseek_v3", "kimi_k2")
ARCHITECTURE = "DeepseekV3ForCausalLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding; plain when `factor` is 1 and `yarn` is False.

    theta                  base of the frequencies
    factor                 by how much YaRN stretches the original context
    original_max_position  context the model was first trained with, tokens
    beta_fast, beta_slow   rotations over that context between which YaRN blends
    truncate               whether the blend's bounds are rounded to whole dimensions
    attention_factor       scales cos and sin
    softmax_factor         scales the attention logits (mscale_all_dim, squared)
    """

    theta: float = 10000.0
    yarn: bool = False
    factor: float = 1.0
    original_max_position: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    softmax_factor: float = 1.0


# What is made of MTP layer 0: nothing; its KV, for others to draft with, which only needs what goes
# into the layer; or drafts.
MtpUse = Literal["none", "kv", "whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """All that the model needs to know; sizes in elements, lengths in tokens."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_dense_layers: int  # the first ones, without experts
    num_mtp_layers: int
    intermediate_size: int  # of the dense layers
    moe_intermediate_size: int  # of one expert
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    num_experts: int
    num_shared_experts: int
    experts_per_token: int
    num_groups: int
    groups_per_token: int
    norm_topk: bool
    routed_scaling: float
    rope: RopeConfig
    rope_interleave: bool
    rms_norm_eps: float
    attention_bias: bool
    tie_word_embeddings: bool
    max_position: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    # Of int4 experts: one scale for all activations of a projection, the checkpoint's own.
    static_expert_inputs: bool = False
    mtp: MtpUse = "none"

    @property
    def kv_dim(self) -> int:
        """Width of one cached latent: normalised compressed KV, then the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        return self.rope.softmax_factor / math.sqrt(self.qk_head_dim)

    def is_dense(self, layer: int) -> bool:
        return layer < self.num_dense_layers

    @property
    def num_moe_layers(self) -> int:
        """Those that are computed: also an MTP layer that drafts, the last one then."""
        return self.num_layers - self.num_dense_layers + (self.mtp == "whole")

    @property
    def moe_layer_numbers(self) -> range:
        """As layers of the checkpoint."""
        return range(self.num_dense_layers, self.num_dense_layers + self.num_moe_layers)

    @property
    def num_kv_layers(self) -> int:
        """Layers of a KV cache; an MTP layer's is the last one."""
        return self.num_layers + (self.mtp != "none")

    def moe_layer(self, layer: int) -> int | None:
        """Which of the MoE layers `layer` is; None for a dense one."""
        return None if self.is_dense(layer) else layer - self.num_dense_layers

    @classmethod
    def from_folder(cls, path: str | Path) -> "ModelConfig":
        """Reads `config.json` (and the end tokens of `generation_config.json`, which win).

        Raises CheckpointError, naming file and field, for anything missing, of the wrong type or
        not supported.
        """
        path = Path(path)
        fields = Fields.read(path / "config.json")
        eos_token_ids = fields.token_ids("eos_token_id")
        if (path / "generation_config.json").is_file():
            generation = Fields.read(path / "generation_config.json")
            eos_token_ids = generation.token_ids("eos_token_id") or eos_token_ids
        check_architecture(fields)
        max_position = fields.count("max_position_embeddings")
        num_layers = fields.count("num_hidden_layers")
        config = cls(
            vocab_size=fields.count("vocab_size"),
            hidden_size=fields.count("hidden_size"),
            num_layers=num_layers,
            num_dense_layers=min(fields.count("first_k_dense_replace", 0, least=0), num_layers),
            num_mtp_layers=fields.count("num_nextn_predict_layers", 0, least=0),
            intermediate_size=fields.count("intermediate_size"),
            moe_intermediate_size=fields.count("moe_intermediate_size"),
            num_heads=fields.count("num_attention_heads"),
            q_lora_rank=fields.count("q_lora_rank", 0, least=0) or None,
            kv_lora_rank=fields.count("kv_lora_rank"),
            qk_nope_head_dim=fields.count("qk_nope_head_dim"),
            qk_rope_head_dim=fields.count("qk_rope_head_dim"),
            v_head_dim=fields.count("v_head_dim"),
            num_experts=fields.count("n_routed_experts"),
            num_shared_experts=fields.count("n_shared_experts", 0, least=0),
            experts_per_token=fields.count("num_experts_per_tok"),
            num_groups=fields.count("n_group", 1),
            groups_per_token=fields.count("topk_group", 1),
            norm_topk=fields.flag("norm_topk_prob", True),
            routed_scaling=fields.number("routed_scaling_factor", 1.0),
            rope=rope_config(fields, max_position),
            rope_interleave=fields.flag("rope_interleave", True),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            attention_bias=fields.flag("attention_bias", False),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            max_position=max_position,
            bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
            eos_token_ids=eos_token_ids,
            static_expert_inputs=has_static_inputs(quantization_of(fields)),
        )
        check_sizes(config, fields)
        check_unknown(fields)
        return config


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object and where it came from; getters check types. JSON null means absent. `seen`
    are the names that were asked for."""

    where: str
    values: Mapping[str, Any]
    seen: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, path: Path) -> "Fields":
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise CheckpointError(f"{path} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} does not hold a JSON object")
        return cls(str(path), values)

    def wrong(self, name: str, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {name} is {self.values.get(name)!r}, not {wanted}")

    def value(self, name: str) -> Any:  # noqa: ANN401 - whatever JSON has
        """None where it is absent."""
        self.seen.add(name)
        return self.values.get(name)

    def get(self, name: str, default: object) -> object:
        value = self.value(name)
        if value is None and default is None:
            raise CheckpointError(f"{self.where}: {name} is missing")
        return default if value is None else value

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.wrong(name, f"a whole number of at least {least}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(name, "a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """A token id or a list of them; none when absent."""
        value = self.value(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self.wrong(name, "a token id or a list of them")
        return tuple(ids)


def check_architecture(fields: Fields) -> None:
    """Refuses what would load and then give wrong numbers. Null stands for the value that the
    architecture's own code takes where there is none."""
    wanted: dict[str, tuple[object, ...]] = {
        "model_type": (*MODEL_TYPES,),
        "hidden_act": ("silu",),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    }
    for name, supported in wanted.items():
        value = fields.value(name)
        if value is None and (name != "model_type" or name not in fields.values):
            continue
        if value not in supported:
            raise fields.wrong(name, f"supported ({' or '.join(map(repr, supported))})")
    architectures = fields.value("architectures") or [ARCHITECTURE]
    if not isinstance(architectures, list) or ARCHITECTURE not in architectures:
        raise fields.wrong("architectures", f"supported ({ARCHITECTURE!r})")
    quantization = fields.value("quantization_config")
    if quantization is not None and (problem := format_problem(quantization)):
        raise CheckpointError(f"{fields.where}: quantization_config: {problem}")


def quantization_of(fields: Fields) -> Mapping[str, Any]:
    """`quantization_config`; empty where there is none."""
    found = fields.value("quantization_config")
    return found if isinstance(found, dict) else {}


def quantization_of_folder(folder: Path) -> Mapping[str, Any]:
    """The same of a folder; empty where it has no config.json."""
    path = folder / "config.json"
    return quantization_of(Fields.read(path)) if path.is_file() else {}


def check_unknown(fields: Fields) -> None:
    """Refuses fields that nobody has asked for, unless they are known to change nothing, are about
    token ids, or switch nothing on (false, 0, empty)."""
    unknown = [
        name
        for name, value in fields.values.items()
        if value and name not in fields.seen | HARMLESS
        if not name.startswith("_") and not name.endswith(("_token_id", "_token_ids"))
    ]
    if unknown:
        raise CheckpointError(
            f"{fields.where}: unknown fields, which may change what the model computes: "
            f"{', '.join(sorted(unknown))}; remove those that do not"
        )


def check_sizes(config: ModelConfig, fields: Fields) -> None:
    """Relations between fields."""
    group_size, rest = divmod(config.num_experts, config.num_groups)
    if rest:
        raise fields.wrong("n_group", f"a divisor of n_routed_experts ({config.num_experts})")
    if config.groups_per_token > config.num_groups:
        raise fields.wrong("topk_group", f"at most n_group ({config.num_groups})")
    if config.experts_per_token > config.groups_per_token * group_size:
        most = config.groups_per_token * group_size
        raise fields.wrong("num_experts_per_tok", f"at most the experts of its groups ({most})")
    if config.qk_rope_head_dim % 2:
        raise fields.wrong("qk_rope_head_dim", "even")
    if any(i >= config.vocab_size for i in config.eos_token_ids):
        raise fields.wrong("eos_token_id", f"below vocab_size ({config.vocab_size})")


def rope_config(fields: Fields, max_position: int) -> RopeConfig:
    """From `rope_theta` and `rope_scaling` (public checkpoints) or `rope_parameters` (newer)."""
    both = {name: fields.value(name) for name in ("rope_scaling", "rope_parameters")}
    name = "rope_parameters" if both["rope_parameters"] else "rope_scaling"
    values = both[name] or {}
    if not isinstance(values, dict):
        raise fields.wrong(name, "an object")
    scaling = Fields(f"{fields.where}: {name}", values)
    theta = scaling.number("rope_theta", fields.number("rope_theta", 10000.0))
    kinds = {key: kind for key in ("rope_type", "type") if (kind := values.get(key)) is not None}
    for key, kind in kinds.items():
        if kind not in ("default", "yarn"):
            raise scaling.wrong(key, "supported ('default' or 'yarn')")
        if kind != kinds.get("rope_type", kind):
            raise scaling.wrong(key, f"what rope_type says ({kinds['rope_type']!r})")
    if "yarn" not in kinds.values():
        return RopeConfig(theta=theta)
    original = scaling.count("original_max_position_embeddings", max_position)
    factor = scaling.number("factor", max_position / original)
    mscale, all_dim = scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0)
    if mscale and all_dim:
        attention = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    else:
        attention = yarn_mscale(factor, 1.0)
    return RopeConfig(
        theta=theta,
        yarn=True,
        factor=factor,
        original_max_position=original,
        beta_fast=scaling.number("beta_fast", 32.0) or 32.0,
        beta_slow=scaling.number("beta_slow", 1.0) or 1.0,
        truncate=scaling.flag("truncate", True),
        attention_factor=scaling.number("attention_factor", attention),
        softmax_factor=yarn_mscale(factor, all_dim) ** 2 if all_dim else 1.0,
    )


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 * mscale * ln(factor) + 1, and 1 for contexts that are not stretched."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
