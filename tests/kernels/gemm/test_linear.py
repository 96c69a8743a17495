import os

import pytest
import torch

from kernels.build.mkl_rows import STRICT, VARIABLE
from kernels.gemm.linear import favoured_layout, linear
from tests.kernels.tensors import TOLERANCE, generator, randn


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 4, 9])
@pytest.mark.parametrize("biased", [False, True])
def test_against_float64(request: pytest.FixtureRequest, num_rows: int, biased: bool) -> None:
    rng = generator(request.node.nodeid)
    x, weight = randn(rng, num_rows, 37), randn(rng, 11, 37)
    bias = randn(rng, 11) if biased else None
    want = torch.einsum("tk,nk->tn", x.double(), weight.double())
    want = want + bias.double() if bias is not None else want
    for stored in (weight, favoured_layout(weight)):
        torch.testing.assert_close(linear(x, stored, bias), want.float(), **TOLERANCE)


def test_favoured_layout_is_the_same_matrix() -> None:
    weight = torch.arange(24.0).view(2, 3, 4)
    assert torch.equal(favoured_layout(weight), weight)
    assert favoured_layout(weight)[0].t().is_contiguous()


def test_a_row_hardly_depends_on_the_others(request: pytest.FixtureRequest) -> None:
    """Exactly equal with MKL; other libraries may differ in the last bit."""
    rng = generator(request.node.nodeid)
    x, weight = randn(rng, 40, 300), favoured_layout(randn(rng, 70, 300))
    together = linear(x, weight)
    alone = torch.cat([linear(row, weight) for row in x.split(1)])
    torch.testing.assert_close(together, alone, rtol=0, atol=3e-5)


@pytest.mark.skipif(os.environ.get(VARIABLE) != STRICT, reason="an Intel processor's products")
@pytest.mark.parametrize("is_favoured", [False, True])
@pytest.mark.parametrize(("n", "k"), [(40, 24), (64, 128), (512, 256), (96, 1536), (1000, 2048)])
def test_a_row_does_not_depend_on_the_others(
    request: pytest.FixtureRequest, n: int, k: int, *, is_favoured: bool
) -> None:
    rng = generator(request.node.nodeid)
    x, weight = randn(rng, 130, k), randn(rng, n, k)
    weight = favoured_layout(weight) if is_favoured else weight
    together = linear(x, weight)
    for num_rows in (1, 3, 4, 5, 7, 8, 12, 16, 17, 33, 64, 100):
        assert torch.equal(linear(x[:num_rows], weight), together[:num_rows]), num_rows
