"""The Triton paths of the operations around matrix products, against their references."""

from typing import Any

import pytest
import torch

from kernels.attention import rope_write_triton
from kernels.attention.rope_write import rope_write_reference
from kernels.elementwise import (
    combine_triton,
    quantise_triton,
    rescale_triton,
    rms_norm_triton,
    silu_mul_triton,
)
from kernels.elementwise.combine import Combination, combine_reference
from kernels.elementwise.quantise import quantise_reference
from kernels.elementwise.rescale import rescale_reference
from kernels.elementwise.rms_norm import norm_reference
from kernels.elementwise.silu_mul import (
    silu_mul_quantise_reference,
    silu_mul_reference,
)
from kernels.moe import permute_triton
from kernels.moe.permute import permute_reference
from tests.kernels.tensors import generator, randn
from tests.kernels.triton_device import DEVICES, INTERPRETED, assert_same_fp8, dtypes

pytestmark = pytest.mark.parametrize("device", DEVICES)

WIDTH = 640 if INTERPRETED else 7168
TOKENS = 5 if INTERPRETED else 131


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """One bit of the last place of bfloat16; sums of many float32 in another order."""
    bound = 2**-7 if dtype == torch.bfloat16 else 1e-5
    return {"rtol": bound, "atol": bound}


