"""FP8 products: references against float64, the paths against the references."""

from dataclasses import asdict

import pytest
import torch

from bench.kernel_cases.fp8_cuts import triton_cuts
from kernels.build.fp8_gemm_blocks import (
    DENSE,
    LAYOUTS,
    Fp8Blocks,
    Fp8Choice,
    default_fp8_blocks,
)
from kernels.elementwise.quantise import quantise_reference
from kernels.gemm import fp8_gemm_triton
from kernels.gemm.block_dequantise import block_dequantise
from kernels.gemm.fp8_gemm import TOLERANCE, fp8_gemm, fp8_gemm_reference
from kernels.gemm.fp8_gemm_choice import faster_path, fp8_blocks
from kernels.moe.fp8_grouped_gemm import (
    fp8_grouped_gemm_contiguous,
    fp8_grouped_gemm_contiguous_reference,
    fp8_grouped_gemm_masked,
    fp8_grouped_gemm_masked_reference,
)
from tests.kernels.tensors import generator, randn
from tests.kernels.triton_device import DEVICES, INTERPRETED

# The interpreter cuts bfloat16 off where the hardware rounds.
BOUND = 5e-3 if INTERPRETED else TOLERANCE
SHAPES = [(1, 128, 128), (5, 200, 256)] if INTERPRETED else [(1, 512, 7168), (130, 4000, 2048)]


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    return generator(request.node.nodeid)


