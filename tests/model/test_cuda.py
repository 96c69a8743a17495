"""The same code on a GPU: against the CPU in float32, and in BF16 within its precision."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from model.batch import AttentionForm
from model.config import ModelConfig
from model.deepseek import DeepseekV3
from model.tensor_names import main_tensors
from tests.model.driver import PagedRunner, load_all

pytestmark = pytest.mark.gpu

CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 300,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.5,
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
}
PROMPTS = {0: [5 + i % 280 for i in range(700)], 1: [9], 2: list(range(4, 104))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cuda")
    (path / "config.json").write_text(json.dumps(CONFIG))
    rng = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in main_tensors(ModelConfig.from_folder(path)).items():
        norm = "norm" in name
        value = (0.1 if norm else 0.07) * torch.randn(shape, generator=rng)
        tensors[name] = value + 1 if norm else value
    save_file(tensors, path / "model.safetensors")
    return path


def run(model: DeepseekV3, form: AttentionForm) -> torch.Tensor:
    """Logits of ragged prompts in two chunks, then of one more token each, on the CPU."""
    runner = PagedRunner(model, page_tokens=64)
    first = {name: ids[: (len(ids) + 1) // 2] for name, ids in PROMPTS.items()}
    second = {name: ids[len(first[name]) :] for name, ids in PROMPTS.items()}
    parts = [
        runner.forward(first, form, all_rows=True),
        runner.forward({name: ids for name, ids in second.items() if ids}, form, all_rows=True),
        runner.forward(dict.fromkeys(PROMPTS, [7]), AttentionForm.ABSORBED),
    ]
    return torch.cat(parts).cpu()


@pytest.mark.parametrize("form", AttentionForm)
def test_float32_equals_the_cpu(folder: Path, form: AttentionForm) -> None:
    want = run(load_all(folder), form)
    got = run(load_all(folder, device="cuda"), form)
    assert ((got - want).abs().max() / want.abs().max()) < 1e-3


@pytest.mark.parametrize("form", AttentionForm)
def test_bfloat16_is_near(folder: Path, form: AttentionForm) -> None:
    """Every gate that is nearly even may turn, so single logits may differ; on average few do."""
    want = run(load_all(folder), form)
    got = run(load_all(folder, device="cuda", dtype=torch.bfloat16), form)
    assert got.isfinite().all()
    assert (got - want).abs().mean() / want.abs().mean() < 0.1


def test_a_rank_without_tokens(folder: Path) -> None:
    model = load_all(folder, device="cuda", dtype=torch.bfloat16)
    runner = PagedRunner(model)
    got = model.forward(runner.batch({}, AttentionForm.ABSORBED), runner.cache)
    assert got.shape == (0, 300)
