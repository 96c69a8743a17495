"""Prefill in groups of keys: the plan and its reference, and the Triton path of it."""

import pytest
import torch

from kernels.attention import mla_prefill_plan, mla_prefill_triton
from kernels.attention.mla_prefill import (
    attend_group_reference,
    mla_prefill,
    mla_prefill_grouped,
    mla_prefill_quantised,
)
from kernels.attention.mla_prefill_plan import max_keys, plan_groups
from kernels.attention.paged_rows import split_rows
from kernels.elementwise.quantise import quantise_reference
from kernels.gemm.block_dequantise import block_dequantise
from tests.kernels.attention_case import make_case
from tests.kernels.tensors import generator, randn
from tests.kernels.triton_device import DEVICES, INTERPRETED, dtypes
from tests.model.random_folder import quantise_blocks

# (new tokens, length) of each row
ROWS = (
    ((5, 5),),
    ((3, 20), (1, 1), (40, 40), (2, 90)),
    ((33, 61), (0, 9), (7, 30)),
    ((1, 64), (1, 7)),
)
NOPE, ROPE, VALUE, RANK = 12, 6, 10, 9
CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("most", [7, 32, 1000])
def test_groups_give_what_rows_give(
    request: pytest.FixtureRequest, rows: tuple[tuple[int, int], ...], most: int
) -> None:
    case, rng = make_case(request.node.nodeid, rows, RANK + ROPE)
    query = randn(rng, sum(case.counts), 3, NOPE + ROPE)
    kv_b = randn(rng, 3, NOPE + VALUE, RANK)
    split = split_rows(*case.ragged())
    groups = plan_groups(split, case.ragged()[3], most, CPU)
    num_keys = sum(length for count, length in rows if count)
    assert sum(len(group.slots) for group in groups) == num_keys
    assert len(groups) == -(-num_keys // most)
    want = mla_prefill(query, case.cache, kv_b, split, scale=0.3)
    got = mla_prefill_grouped(query, case.cache, kv_b, groups, scale=0.3)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("most", [7, 1000])
def test_expanded_by_fp8(request: pytest.FixtureRequest, most: int) -> None:
    """Latents of 4% error, weights of none."""
    nope, value, rank = 24, 40, 256
    case, rng = make_case(request.node.nodeid, ROWS[1], rank + ROPE)
    query = randn(rng, sum(case.counts), 4, nope + ROPE)
    kv_b, kv_b_scale = quantise_blocks(randn(rng, 4 * (nope + value), rank))
    exact = block_dequantise(kv_b, kv_b_scale, torch.float32).view(4, nope + value, rank)
    kv_b = kv_b.view(exact.shape)
    split = split_rows(*case.ragged())
    groups = plan_groups(split, case.ragged()[3], most, CPU)
    want = mla_prefill(query, case.cache, exact, split, scale=0.01)
    by_row = mla_prefill(query, case.cache, kv_b, split, scale=0.01, kv_b_scale=kv_b_scale)
    got = mla_prefill_grouped(query, case.cache, kv_b, groups, scale=0.01, kv_b_scale=kv_b_scale)
    torch.testing.assert_close(got, by_row, rtol=1e-4, atol=1e-5)
    assert 1e-3 < float((got - want).norm() / want.norm()) < 0.04


def test_quantised(request: pytest.FixtureRequest) -> None:
    """With enough values that groups of 128 are full."""
    case, rng = make_case(request.node.nodeid, ROWS[1], RANK + ROPE)
    query = randn(rng, sum(case.counts), 4, NOPE + ROPE)
    kv_b = randn(rng, 4, NOPE + 32, RANK)
    groups = plan_groups(split_rows(*case.ragged()), case.ragged()[3], 32, CPU)
    values, scales = mla_prefill_quantised(query, case.cache, kv_b, groups, scale=0.3)
    out = mla_prefill_grouped(query, case.cache, kv_b, groups, scale=0.3)
    want, want_scales = quantise_reference(out.flatten(1))
    assert torch.equal(values.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(scales, want_scales)


def test_blocks_that_see_nothing_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys 6 .. 9 of ten new tokens: the first six queries do not see them."""
    monkeypatch.setattr(mla_prefill_plan, "BLOCK_QUERIES", 3)
    case, _ = make_case("blocks", ((10, 10),), 8)
    groups = plan_groups(split_rows(*case.ragged()), case.ragged()[3], 6, CPU)
    first, second = (group.blocks.tolist() for group in groups)
    # (query, queries, key, keys, shift, is first), most keys first
    assert first == [[3, 3, 0, 6, 3, 1], [6, 3, 0, 6, 6, 1], [9, 1, 0, 6, 9, 1], [0, 3, 0, 3, 0, 1]]
    assert second == [[9, 1, 0, 4, 3, 0], [6, 3, 0, 3, 0, 0]]


def test_scratch_is_bounded() -> None:
    assert max_keys(128, 256, 2) * 128 * 256 * 2 == mla_prefill_plan.SCRATCH_BYTES
    assert max_keys(10**6, 256, 2) == mla_prefill_plan.LEAST_KEYS


SMALL = [(2, (12, 6, 10), ((3, 20), (1, 1), (40, 40), (2, 90))), (1, (16, 16, 16), ((70, 70),))]
LARGE = [
    (128, (128, 64, 128), ((300, 300), (1, 700), (129, 4000), (64, 64))),
    (16, (128, 64, 128), ((2048, 4096),)),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize("groups_of", [50, 1500])
@pytest.mark.parametrize("shape", SMALL if INTERPRETED else [*SMALL, *LARGE])
def test_triton(
    request: pytest.FixtureRequest, device: str, dtype: torch.dtype, groups_of: int,
    shape: tuple[int, tuple[int, int, int], tuple[tuple[int, int], ...]],
) -> None:  # fmt: skip
    heads, (nope, rope, value), rows = shape
    rng = generator(request.node.nodeid)
    case, _ = make_case(request.node.nodeid, rows, 8)
    groups = plan_groups(split_rows(*case.ragged()), 8, groups_of, torch.device(device))
    num_tokens, most = sum(case.counts), max(len(group.slots) for group in groups)
    query = randn(rng, num_tokens, heads, nope + rope).to(device, dtype)
    every = randn(rng, most, heads, nope + value).to(device, dtype)
    ropes = randn(rng, most, 3 + rope).to(device, dtype)[:, 3:]
    out = torch.full((2, num_tokens, heads, value), torch.nan, device=device)
    lse = torch.full((2, num_tokens, heads), torch.nan, device=device)
    ours = out[1].to(dtype)
    scale = (nope + rope) ** -0.5
    for group in groups:
        keys = len(group.slots)
        # Keys that differ from group to group.
        both, key_rope = every[:keys].roll(keys, 1), ropes[:keys].roll(keys, 1)
        both = both.contiguous()
        attend_group_reference(
            query.float(), both.float(), key_rope.float(), group, out[0], lse[0], scale=scale
        )
        mla_prefill_triton.launch(query, both, key_rope, group, ours, lse[1], scale=scale)
    error = float((ours.float() - out[0]).norm() / out[0].norm())
    # Not a number anywhere would be one here too.
    assert error < (1e-2 if dtype == torch.bfloat16 else 1e-4), error
    torch.testing.assert_close(lse[1], lse[0], rtol=1e-2, atol=1e-2)
