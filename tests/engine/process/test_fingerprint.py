"""KV fingerprints: equal for equal workers, another one for anything that KV depends on."""

from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest

from core.errors import CheckpointError
from engine.process.fingerprint import kv_fingerprint
from model.config import ModelConfig, MtpUse
from tests.tiny_checkpoint import make_tiny_checkpoint


def fingerprint(
    folder: Path, dtype_name: str = "float32", page_tokens: int = 64, mtp: MtpUse = "none"
) -> str:
    config = replace(ModelConfig.from_folder(folder), mtp=mtp)
    return kv_fingerprint(folder, config, dtype_name=dtype_name, page_tokens=page_tokens)


def test_the_same_model_elsewhere_has_the_same_fingerprint(tmp_path: Path) -> None:
    here = fingerprint(make_tiny_checkpoint(tmp_path / "a"))
    assert here == fingerprint(make_tiny_checkpoint(tmp_path / "b"))
    assert len(here) == 32


def test_whatever_kv_depends_on_changes_it(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "a")
    seen = [
        fingerprint(folder),
        fingerprint(folder, dtype_name="bfloat16"),
        fingerprint(folder, page_tokens=32),
        fingerprint(make_tiny_checkpoint(tmp_path / "b", seed=1)),  # same shapes, other training
        fingerprint(make_tiny_checkpoint(tmp_path / "c", rope_theta=5000.0)),
        fingerprint(make_tiny_checkpoint(tmp_path / "d", kv_lora_rank=24)),
        fingerprint(folder, mtp="kv"),
    ]
    assert fingerprint(folder, mtp="whole") == seen[-1], "whoever drafts, and who prefills for it"
    assert len(set(seen)) == len(seen)


def test_a_setting_added_later_leaves_it(tmp_path: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class LaterConfig(ModelConfig):
        attention_sinks: int = 0

    folder = make_tiny_checkpoint(tmp_path / "a")
    config = ModelConfig.from_folder(folder)
    values = {each.name: getattr(config, each.name) for each in fields(config)}
    options = {"dtype_name": "float32", "page_tokens": 64}
    before = kv_fingerprint(folder, config, **options)
    assert kv_fingerprint(folder, LaterConfig(**values), **options) == before
    later = LaterConfig(**values, attention_sinks=4)
    assert kv_fingerprint(folder, later, **options) != before


def test_a_folder_without_weights_has_none(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "a")
    config = ModelConfig.from_folder(folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(CheckpointError, match="no safetensors"):
        kv_fingerprint(folder, config, dtype_name="float32", page_tokens=64)
