import pytest
import torch

from kernels.attention.mla_prefill import attend_in_blocks, mla_prefill
from kernels.attention.paged_rows import split_rows
from tests.kernels.attention_case import attend_one, make_case
from tests.kernels.tensors import TOLERANCE, generator, randn

ROWS = (
    ((1, 1),),
    ((5, 5), (8, 8), (3, 20), (0, 4), (1, 33)),
    ((140, 150), (2, 2)),  # more than one block of queries
)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("value_dim", [4, 30])
def test_against_one_query_at_a_time(
    request: pytest.FixtureRequest, rows: tuple[tuple[int, int], ...], value_dim: int
) -> None:
    heads, nope, rotated, rank, scale = 3, 5, 6, 9, 0.4
    case, rng = make_case(request.node.nodeid, rows, rank + rotated)
    query = randn(rng, sum(case.counts), heads, nope + rotated)
    kv_b = randn(rng, heads, nope + value_dim, rank)
    got = mla_prefill(query, case.cache, kv_b, split_rows(*case.ragged()), scale=scale)
    token = 0
    for row, (count, length) in enumerate(rows):
        latents = case.latents(row)
        both = torch.einsum("sc,hnc->shn", latents[:, :rank], kv_b.double())
        for i in range(count):
            seen = length - count + i + 1
            for head in range(heads):
                keys = torch.cat((both[:seen, head, :nope], latents[:seen, rank:]), dim=-1)
                values = both[:seen, head, nope:]
                want = attend_one(query[token, head].double(), keys, values, scale)
                torch.testing.assert_close(got[token, head], want.float(), **TOLERANCE)
            token += 1


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (7, 7), (130, 300), (1, 40)])
def test_blocks_of_queries_see_what_they_may(
    request: pytest.FixtureRequest, num_queries: int, num_keys: int
) -> None:
    rng = generator(request.node.nodeid)
    query, key = randn(rng, 2, num_queries, 10), randn(rng, 2, num_keys, 10)
    for value_dim in (6, 10, 16):
        value = randn(rng, 2, num_keys, value_dim)
        hidden = torch.ones(num_queries, num_keys, dtype=torch.bool).triu(
            num_keys - num_queries + 1
        )
        scores = (query @ key.transpose(1, 2) * 0.5).masked_fill(hidden, -torch.inf)
        want = scores.softmax(-1) @ value
        torch.testing.assert_close(attend_in_blocks(query, key, value, 0.5), want, **TOLERANCE)
