"""The gate's Triton kernels: its logits against float64, its choice against the reference."""

import pytest
import torch

from kernels.gemm import router_gemm_triton
from kernels.gemm.router_gemm import MANY_ROWS, TOLERANCE, router_gemm, router_gemm_reference
from kernels.moe import gate_triton
from kernels.moe.choose_replica import choose_replica
from kernels.moe.gate import count_experts, drop_groups, gate
from tests.kernels.tensors import generator, randn
from tests.kernels.triton_device import DEVICES, INTERPRETED

# experts, groups, groups per token, experts per token
SHAPES = [(8, 1, 1, 3), (8, 4, 2, 3), (12, 4, 1, 3), (4, 4, 2, 2), (64, 8, 4, 8)]
LARGE = [] if INTERPRETED else [(256, 8, 4, 8)]
ROWS = [0, 1, 5] if INTERPRETED else [0, 1, 16, 128, 1000]
CLOSE = 1e-6  # several times what float32 makes of scores, and of sums of two


def undecided(
    logits: torch.Tensor, bias: torch.Tensor, shape: tuple[int, int, int, int]
) -> torch.Tensor:
    """[T] bool: tokens whose choice float32 cannot tell, by what float64 makes of it: groups, or
    experts, that are chosen and others that are not, or come later, are less than CLOSE apart."""
    _, groups, kept_groups, chosen = shape
    choice = (logits.double().sigmoid() + bias.double()).unflatten(1, (groups, -1))
    ratings = choice.topk(min(2, choice.shape[2]), dim=-1).values.sum(-1).sort(dim=1).values
    drop_groups(choice, kept_groups)
    ordered = choice.flatten(1).sort(dim=1, descending=True).values
    close = (ordered[:, :-1] - ordered[:, 1:])[:, :chosen].lt(CLOSE).any(1)
    if kept_groups < groups:
        close |= ratings[:, -kept_groups] - ratings[:, -kept_groups - 1] < CLOSE
    return close


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_tokens", ROWS)
@pytest.mark.parametrize("norm_topk", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, *LARGE])
def test_choice(
    request: pytest.FixtureRequest, device: str, shape: tuple[int, int, int, int],
    norm_topk: bool, num_tokens: int,
) -> None:  # fmt: skip
    rng = generator(request.node.nodeid)
    experts, groups, kept_groups, chosen = shape
    options = {
        "num_groups": groups,
        "groups_per_token": kept_groups,
        "experts_per_token": chosen,
        "norm_topk": norm_topk,
        "scaling": 2.5,
    }
    logits, bias = randn(rng, num_tokens, experts), randn(rng, experts) * 0.3
    # The reference makes its logits itself: from the identity they are what it is given.
    want_idx, want_weights = gate(logits, torch.eye(experts), bias, **options)
    physical = torch.randint(0, 4 * experts, (experts, 3), generator=rng)
    num_replicas = torch.randint(1, 4, (experts,), generator=rng)
    counts = torch.randint(0, 9, (experts,), generator=rng)
    want_counts, counts = counts, counts.to(device, copy=True)
    topk_idx, placed, topk_weights = gate_triton.launch(
        logits.to(device), bias.to(device), **options, physical=physical.to(device),
        num_replicas=num_replicas.to(device), counts=counts, first=7,
    )  # fmt: skip
    left_out = undecided(logits, bias, shape)
    assert int(left_out.sum()) <= num_tokens / 100
    want_idx = torch.where(left_out[:, None], topk_idx.cpu(), want_idx)
    count_experts(want_idx, want_counts)
    assert torch.equal(topk_idx.cpu(), want_idx)
    assert torch.equal(counts.cpu(), want_counts)
    assert torch.equal(placed.cpu(), choose_replica(want_idx, physical, num_replicas, 7))
    decided = ~left_out
    found_weights, want_weights = topk_weights.cpu()[decided], want_weights[decided]
    torch.testing.assert_close(found_weights, want_weights, rtol=1e-5, atol=1e-6)
    plain = gate_triton.launch(logits.to(device), bias.to(device), **options)
    assert torch.equal(plain[1], topk_idx)


@pytest.mark.parametrize("device", DEVICES)
def test_equal_choices_go_to_the_smaller_id(device: str) -> None:
    logits, bias = torch.zeros(2, 8, device=device), torch.zeros(8, device=device)
    topk_idx, _, _ = gate_triton.launch(
        logits, bias, num_groups=4, groups_per_token=2, experts_per_token=3, norm_topk=True,
        scaling=1.0,
    )  # fmt: skip
    assert topk_idx.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_tokens", ROWS)
@pytest.mark.parametrize(("experts", "width"), [(12, 300), (256, 384 if INTERPRETED else 7168)])
def test_logits(
    request: pytest.FixtureRequest, device: str, experts: int, width: int, num_tokens: int
) -> None:
    rng = generator(request.node.nodeid)
    # NOTE: the interpreter multiplies the bits of bfloat16 as if they were integers.
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    hidden, weight = randn(rng, num_tokens, width).to(dtype), randn(rng, experts, width).to(dtype)
    want = (hidden.double() @ weight.double().t()).to(device)
    hidden, weight = hidden.to(device), weight.to(device)
    # Again and again: the counters of a launch must be back at zero. Then without them.
    ways: list[tuple[int, router_gemm_triton.RouterTritonShape | None]] = [(0, None), (0, None)]
    if num_tokens <= router_gemm_triton.FEW_ROWS:
        ways.append((num_tokens, None))
    if experts == 12 or not INTERPRETED:
        ways += [(0, router_gemm_triton.shape_for(5000))] * 2
    for few_rows, shape in ways:
        out = router_gemm_triton.launch(hidden, weight, few_rows=few_rows, shape=shape)
        assert out.dtype == torch.float32
        assert (out - want).norm() <= TOLERANCE * want.norm()
    for other in (router_gemm_reference(hidden, weight), router_gemm(hidden, weight)):
        assert (other - want).norm() <= TOLERANCE * want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [MANY_ROWS - 1, MANY_ROWS, 4096])
def test_logits_of_many_tokens(request: pytest.FixtureRequest, num_tokens: int) -> None:
    rng = generator(request.node.nodeid)
    hidden, weight = (randn(rng, rows, 7168).bfloat16().cuda() for rows in (num_tokens, 256))
    want, out = hidden.double() @ weight.double().t(), router_gemm(hidden, weight)
    assert out.dtype == torch.float32
    assert (out - want).norm() <= TOLERANCE * want.norm()
