import pytest
import torch

from kernels.attention.mla_decode import mla_decode, mla_decode_paged
from kernels.attention.paged_rows import group_rows
from tests.kernels.attention_case import attend_one, make_case
from tests.kernels.tensors import TOLERANCE, randn

ROWS = (
    ((1, 1),),
    ((1, 5), (1, 8), (1, 9), (1, 64)),
    ((1, 700), (1, 3), (1, 650)),  # lengths too unlike for one group
    ((3, 3), (1, 20), (3, 17), (0, 9), (1, 2)),  # several new tokens; a row without any
    ((9, 30), (2, 600)),
    ((8, 8), (8, 23), (1, 1), (8, 71)),  # as many as speculation has at most
)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("heads", [1, 5, 20])
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


def test_rows_without_tokens_are_zeros(request: pytest.FixtureRequest) -> None:
    """Rows of padding between others: no NaN, and the others are as without them."""
    case, rng = make_case(request.node.nodeid, ((2, 9), (2, 5)), 18)
    query = randn(rng, 8, 3, 18)
    table = torch.zeros(4, 2, dtype=torch.int32)
    table[[0, 2]] = case.block_table
    lengths = torch.tensor([9, 0, 5, 0], dtype=torch.int32)
    options = {"value_dim": 12, "scale": 0.3}
    got = mla_decode_paged(query, case.cache, table, lengths, **options)
    assert not got[[2, 3, 6, 7]].any()
    used = query[[0, 1, 4, 5]]
    want = mla_decode_paged(used, case.cache, case.block_table, case.kv_lengths, **options)
    assert torch.equal(got[[0, 1, 4, 5]], want)
    none = mla_decode_paged(query, case.cache, table, torch.zeros_like(lengths), **options)
    assert not none.any()
