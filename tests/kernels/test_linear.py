import pytest
import torch

from kernels.linear import favoured_layout, linear
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
