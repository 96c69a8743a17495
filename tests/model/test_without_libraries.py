"""A model with neither DeepGEMM nor FlashMLA, and by the references alone: the logits are those
that it has with all there is, and it says what computes them."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kernels.attention
import kernels.gemm
from kernels.build import cuda_build, paths
from model.batch import AttentionForm
from model.deepseek import DeepseekV3
from tests.kernels.triton_device import DEVICES
from tests.model.decode_rows import decode_batch, row_error
from tests.model.driver import PagedRunner, load_all
from tests.model.random_folder import make_random_folder

LIBRARIES = ("deep_gemm", "flash_mla")
BEHIND_THEM = (
    (kernels.gemm, "fp8_gemm_deep_gemm"),
    (kernels.attention, "mla_decode_flash"),
)
PAGE_TOKENS, SIZE, PAGES = 64, 6, 16
# With sizes that every library and kernel of ours takes; then what an interpreter can do.
PROMPTS = {
    "cuda": {0: [5 + i % 280 for i in range(700)], 1: [9], 2: list(range(4, 68)), 3: [3] * 65},
    "cpu": {0: [5 + i % 280 for i in range(70)], 1: [9], 2: list(range(4, 20))},
}
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {
        "num_hidden_layers": 2, "num_attention_heads": 128, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": 256,
    },
    "cpu": {
        "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 128,
        "intermediate_size": 128, "n_routed_experts": 8,
    },
}  # fmt: skip
Change = Callable[[], None]


@pytest.fixture
def as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """A CPU chooses from then on as a Hopper without a compiler would: Triton's interpreter."""

    def choose(device: str) -> None:
        if device == "cpu":
            chosen = paths._best_path
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
            monkeypatch.setattr(cuda_build, "is_built", lambda *_: False)
            monkeypatch.setattr(
                paths, "_best_path", lambda operation, _, index: chosen(operation, "cuda", index)
            )

    forget = paths._best_path.cache_clear
    forget()
    yield choose
    forget()


@pytest.fixture
def without_libraries(monkeypatch: pytest.MonkeyPatch) -> Change:
    """Neither is found from then on, nor can it be imported."""

    def hide() -> None:
        paths._best_path.cache_clear()
        monkeypatch.setattr(paths, "_noted", {})
        paths._is_installed.cache_clear()
        find = paths.find_spec
        monkeypatch.setattr(
            paths, "find_spec", lambda name: None if name in LIBRARIES else find(name)
        )
        for room, name in BEHIND_THEM:
            monkeypatch.delattr(room, name, raising=False)
            monkeypatch.setitem(sys.modules, f"{room.__name__}.{name}", None)
        for library in LIBRARIES:
            monkeypatch.setitem(sys.modules, library, None)

    return hide


@pytest.fixture
def by_references(monkeypatch: pytest.MonkeyPatch) -> Change:
    def ask() -> None:
        paths._best_path.cache_clear()
        monkeypatch.setattr(paths, "_noted", {})
        monkeypatch.setenv("EPSERVE_KERNELS", "reference")

    return ask


def load(path: Path, device: str, *, fp8: bool) -> DeepseekV3:
    folder = make_random_folder(path, fp8=fp8, **SIZES[device])
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return load_all(folder, device=device, dtype=dtype, linear="fp8" if fp8 else "plain")


def logits(model: DeepseekV3) -> torch.Tensor:
    """[rows, vocab] of prompts, of some tokens more behind them, of three a row in absorbed form,
    and of a decode step."""
    prompts = PROMPTS[model.embedding.device.type]
    runner = PagedRunner(model, page_tokens=PAGE_TOKENS, num_pages=32)
    passes = [
        runner.forward(prompts, AttentionForm.PLAIN),
        runner.forward(dict.fromkeys(prompts, list(range(8, 40))), AttentionForm.PLAIN),
        runner.forward(dict.fromkeys(prompts, [5, 6, 7]), AttentionForm.ABSORBED),
    ]
    batch = runner.batch(dict.fromkeys(prompts, [7]), AttentionForm.ABSORBED)
    step = model.decode(decode_batch(batch, SIZE, PAGES), runner.cache)[: len(prompts)]
    found = torch.cat([*passes, step]).cpu()
    assert found.isfinite().all()
    return found


def named() -> set[str]:
    """What a rank would log."""
    found = paths.noted()
    assert {"mla_decode", "rms_norm"} < set(found)
    return set("+".join(found.values()).split("+"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.filterwarnings("ignore:overflow|invalid value|All-NaN:RuntimeWarning")
def test_our_own_kernels_compute_it_all(
    tmp_path: Path,
    as_a_gpu: Callable[[str], None],
    without_libraries: Change,
    device: str,
    *,
    fp8: bool,
) -> None:
    model = load(tmp_path, device, fp8=fp8)
    want = logits(model)
    without_libraries()
    as_a_gpu(device)
    assert row_error(logits(model), want) < (0.3 if fp8 else 0.1 if device == "cuda" else 1e-3)
    assert {"triton"} < named() <= {"cublas", "cuda", "triton"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fp8", [False, True])
def test_references_compute_it_all(
    tmp_path: Path,
    as_a_gpu: Callable[[str], None],
    by_references: Change,
    device: str,
    *,
    fp8: bool,
) -> None:
    model = load(tmp_path, device, fp8=fp8)
    want = logits(model)
    by_references()
    as_a_gpu(device)
    got = logits(model)
    assert named() == {"reference"}
    if device == "cpu":
        assert torch.equal(got, want)
    assert row_error(got, want) < (0.3 if fp8 else 0.1)
