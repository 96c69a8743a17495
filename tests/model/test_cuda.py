"""The same code on a GPU: against the CPU in float32, and in BF16 within its precision."""

from pathlib import Path

import pytest
import torch

from model.batch import AttentionForm
from model.deepseek import DeepseekV3
from tests.model.driver import PagedRunner, load_all
from tests.model.random_folder import make_random_folder

pytestmark = pytest.mark.gpu

PROMPTS = {0: [5 + i % 280 for i in range(700)], 1: [9], 2: list(range(4, 104))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_folder(tmp_path_factory.mktemp("cuda"))


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
