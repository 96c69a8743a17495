import math

import torch

from kernels.elementwise.silu_mul import silu_mul


def test_against_one_element_at_a_time() -> None:
    x = torch.linspace(-30, 30, 24).view(3, 8)
    got = silu_mul(x)
    for t in range(3):
        for i in range(4):
            a, b = float(x[t, i]), float(x[t, 4 + i])
            assert math.isclose(got[t, i], a / (1 + math.exp(-a)) * b, rel_tol=1e-5)
    assert silu_mul(x[:0]).shape == (0, 4)
