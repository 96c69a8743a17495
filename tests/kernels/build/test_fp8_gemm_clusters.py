"""The CUDA path of FP8 products of few tokens: its cuts, and on a GPU against the reference."""

from dataclasses import asdict

import pytest
import torch

from bench.kernel_cases.fp8_cuts import cluster_cuts
from kernels.build.fp8_gemm_blocks import Fp8Choice, default_fp8_blocks
from kernels.build.fp8_gemm_clusters import (
    HEIGHTS,
    MAX_ROWS,
    MULTIPROCESSOR_BYTES,
    ClusterBlocks,
)
from kernels.gemm import fp8_gemm_cuda
from kernels.gemm.fp8_gemm import TOLERANCE, fp8_gemm_reference
from tests.kernels.gemm.test_fp8_gemm import activations, relative_error, weights
from tests.kernels.tensors import generator


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    return generator(request.node.nodeid)


def blocks(
    warpgroups: int,
    across: int,
    splits: int,
    per_multiprocessor: int = 1,
    tokens_first: bool = False,
) -> ClusterBlocks:
    return ClusterBlocks(
        warpgroups=warpgroups, across=across, splits=splits,
        per_multiprocessor=per_multiprocessor, tokens_first=tokens_first,
    )  # fmt: skip


def test_cuts_fit_and_are_bounded() -> None:
    for n, k in ((7168, 16384), (2112, 7168), (24576, 1536), (7168, 2048)):
        for rows in (1, 9, 64, 65, MAX_ROWS):
            found = list(cluster_cuts(rows, n, k))
            assert 5 < len(found) == len(set(found)) <= 150
            assert any(each.tokens_first for each in found) == (rows > 64)
            for each in found:
                stages, height = each.num_stages(rows, k), each.height(rows)
                assert rows <= height in HEIGHTS
                assert 3 <= stages <= -(-k // 128 // each.splits)
                num_bytes = stages * 128 * 64 * each.warpgroups
                num_bytes += each.token_stages(rows, k) * 128 * height
                assert each.per_multiprocessor * num_bytes < MULTIPROCESSOR_BYTES
                assert ClusterBlocks(**asdict(each)) == each
    assert not list(cluster_cuts(MAX_ROWS + 1, 7168, 16384))


def test_cuts_that_no_kernel_has_are_refused() -> None:
    with pytest.raises(ValueError, match="no kernel"):
        blocks(4, 1, 1)
    with pytest.raises(ValueError, match="no kernel"):
        blocks(3, 1, 1, tokens_first=True)
    with pytest.raises(ValueError, match="cluster"):
        blocks(1, 4, 3)


def test_a_choice_keeps_its_clusters() -> None:
    cut = default_fp8_blocks(0, 8, 7168, 16384)
    for clusters in (None, blocks(2, 2, 3), blocks(2, 1, 3, tokens_first=True)):
        choice = Fp8Choice(path="triton", blocks=cut, clusters=clusters)
        assert Fp8Choice.of_record(choice.record()) == choice


# One block a sum, sums that blocks share, tokens that neighbours copy for each other, both; edges.
SHAPES = [(1, 2112, 7168), (7, 200, 1024), (16, 328, 1536), (90, 4104, 1536), (128, 7168, 2048)]
CUTS = [
    *(blocks(1, 1, 1, 3), blocks(2, 1, 1, 2), blocks(3, 1, 4), blocks(2, 2, 1), blocks(1, 4, 2)),
    blocks(2, 1, 7),
    *(blocks(2, 1, splits, tokens_first=True) for splits in (1, 2, 3, 7)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_against_the_reference(
    rng: torch.Generator, rows: int, n: int, k: int, cut: ClusterBlocks
) -> None:
    chosen = cut
    if chosen.height(rows) < 8 * chosen.across or not chosen.num_stages(rows, k):
        chosen = blocks(1, 1, chosen.splits)
    operands = (*activations(rng, rows, k, device="cuda"), *weights(rng, n, k, device="cuda"))
    assert fp8_gemm_cuda.is_possible(*operands[:3])
    out = fp8_gemm_cuda.dense(operands, blocks=chosen)
    assert relative_error(out, fp8_gemm_reference(*operands)) < TOLERANCE
    assert torch.equal(out, fp8_gemm_cuda.dense(operands, blocks=chosen))


@pytest.mark.gpu
def test_follows_what_is_in_front(rng: torch.Generator) -> None:
    """In a graph, behind kernels that write its operand and in front of one that reads its
    result."""
    rows, n, k = 16, 7168, 2048
    x, x_scale = activations(rng, rows, k, device="cuda")
    other = activations(rng, rows, k, device="cuda")[0]
    weight, w_scale = weights(rng, n, k, device="cuda")
    chosen = blocks(2, 1, 2)
    fp8_gemm_cuda.dense((x, x_scale, weight, w_scale), blocks=chosen)
    given, results = x.clone(), torch.empty(2, rows, n, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for source, result in zip((x, other), results, strict=True):
            given.copy_(source)
            result.copy_(fp8_gemm_cuda.dense((given, x_scale, weight, w_scale), blocks=chosen))
    for _ in range(3):
        results.fill_(float("nan"))
        graph.replay()
        for source, result in zip((x, other), results, strict=True):
            want = fp8_gemm_reference(source, x_scale, weight, w_scale)
            assert relative_error(result, want) < TOLERANCE


@pytest.mark.gpu
def test_operands_that_do_not_suit_are_left_to_others(rng: torch.Generator) -> None:
    x, x_scale = activations(rng, 16, 1024, device="cuda")
    weight, _ = weights(rng, 256, 1024, device="cuda")
    assert fp8_gemm_cuda.is_possible(x, x_scale, weight)
    assert not fp8_gemm_cuda.is_possible(x, x_scale.contiguous(), weight)
    assert not fp8_gemm_cuda.is_possible(x, x_scale, weight.flatten()[8:8200].view(8, 1024))
    assert not fp8_gemm_cuda.is_possible(x, x_scale, weight[:255])
    assert not fp8_gemm_cuda.is_possible(x.new_empty(MAX_ROWS + 1, 1024), x_scale, weight)
