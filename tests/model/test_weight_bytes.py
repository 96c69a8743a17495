"""What weights will take, from headers alone, against what the loaded tensors take."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.ranks.deepseek_v3_config import write_config
from core.memory_term import MemoryTerm
from ep.dispatch.expert_shard import ExpertShard
from ep.dispatch.local import LocalDispatcher
from ep.placement.placement import Placement
from model.batch import AttentionForm
from model.config import ModelConfig, MtpUse
from model.deepseek import DeepseekV3
from model.known_models import WeightFormat
from model.weight_bytes import (
    ATTENTION,
    DENSE,
    EXPERTS,
    SCALES,
    VOCABULARY,
    held_weights,
    planned_weights,
)
from model.weights.dummy_checkpoint import DummyCheckpoint
from model.weights.weights import LinearForm, Weights
from tests.model.weights.test_dummy_checkpoint import FP8, INT4, config_folder

OTHERS: dict[str, dict[str, Any]] = {
    "as usual": {},
    "tied": {"tie_word_embeddings": True},
    "odd": {"q_lora_rank": None, "attention_bias": True, "intermediate_size": 96},
    "no shared expert": {"n_shared_experts": 0, "q_lora_rank": 128},
    "latents of whole blocks": {"kv_lora_rank": 128},
}


def planned(
    folder: Path,
    num_slots: int,
    *,
    device: str = "cpu",
    fold_shared: bool = False,
    mtp: MtpUse = "none",
    **options: Any,
) -> tuple[MemoryTerm, ...]:
    weights = Weights(
        checkpoint=DummyCheckpoint(folder, device), device=torch.device(device), **options
    )
    config = replace(ModelConfig.from_folder(folder), mtp=mtp)
    return planned_weights(weights, config, num_slots=num_slots, fold_shared=fold_shared)


@pytest.mark.parametrize("linear", ["plain", "fp8"])
@pytest.mark.parametrize("quantization", [None, FP8, INT4 | {"moe_activation_scheme": "static"}])
@pytest.mark.parametrize(
    ("overrides", "mtp"), [({}, "none"), ({}, "kv"), *((one, "whole") for one in OTHERS.values())]
)
def test_what_is_planned_is_what_is_held(
    tmp_path: Path,
    linear: LinearForm,
    quantization: dict[str, Any] | None,
    overrides: dict[str, Any],
    mtp: MtpUse,
) -> None:
    shape = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    folder = config_folder(tmp_path, quantization, **shape, **overrides)
    config = replace(ModelConfig.from_folder(folder), mtp=mtp)
    options: dict[str, Any] = {"dtype": torch.float32, "linear": linear}
    # 6 slots, the last rank has 5.
    placement = Placement.trivial(config.num_moe_layers, 16, 3, num_redundant=1)
    is_int4 = quantization is not None and quantization["quant_method"] == "w4afp8"
    can_fold = not is_int4 and overrides.get("n_shared_experts") != 0
    shard = ExpertShard.build(placement, 2, LocalDispatcher(6), "cpu", fold_shared=can_fold)
    source = DummyCheckpoint(folder)
    model = DeepseekV3.load(
        folder, device="cpu", config=config, experts=shard, source=source, **options
    )
    terms = planned(folder, placement.slots_per_rank, fold_shared=can_fold, mtp=mtp, **options)
    assert terms == held_weights(model)
    assert all(term.num_bytes for term in terms if term.name in (ATTENTION, EXPERTS, VOCABULARY))


@pytest.mark.slow  # headers of 90,000 tensors
@pytest.mark.parametrize(
    ("weights", "num_ranks", "gigabytes"),
    [
        # 656 GB of 3 x 256 x 58 expert matrices, an eighth each; 12.4 GB of attention.
        ("fp8", 8, {ATTENTION: 12.44, DENSE: 3.743, EXPERTS: 81.74, VOCABULARY: 3.707}),
        ("w4afp8", 4, {ATTENTION: 12.44, DENSE: 3.743, EXPERTS: 86.85, VOCABULARY: 3.707}),
    ],
)
def test_deepseek_v3_on_gpus(
    tmp_path: Path, weights: WeightFormat, num_ranks: int, gigabytes: dict[str, float]
) -> None:
    folder = write_config(tmp_path, weights=weights)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    terms = planned(folder, 256 // num_ranks, form=AttentionForm.ABSORBED, **options)
    plain = planned(folder, 256 // num_ranks, **options)
    pairs = zip(terms, plain, strict=True)
    more = {term.name: each.num_bytes - term.num_bytes for term, each in pairs}
    # kv_b in FP8 beside bfloat16.
    assert more[ATTENTION] == 61 * 128 * (128 + 128) * 512
    assert more[SCALES] * 128 * 128 == 4 * more[ATTENTION]
    assert sum(more.values()) == more[ATTENTION] + more[SCALES]
    found = {term.name: term.num_bytes / 1e9 for term in terms}
    for name, expected in gigabytes.items():
        assert found[name] == pytest.approx(expected, rel=1e-3), name


@pytest.mark.slow
def test_deepseek_v3_has_671_billion_parameters(tmp_path: Path) -> None:
    folder = write_config(tmp_path, weights="bf16")
    terms = planned(folder, 256, device="cuda", dtype=torch.bfloat16)
    # What is no parameter: the table of rotations.
    table = 8 * 32 * 163840
    total = (sum(term.num_bytes for term in terms) - table) / 2
    assert total == pytest.approx(671.03e9, rel=1e-4)
