import json
import math
from pathlib import Path
from typing import Any

import pytest

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
        write(tmp_path, q_lora_rank=None, n_shared_experts=None, rope_scaling=None)
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
    {"quantization_config": {"quant_method": "awq"}},
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
