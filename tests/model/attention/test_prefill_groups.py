"""A whole forward pass whose plain attention goes through groups of keys."""

from pathlib import Path

import pytest
import torch

from kernels.attention import mla_decode_triton
from kernels.build import paths
from model.attention import form, plan
from model.batch import AttentionForm
from model.deepseek import DeepseekV3
from tests.kernels.triton_device import INTERPRETED
from tests.model.decode_rows import norm_error
from tests.model.driver import PagedRunner, load_all
from tests.model.random_folder import make_random_folder

FIRST = {0: list(range(40)), 1: [9], 2: list(range(4, 21))}
SECOND = {2: [5] * 30, 0: [7], 1: list(range(25))}
THIRD = {0: [3] * 5, 1: [4] * 3, 2: [6] * 6}  # behind 41, 26 and 47 tokens


def logits(model: DeepseekV3) -> torch.Tensor:
    """Of ragged prompts in three chunks."""
    runner = PagedRunner(model, num_pages=12)
    chunks = (FIRST, SECOND, THIRD)
    parts = [runner.forward(chunk, AttentionForm.PLAIN, all_rows=True) for chunk in chunks]
    return torch.cat(parts)


@pytest.mark.skipif(not INTERPRETED, reason="the GPU runs this in test_cuda.py")
@pytest.mark.parametrize("counts", [(2, 2), (1, 3)])
def test_absorbed_rows_over_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: tuple[int, int]
) -> None:
    """Rows with as many new tokens go to the kernel at once, others one after the other."""
    folder = make_random_folder(
        tmp_path, num_hidden_layers=2, first_k_dense_replace=2, num_attention_heads=2
    )
    model = load_all(folder)
    chunks = {name: [5] * count for name, count in zip((2, 0), counts, strict=True)}

    def step() -> torch.Tensor:
        runner = PagedRunner(model, num_pages=12)
        runner.forward(FIRST, AttentionForm.ABSORBED)
        return runner.forward(chunks, AttentionForm.ABSORBED, all_rows=True)

    want = step()
    launched = []
    launch = mla_decode_triton.launch

    def spy(*arguments: torch.Tensor, **options: float) -> tuple[torch.Tensor, torch.Tensor]:
        launched.append(arguments)
        return launch(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(mla_decode_triton, "launch", spy)
    monkeypatch.setattr(
        paths,
        "_best_path",
        lambda operation, *_: "triton" if operation == "mla_decode" else "reference",
    )
    assert norm_error(step(), want) < 1e-4
    assert len(launched) == (2 if counts == (2, 2) else 4)


@pytest.mark.skipif(not INTERPRETED, reason="the GPU runs this in test_cuda.py")
@pytest.mark.parametrize("has_paged", [False, True])
def test_equals_attention_by_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_paged: bool
) -> None:
    """With both kernels, rows of one pass take the form that is cheaper for them."""
    folder = make_random_folder(
        tmp_path, num_hidden_layers=2, first_k_dense_replace=2, num_attention_heads=2
    )
    model = load_all(folder)
    want = logits(model)
    kernels = ("mla_prefill", "mla_decode") if has_paged else ("mla_prefill",)
    monkeypatch.setattr(
        paths,
        "_best_path",
        lambda operation, *_: "triton" if operation in kernels else "reference",
    )
    monkeypatch.setattr(plan, "max_keys", lambda *_: 48)
    monkeypatch.setattr(form, "PLAIN_FROM", ((0, 1), (32, 78)))
    absorbed = []
    launch = mla_decode_triton.launch

    def spy(query: torch.Tensor, *rest: torch.Tensor, **options: float) -> object:
        absorbed.append(len(query))
        return launch(query, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(mla_decode_triton, "launch", spy)
    assert norm_error(logits(model), want) < 1e-4
    # In both layers: one token of the second chunk, 5 and 6 filled up to 8 each of the third.
    assert absorbed == ([1, 1, 16, 16] if has_paged else [])
