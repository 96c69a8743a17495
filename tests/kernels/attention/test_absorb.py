"""The end of absorbed attention: the Triton path against float64."""

import pytest
import torch

from kernels.attention import absorb_triton
from kernels.attention.absorb import absorb_values
from kernels.gemm.block_dequantise import BLOCK
from tests.kernels.tensors import generator, randn
from tests.kernels.triton_device import DEVICES, INTERPRETED

SMALL = (3, 64, 256)  # heads, D, C
SIZES = [SMALL] if INTERPRETED else [SMALL, (128, 128, 512)]


def norm_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    return generator(request.node.nodeid)


def of_device(device: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The interpreter does not round to bfloat16 as the hardware does."""
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    return [tensor.to(device, dtype) for tensor in tensors]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("num_tokens", [0, 1, 19] if INTERPRETED else [0, 1, 19, 128])
@pytest.mark.parametrize("follows", [False, True])
def test_absorb_values(
    rng: torch.Generator, device: str, sizes: tuple[int, ...], num_tokens: int, follows: bool
) -> None:
    heads, nope, rank = sizes
    latents, kv_b = of_device(
        device, randn(rng, num_tokens, heads, rank), randn(rng, heads, nope + BLOCK, rank)
    )
    values, scales = absorb_triton.launch(latents, kv_b, nope, follows=follows)
    assert values.shape == (num_tokens, heads * BLOCK)
    assert scales.shape == (num_tokens, heads)
    assert values.dtype == torch.float8_e4m3fn
    if num_tokens:
        want = torch.einsum("thc,hvc->thv", latents.double(), kv_b[:, nope:].double())
        got = values.float().view(num_tokens, heads, BLOCK) * scales.unsqueeze(-1)
        assert norm_error(got, want) < 4e-2
        largest = want.abs().amax(dim=-1) / 448
        torch.testing.assert_close(scales.double(), largest, rtol=1e-4, atol=0)


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_reference(rng: torch.Generator, num_tokens: int) -> None:
    heads, nope, rank = SMALL
    latents, kv_b = randn(rng, num_tokens, heads, rank), randn(rng, heads, nope + BLOCK, rank)
    values, scales = absorb_values(latents, kv_b, nope)
    assert scales.shape == (num_tokens, heads)
    for token in range(num_tokens):
        for head in range(heads):
            want = kv_b[head, nope:] @ latents[token, head]
            got = values[token].float().view(heads, BLOCK)[head] * scales[token, head]
            assert norm_error(got, want) < 4e-2
