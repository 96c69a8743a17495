"""What works on a block of rows for each expert: references against loops, Triton against them."""

from dataclasses import replace

import pytest
import torch

from kernels.elementwise import combine_triton, rescale_triton, silu_mul_triton
from kernels.elementwise.combine import combine_reference
from kernels.elementwise.quantise import quantise_reference
from kernels.elementwise.silu_mul import (
    silu_mul_quantise_reference,
    silu_mul_reference,
)
from kernels.gemm.grouped_linear import (
    TOLERANCE,
    grouped_linear_aligned,
    grouped_linear_aligned_reference,
    grouped_linear_masked,
    grouped_linear_masked_reference,
)
from kernels.gemm.grouped_linear_triton import aligned, masked
from kernels.gemm.linear import favoured_layout
from kernels.moe import gate_triton, permute_masked_triton
from kernels.moe.gate import count_experts, gate, route
from kernels.moe.masked_rows import MaskedRows
from kernels.moe.permute_masked import permute_masked, permute_masked_reference
from tests.kernels.tensors import generator, randn
from tests.kernels.triton_device import DEVICES, INTERPRETED, assert_same_fp8, dtypes

EXPERTS, CHOICES, WIDTH = 5, 3, 256


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    return generator(request.node.nodeid)


def distinct(rng: torch.Generator, num_tokens: int, num_experts: int) -> torch.Tensor:
    """[T, K] distinct ids of 0 .. num_experts - 1, some of them -1."""
    topk_idx = torch.rand(num_tokens, num_experts, generator=rng).argsort(1)[:, :CHOICES]
    elsewhere = torch.rand(topk_idx.shape, generator=rng) < 0.2
    return topk_idx.masked_fill(elsewhere, -1)


def assert_same(found: MaskedRows, want: MaskedRows) -> None:
    assert torch.equal(found.counts, want.counts)
    assert torch.equal(found.row_of, want.row_of)
    for expert, count in enumerate(want.counts.tolist()):
        assert torch.equal(found.rows[expert, :count], want.rows[expert, :count])
        if want.scales is not None:
            assert found.scales is not None
            assert torch.equal(found.scales[expert, :count], want.scales[expert, :count])


def test_a_choice_finds_its_row(rng: torch.Generator) -> None:
    """Experts 5 .. 9 of 15 are here; hidden states and ids are columns of something wider."""
    wide, ids = randn(rng, 11, WIDTH + 7), distinct(rng, 11, 15)
    hidden = wide[:, 3 : 3 + WIDTH]
    for idx in (ids, torch.cat((ids, ids), 1).to(torch.int32)[:, CHOICES:]):
        rows = permute_masked(hidden, idx, EXPERTS, 11, first=5)
        assert rows.rows.shape == (EXPERTS, 11, WIDTH)
        places = [0] * EXPERTS
        for token in range(11):
            for choice in range(CHOICES):
                expert = int(ids[token, choice]) - 5
                if 0 <= expert < EXPERTS:
                    place, places[expert] = places[expert], places[expert] + 1
                    assert int(rows.row_of[choice, token]) == expert * 11 + place
                    assert torch.equal(rows.rows[expert, place], hidden[token])
                else:
                    assert int(rows.row_of[choice, token]) == -1
        assert rows.counts.tolist() == places


def test_what_does_not_fit_is_refused() -> None:
    hidden, idx = torch.zeros(2, 8), torch.zeros(2, 1, dtype=torch.int64)
    for arguments in ((hidden, idx.float()), (hidden[:1], idx), (hidden.t(), idx)):
        with pytest.raises(ValueError):
            permute_masked(*arguments, 1, 2)
    x, weight, counts = torch.zeros(2, 3, 8), torch.zeros(2, 4, 8), torch.zeros(2).int()
    for wrong in ((x[:1], counts, weight), (x, counts.long(), weight), (x, counts, weight.half())):
        with pytest.raises(ValueError):
            grouped_linear_masked(*wrong)
    with pytest.raises(ValueError, match="multiple of 128"):
        grouped_linear_aligned(x[0], counts, weight)
    with pytest.raises(ValueError, match="int32"):
        grouped_linear_aligned(torch.zeros(128, 8), torch.zeros(128), weight)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_tokens", [0, 1, 13] if INTERPRETED else [0, 1, 13, 128, 1000])
