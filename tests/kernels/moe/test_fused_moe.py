"""Routed experts in one call: the reference against one token at a time, Triton against it."""

from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F

from kernels.build.tuned import Blocks, blocks_for, default_blocks
from kernels.moe import fused_moe_triton
from kernels.moe.fused_experts import FusedExperts
from kernels.moe.fused_moe import TOLERANCE, fused_moe, fused_moe_reference
from tests.kernels.tensors import generator, randn
from tests.kernels.triton_device import DEVICES, INTERPRETED

HIDDEN, WIDTH, EXPERTS, CHOICES = (256, 128, 5, 3) if INTERPRETED else (7168, 2048, 8, 4)


def experts_of(rng: torch.Generator, device: str, dtype: torch.dtype) -> FusedExperts:
    gate_up = randn(rng, EXPERTS, 2 * WIDTH, HIDDEN).to(device) * HIDDEN**-0.5
    down = randn(rng, EXPERTS, HIDDEN, WIDTH).to(device) * WIDTH**-0.5
    if dtype != torch.float8_e4m3fn:
        return FusedExperts(gate_up=gate_up.to(dtype), down=down.to(dtype))
    scales = [
        (torch.rand(EXPERTS, each.shape[1] // 128, each.shape[2] // 128, generator=rng) + 0.5).to(
            device
        )
        for each in (gate_up, down)
    ]
    return FusedExperts(
        gate_up=(gate_up * 60).to(dtype),
        down=(down * 60).to(dtype),
        gate_up_scale=scales[0] / 60,
        down_scale=scales[1] / 60,
    )


def choices(rng: torch.Generator, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    topk_idx = torch.stack(
        [torch.randperm(EXPERTS, generator=rng)[:CHOICES] for _ in range(num_tokens)]
    )
    elsewhere = torch.rand(num_tokens, CHOICES, generator=rng) < 0.3
    return topk_idx.masked_fill_(elsewhere, -1), torch.rand(num_tokens, CHOICES, generator=rng)


def test_reference_one_token_at_a_time(request: pytest.FixtureRequest) -> None:
    rng = generator(request.node.nodeid)
    hidden, experts = randn(rng, 6, HIDDEN), experts_of(rng, "cpu", torch.float32)
    topk_idx, topk_weights = choices(rng, 6)
    out = fused_moe_reference(hidden, topk_idx, topk_weights, experts)
    for t in range(6):
        want = torch.zeros(HIDDEN, dtype=torch.float64)
        for k, expert in enumerate(topk_idx[t].tolist()):
            if expert >= 0:
                both = experts.gate_up[expert].double() @ hidden[t].double()
                inner = F.silu(both[:WIDTH]) * both[WIDTH:]
                want += topk_weights[t, k] * (experts.down[expert].double() @ inner)
        torch.testing.assert_close(out[t].double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_tokens", [0, 1, 9] if INTERPRETED else [0, 1, 33, 1000])
@pytest.mark.parametrize("fp8", [False, True])
# Rows of padding hold whatever was there; nothing is made of what they become.
@pytest.mark.filterwarnings("ignore:overflow|invalid value|All-NaN:RuntimeWarning")
def test_triton(request: pytest.FixtureRequest, device: str, num_tokens: int, fp8: bool) -> None:
    rng = generator(request.node.nodeid)
    plain = torch.float32 if INTERPRETED else torch.bfloat16
    experts = experts_of(rng, device, torch.float8_e4m3fn if fp8 else plain)
    hidden = randn(rng, num_tokens, HIDDEN).to(device, plain)
    topk_idx, topk_weights = (each.to(device) for each in choices(rng, num_tokens or 1))
    topk_idx, topk_weights = topk_idx[:num_tokens], topk_weights[:num_tokens]
    want = fused_moe_reference(hidden, topk_idx, topk_weights, experts)
    for out in (
        fused_moe_triton.launch(hidden, topk_idx, topk_weights, experts),
        fused_moe(hidden, topk_idx, topk_weights, experts),
    ):
        assert out.dtype == plain
        assert (out.float() - want.float()).norm() <= TOLERANCE * want.float().norm()


def test_what_does_not_fit_is_refused(request: pytest.FixtureRequest) -> None:
    rng = generator(request.node.nodeid)
    experts = experts_of(rng, "cpu", torch.float32)
    topk_idx, topk_weights = choices(rng, 2)
    with pytest.raises(ValueError, match="weights torch.float32"):
        fused_moe(randn(rng, 2, HIDDEN).bfloat16(), topk_idx, topk_weights, experts)
    with pytest.raises(ValueError, match="do not fit together"):
        fused_moe(randn(rng, 3, HIDDEN), topk_idx, topk_weights, experts)
    with pytest.raises(ValueError, match="does not fit gate_up"):
        FusedExperts(gate_up=experts.gate_up, down=experts.down[:, :, 1:])
    with pytest.raises(ValueError, match="scales"):
        FusedExperts(gate_up=experts.gate_up, down=experts.down, gate_up_scale=experts.down)


def test_untuned_shapes_have_blocks() -> None:
    blocks = blocks_for(torch.device("cpu"), torch.bfloat16, 32, 4096, 7168, 3)
    assert blocks == default_blocks(torch.bfloat16, 3)
    assert Blocks(**asdict(blocks)) == blocks
