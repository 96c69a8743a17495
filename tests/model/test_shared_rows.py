"""What shared and routed experts of a single rank take is quantised once, by the norm."""

from pathlib import Path

import pytest
import torch

from ep.expert_shard import ExpertShard
from ep.local import LocalDispatcher
from ep.local_aligned import LocalAlignedDispatcher
from ep.placement import Placement
from model.batch import AttentionForm
from model.moe import Moe
from tests.model.driver import PagedRunner, load_all
from tests.model.random_folder import make_random_folder

PROMPTS = {0: [5 + i % 280 for i in range(40)], 1: [9, 8, 7]}


def test_the_results_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_random_folder(tmp_path, fp8=True, num_hidden_layers=3)
    placement = Placement.trivial(2, 16, 1)
    shard = ExpertShard.build(
        placement, 0, LocalDispatcher(16), "cpu", aligned=LocalAlignedDispatcher(16)
    )
    model = load_all(folder, linear="fp8", experts=shard)
    assert all(moe.shares_rows for moe in model.moe_layers)

    def logits() -> torch.Tensor:
        return PagedRunner(model).forward(PROMPTS, AttentionForm.PLAIN, all_rows=True)

    once = logits()
    monkeypatch.setattr(Moe, "shares_rows", False)
    assert torch.equal(logits(), once)
