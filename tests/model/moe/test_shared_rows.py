"""What shared and routed experts of a single rank take is quantised once, by the norm."""

from pathlib import Path

import pytest
import torch

from ep.dispatch.expert_shard import ExpertShard
from ep.dispatch.local import LocalDispatcher
from ep.placement.placement import Placement
from kernels.elementwise.combine import combined
from kernels.elementwise.rms_norm import rms_norms
from model.batch import AttentionForm
from model.moe.moe import Moe
from tests.model.driver import PagedRunner, load_all
from tests.model.moe.moe_layer import make_int4
from tests.model.random_folder import make_random_folder

PROMPTS = {0: [5 + i % 280 for i in range(40)], 1: [9, 8, 7]}


@pytest.mark.parametrize("experts", ["fp8", "int4", "static int4"])
def test_the_results_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experts: str
) -> None:
    folder = make_random_folder(tmp_path, fp8=True, num_hidden_layers=3)
    if experts != "fp8":
        make_int4(folder, static="static" in experts)
    placement = Placement.trivial(2, 16, 1)
    shard = ExpertShard.build(
        placement, 0, LocalDispatcher(16), "cpu", aligned=LocalDispatcher(16),
        masked=LocalDispatcher(16, 64),
    )  # fmt: skip
    model = load_all(folder, linear="fp8", experts=shard)
    assert all(moe.shares_rows for moe in model.moe_layers)

    def logits() -> torch.Tensor:
        return PagedRunner(model).forward(PROMPTS, AttentionForm.PLAIN, all_rows=True)

    def decoded() -> torch.Tensor:
        moe, weight = model.moe_layers[0], torch.linspace(0.5, 2, x.shape[1])
        normed, rows, _ = moe.add_normed(x, residual, weight, 1e-6, decodes=True)
        return combined(moe.decode_parts(normed, torch.ones(9, dtype=torch.bool), rows))

    x, residual = torch.randn(2, 9, model.config.hidden_size)
    once, once_decoded = logits(), decoded()
    monkeypatch.setattr(Moe, "add_normed", without_rows)
    assert torch.equal(logits(), once)
    assert torch.equal(decoded(), once_decoded)


def without_rows(
    moe: Moe, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *,
    decodes: bool,
) -> tuple[torch.Tensor, None, torch.Tensor]:  # fmt: skip
    del moe, decodes
    out, *_, total = rms_norms(x, residual, weight, eps)
    return out, None, total