def close(out: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(out, want, **tolerance(want.dtype))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    return generator(request.node.nodeid)


@pytest.mark.parametrize("num_tokens", [0, 1, TOKENS])
def test_quantise(rng: torch.Generator, device: str, num_tokens: int) -> None:
    x = (randn(rng, num_tokens, WIDTH) * 30).to(device, dtypes()[-1])
    x[:, :128] = 0
    x[1:2] = 0
    for groups, rows in ((0, 0), (2, 8), (4, 4)):
        out, scale = quantise_triton.launch(x, groups=groups, rows=rows)
        assert scale.stride(0) == 1
        assert scale.shape == (num_tokens, WIDTH // 128)
        assert_same_fp8((out, scale), quantise_reference(x))
    part = x[:, 128:]
    assert_same_fp8(quantise_triton.launch(part), quantise_reference(part))


@pytest.mark.parametrize("expected_rows", [0, 1])
def test_quantise_masked(rng: torch.Generator, device: str, expected_rows: int) -> None:
    x = randn(rng, 4, TOKENS, WIDTH).to(device, dtypes()[-1])
    counts = torch.tensor([2, 0, TOKENS, 1], dtype=torch.int32, device=device)
    out = quantise_triton.launch(x, counts, expected_rows=expected_rows)
    want = quantise_reference(x, counts)
    for expert, count in enumerate(counts.tolist()):
        found = (out[0][expert, :count], out[1][expert, :count])
        assert_same_fp8(found, (want[0][expert, :count], want[1][expert, :count]))


@pytest.mark.parametrize("gated", [False, True])
def test_one_given_scale(rng: torch.Generator, device: str, *, gated: bool) -> None:
    x = (randn(rng, 3, TOKENS, WIDTH * (1 + gated)) * 5).to(device, dtypes()[-1])
    x[:, 0, 0] = 1e4  # saturates
    counts = torch.tensor([TOKENS, 0, 3], dtype=torch.int32, device=device)
    scale = torch.tensor(0.173, device=device)
    launch = silu_mul_triton.launch_quantise if gated else quantise_triton.launch
    reference = silu_mul_quantise_reference if gated else quantise_reference
    found = launch(x[0], scale=scale)
    want = reference(x[0], scale=scale)
    assert float(want[0].float().abs().max()) == 448
    assert found[1] is scale
    assert_same_fp8(found, want)
    out, _ = launch(x, counts, scale=scale)
    want = reference(x, counts, scale=scale)
    for expert, count in enumerate(counts.tolist()):
        assert_same_fp8((out[expert, :count], scale), (want[0][expert, :count], want[1]))


@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize("num_tokens", [0, 1, TOKENS])
def test_silu_mul(rng: torch.Generator, device: str, num_tokens: int, dtype: torch.dtype) -> None:
    x = (randn(rng, num_tokens, 2 * WIDTH) * 5).to(device, dtype)
    close(silu_mul_triton.launch(x), silu_mul_reference(x))
    out = silu_mul_triton.launch_quantise(x)
    assert_same_fp8(out, silu_mul_quantise_reference(x))


def test_silu_mul_of_owned_rows(rng: torch.Generator, device: str) -> None:
    x = randn(rng, 3 * TOKENS, 2 * WIDTH).to(device, dtypes()[-1])
    owner = torch.randint(-1, 2, (3 * TOKENS,), generator=rng).int().to(device)
    for groups, rows in ((4, 4), (16, 1)):
        out, scale = silu_mul_triton.launch_quantise(x, groups=groups, rows=rows, owner=owner)
        want = silu_mul_quantise_reference(x)
        owned = owner >= 0
        assert_same_fp8((out[owned], scale[owned]), (want[0][owned], want[1][owned]))
        assert out[~owned].float().isnan().all(), "as memory that nobody wrote"
        assert scale[~owned].isnan().all()


def test_silu_mul_masked(rng: torch.Generator, device: str) -> None:
    x = randn(rng, 3, TOKENS, 2 * WIDTH).to(device, dtypes()[-1])
    counts = torch.tensor([TOKENS, 0, 3], dtype=torch.int32, device=device)
    out = silu_mul_triton.launch_quantise(x, counts)
    want = silu_mul_quantise_reference(x, counts)
    for expert, count in enumerate(counts.tolist()):
        found = (out[0][expert, :count], out[1][expert, :count])
        assert_same_fp8(found, (want[0][expert, :count], want[1][expert, :count]))


@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize("width", [1, 512, 576, WIDTH])
def test_rms_norm(rng: torch.Generator, device: str, width: int, dtype: torch.dtype) -> None:
    wide = (randn(rng, TOKENS, width + 64) * 3).to(device, dtype)
    x, weight = wide[:, 64:], randn(rng, width).to(device, dtype)
    residual = randn(rng, TOKENS, width).to(device, dtype)
    alone = (x, None, weight, 1e-6)
    close(rms_norm_triton.launch(*alone)[0], norm_reference(*alone)[0])
    scale = torch.tensor(0.01, device=device)
    ways: list[dict[str, Any]] = [{}]
    if width % 128 == 0:
        quantises = {"quantises": True}
        ways += [quantises | {"plain": False}, quantises, quantises | {"scale": scale}]
    for wanted in ways:
        out, values, scales, given, total = rms_norm_triton.launch(
            x, residual, weight, 1e-6, **wanted
        )
        want = norm_reference(x, residual, weight, 1e-6, **wanted)
        assert [each is None for each in (out, values, scales, given)] == [
            each is None for each in want[:4]
        ]
        if out is not None:
            close(out, want[0])
        if values is not None:
            assert_same_fp8((values, scales), (want[1], want[2]))
        if given is not None:
            assert_same_fp8((given, scale), (want[3], scale))
        assert torch.equal(total, want[4])


@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize("has_base", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "least", "few"),
    [(0, 1, 128), (1, 1, 128), (TOKENS, 1, 128), (TOKENS, 1000, 128), (TOKENS, 1, 0)],
)
def test_rms_norm_of_a_combination(
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, device: str, num_tokens: int,
    least: int, few: int, has_base: bool, dtype: torch.dtype,
) -> None:  # fmt: skip
    monkeypatch.setattr(rms_norm_triton, "MIN_COMBINED", least)
    monkeypatch.setattr(rms_norm_triton, "FEW_COMBINED", few)
    monkeypatch.setattr(rms_norm_triton, "AT_ONCE", 3)
    num_rows, choices = 3 * num_tokens + 1, 4
    rows = randn(rng, num_rows, WIDTH).to(device, dtype)
    row_of = torch.randint(-1, num_rows, (choices, num_tokens), generator=rng)
    weights = torch.rand(num_tokens, choices, generator=rng).to(device)
    residual, base = (randn(rng, num_tokens, WIDTH).to(device, dtype) for _ in range(2))
    weight = randn(rng, WIDTH).to(device, dtype)
    x = Combination(
        rows=rows, row_of=row_of.to(device, torch.int32), weights=weights,
        base=base if has_base else None,
    )  # fmt: skip
    out, *quantised, _, total = rms_norm_triton.launch(x, residual, weight, 1e-6, quantises=True)
    given = combine_reference(rows, x.row_of, weights, base=x.base)
    close(total, given + residual)
    # The rest follows the sum, bit by bit.
    nothing = torch.zeros_like(total)
    want, *wanted, _, _ = norm_reference(nothing, total, weight, 1e-6, quantises=True)
    close(out, want)
    if num_tokens:
        assert_same_fp8((quantised[0], quantised[1]), (wanted[0], wanted[1]))


@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize(("heads", "nope", "rope", "latent"), [(5, 12, 8, 20), (128, 128, 64, 512)])
def test_rope_write(
    rng: torch.Generator, device: str, heads: int, nope: int, rope: int, latent: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    query = randn(rng, TOKENS, heads, nope + rope).to(device, dtype)
    projected = randn(rng, TOKENS, latent + rope + 3).to(device, dtype)
    latents, key = projected[:, :latent], projected[:, latent : latent + rope]
    angles = randn(rng, TOKENS, rope // 2) * 100
    rotation = torch.polar(torch.ones_like(angles), angles).to(device)
    page_tokens = 16
    num_pages = TOKENS // page_tokens + 3
    slots = torch.randperm(num_pages * page_tokens, generator=rng)[:TOKENS].to(device)
    cache = randn(rng, num_pages, page_tokens, latent + rope).to(device, dtype)
    want_query, want_cache = query.clone(), cache.clone()
    rope_write_reference(want_query, latents, key, rotation, slots, want_cache)
    rope_write_triton.launch(query, latents, key, rotation, slots, cache)
    close(query, want_query)
    close(cache, want_cache)


@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize(("heads", "nope", "rope", "latent"), [(5, 12, 8, 20), (128, 128, 64, 512)])
def test_rope_write_of_a_padded_batch(
    rng: torch.Generator, device: str, heads: int, nope: int, rope: int, latent: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """With the norm of the latent, queries to another place, and slots of -1."""
    query = randn(rng, TOKENS, heads, nope + rope).to(device, dtype)
    projected = (3 * randn(rng, TOKENS, latent + rope)).to(device, dtype)
    operands = (projected[:, :latent], projected[:, latent:])
    angles = randn(rng, TOKENS, rope // 2) * 100
    rotation = torch.polar(torch.ones_like(angles), angles).to(device)
    slots = torch.randperm(TOKENS + 5, generator=rng)[:TOKENS].to(device)
    slots[1::3] = -1
    norm, before = (randn(rng, latent) + 1).to(device, dtype), query.clone()
    absorbed = torch.full((2, TOKENS, heads, latent + rope), 7.0).to(device, dtype)
    caches = randn(rng, 1, TOKENS + 5, 1, latent + rope).to(device, dtype).repeat(2, 1, 1, 1)
    writes = (rope_write_reference, rope_write_triton.launch)
    for write, rotated, cache in zip(writes, absorbed[..., latent:], caches, strict=True):
        write(query, *operands, rotation, slots, cache, latent_norm=norm, eps=1e-6, rotated=rotated)
    assert torch.equal(query, before)
    assert bool((absorbed[..., :latent] == 7).all())
    close(absorbed[1], absorbed[0])
    close(caches[1], caches[0])
    normed = norm_reference(operands[0], None, norm, 1e-6)[0]
    kept = slots >= 0
    assert torch.equal(caches[0, slots[kept], 0, :latent], normed[kept])
    unwritten = torch.ones(TOKENS + 5, dtype=torch.bool, device=device)
    unwritten[slots[kept]] = False
    assert torch.equal(caches[0, unwritten], caches[1, unwritten])


def test_rescale(rng: torch.Generator, device: str) -> None:
    x = (randn(rng, 3, TOKENS, WIDTH) * 100).clamp(-448, 448).to(device).to(torch.float8_e4m3fn)
    scale = torch.rand(3, TOKENS, WIDTH // 128, generator=rng).to(device)
    whole = torch.tensor(0.4, device=device)
    counts = torch.tensor([1, 0, TOKENS], dtype=torch.int32, device=device)
    out = rescale_triton.launch(x, scale, whole, counts)
    want = rescale_reference(x, scale, whole, counts)
    for expert, count in enumerate(counts.tolist()):
        here = (out[expert, :count], scale[expert, :count])
        assert_same_fp8(here, (want[expert, :count], scale[expert, :count]))


LAYOUTS = [(0, 2, 3, 8), (1, 1, 1, 128), (7, 3, 5, 4)]


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_choices_are_ranked_in_parts(rng: torch.Generator, device: str, parts: int) -> None:
    idx = torch.randint(-1, 5, (23, 4), generator=rng).to(device)
    rank_of, counts = permute_triton.rank_choices(idx, 6, chunk=16, parts=parts)
    mine = torch.nn.functional.one_hot(idx.flatten() + 1, 7)[:, 1:]
    assert torch.equal(counts.long(), mine.sum(0))
    ranks = ((mine.cumsum(0) - 1) * mine).sum(1)
    known = idx.flatten() >= 0
    assert torch.equal(rank_of.long()[known], ranks[known])


@pytest.mark.parametrize(
    ("num_tokens", "num_choices", "num_experts", "alignment"),
    LAYOUTS if INTERPRETED else [*LAYOUTS, (3000, 8, 32, 128)],
)
@pytest.mark.parametrize("everything", ["spread", "to one", "to none"])
def test_permute_and_combine(
    rng: torch.Generator, device: str, num_tokens: int, num_choices: int, num_experts: int,
    alignment: int, everything: str,
) -> None:  # fmt: skip
    hidden = randn(rng, num_tokens, 256).to(device)
    scale = torch.rand(num_tokens, 2, generator=rng).to(device)
    shape = (num_tokens, num_choices)
    idx = torch.randint(-1, num_experts, shape, generator=rng)
    if everything != "spread":
        idx.fill_(-1 if everything == "to none" else num_experts - 1)
    idx = idx.to(device)
    found = permute_triton.launch(hidden, idx, num_experts, alignment, scale)
    want = permute_reference(hidden, idx, num_experts, alignment=alignment, scale=scale)
    for name in ("row_of", "counts", "ends", "expert_of"):
        assert torch.equal(getattr(found, name), getattr(want, name)), name
    live = want.expert_of >= 0
    assert torch.equal(found.rows[live], want.rows[live])
    assert found.scales is not None
    assert want.scales is not None
    assert torch.equal(found.scales[live], want.scales[live])

    rows = randn(rng, *want.rows.shape).to(device)
    weights = torch.rand(shape, generator=rng).to(device)
    base = randn(rng, num_tokens, 256).to(device)
    for added in (None, base):
        out = combine_triton.launch(rows, want.row_of, weights, added)
        close(out, combine_reference(rows, want.row_of, weights, base=added))
