"""Products with int4 and FP8 weights against DeepGEMM's numbers, which nobody here wrote.

Int4 values are exact in e4m3: with a scale for each 128 x 128 of the weights, as DeepGEMM has them,
both are the same product.
"""

from types import ModuleType

import pytest
import torch

from kernels.elementwise.quantise import quantise_reference
from kernels.gemm import fp8_gemm_triton
from kernels.gemm.fp8_gemm import fp8_gemm_own
from kernels.moe.w4a8_grouped_gemm import (
    TOLERANCE,
    w4a8_grouped_gemm_contiguous,
    w4a8_grouped_gemm_masked,
)
from kernels.moe.w4a8_grouped_gemm_packing import PackedWeights, pack_weights
from model.weights.int4 import pack_nibbles
from tests.kernels.tensors import generator, randn

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SHAPES = [(4096, 7168), (7168, 2048)]
COUNTS = [0, 1, 64, 128]
# Of DeepGEMM's result and of ours, each as far from the exact one.
BOUND = 2 * TOLERANCE


@pytest.fixture
def deep_gemm() -> ModuleType:
    """The module by which the product's own paths call it."""
    pytest.importorskip("deep_gemm")
    from kernels.gemm import fp8_gemm_deep_gemm

    return fp8_gemm_deep_gemm


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    return generator(request.node.nodeid)


def activations(rng: torch.Generator, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, scale = quantise_reference(randn(rng, *shape).to(DEVICE))
    return x, scale


def weights(
    rng: torch.Generator, n: int, k: int
) -> tuple[PackedWeights, torch.Tensor, torch.Tensor]:
    """Of len(COUNTS) experts: as int4, and as DeepGEMM takes them."""
    values = torch.randint(-7, 8, (len(COUNTS), n, k), generator=rng)
    scales = torch.rand(len(COUNTS), n // 128, k // 128, generator=rng) + 0.5
    packed = pack_weights(pack_nibbles(values), scales.repeat_interleave(128, dim=1), device=DEVICE)
    return packed, values.to(DEVICE).to(torch.float8_e4m3fn), scales.to(DEVICE)


def relative_error(out: torch.Tensor, want: torch.Tensor) -> float:
    return float((out.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("expected_rows", [32, 1000])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_masked(
    deep_gemm: ModuleType, rng: torch.Generator, n: int, k: int, expected_rows: int
) -> None:
    packed, values, w_scale = weights(rng, n, k)
    x, x_scale = activations(rng, len(COUNTS), 128, k)
    counts = torch.tensor(COUNTS, dtype=torch.int32, device=DEVICE)
    filled = torch.arange(128, device=DEVICE) < counts[:, None]
    theirs = deep_gemm.masked((x, x_scale, values, w_scale), counts, 128)[filled]
    ours = w4a8_grouped_gemm_masked(x, x_scale, packed, counts, expected_rows=expected_rows)
    fp8 = fp8_gemm_triton.masked((x, x_scale, values, w_scale), counts, 128)
    assert relative_error(ours[filled], theirs) < BOUND
    assert relative_error(fp8[filled], theirs) < BOUND


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_contiguous(deep_gemm: ModuleType, rng: torch.Generator, n: int, k: int) -> None:
    packed, values, w_scale = weights(rng, n, k)
    rows = [128, 512, 0, 384]  # multiples of what DeepGEMM takes at a time
    x, x_scale = activations(rng, sum(rows), k)
    counts = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    expert_of = torch.arange(len(rows), device=DEVICE).int().repeat_interleave(counts)
    theirs = deep_gemm.contiguous((x, x_scale, values, w_scale), counts.cumsum(0).int())
    ours = w4a8_grouped_gemm_contiguous(x, x_scale, packed, counts)
    fp8 = fp8_gemm_triton.contiguous((x, x_scale, values, w_scale), expert_of)
    assert relative_error(ours, theirs) < BOUND
    assert relative_error(fp8, theirs) < BOUND


@pytest.mark.parametrize("tokens", [1, 64, 128, 1000])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_dense(deep_gemm: ModuleType, rng: torch.Generator, n: int, k: int, tokens: int) -> None:
    _, values, w_scale = weights(rng, n, k)
    x, x_scale = activations(rng, tokens, k)
    theirs = deep_gemm.dense((x, x_scale, values[0], w_scale[0]))
    ours = fp8_gemm_own(x, x_scale, values[0], w_scale[0])
    assert relative_error(ours, theirs) < BOUND