@pytest.mark.parametrize("fp8", [False, True])
def test_permute(rng: torch.Generator, device: str, num_tokens: int, fp8: bool) -> None:
    hidden = randn(rng, num_tokens, WIDTH + 16)[:, 16:].to(device)
    scale = None
    if fp8:
        hidden = (hidden * 10).to(torch.float8_e4m3fn)
        scale = torch.rand(num_tokens, WIDTH // 128, generator=rng).to(device)
    everywhere = distinct(rng, num_tokens, 4 * EXPERTS)
    crowded = torch.full_like(everywhere, 7)
    nowhere = torch.full_like(everywhere, -1)
    for idx in (everywhere, everywhere.int(), crowded, nowhere):
        arguments = (hidden, idx.to(device), EXPERTS, max(1, num_tokens))
        found = permute_masked_triton.launch(*arguments, EXPERTS, scale)
        assert_same(found, permute_masked_reference(*arguments, first=EXPERTS, scale=scale))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("max_found", [0, 2048])
def test_places_found_or_looked_up(
    rng: torch.Generator, device: str, max_found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many choices the places are worked out by a kernel of its own."""
    monkeypatch.setattr(permute_masked_triton, "MAX_FOUND", max_found)
    for name in ("CHUNK", "LARGE_CHUNK"):
        monkeypatch.setattr(permute_masked_triton, name, 16)
    hidden, idx = randn(rng, 13, WIDTH).to(device), distinct(rng, 13, 2 * EXPERTS).to(device)
    found = permute_masked_triton.launch(hidden, idx, EXPERTS, 13, 3, None)
    assert_same(found, permute_masked_reference(hidden, idx, EXPERTS, 13, first=3))


@pytest.mark.parametrize("device", DEVICES)
def test_permute_and_quantise(rng: torch.Generator, device: str) -> None:
    hidden = randn(rng, 7, 10 * 128).to(device, dtypes()[-1])
    idx = distinct(rng, 7, 2 * EXPERTS).to(device)
    found = permute_masked_triton.launch(hidden, idx, EXPERTS, 8, 2, None, quantises=True)
    values, scale = quantise_reference(hidden)
    want = permute_masked_reference(values, idx, EXPERTS, 8, first=2, scale=scale)
    assert torch.equal(found.counts, want.counts)
    assert torch.equal(found.row_of, want.row_of)
    for expert, count in enumerate(want.counts.tolist()):
        here = (found.rows[expert, :count], found.scales[expert, :count])
        assert_same_fp8(here, (want.rows[expert, :count], want.scales[expert, :count]))
    on_cpu = permute_masked(hidden.cpu(), idx.cpu(), EXPERTS, 8, first=2, quantises=True)
    want = permute_masked_reference(
        *(quantise_reference(hidden.cpu())[:1]), idx.cpu(), EXPERTS, 8, first=2,
        scale=quantise_reference(hidden.cpu())[1],
    )  # fmt: skip
    assert on_cpu.rows.dtype == torch.float8_e4m3fn
    assert_same(replace(on_cpu, rows=on_cpu.rows.float()), replace(want, rows=want.rows.float()))


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_written_past_a_block(rng: torch.Generator, device: str) -> None:
    """Choices that are not distinct do not fit; they are left out."""
    hidden = randn(rng, 4, WIDTH).to(device)
    idx = torch.zeros(4, CHOICES, dtype=torch.int64, device=device)
    found = permute_masked_triton.launch(hidden, idx, 2, 4, 0, None)
    assert found.counts.tolist() == [4, 0]
    assert (found.row_of >= 0).sum() == 4
    assert_same(found, permute_masked_reference(hidden, idx, 2, 4))


def products(
    rng: torch.Generator, device: str, dtype: torch.dtype, shape: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, counts and weight of some experts, poisoned behind the counts."""
    n, k = shape
    capacity = 37 if INTERPRETED else 300
    counts = torch.tensor([3, 0, capacity, 17, 1], dtype=torch.int32)
    x = randn(rng, EXPERTS, capacity, k)
    for expert, count in enumerate(counts.tolist()):
        x[expert, count:] = torch.nan
    weight = randn(rng, EXPERTS, n, k) * k**-0.5
    return x.to(device, dtype), counts.to(device), weight.to(device, dtype)


def near(found: torch.Tensor, want: torch.Tensor) -> None:
    bound = TOLERANCE if want.dtype == torch.bfloat16 else 1e-5
    assert found.dtype == want.dtype
    assert (found.float() - want.float()).norm() <= bound * want.float().norm()


SHAPES = [(150, 72)] if INTERPRETED else [(150, 72), (4096, 7168), (7168, 2048)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("expected_rows", [1, 20, 128])
def test_masked_product(
    rng: torch.Generator, device: str, dtype: torch.dtype, shape: tuple[int, int],
    expected_rows: int,
) -> None:  # fmt: skip
    x, counts, weight = products(rng, device, dtype, shape)
    found = masked(x, counts, weight, expected_rows)
    want = grouped_linear_masked_reference(x, counts, weight)
    for expert, count in enumerate(counts.tolist()):
        if count:
            near(found[expert, :count], want[expert, :count])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", dtypes())
@pytest.mark.parametrize("shape", SHAPES)
def test_aligned_product(
    rng: torch.Generator, device: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    n, k = shape
    expert_of = torch.full((4 * 128,), -1, dtype=torch.int32, device=device)
    expert_of[:5], expert_of[128:256], expert_of[256:257] = 0, 3, 4
    x = randn(rng, 4 * 128, k).to(device, dtype)
    x[expert_of < 0] = torch.nan
    weight = (randn(rng, EXPERTS, n, k) * k**-0.5).to(device, dtype)
    want = grouped_linear_aligned_reference(x, expert_of, weight)
    live = expert_of >= 0
    near(aligned(x, expert_of, weight)[live], want[live])
    one_by_one = torch.stack([weight[e].double() @ x[i].double() for i, e in [(2, 0), (256, 4)]])
    torch.testing.assert_close(want[[2, 256]].double(), one_by_one, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("counts", [[3, 0, 1, 9], [1, 5, 0, 0], [12, 12, 12, 12], [0, 0, 0, 0]])
def test_bits_of_a_row_do_not_depend_on_the_layout(rng: torch.Generator, counts: list[int]) -> None:
    x, weight = randn(rng, 4, 12, 200), favoured_layout(randn(rng, 4, 64, 200))
    found = grouped_linear_masked(x, torch.tensor(counts, dtype=torch.int32), weight)
    for expert, count in enumerate(counts):
        rows = torch.zeros(128, 200)
        rows[:count] = x[expert, :count]
        expert_of = torch.full((128,), -1, dtype=torch.int32)
        expert_of[:count] = expert
        want = grouped_linear_aligned(rows, expert_of, weight)[:count]
        assert torch.equal(found[expert, :count], want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", dtypes())
def test_silu_mul(rng: torch.Generator, device: str, dtype: torch.dtype) -> None:
    x = (randn(rng, 3, 9, 2 * WIDTH) * 5).to(device, dtype)
    counts = torch.tensor([9, 0, 2], dtype=torch.int32, device=device)
    bound = 2**-7 if dtype == torch.bfloat16 else 1e-5
    want = silu_mul_reference(x, counts)
    for expected_rows in (0, 1, 9):
        found = silu_mul_triton.launch(x, counts, expected_rows=expected_rows)
        for expert, count in enumerate(counts.tolist()):
            here = found[expert, :count], want[expert, :count]
            torch.testing.assert_close(*here, rtol=bound, atol=bound)
            assert torch.equal(here[1], silu_mul_reference(x[expert, :count]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("expected_rows", [0, 1, 40])
def test_few_programs_do_all_rows(rng: torch.Generator, device: str, expected_rows: int) -> None:
    """As many as are expected share those that come."""
    x = randn(rng, 2, 19, 256).to(device, dtypes()[-1])
    counts = torch.tensor([19, 3], dtype=torch.int32, device=device)
    found = silu_mul_triton.launch_quantise(x, counts, expected_rows=expected_rows)
    want = silu_mul_quantise_reference(x, counts)
    whole = torch.tensor(0.3, device=device)
    rescaled = rescale_triton.launch(*want, whole, counts, expected_rows)
    want_rescaled = rescale_triton.launch(*want, whole, counts)
    for expert, count in enumerate(counts.tolist()):
        here = found[0][expert, :count], found[1][expert, :count]
        assert_same_fp8(here, (want[0][expert, :count], want[1][expert, :count]))
        same = rescaled[expert, :count].float(), want_rescaled[expert, :count].float()
        assert torch.equal(*same)


RULE = {
    "num_groups": 4, "groups_per_token": 2, "experts_per_token": 3, "norm_topk": True,
    "scaling": 2.5,
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_padding_is_routed_nowhere(rng: torch.Generator, device: str) -> None:
    logits, bias = randn(rng, 7, 12), randn(rng, 12) * 0.3
    logits[2] = torch.nan  # of what is no token
    is_row = torch.tensor([1, 1, 0, 1, 0, 0, 1], dtype=torch.bool)
    physical = torch.randint(0, 48, (12, 3), generator=rng)
    num_replicas = torch.randint(1, 4, (12,), generator=rng)
    counts, want_counts = torch.zeros(12, dtype=torch.int64), torch.zeros(12, dtype=torch.int64)
    placed, weights = route(
        logits, torch.eye(12), bias, physical, num_replicas, counts, first=3, is_row=is_row, **RULE
    )
    everything, all_weights = route(
        logits.nan_to_num(0), torch.eye(12), bias, physical, num_replicas, want_counts.clone(),
        first=3, **RULE,
    )  # fmt: skip
    topk_idx, _ = gate(logits[is_row], torch.eye(12), bias, **RULE)
    count_experts(topk_idx, want_counts)
    assert torch.equal(placed[is_row], everything[is_row])
    torch.testing.assert_close(weights[is_row], all_weights[is_row], rtol=1e-6, atol=0)
    assert placed[~is_row].eq(-1).all()
    assert not weights[~is_row].any()
    assert torch.equal(counts, want_counts)

    counts.zero_()
    on_device = [t.to(device) for t in (logits, bias, physical, num_replicas, counts, is_row)]
    logits, bias, physical, num_replicas, counts, is_row = on_device
    _, found, found_weights = gate_triton.launch(
        logits, bias, **RULE, physical=physical, num_replicas=num_replicas, counts=counts,
        first=3, is_row=is_row,
    )  # fmt: skip
    assert torch.equal(found.cpu(), placed)
    torch.testing.assert_close(found_weights.cpu(), weights, rtol=1e-5, atol=1e-6)
    assert torch.equal(counts.cpu(), want_counts)


@pytest.mark.parametrize("device", DEVICES)
def test_combine_of_tokens_without_experts(rng: torch.Generator, device: str) -> None:
    """Their weights may be anything."""
    rows = randn(rng, 6, WIDTH).to(device)
    row_of = torch.tensor([[0, -1, 5], [3, -1, -1]], dtype=torch.int32, device=device)
    weights = torch.tensor([[0.5, 2.0], [torch.nan, torch.inf], [1.5, torch.nan]], device=device)
    want = combine_reference(rows, row_of, weights)
    assert torch.equal(want[1], torch.zeros_like(want[1]))
    torch.testing.assert_close(want[2], 1.5 * rows[5])
    found = combine_triton.launch(rows, row_of, weights, None)
    torch.testing.assert_close(found, want)
    assert not combine_reference(rows[:0], torch.full_like(row_of, -1), weights).any()