def activations(
    rng: torch.Generator, *shape: int, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    x, scale = quantise_reference(randn(rng, *shape).to(device))
    return x, scale


def weights(
    rng: torch.Generator, *shape: int, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values over the whole range of e4m3, a scale for each block of 128 x 128."""
    weight = (randn(rng, *shape) * 60).clamp(-400, 400).to(torch.float8_e4m3fn)
    scale = torch.rand(*shape[:-2], -(-shape[-2] // 128), shape[-1] // 128, generator=rng) + 0.01
    return weight.to(device), scale.to(device)


def relative_error(out: torch.Tensor, want: torch.Tensor) -> float:
    difference = (out.double() - want.double()).norm()
    return float(difference / want.double().norm().clamp_min(1e-30))


def test_reference_against_float64(rng: torch.Generator) -> None:
    (x, x_scale), (weight, w_scale) = activations(rng, 7, 256), weights(rng, 200, 256)
    left = x.double().view(7, 2, 128) * x_scale.double().unsqueeze(-1)
    right = block_dequantise(weight, w_scale, torch.float32).double()
    want = left.view(7, 256) @ right.t()
    assert relative_error(fp8_gemm_reference(x, x_scale, weight, w_scale), want) < TOLERANCE


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_dense(rng: torch.Generator, device: str, rows: int, n: int, k: int) -> None:
    operands = (*activations(rng, rows, k, device=device), *weights(rng, n, k, device=device))
    want = fp8_gemm_reference(*operands)
    assert relative_error(fp8_gemm_triton.dense(operands), want) < BOUND
    assert relative_error(fp8_gemm(*operands), want) < TOLERANCE


# Weights first or tokens first, in halves, and with sums that programs share.
CUTS = [
    Fp8Blocks(
        block_m=block_m, block_n=block_n, halves=halves, swapped=swapped, splits=splits,
        num_warps=4 if block_m < 128 else 8, num_stages=3,
    )
    for block_m, block_n, halves, swapped, splits in (
        (16, 128, 1, True, 2), (32, 64, 1, True, 1), (128, 128, 1, False, 2),
        (128, 128, 2, False, 1), (64, 128, 2, False, 3),
    )
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("blocks", CUTS)
def test_each_way_to_cut(rng: torch.Generator, device: str, blocks: Fp8Blocks) -> None:
    rows, n, k = (20, 328, 384) if INTERPRETED else (200, 4040, 2048)
    operands = (*activations(rng, rows, k, device=device), *weights(rng, n, k, device=device))
    out = fp8_gemm_triton.dense(operands, blocks=blocks)
    assert relative_error(out, fp8_gemm_reference(*operands)) < BOUND
    assert torch.equal(out, fp8_gemm_triton.dense(operands, blocks=blocks))


def test_cuts_are_possible_and_bounded() -> None:
    for layout in range(len(LAYOUTS)):
        for rows in (1, 17, 64, 65, 4096):
            found = list(triton_cuts(layout, rows, 7168, 16384))
            assert found[0] == default_fp8_blocks(layout, rows, 7168, 16384)
            assert len(found) == len(set(found)) <= 150
            for each in found:
                assert each.stage_bytes * each.num_stages <= 227 * 1024
                assert each.splits == 1 or layout == DENSE
                assert Fp8Blocks(**asdict(each)) == each
    cpu = torch.device("cpu")
    assert fp8_blocks(cpu, DENSE, 64, 7168, 16384) == default_fp8_blocks(DENSE, 64, 7168, 16384)
    # Too few programs for the device share their sums; those of enough do not.
    assert default_fp8_blocks(DENSE, 64, 7168, 16384).splits == 4
    assert default_fp8_blocks(DENSE, 4096, 7168, 16384).splits == 1


def test_untuned_products_are_left_to_deep_gemm() -> None:
    assert faster_path(torch.device("cpu"), DENSE, 128, 24576, 1536) == "deep_gemm"
    choice = Fp8Choice(path="triton", blocks=CUTS[0])
    assert Fp8Choice.of_record(choice.record()) == choice
    with pytest.raises(ValueError, match="no path"):
        Fp8Choice(path="cublas", blocks=CUTS[0])


def test_cuts_that_no_kernel_has_are_refused() -> None:
    with pytest.raises(ValueError, match="two halves"):
        Fp8Blocks(**(asdict(CUTS[0]) | {"halves": 2}))
    with pytest.raises(ValueError, match="no kernel"):
        Fp8Blocks(**(asdict(CUTS[0]) | {"block_n": 256}))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("capacity", [20] if INTERPRETED else [200, 256])
@pytest.mark.parametrize("expected_rows", [1, 64])
def test_masked(rng: torch.Generator, device: str, expected_rows: int, capacity: int) -> None:
    n, k = (256, 256) if INTERPRETED else (4096, 7168)
    counts = torch.tensor([3, 0, capacity, 17], dtype=torch.int32, device=device)
    x, x_scale = activations(rng, 4, capacity, k, device=device)
    operands = (x, x_scale, *weights(rng, 4, n, k, device=device), counts)
    want = fp8_grouped_gemm_masked_reference(*operands)
    for out in (
        fp8_gemm_triton.masked(operands[:4], counts, expected_rows),
        fp8_grouped_gemm_masked(*operands, expected_rows=expected_rows),
    ):
        for expert, count in enumerate(counts.tolist()):
            error = relative_error(out[expert, :count], want[expert, :count])
            assert error < BOUND, (expert, error)


@pytest.mark.parametrize("device", DEVICES)
def test_contiguous(rng: torch.Generator, device: str) -> None:
    n, k = (128, 256) if INTERPRETED else (4096, 7168)
    # With room behind the last expert that has rows, and for more.
    expert_of = torch.full((768,), -1, dtype=torch.int32)
    expert_of[:5], expert_of[128:440] = 0, 2
    expert_of = expert_of.to(device)
    ends = torch.tensor([5, 128, 440, 512], dtype=torch.int32, device=device)
    operands = (
        *activations(rng, len(expert_of), k, device=device),
        *weights(rng, 4, n, k, device=device),
        expert_of,
    )
    want = fp8_grouped_gemm_contiguous_reference(*operands, ends)
    live = expert_of >= 0
    for out in (
        fp8_gemm_triton.contiguous(operands[:4], expert_of),
        fp8_grouped_gemm_contiguous(*operands, ends),
    ):
        assert relative_error(out[live], want[live]) < BOUND


def test_what_does_not_fit_is_refused(rng: torch.Generator) -> None:
    (x, x_scale), (weight, w_scale) = activations(rng, 3, 256), weights(rng, 128, 256)
    with pytest.raises(ValueError, match="float8"):
        fp8_gemm(x.float(), x_scale, weight, w_scale)
    with pytest.raises(ValueError, match="x_scale"):
        fp8_gemm(x, x_scale[:, :1], weight, w_scale)
    with pytest.raises(ValueError, match="w_scale"):
        fp8_gemm(x, x_scale, weight, w_scale[:, :1])
    with pytest.raises(ValueError, match="multiple of 128"):
        fp8_gemm(x[:, :100].contiguous(), x_scale, weight[:, :100].contiguous(), w_scale)
    with pytest.raises(ValueError, match="contiguous"):
        fp8_gemm(x.t().contiguous().t(), x_scale, weight, w_scale)
    counts = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="no experts"):
        fp8_grouped_gemm_masked(x, x_scale, weight, w_scale, counts)
    expert_of = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="M a multiple of 128"):
        fp8_grouped_gemm_contiguous(
            x, x_scale, weight[None], w_scale[None], expert_of, expert_of[:1]
        )
    with pytest.raises(ValueError, match="ends"):
        fp8_grouped_gemm_contiguous(
            x[:0], x_scale[:0], weight[None], w_scale[None], expert_of[:0], expert_of
        )
