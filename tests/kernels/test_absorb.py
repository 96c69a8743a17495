"""Both ends of absorbed attention: the Triton paths against what they are made of."""

import pytest
import torch

from kernels import absorb_triton
from kernels.absorb import absorb_query, absorb_values
from kernels.block_dequantise import BLOCK
from tests.kernels.tensors import generator, randn
from tests.kernels.triton_device import DEVICES, INTERPRETED

EPS = 1e-6
PAGES, PAGE_TOKENS = 40, 4
SMALL = (3, 64, 32, 128)  # heads, D, R, C
SIZES = [SMALL] if INTERPRETED else [SMALL, (128, 128, 64, 512)]


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
def test_absorb_query(
    rng: torch.Generator, device: str, sizes: tuple[int, ...], num_tokens: int
) -> None:
    heads, nope, rope, rank = sizes
    query, kv_b, projected, norm, cache = of_device(
        device,
        randn(rng, num_tokens, heads, nope + rope),
        randn(rng, heads, nope + 128, rank),
        randn(rng, num_tokens, rank + rope),
        randn(rng, rank),
        randn(rng, PAGES, PAGE_TOKENS, rank + rope),
    )
    angles = torch.rand(num_tokens, rope // 2, generator=rng)
    rotation = torch.polar(torch.ones_like(angles), angles).to(device)
    slots = torch.randperm(PAGES * PAGE_TOKENS, generator=rng)[:num_tokens]
    slots[1:2] = -1
    written = cache.clone()
    out = absorb_triton.launch_query(
        query, kv_b, projected[:, :rank], projected[:, rank:], rotation, slots.to(device), written,
        latent_norm=norm, eps=EPS,
    )  # fmt: skip
    want_written = cache.float().cpu()
    plain = [each.float().cpu() for each in (query, kv_b, projected, norm)]
    want = absorb_query(
        plain[0], plain[1], plain[2][:, :rank], plain[2][:, rank:], rotation.cpu(), slots,
        want_written, latent_norm=plain[3], eps=EPS,
    )  # fmt: skip
    bound = 1e-5 if INTERPRETED else 1e-2
    assert out.shape == want.shape
    assert norm_error(written.cpu(), want_written) < bound
    if num_tokens:
        assert norm_error(out[..., :rank].cpu(), want[..., :rank]) < bound
        assert norm_error(out[..., rank:].cpu(), want[..., rank:]) < bound
    untouched = torch.ones(PAGES * PAGE_TOKENS, dtype=torch.bool)
    untouched[slots[slots >= 0]] = False
    assert torch.equal(written.flatten(0, 1)[untouched], cache.flatten(0, 1)[untouched])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("num_tokens", [0, 1, 19] if INTERPRETED else [0, 1, 19, 128])
def test_absorb_values(
    rng: torch.Generator, device: str, sizes: tuple[int, ...], num_tokens: int
) -> None:
    heads, nope, _, rank = sizes
    latents, kv_b = of_device(
        device, randn(rng, num_tokens, heads, rank), randn(rng, heads, nope + BLOCK, rank)
    )
    values, scales = absorb_triton.launch_values(latents, kv_b, nope)
    assert values.shape == (num_tokens, heads * BLOCK)
    assert scales.shape == (num_tokens, heads)
    assert values.dtype == torch.float8_e4m3fn
    if num_tokens:
        want = torch.einsum("thc,hvc->thv", latents.double(), kv_b[:, nope:].double())
        got = values.float().view(num_tokens, heads, BLOCK) * scales.unsqueeze(-1)
        # NOTE: the interpreter loses the carry of some values that round up.
        assert norm_error(got, want) < (0.2 if INTERPRETED else 4e-2)
        largest = want.abs().amax(dim=-1) / 448
        torch.testing.assert_close(scales.double(), largest, rtol=1e-4, atol=0)


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_references(rng: torch.Generator, num_tokens: int) -> None:
    """Of one head each, a token at a time."""
    heads, nope, rope, rank = SMALL
    query, kv_b = randn(rng, num_tokens, heads, nope + rope), randn(rng, heads, nope + BLOCK, rank)
    projected, norm = randn(rng, num_tokens, rank + rope), randn(rng, rank)
    cache = randn(rng, PAGES, PAGE_TOKENS, rank + rope)
    rotation = torch.ones(num_tokens, rope // 2, dtype=torch.complex64)
    out = absorb_query(
        query, kv_b, projected[:, :rank], projected[:, rank:], rotation, torch.arange(num_tokens),
        cache, latent_norm=norm, eps=EPS,
    )  # fmt: skip
    values, scales = absorb_values(out[..., :rank].contiguous(), kv_b, nope)
    for token in range(num_tokens):
        line = cache.flatten(0, 1)[token]
        latent = projected[token, :rank]
        torch.testing.assert_close(line[:rank], latent * latent.square().mean().rsqrt() * norm)
        torch.testing.assert_close(line[rank:], projected[token, rank:])
        for head in range(heads):
            folded = query[token, head, :nope] @ kv_b[head, :nope]
            torch.testing.assert_close(out[token, head, :rank], folded, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(out[token, head, rank:], query[token, head, nope:])
            want = kv_b[head, nope:] @ folded
            got = values[token].float().view(heads, BLOCK)[head] * scales[token, head]
            assert norm_error(got, want) < 4e-2
