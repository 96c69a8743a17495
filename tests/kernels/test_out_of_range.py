"""Triton kernels given ids, slots and pages that there are not: the host does not read those on a
device, so they are left out, and what lies beside the tensors is neither read nor written."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kernels.attention import absorb_query_triton, rope_write_triton
from kernels.attention.rope_write import rope_write_reference
from kernels.build.aligned_rows import Permuted, empty_permuted
from kernels.elementwise import combine_triton
from kernels.elementwise.combine import Combination, combine_reference
from kernels.elementwise.quantise import quantise_reference
from kernels.gemm import fp8_gemm_triton
from kernels.gemm.fp8_gemm import fp8_gemm_reference
from kernels.gemm.grouped_linear import grouped_linear_aligned_reference
from kernels.gemm.grouped_linear_triton import aligned
from kernels.moe import fused_moe_triton, gate_triton, permute_masked_triton, permute_triton
from kernels.moe.fused_experts import FusedExperts
from kernels.moe.fused_moe import fused_moe_reference
from kernels.moe.permute import permute_reference
from kernels.moe.permute_masked import permute_masked_reference
from tests.kernels.tensors import generator, randn
from tests.kernels.triton_device import DEVICES

pytestmark = pytest.mark.parametrize("device", DEVICES)

EXPERTS, CHOICES, WIDTH = 4, 3, 256
BESIDE = 4096  # bytes in front of a tensor and behind it
WRONG = (EXPERTS, 9, -7, 2**32 + 1, -(2**32) + 2, 2**40)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    return generator(request.node.nodeid)


def put_between(x: torch.Tensor, filler: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A copy of `x`, strides and all, and the bytes in front of it and behind it."""
    num = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    num_bytes = num * x.element_size() if x.numel() else 0
    memory = torch.full((2 * BESIDE + num_bytes,), filler, dtype=torch.uint8, device=x.device)
    middle = memory[BESIDE : BESIDE + num_bytes].view(x.dtype).as_strided(x.shape, x.stride())
    return middle.copy_(x), memory[:BESIDE], memory[BESIDE + num_bytes :]


@contextmanager
def untouched(*beside: torch.Tensor) -> Iterator[None]:
    before = [each.clone() for each in beside]
    yield
    for each, was in zip(beside, before, strict=True):
        assert torch.equal(each, was)


