"""A whole forward pass whose plain attention goes through groups of keys."""

from pathlib import Path

import pytest
import torch

from kernels import paths
from model import attention_plan
from model.batch import AttentionForm
from model.deepseek import DeepseekV3
from tests.kernels.triton_device import INTERPRETED
from tests.model.decode_rows import norm_error
from tests.model.driver import PagedRunner, load_all
from tests.model.random_folder import make_random_folder

FIRST = {0: list(range(40)), 1: [9], 2: list(range(4, 21))}
SECOND = {2: [5] * 30, 0: [7], 1: list(range(25))}


def logits(model: DeepseekV3) -> torch.Tensor:
    """Of ragged prompts in two chunks."""
    runner = PagedRunner(model, num_pages=12)
    parts = [runner.forward(chunk, AttentionForm.PLAIN, all_rows=True) for chunk in (FIRST, SECOND)]
    return torch.cat(parts)


@pytest.mark.skipif(not INTERPRETED, reason="the GPU runs this in test_cuda.py")
def test_equals_attention_by_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_random_folder(
        tmp_path, num_hidden_layers=2, first_k_dense_replace=2, num_attention_heads=2
    )
    model = load_all(folder)
    want = logits(model)
    monkeypatch.setattr(
        paths,
        "_path_of",
        lambda operation, *_: "triton" if operation == "mla_prefill" else "reference",
    )
    monkeypatch.setattr(attention_plan, "max_keys", lambda *_: 48)
    assert norm_error(logits(model), want) < 1e-4
