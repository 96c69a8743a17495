"""From scales of 128 values to one for all: near what one rounding gives, clipped beyond 448, and
refused where shapes do not fit."""

import pytest
import torch

from kernels.elementwise.quantise import quantise_reference
from kernels.elementwise.rescale import rescale
from tests.kernels.tensors import generator, randn

# Relative, by norm, of normal values: each of two roundings to e4m3 is 2.65% off, and they are not
# independent.
TWO_ROUNDINGS = 0.05


def test_near_one_rounding(request: pytest.FixtureRequest) -> None:
    x = randn(generator(request.node.nodeid), 3, 40, 512)
    scale, counts = torch.tensor(0.0125), torch.tensor([40, 0, 7], dtype=torch.int32)
    values, scales = (part.view(3, 40, -1) for part in quantise_reference(x.flatten(0, 1)))
    got, want = rescale(values, scales, scale, counts).float(), quantise_reference(x, scale=scale)
    for expert, count in enumerate(counts.tolist()):
        once = want[0][expert, :count].float()
        error = (got[expert, :count] - once).norm()
        assert error <= TWO_ROUNDINGS * once.norm()
        assert not count or error > 0


def test_what_is_exact_stays(request: pytest.FixtureRequest) -> None:
    """Scales of powers of two only move the exponent; what goes beyond the largest is clipped."""
    x = randn(generator(request.node.nodeid), 1, 5, 128).to(torch.float8_e4m3fn)
    counts = torch.tensor([5], dtype=torch.int32)
    got = rescale(x, torch.full((1, 5, 1), 0.5), torch.tensor(0.25), counts)
    assert torch.equal(got.float(), 2 * x.float())
    x[0, 0, 0] = 300.0
    got = rescale(x, torch.full((1, 5, 1), 0.5), torch.tensor(0.25), counts)
    assert float(got[0, 0, 0]) == 448


def test_what_does_not_fit_is_refused() -> None:
    x, counts = torch.zeros(2, 3, 256).to(torch.float8_e4m3fn), torch.zeros(2, dtype=torch.int32)
    for values, num_scales, of_experts in (
        (x.float(), 2, counts),
        (x, 1, counts),
        (x, 2, counts[:1]),
    ):
        with pytest.raises(ValueError):
            rescale(values, torch.ones(2, 3, num_scales), torch.tensor(1.0), of_experts)
