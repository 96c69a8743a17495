"""The CUDA path of MLA prefill against the reference in float32, and against torch's attention."""

import pytest
import torch
import torch.nn.functional as F

from kernels.attention import mla_prefill_cuda
from kernels.attention.mla_prefill import (
    attend_group_reference,
    mla_prefill,
    mla_prefill_grouped,
    mla_prefill_quantised,
)
from kernels.attention.mla_prefill_plan import KeyGroup, plan_groups
from kernels.attention.paged_rows import split_rows
from kernels.build.fp8_scales import empty_scales
from kernels.elementwise.quantise import quantise_reference
from tests.kernels.attention_case import make_case
from tests.kernels.tensors import generator, randn

NOPE, ROPE, VALUE = 128, 64, 128
SCALE = (NOPE + ROPE) ** -0.5
DEVICE = torch.device("cuda")
# (heads, keys of a group at most, (new tokens, length) of each row)
CASES = (
    (1, 4096, ((128, 128),)),
    (3, 4096, ((5, 5),)),
    (2, 4096, ((1, 1), (1, 64), (3, 20), (64, 64), (65, 65), (127, 129))),
    (128, 4096, ((300, 300), (1, 700), (129, 1500), (64, 64))),
    (16, 1500, ((300, 300), (1, 700), (129, 4000), (64, 64))),
    (5, 50, ((40, 40), (2, 90), (1, 1), (0, 9))),
    (16, 1024, ((2048, 4096),)),
    (128, 4096, ((1, 64), (7, 70)) * 40),
)


def operands(
    test_id: str, heads: int, most: int, rows: tuple[tuple[int, int], ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[KeyGroup, ...]]:
    """query whose rows are slices; keys and values, rotated keys whose rows are; groups."""
    rng = generator(test_id)
    case, _ = make_case(test_id, rows, 8)
    groups = plan_groups(split_rows(*case.ragged()), 8, most, DEVICE)
    keys = max(len(group.slots) for group in groups)
    shape = sum(case.counts), heads, NOPE + ROPE
    query = randn(rng, *shape[:2], shape[2] + 8).to(DEVICE, torch.bfloat16)[..., : shape[2]]
    both = randn(rng, keys, heads, NOPE + VALUE).to(DEVICE, torch.bfloat16)
    key_rope = randn(rng, keys, 512 + ROPE).to(DEVICE, torch.bfloat16)[:, 512:]
    return query, both, key_rope, groups


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "most", "rows"), CASES)
def test_against_reference(
    request: pytest.FixtureRequest, heads: int, most: int, rows: tuple[tuple[int, int], ...]
) -> None:
    query, both, key_rope, groups = operands(request.node.nodeid, heads, most, rows)
    out = torch.full((len(query), heads, VALUE), torch.nan, device=DEVICE)
    lse = torch.full((2, len(query), heads), torch.nan, device=DEVICE)
    ours = out.to(torch.bfloat16)
    for index, group in enumerate(groups):
        # Keys that differ from group to group.
        keys = len(group.slots)
        here, rope = both[:keys].roll(index, 0), key_rope.roll(index, 0)[:keys]
        attend_group_reference(
            query.float(), here.float(), rope.float(), group, out, lse[0], scale=SCALE
        )
        mla_prefill_cuda.launch(query, here, rope, group, ours, lse[1], scale=SCALE)
    error = float((ours.float() - out).norm() / out.norm())
    # Not a number anywhere would be one here too.
    assert error < 1e-2, error
    torch.testing.assert_close(lse[1], lse[0], rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [0, 3, 4, 5])
def test_quantised(request: pytest.FixtureRequest, case: int) -> None:
    """The bits that quantising the result gives, in one group and in several."""
    query, both, key_rope, groups = operands(request.node.nodeid, *CASES[case])
    shape = *query.shape[:2], VALUE
    outs = [torch.full(shape, torch.nan, device=DEVICE).to(torch.bfloat16) for _ in range(2)]
    lses = [torch.full(shape[:2], torch.nan, device=DEVICE) for _ in range(2)]
    values = torch.zeros(len(query), shape[1] * VALUE, device=DEVICE).to(torch.float8_e4m3fn)
    quantised = values, empty_scales(values)
    for index, group in enumerate(groups):
        keys = len(group.slots)
        here, rope = both[:keys].roll(index, 0), key_rope.roll(index, 0)[:keys]
        for out, lse, to in zip(outs, lses, (None, quantised), strict=True):
            mla_prefill_cuda.launch(query, here, rope, group, out, lse, scale=SCALE, quantised=to)
    want = quantise_reference(outs[0].flatten(1))
    assert torch.equal(quantised[1], want[1])
    assert torch.equal(quantised[0].view(torch.uint8), want[0].view(torch.uint8))
    if len(groups) == 1:
        assert outs[1].isnan().all()


