"""The judge: transformers' DeepseekV3ForCausalLM."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import DeepseekV3ForCausalLM

RELATIVE_ERROR = 1e-4  # of logits, against their largest magnitude


def load_reference(folder: str | Path) -> DeepseekV3ForCausalLM:
    # Its default grouped product refuses odd sizes.
    return DeepseekV3ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    ).eval()


@torch.no_grad()
def reference_logits(reference: DeepseekV3ForCausalLM, ids: Sequence[int]) -> torch.Tensor:
    """[len(ids), vocab]."""
    return reference(torch.tensor([ids])).logits[0]


@torch.no_grad()
def reference_greedy(reference: DeepseekV3ForCausalLM, ids: Sequence[int], count: int) -> list[int]:
    """The `count` likeliest next tokens, one after the other; end tokens do not end it."""
    out = reference(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
    produced = [int(out.logits[0, -1].argmax())]
    while len(produced) < count:
        last = torch.tensor([produced[-1:]])
        out = reference(last, past_key_values=out.past_key_values, use_cache=True)
        produced.append(int(out.logits[0, -1].argmax()))
    return produced


def assert_close(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Names the worst place."""
    assert got.shape == want.shape, (what, got.shape, want.shape)
    error = (got - want).abs() / want.abs().max()
    worst = int(error.argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), error.shape))
    assert error.max() <= RELATIVE_ERROR, f"{what}: relative error {error.max():.2e} at {where}"
