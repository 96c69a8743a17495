import pytest
import torch

from kernels.elementwise.combine import Combination
from kernels.elementwise.rms_norm import rms_norm, rms_norms
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
    normed, *_, total = rms_norms(x, other, weight, 1e-5)
    torch.testing.assert_close(normed, reference(x + other, weight, 1e-5), **TOLERANCE)
    assert torch.equal(total, x + kept)
    assert torch.equal(other, kept)


@pytest.mark.parametrize("has_base", [True, False])
def test_a_combination_is_what_it_adds_up_to(
    request: pytest.FixtureRequest, has_base: bool
) -> None:
    rng = generator(request.node.nodeid)
    residual, base, weight = randn(rng, 3, 256), randn(rng, 3, 256), randn(rng, 256)
    parts = Combination(
        rows=randn(rng, 7, 256),
        row_of=torch.tensor([[0, -1, 6], [2, -1, 5]]),
        weights=randn(rng, 3, 2),
        base=base if has_base else None,
    )
    total = parts.combined() + residual
    assert torch.equal(parts.combined()[1], base[1] if has_base else torch.zeros(256))
    for plain, quantises in ((True, False), (False, True), (True, True)):
        form = {"plain": plain, "quantises": quantises}
        *got, got_total = rms_norms(parts, residual, weight, 1e-6, **form)
        *want, _ = rms_norms(total, torch.zeros_like(total), weight, 1e-6, **form)
        assert torch.equal(got_total, total)
        assert [each is not None for each in got] == [plain, quantises, quantises, False]
        for one, other in zip(got, want, strict=True):
            assert one is other is None or torch.equal(one.float(), other.float())


def test_bfloat16_is_averaged_in_float32() -> None:
    x = torch.full((1, 4096), 3.0, dtype=torch.bfloat16)
    got = rms_norm(x, torch.ones(4096, dtype=torch.bfloat16), 1e-6)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, torch.ones_like(got))
