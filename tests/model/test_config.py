import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV3Config, PretrainedConfig

from core.errors import CheckpointError
from model import known_models
from model.config import ModelConfig

# As deepseek-ai/DeepSeek-V3 has it, with what only its writers read.
DEEPSEEK_V3: dict[str, Any] = known_models.DEEPSEEK_V3 | {
    "ep_size": 1,
    "quantization_config": known_models.QUANTIZATION["fp8"],
}


def write(folder: Path, **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps(DEEPSEEK_V3 | changes))
    return folder


def test_public_config(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(write(tmp_path))
    assert (config.kv_dim, config.qk_head_dim, config.num_layers) == (576, 192, 61)
    assert (config.num_experts, config.experts_per_token, config.groups_per_token) == (256, 8, 4)
    assert config.eos_token_ids == (1,)
    assert config.rope.yarn
    assert config.rope.attention_factor == 1.0
    mscale = 0.1 * math.log(40) + 1
    assert config.softmax_scale == pytest.approx(192**-0.5 * mscale * mscale)
    assert [config.is_dense(layer) for layer in (0, 2, 3)] == [True, True, False]


def test_new_rope_fields_say_the_same_as_old_ones(tmp_path: Path) -> None:
    old = ModelConfig.from_folder(write(tmp_path))
    parameters = dict(DEEPSEEK_V3["rope_scaling"], rope_theta=10000.0, rope_type="yarn")
    del parameters["type"]
    new = write(tmp_path, rope_scaling=None, rope_theta=None, rope_parameters=parameters)
    assert ModelConfig.from_folder(new) == old


def test_absent_and_null_mean_the_same(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(
        write(
            tmp_path,
            q_lora_rank=None,
            n_shared_experts=None,
            rope_scaling=None,
            topk_method=None,
            scoring_func=None,
        )
    )
    assert config.q_lora_rank is None
    assert config.num_shared_experts == 0
    assert not config.rope.yarn


def test_end_tokens_of_generation_config_win(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert ModelConfig.from_folder(write(tmp_path)).eos_token_ids == (7, 9)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    assert ModelConfig.from_folder(write(tmp_path)).eos_token_ids == (1,)


BAD_FIELDS = (
    {"hidden_size": None},
    {"hidden_size": "7168"},
    {"hidden_size": 0},
    {"num_hidden_layers": True},
    {"model_type": "llama"},
    {"model_type": None},
    {"hidden_act": "gelu"},
    {"scoring_func": "softmax"},
    {"topk_method": "greedy"},
    {"norm_topk_prob": 1},
    {"n_group": 7},
    {"topk_group": 9},
    {"num_experts_per_tok": 200},
    {"qk_rope_head_dim": 63},
    {"eos_token_id": 129280},
    {"eos_token_id": "1"},
    {"rope_scaling": {"type": "linear", "factor": 2}},
    {"rope_scaling": {"type": "yarn", "factor": "40"}},
    {"rope_scaling": 40},
    {"rope_scaling": {"type": "yarn", "rope_type": "default", "factor": 40}},
    {"architectures": ["DeepseekV3ForCausalLMNextN"]},
    {"qk_layernorm": True},
    {"sliding_window": 4096},
    {"quantization_config": {"quant_method": "bitsandbytes"}},
    {"quantization_config": {"quant_method": "awq", "bits": 8}},
    {"quantization_config": {"quant_method": "awq", "group_size": 64}},
    {"quantization_config": {"quant_method": "awq", "version": "gemv"}},
    {"quantization_config": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}},
    {"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}},
    {"quantization_config": {"quant_method": "fp8"}},
    {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
)


@pytest.mark.parametrize("change", BAD_FIELDS)
def test_wrong_field_is_named(tmp_path: Path, change: dict[str, object]) -> None:
    (name,) = change
    with pytest.raises(CheckpointError, match=rf"config\.json.*({name}|rope_type|factor)"):
        ModelConfig.from_folder(write(tmp_path, **change))


def test_unreadable_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)
    for text in ("{", "[]", "\x00"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_a_wrong_rotation_is_named_as_the_file_names_it(tmp_path: Path, key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"rope_scaling: {key} is 'linear', not supported"):
        ModelConfig.from_folder(write(tmp_path, rope_scaling={key: "linear"}))


def test_a_rotation_may_be_named_twice(tmp_path: Path) -> None:
    old = ModelConfig.from_folder(write(tmp_path))
    both = DEEPSEEK_V3["rope_scaling"] | {"rope_type": "yarn"}
    assert ModelConfig.from_folder(write(tmp_path, rope_scaling=both)) == old


def test_null_is_what_the_architecture_does(tmp_path: Path) -> None:
    names = ("topk_method", "scoring_func", "hidden_act", "moe_layer_freq", "architectures")
    old = ModelConfig.from_folder(write(tmp_path))
    assert ModelConfig.from_folder(write(tmp_path, **dict.fromkeys(names))) == old


@pytest.mark.parametrize("general", [PretrainedConfig, DeepseekV3Config])
def test_what_transformers_writes_is_no_unknown_field(
    tmp_path: Path, general: type[PretrainedConfig]
) -> None:
    """Whatever the value: these do not decide what is computed here."""
    added = {
        name: value if name in DEEPSEEK_V3 or name.startswith("rope_") else "something"
        for name, value in general().to_dict().items()
        if name not in {**DEEPSEEK_V3}
    }
    ModelConfig.from_folder(write(tmp_path, **added))


def test_an_unknown_field_is_refused_unless_it_switches_nothing_on(tmp_path: Path) -> None:
    ModelConfig.from_folder(write(tmp_path, qk_layernorm=False, index_topk=None, gates=[], _x=1))
    with pytest.raises(CheckpointError, match=r"unknown fields.*: index_topk, swiglu_limit; rem"):
        ModelConfig.from_folder(write(tmp_path, swiglu_limit=7.0, index_topk=2048))
