"""The Triton path of absorbed attention against the reference."""

import pytest
import torch

from kernels import mla_decode_triton
from kernels.mla_decode import mla_decode, mla_decode_paged
from kernels.paged_rows import group_rows
from tests.kernels.tensors import generator, randn
from tests.kernels.triton_device import DEVICES, INTERPRETED, dtypes

SMALL = [(3, 24, 8, 4, [9, 1, 4]), (17, 16, 16, 8, [40])]
LARGE = [(128, 512, 64, 64, [1, 700, 64, 4096, 65]), (16, 512, 64, 64, [2000] * 130)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize("num_queries", [1, 3])
@pytest.mark.parametrize("shape", SMALL if INTERPRETED else [*SMALL, *LARGE])
def test_against_the_reference(
    request: pytest.FixtureRequest, device: str, dtype: torch.dtype, num_queries: int,
    shape: tuple[int, int, int, int, list[int]],
) -> None:  # fmt: skip
    heads, value_dim, rope_dim, page_tokens, lengths = shape
    rng = generator(request.node.nodeid)
    lengths = [max(length, num_queries) for length in lengths]
    num_pages = sum(-(-length // page_tokens) for length in lengths)
    ids = torch.randperm(num_pages, generator=rng).int()
    widest = -(-max(lengths) // page_tokens)
    table, used = torch.zeros(len(lengths), widest, dtype=torch.int32), 0
    for row, length in enumerate(lengths):
        count = -(-length // page_tokens)
        table[row, :count] = ids[used : used + count]
        used += count
    width = value_dim + rope_dim
    num_tokens = num_queries * len(lengths)
    query = randn(rng, num_tokens, heads, width).to(device, dtype)
    cache = randn(rng, num_pages, page_tokens, width).to(device, dtype)
    table, kv_lengths = table.to(device), torch.tensor(lengths, dtype=torch.int32, device=device)
    starts = torch.arange(0, num_tokens + 1, num_queries, dtype=torch.int32, device=device)
    options = {"value_dim": value_dim, "scale": width**-0.5}

    groups = group_rows(starts, kv_lengths, table, page_tokens)
    want = mla_decode(query.float(), cache.float(), groups, **options)
    out, lse = mla_decode_triton.launch(query, cache, table, kv_lengths, **options)
    error = float((out.float() - want).norm() / want.norm())
    assert error < (1e-2 if dtype == torch.bfloat16 else 2e-3), error
    assert torch.isfinite(lse).all()

    chosen = mla_decode_paged(query, cache, table, kv_lengths, **options)
    torch.testing.assert_close(chosen.float(), want, rtol=2e-2, atol=2e-2)

    row = len(lengths) - 1
    count = lengths[row] - num_queries + 1
    latents = cache[table[row].long()].flatten(0, 1)[:count].float()
    scores = query[num_queries * row, 0].float() @ latents.t() * options["scale"]
    expected = scores.logsumexp(0)
    torch.testing.assert_close(lse[num_queries * row, 0], expected, rtol=1e-2, atol=1e-2)
