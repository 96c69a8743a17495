"""The Triton path of absorbed attention against the reference."""

import pytest
import torch

from kernels.attention import mla_decode_triton
from kernels.attention.mla_decode import mla_decode_paged, mla_decode_reference
from tests.kernels.tensors import generator, randn
from tests.kernels.triton_device import DEVICES, INTERPRETED, dtypes

# heads, value and rotated width, page size, lengths (0: no row)
SMALL = [
    (3, 24, 8, 4, [9, 1, 0, 4]),
    (5, 16, 16, 8, [8, 30, 0, 17]),
    (17, 16, 16, 8, [40]),
    (20, 24, 8, 16, [50, 8]),
    (2, 16, 16, 32, [0, 70, 150, 16, 0, 33, 17]),
]
LARGE = [
    (128, 512, 64, 64, [1, 700, 64, 4096, 0, 65]),
    (5, 512, 64, 64, [8, 700, 64, 0, 65]),
    (20, 512, 64, 64, [3000, 8, 71]),
    (16, 512, 64, 64, [2000] * 130),
    (128, 512, 64, 16, [300, 4000]),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize("num_queries", [1, 3, 8])
@pytest.mark.parametrize("num_programs", [None, 3])
@pytest.mark.parametrize("shape", SMALL if INTERPRETED else [*SMALL, *LARGE])
def test_against_the_reference(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, device: str,
    dtype: torch.dtype, num_queries: int, num_programs: int | None,
    shape: tuple[int, int, int, int, list[int]],
) -> None:  # fmt: skip
    """Few programs take long stretches of several rows each, many a piece of one row."""
    heads, value_dim, rope_dim, page_tokens, lengths = shape
    if num_programs is not None:
        monkeypatch.setattr(mla_decode_triton, "programs", lambda *_: num_programs)
    rng = generator(request.node.nodeid)
    lengths = [length and max(length, num_queries) for length in lengths]
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
    options = {"value_dim": value_dim, "scale": width**-0.5}

    want = mla_decode_reference(query.float(), cache.float(), table, kv_lengths, **options)
    out, lse = mla_decode_triton.launch(query, cache, table, kv_lengths, **options)
    error = float((out.float() - want).norm() / want.norm())
    assert error < (1e-2 if dtype == torch.bfloat16 else 2e-3), error
    is_row = (kv_lengths > 0).repeat_interleave(num_queries)
    assert not out[~is_row].any()
    assert torch.isneginf(lse[~is_row]).all()

    chosen = mla_decode_paged(query, cache, table, kv_lengths, **options)
    torch.testing.assert_close(chosen.float(), want, rtol=2e-2, atol=2e-2)

    for row, length in enumerate(lengths):
        if not length:
            continue
        latents = cache[table[row].long()].flatten(0, 1).float()
        for i in range(num_queries):
            token = num_queries * row + i
            seen = latents[: length - num_queries + i + 1]
            scores = query[token].float() @ seen.t() * options["scale"]
            torch.testing.assert_close(lse[token], scores.logsumexp(1), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_to_see(device: str) -> None:
    """Padding only: zeros, whatever the table says."""
    query = torch.randn(3, 2, 32, device=device)
    cache = torch.randn(4, 8, 32, device=device)
    lengths = torch.zeros(3, dtype=torch.int32, device=device)
    table = torch.full((3, 2), 10**6, dtype=torch.int32, device=device)
    out, lse = mla_decode_triton.launch(query, cache, table, lengths, value_dim=16, scale=1.0)
    assert not out.any()
    assert torch.isneginf(lse).all()