@pytest.mark.gpu
def test_against_torch(request: pytest.FixtureRequest) -> None:
    query, both, key_rope, (group,) = operands(request.node.nodeid, 128, 1111, ((1111, 1111),))
    out = torch.empty(1111, 128, VALUE, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.empty(1111, 128, device=DEVICE)
    mla_prefill_cuda.launch(query, both, key_rope, group, out, lse, scale=SCALE)
    shared = key_rope[:, None].expand(-1, 128, -1)
    key = torch.cat((both[..., :NOPE], shared), dim=-1)
    first, second, third = (each.transpose(0, 1)[None] for each in (query, key, both[..., NOPE:]))
    want = F.scaled_dot_product_attention(first, second, third, is_causal=True, scale=SCALE)
    error = float((out - want[0].transpose(0, 1)).float().norm() / want.float().norm())
    assert error < 1e-2, error


@pytest.mark.gpu
def test_rows_do_not_see_each_other(request: pytest.FixtureRequest) -> None:
    """Keys and values behind those of a row are not a number, and another row's."""
    rows = ((100, 130), (70, 70))
    query, both, key_rope, (group,) = operands(request.node.nodeid, 4, 4096, rows)
    outs = []
    for poison in (0.0, torch.nan):
        both[130:], key_rope[130:] = poison, poison
        out = torch.empty(170, 4, VALUE, dtype=torch.bfloat16, device=DEVICE)
        lse = torch.empty(170, 4, device=DEVICE)
        mla_prefill_cuda.launch(query, both, key_rope, group, out, lse, scale=SCALE)
        outs.append(out[:100])
    assert torch.equal(*outs)


@pytest.mark.gpu
def test_large_scores_stay_finite(request: pytest.FixtureRequest) -> None:
    query, both, key_rope, (group,) = operands(request.node.nodeid, 2, 4096, ((200, 200),))
    out = torch.full((2, 200, 2, VALUE), torch.nan, device=DEVICE)
    lse = torch.full((2, 200, 2), torch.nan, device=DEVICE)
    ours = out[1].to(torch.bfloat16)
    mla_prefill_cuda.launch(query * 300, both, key_rope, group, ours, lse[1], scale=SCALE)
    attend_group_reference(
        (query * 300).float(), both.float(), key_rope.float(), group, out[0], lse[0], scale=SCALE
    )
    error = float((ours.float() - out[0]).norm() / out[0].norm())
    assert error < 1e-2, error


@pytest.mark.gpu
def test_by_way_of_the_operation(request: pytest.FixtureRequest) -> None:
    """From latents, in one group and in several, as values and quantised."""
    rank, heads, rows = 512, 4, ((200, 333), (64, 64), (1, 40))
    case, rng = make_case(request.node.nodeid, rows, rank + ROPE)
    sources = (
        randn(rng, sum(case.counts), heads, NOPE + ROPE),
        case.cache,
        randn(rng, heads, NOPE + VALUE, rank) * rank**-0.5,
    )
    query, cache, kv_b = (each.to(DEVICE, torch.bfloat16) for each in sources)
    assert mla_prefill_cuda.takes(query, cache, kv_b)
    split = split_rows(*case.ragged())
    rounded = [each.float().cpu() for each in (query, cache, kv_b)]
    want = mla_prefill(rounded[0], rounded[1], rounded[2], split, scale=SCALE)
    for most in (4096, 150):
        groups = plan_groups(split, 8, most, DEVICE)
        out = mla_prefill_grouped(query, cache, kv_b, groups, scale=SCALE)
        error = float((out.float().cpu() - want).norm() / want.norm())
        assert error < 1e-2, error
        values, scales = mla_prefill_quantised(query, cache, kv_b, groups, scale=SCALE)
        again, again_scales = quantise_reference(out.flatten(1))
        assert torch.equal(values.view(torch.uint8), again.view(torch.uint8))
        assert torch.equal(scales, again_scales)
        assert not any(group.drawn.any() for group in groups)


def test_other_heads_are_not_for_it() -> None:
    def fits(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> bool:
        query, cache, kv_b = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
        return mla_prefill_cuda.fits(query, cache, kv_b)

    assert fits((7, 3, 192), (2, 64, 576), (3, 256, 512))
    assert not fits((7, 3, 192), (2, 64, 576), (3, 256, 512), dtype=torch.float32)
    assert not fits((7, 3, 128), (2, 64, 576), (3, 256, 512))
    assert not fits((7, 3, 192), (2, 64, 576), (3, 192, 512))
    assert not fits((7, 3, 192), (2, 64, 564), (3, 256, 500))
