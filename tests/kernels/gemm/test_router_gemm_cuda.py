"""The CUDA path of the gate's logits, on a GPU against float64."""

import pytest
import torch

from kernels.gemm import router_gemm_cuda
from kernels.gemm.router_gemm import TOLERANCE
from kernels.gemm.router_gemm_cuda import (
    EXPERTS,
    GROUP,
    MAX_SHARED_BYTES,
    SPLITS,
    RouterCudaShape,
    shape_for,
    shared_bytes,
)
from tests.kernels.tensors import generator, randn


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    return generator(request.node.nodeid)


def test_blocks_have_room_for_the_hidden_size_of_deepseek_v3() -> None:
    for rows in (1, 8, 9, 17, 96, 97, 511):
        operands = 7168 // SPLITS * 2 * (EXPERTS + shape_for(rows).tokens)
        assert operands < shared_bytes(shape_for(rows), 7168 // GROUP) <= MAX_SHARED_BYTES


# Edges of tokens, experts and sums; sums that are not shared.
SIZES = [(1, 256, 7168), (5, 12, 296), (64, 200, 1032), (65, 256, 7168), (511, 320, 7168)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [None, RouterCudaShape(8, 5), RouterCudaShape(16, 1), RouterCudaShape(32, 3)]
)
@pytest.mark.parametrize(("rows", "experts", "width"), SIZES)
def test_against_float64(
    rng: torch.Generator, rows: int, experts: int, width: int, shape: RouterCudaShape | None
) -> None:
    # A long sum needs all blocks, a short one has no part for each.
    if width > 2000 and shape:
        shape = RouterCudaShape(shape.tokens)
    elif shape is None and width < SPLITS * GROUP:
        shape = RouterCudaShape(32, 2)
    hidden, weight = (randn(rng, each, width).bfloat16().cuda() for each in (rows, experts))
    out = router_gemm_cuda.launch(hidden, weight, shape=shape)
    want = hidden.double() @ weight.double().t()
    assert out.shape == want.shape
    assert out.dtype == torch.float32
    assert (out - want).norm() <= TOLERANCE * want.norm()
    assert torch.equal(out, router_gemm_cuda.launch(hidden, weight, shape=shape))


@pytest.mark.gpu
def test_follows_what_is_in_front(rng: torch.Generator) -> None:
    """In a graph, behind kernels that write its operand and in front of one that reads its
    result."""
    sources = [randn(rng, 64, 7168).bfloat16().cuda() for _ in range(2)]
    weight = randn(rng, 256, 7168).bfloat16().cuda()
    given, results = sources[0].clone(), torch.empty(2, 64, 256, device="cuda")
    router_gemm_cuda.launch(given, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for source, result in zip(sources, results, strict=True):
            given.copy_(source)
            result.copy_(router_gemm_cuda.launch(given, weight))
    for _ in range(3):
        results.fill_(float("nan"))
        graph.replay()
        for source, result in zip(sources, results, strict=True):
            want = source.double() @ weight.double().t()
            assert (result - want).norm() <= TOLERANCE * want.norm()


@pytest.mark.gpu
def test_operands_that_do_not_suit_are_left_to_others() -> None:
    values = torch.zeros(9 * 16384 + 1, dtype=torch.bfloat16, device="cuda")

    def is_possible(k: int, first: int = 0) -> bool:
        hidden = values[first : first + 9 * k].view(9, k)
        return router_gemm_cuda.is_possible(hidden, hidden[:8])

    assert is_possible(7168)
    assert not is_possible(7168, first=1)
    assert not is_possible(7164)
    assert not is_possible(256)
    assert not is_possible(16384)
