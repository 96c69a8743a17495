import pytest
import torch

from kernels.rms_norm import add_rms_norm, rms_norm
from tests.kernels.tensors import TOLERANCE, generator, randn


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return (x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()).float()


@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (5, 33), (3, 7168)])
@pytest.mark.parametrize("size", [1.0, 1e-4, 1e4])
def test_against_float64(
    request: pytest.FixtureRequest, shape: tuple[int, int], size: float
) -> None:
    rng = generator(request.node.nodeid)
    x, other = size * randn(rng, *shape), size * randn(rng, *shape)
    weight = randn(rng, shape[1])
    kept = other.clone()
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), reference(x, weight, 1e-6), **TOLERANCE)
    normed, total = add_rms_norm(x, other, weight, 1e-5)
    torch.testing.assert_close(normed, reference(x + other, weight, 1e-5), **TOLERANCE)
    assert torch.equal(total, x + kept)
    assert torch.equal(other, kept)


def test_bfloat16_is_averaged_in_float32() -> None:
    x = torch.full((1, 4096), 3.0, dtype=torch.bfloat16)
    got = rms_norm(x, torch.ones(4096, dtype=torch.bfloat16), 1e-6)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, torch.ones_like(got))