def with_wrong(topk_idx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [T, K] of which some are no experts, and the same with -1 for these."""
    ids = topk_idx.clone()
    ids.view(-1)[: 2 * len(WRONG) : 2] = torch.tensor(WRONG)
    return ids, ids.where((ids >= 0) & (ids < EXPERTS), -1)


def choices(rng: torch.Generator, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return with_wrong(torch.randint(0, EXPERTS, (num_tokens, CHOICES), generator=rng))


def guarded(
    monkeypatch: pytest.MonkeyPatch,
) -> list[torch.Tensor]:
    """What will lie beside the outputs of `permute`."""
    beside: list[torch.Tensor] = []

    def between(x: torch.Tensor) -> torch.Tensor:
        middle, *around = put_between(x, 0x5A)
        beside.extend(around)
        return middle

    def empty(*arguments: object) -> Permuted:
        found = empty_permuted(*arguments)
        assert found.scales is not None
        return Permuted(
            rows=between(found.rows), scales=between(found.scales), row_of=between(found.row_of),
            counts=between(found.counts), ends=between(found.ends),
            expert_of=between(found.expert_of),
        )  # fmt: skip

    monkeypatch.setattr(permute_triton, "empty_permuted", empty)
    return beside


@pytest.mark.parametrize("num_tokens", [4, 11])
def test_permute(
    rng: torch.Generator, device: str, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    ids, known = (each.to(device) for each in choices(rng, num_tokens))
    hidden, scale = quantise_reference(randn(rng, num_tokens, WIDTH).to(device))
    want = permute_reference(hidden, known, EXPERTS, alignment=8, scale=scale)
    beside = guarded(monkeypatch)
    found = permute_triton.launch(hidden, ids, EXPERTS, 8, scale)
    for name in ("row_of", "counts", "ends", "expert_of"):
        assert torch.equal(getattr(found, name), getattr(want, name)), name
    used = want.expert_of >= 0
    assert torch.equal(found.rows[used].float(), want.rows[used].float())
    assert torch.equal(found.scales[used], want.scales[used])
    assert len(beside) == 12
    assert all(bool((each == 0x5A).all()) for each in beside)


def test_permute_of_more_than_most(
    rng: torch.Generator, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choices that there is no room for are left out."""
    topk_idx = torch.randint(0, EXPERTS, (9, CHOICES), generator=rng).to(device)
    hidden, scale = quantise_reference(randn(rng, 9, WIDTH).to(device))
    want = permute_reference(hidden, topk_idx, EXPERTS, alignment=4, scale=scale)
    beside = guarded(monkeypatch)
    found = permute_triton.launch(hidden, topk_idx, EXPERTS, 4, scale, 2)
    num_rows = len(found.rows)
    assert num_rows < want.ends.max()
    assert torch.equal(found.row_of, want.row_of.where(want.row_of < num_rows, -1))
    assert torch.equal(found.ends, want.ends.clamp_max(num_rows))
    assert all(bool((each == 0x5A).all()) for each in beside)


@pytest.mark.parametrize("max_found", [0, 2048])
def test_permute_masked(
    rng: torch.Generator, device: str, monkeypatch: pytest.MonkeyPatch, max_found: int
) -> None:
    monkeypatch.setattr(permute_masked_triton, "MAX_FOUND", max_found)
    ids, known = (each.to(device) for each in choices(rng, 8))
    hidden = randn(rng, 8, WIDTH).to(device)
    found = permute_masked_triton.launch(hidden, ids, EXPERTS, 8, 0, None)
    want = permute_masked_reference(hidden, known, EXPERTS, 8)
    assert torch.equal(found.row_of, want.row_of)
    assert torch.equal(found.counts, want.counts)


def test_fused_moe(rng: torch.Generator, device: str) -> None:
    ids, known = (each.to(device) for each in choices(rng, 7))
    experts = FusedExperts(
        gate_up=(randn(rng, EXPERTS, 2 * 64, WIDTH) / 16).to(device),
        down=(randn(rng, EXPERTS, WIDTH, 64) / 8).to(device),
    )
    hidden = randn(rng, 7, WIDTH).to(device)
    weights = torch.rand(7, CHOICES, generator=rng).to(device)
    found = fused_moe_triton.launch(hidden, ids, weights, experts)
    want = fused_moe_reference(hidden, known, weights, experts)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def combination(rng: torch.Generator, device: str) -> tuple[Combination, torch.Tensor]:
    """Its rows lie between NaN, which a sum would show; and the rows of choices that there are."""
    rows, *_ = put_between(randn(rng, 5, WIDTH).to(device), 0xFF)
    row_of = torch.randint(0, 5, (CHOICES, 20), generator=rng, dtype=torch.int32)
    row_of.view(-1)[::4] = torch.tensor([5, 6, -2])[torch.arange(15) % 3].int()
    weights = torch.rand(20, CHOICES, generator=rng).to(device)
    known = row_of.where((row_of >= 0) & (row_of < 5), -1).to(device)
    x = Combination(rows=rows, row_of=known, weights=weights, base=None)
    # What is built on a CPU is checked; this stands for ids on a device.
    object.__setattr__(x, "row_of", row_of.to(device))
    return x, known


def test_combine(rng: torch.Generator, device: str) -> None:
    x, known = combination(rng, device)
    found = combine_triton.launch(x.rows, x.row_of, x.weights, None)
    torch.testing.assert_close(found, combine_reference(x.rows, known, x.weights))


def test_slots(rng: torch.Generator, device: str) -> None:
    """Of both kernels that write to the cache; two tokens have slots behind it."""
    pages, page_tokens, heads, nope, rope, latent = 2, 4, 2, 128, 8, 128
    slots = torch.tensor([3, 8, 0, 10, -1, 2**33], device=device)
    projected = randn(rng, 6, latent + rope).to(device)
    angles = randn(rng, 6, rope // 2)
    norm, kv_b = randn(rng, latent).to(device), randn(rng, heads, nope + 64, latent).to(device)
    before = randn(rng, pages, page_tokens, latent + rope).to(device)
    cache, *beside = put_between(before, 0x5A)
    given = (
        randn(rng, 6, heads, nope + rope).to(device), projected[:, :latent],
        projected[:, latent:], torch.polar(torch.ones_like(angles), angles).to(device), slots,
    )  # fmt: skip
    want = before.clone()
    known = slots.where(slots < pages * page_tokens, -1)
    rope_write_reference(given[0].clone(), *given[1:4], known, want, latent_norm=norm, eps=1e-6)
    with untouched(*beside):
        absorb_query_triton.launch(*given, cache, kv_b, latent_norm=norm, eps=1e-6)
        torch.testing.assert_close(cache, want, rtol=1e-5, atol=1e-5)
        cache.copy_(before)
        rope_write_triton.launch(*given, cache, latent_norm=norm, eps=1e-6)
        torch.testing.assert_close(cache, want, rtol=1e-5, atol=1e-5)


def test_numbers_of_replicas(rng: torch.Generator, device: str) -> None:
    """Whatever they are, a physical expert is one of the table's."""
    logits, bias = randn(rng, 9, EXPERTS).to(device), torch.zeros(EXPERTS, device=device)
    table = torch.arange(100, 100 + 2 * EXPERTS, device=device).view(EXPERTS, 2)
    physical, *_ = put_between(table, 0x5A)
    numbers = torch.tensor([0, 9, -3, 2**31 - 1], device=device)
    topk_idx, placed, _ = gate_triton.launch(
        logits, bias, num_groups=1, groups_per_token=1, experts_per_token=CHOICES, norm_topk=True,
        scaling=1.0, physical=physical, num_replicas=numbers, first=5,
    )  # fmt: skip
    assert torch.equal((placed - 100) // 2, topk_idx)


def test_experts_of_blocks(rng: torch.Generator, device: str) -> None:
    expert_of = torch.tensor([1, EXPERTS, 2**30, 0]).repeat_interleave(128).int().to(device)
    x = randn(rng, 4 * 128, WIDTH).to(device)
    weight, *_ = put_between(randn(rng, EXPERTS, 64, WIDTH).to(device), 0xFF)
    known = expert_of < EXPERTS
    found = aligned(x, expert_of, weight)
    want = grouped_linear_aligned_reference(x, expert_of.where(known, -1), weight)
    torch.testing.assert_close(found[known], want[known], rtol=1e-4, atol=1e-3)
    values, scales = quantise_reference(x)
    small = (weight * 8).to(torch.float8_e4m3fn)
    w_scale = torch.rand(EXPERTS, 1, WIDTH // 128, generator=rng).to(device)
    found = fp8_gemm_triton.contiguous((values, scales, small, w_scale), expert_of)
    for block, expert in ((0, 1), (3, 0)):
        here = slice(128 * block, 128 * block + 128)
        want = fp8_gemm_reference(values[here], scales[here], small[expert], w_scale[expert])
        torch.testing.assert_close(found[here].float(), want.float(), rtol=2e-2, atol=1.0)
