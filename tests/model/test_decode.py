"""The decode step of fixed sizes against the ragged forward pass."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels.build import paths
from model.batch import AttentionForm
from model.deepseek import DeepseekV3
from tests.kernels.triton_device import INTERPRETED
from tests.model.decode_rows import decode_batch, norm_error
from tests.model.driver import PagedRunner, load_all
from tests.model.random_config import random_config
from tests.model.random_folder import make_random_folder

PROMPTS = {0: [5 + i % 280 for i in range(70)], 1: [9], 2: list(range(4, 36)), 3: [2] * 16}
TINY = {
    "vocab_size": 300, "num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 128,
    "intermediate_size": 128, "first_k_dense_replace": 2,
}  # fmt: skip


def step(
    model: DeepseekV3, error: float, *, size: int = 6, paths_of: Callable[[], None] = lambda: None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [rows, vocab] of one more token for each prompt, as `decode` has them, behind
    `paths_of`, and as `forward` has them; asserts that both leave the same cache within `error`,
    and nothing else in it changed."""
    runner = PagedRunner(model, num_pages=16)
    # A latent of padding would be seen here: page 0 is the one in the table of padding.
    runner.cache.copy_(torch.rand(runner.cache.shape, generator=torch.Generator().manual_seed(1)))
    runner.forward(PROMPTS, AttentionForm.PLAIN)
    batch = runner.batch(dict.fromkeys(PROMPTS, [7]), AttentionForm.ABSORBED)
    ragged = runner.cache.clone()
    want = model.forward(batch, ragged)
    paths_of()
    got = model.decode(decode_batch(batch, size, max_pages=7), runner.cache)
    assert got.shape == (size, model.config.vocab_size)
    assert got.isfinite().all()
    assert got.dtype == torch.float32
    assert norm_error(runner.cache, ragged) < error
    untouched = torch.ones(ragged.shape[1] * ragged.shape[2], dtype=torch.bool)
    untouched[batch.slots] = False
    assert torch.equal(runner.cache.flatten(1, 2)[:, untouched], ragged.flatten(1, 2)[:, untouched])
    return got[: len(want)], want


@pytest.mark.parametrize("index", [0, 5, 7])
def test_equals_the_forward_pass(tmp_path: Path, index: int) -> None:
    fields = random_config(index) | {"vocab_size": 300}
    got, want = step(load_all(make_random_folder(tmp_path, **fields)), 1e-6)
    assert norm_error(got, want) < 1e-5


def test_of_padding_only(tmp_path: Path) -> None:
    model = load_all(make_random_folder(tmp_path, **TINY))
    runner = PagedRunner(model, num_pages=4)
    before = runner.cache.normal_(generator=torch.Generator().manual_seed(0)).clone()
    batch = runner.batch({}, AttentionForm.ABSORBED)
    logits = model.decode(decode_batch(batch, 3, max_pages=2), runner.cache)
    assert logits.isfinite().all()
    assert torch.equal(runner.cache, before)


@pytest.mark.skipif(not INTERPRETED, reason="the GPU runs these kernels in test_cuda_decode.py")
@pytest.mark.parametrize("linear", ["plain", "fp8"])
def test_through_every_triton_kernel(
    tmp_path: Path, linear: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU without other libraries runs in dense layers, in Triton's interpreter."""
    model = load_all(make_random_folder(tmp_path, fp8=True, **TINY), linear=linear)
    chosen: set[str] = set()

    def triton(operation: str, device_type: str, index: int) -> str:
        del device_type, index
        chosen.add(operation)
        return "triton"

    error = 0.08 if linear == "fp8" else 1e-3
    got, want = step(
        model, error, size=5, paths_of=lambda: monkeypatch.setattr(paths, "_best_path", triton)
    )
    assert {"mla_decode", "rope_write", "rms_norm"} < chosen
    assert ("fp8_gemm" in chosen) == (linear == "fp8")
    assert norm_error(got, want) < error
