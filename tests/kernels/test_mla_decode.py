import pytest
import torch

from kernels.mla_decode import mla_decode
from kernels.paged_rows import group_rows
from tests.kernels.attention_case import attend_one, make_case
from tests.kernels.tensors import TOLERANCE, randn

ROWS = (
    ((1, 1),),
    ((1, 5), (1, 8), (1, 9), (1, 64)),
    ((1, 700), (1, 3), (1, 650)),  # lengths too unlike for one group
    ((3, 3), (1, 20), (3, 17), (0, 9), (1, 2)),  # several new tokens; a row without any
    ((9, 30), (2, 600)),
)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("heads", [1, 5])
def test_against_one_query_at_a_time(
    request: pytest.FixtureRequest, rows: tuple[tuple[int, int], ...], heads: int
) -> None:
    value_dim, width, scale = 12, 18, 0.3
    case, rng = make_case(request.node.nodeid, rows, width)
    query = randn(rng, sum(case.counts), heads, width)
    groups = group_rows(*case.ragged())
    got = mla_decode(query, case.cache, groups, value_dim=value_dim, scale=scale)
    token = 0
    for row, (count, length) in enumerate(rows):
        latents = case.latents(row)
        for i in range(count):
            seen = latents[: length - count + i + 1]
            for head in range(heads):
                q = query[token, head].double()
                want = attend_one(q, seen, seen[:, :value_dim], scale)
                torch.testing.assert_close(got[token, head], want.float(), **TOLERANCE)
            token += 1
