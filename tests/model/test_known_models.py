"""Models that are known by the name of their folder."""

import pytest

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
    "folder", ["DeepSeek-V3.2", "DeepSeek-R1-Distill-Qwen-7B", "DeepSeek-V3-AWQ", "v3", ""]
)
def test_others_are_not_guessed(folder: str) -> None:
    assert known_config(folder) is None
