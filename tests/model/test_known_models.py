"""Models that are known by the name of their folder."""

import json
from pathlib import Path

import pytest

from model.config import ModelConfig
from model.known_models import QUANTIZATION, known_config


@pytest.mark.parametrize(
    ("folder", "weights"),
    [
        ("DeepSeek-V3", "fp8"),
        ("/models/deepseek-v3-0324", "fp8"),
        ("models/DeepSeek-V3.1-Terminus", "fp8"),
        ("/mnt/DeepSeek-R1-0528-W4AFP8", "w4afp8"),
        ("DeepSeek-V3-w4a8", "w4afp8"),
        ("store:models/DeepSeek-R1", "fp8"),
        ("moonshotai/Kimi-K2-Instruct", "fp8"),
        ("Kimi-K2-Instruct-0905-W4AFP8", "w4afp8"),
    ],
)
def test_formats_follow_from_names(folder: str, weights: str) -> None:
    config = known_config(folder)
    assert config is not None
    assert config["num_hidden_layers"] == 61
    assert config["quantization_config"] == {**QUANTIZATION}[weights]  # type: ignore[index]


def test_bf16_has_no_quantization() -> None:
    assert "quantization_config" not in (
        known_config("DeepSeek-V3-BF16") or {"quantization_config"}
    )


@pytest.mark.parametrize(
    "folder",
    [
        "DeepSeek-V3.2",
        "Kimi-K2-Thinking",
        "Kimi-K2.5",
        "DeepSeek-R1-Distill-Qwen-7B",
        "DeepSeek-V3-AWQ",
        "v3",
        "",
    ],
)
def test_others_are_not_guessed(folder: str) -> None:
    assert known_config(folder) is None


def test_kimi_k2_is_read_as_its_config_says(tmp_path: Path) -> None:
    for name, context in (("Kimi-K2-Instruct", 131072), ("Kimi-K2-Instruct-0905", 262144)):
        (tmp_path / "config.json").write_text(json.dumps(known_config(name)))
        config = ModelConfig.from_folder(tmp_path)
        assert (config.num_experts, config.num_heads, config.num_groups) == (384, 64, 1)
        assert (config.max_position, config.num_dense_layers) == (context, 1)
        assert config.rope.factor * config.rope.original_max_position == context
