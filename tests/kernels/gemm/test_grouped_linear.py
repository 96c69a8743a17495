import pytest
import torch

from kernels.gemm.grouped_linear import grouped_linear
from kernels.gemm.linear import favoured_layout
from tests.kernels.tensors import TOLERANCE, generator, randn

COUNTS = ([3, 0, 1, 9], [0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0], [20, 2, 0, 3], [1, 5, 0, 0])


@pytest.mark.parametrize("counts", COUNTS)
def test_against_one_row_at_a_time(request: pytest.FixtureRequest, counts: list[int]) -> None:
    rng = generator(request.node.nodeid)
    x, weight = randn(rng, sum(counts), 19), randn(rng, 4, 6, 19)
    expert = [e for e, count in enumerate(counts) for _ in range(count)]
    rows = [weight[e].double() @ row.double() for e, row in zip(expert, x, strict=True)]
    want = torch.stack(rows).float() if rows else torch.empty(0, 6)
    for stored in (weight, favoured_layout(weight)):
        torch.testing.assert_close(grouped_linear(x, counts, stored), want, **TOLERANCE)


def test_empty_slots_behind_the_experts() -> None:
    x, weight = torch.ones(2, 3), torch.ones(1, 4, 3)
    assert torch.equal(grouped_linear(x, [2, 0, 0], weight), torch.full((2, 4), 3.0))
    assert grouped_linear(x[:0], [0, 0], weight[:0]).shape == (0, 4)


def test_rows_without_an_expert_are_refused() -> None:
    with pytest.raises(ValueError, match="counts"):
        grouped_linear(torch.ones(3, 3), [1, 0, 2], torch.ones(2, 4, 3))
