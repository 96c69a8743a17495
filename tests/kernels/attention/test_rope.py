import math

import pytest
import torch

from kernels.attention.rope_write import rope
from tests.kernels.tensors import TOLERANCE, generator, randn


def test_against_one_pair_at_a_time(request: pytest.FixtureRequest) -> None:
    rng = generator(request.node.nodeid)
    x = randn(rng, 3, 2, 6)
    angles, factor = 10 * randn(rng, 3, 3), 1.25
    got = rope(x, torch.polar(torch.full_like(angles, factor), angles))
    for t in range(3):
        for h in range(2):
            for i in range(3):
                a, b = float(x[t, h, 2 * i]), float(x[t, h, 2 * i + 1])
                cos = factor * math.cos(float(angles[t, i]))
                sin = factor * math.sin(float(angles[t, i]))
                want = torch.tensor((a * cos - b * sin, a * sin + b * cos))
                torch.testing.assert_close(got[t, h, 2 * i : 2 * i + 2], want, **TOLERANCE)


def test_part_of_a_wider_tensor_and_bfloat16() -> None:
    wide = torch.randn(4, 3, 10, generator=generator("wide")).bfloat16()
    angles = torch.rand(4, 2)
    rotation = torch.polar(torch.ones_like(angles), angles)
    got = rope(wide[..., 6:], rotation)
    assert got.dtype == torch.bfloat16
    want = rope(wide[..., 6:].float().contiguous(), rotation)
    torch.testing.assert_close(got, want.bfloat16())
    assert rope(wide[:0, :, 6:], rotation[:0]).shape == (0, 3, 4)
