import pytest
import torch

from kernels.gemm.head_linear import head_linear
from tests.kernels.tensors import TOLERANCE, generator, randn


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 10])
def test_against_float64(request: pytest.FixtureRequest, num_tokens: int) -> None:
    rng = generator(request.node.nodeid)
    x, weight = randn(rng, num_tokens, 3, 13), randn(rng, 3, 7, 13)
    want = torch.einsum("thk,hnk->thn", x.double(), weight.double()).float()
    torch.testing.assert_close(head_linear(x, weight), want, **TOLERANCE)
    strided = weight.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(head_linear(x, strided), want, **TOLERANCE)
    place = torch.full((num_tokens, 3, 9), 5.0)
    head_linear(x, weight, out=place[..., :7])
    assert torch.equal(place[..., :7], head_linear(x, weight))
    assert bool((place[..., 7:] == 5).all())
