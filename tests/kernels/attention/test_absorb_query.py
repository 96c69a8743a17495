"""The beginning of absorbed attention: the Triton path, and the reference by loops."""

import pytest
import torch

from kernels.attention import absorb_query_triton
from kernels.attention.absorb_query import TOLERANCE, absorb_query_in_parts
from kernels.attention.absorb_query_triton import AbsorbQueryShape
from tests.kernels.tensors import generator, randn
from tests.kernels.triton_device import DEVICES, INTERPRETED, dtypes

SMALL = (3, 128, 8, 256)  # heads, D, R, C
SIZES = [SMALL] if INTERPRETED else [SMALL, (128, 128, 64, 512)]
VALUE_DIM, PAGE_TOKENS, EPS = 64, 16, 1e-6


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    return generator(request.node.nodeid)


def operands(
    rng: torch.Generator,
    sizes: tuple[int, ...],
    num_tokens: int,
    device: str,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """Those by position, then the norm's weight. Every fifth token is padding."""
    heads, nope, rope, rank = sizes
    projected = randn(rng, num_tokens, rank + rope + 3).to(device, dtype)
    angles = randn(rng, num_tokens, rope // 2) * 100
    num_pages = num_tokens // PAGE_TOKENS + 3
    slots = torch.randperm(num_pages * PAGE_TOKENS, generator=rng)[:num_tokens]
    slots[4::5] = -1
    return (
        randn(rng, num_tokens, heads, nope + rope).to(device, dtype),
        projected[:, :rank],
        projected[:, rank : rank + rope],
        torch.polar(torch.ones_like(angles), angles).to(device),
        slots.to(device),
        randn(rng, num_pages, PAGE_TOKENS, rank + rope).to(device, dtype),
        randn(rng, heads, nope + VALUE_DIM, rank).to(device, dtype),
        randn(rng, rank).to(device, dtype),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", dtypes()[-1:])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("num_tokens", [0, 1, 19] if INTERPRETED else [0, 1, 19, 33, 64, 128, 131])
@pytest.mark.parametrize("shape", [None, AbsorbQueryShape(16, 64, 4)])
def test_absorb_query(
    rng: torch.Generator,
    device: str,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    num_tokens: int,
    shape: AbsorbQueryShape | None,
) -> None:
    *given, norm = operands(rng, sizes, num_tokens, device, dtype)
    cache, rank = given[5], sizes[3]
    wanted_cache = cache.clone()
    want = absorb_query_in_parts(*given[:5], wanted_cache, given[6], latent_norm=norm, eps=EPS)
    got = absorb_query_triton.launch(*given, latent_norm=norm, eps=EPS, shape=shape)
    assert got.shape == want.shape == (num_tokens, sizes[0], rank + sizes[2])
    bound = 2**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(cache, wanted_cache, rtol=bound, atol=bound)
    torch.testing.assert_close(got[..., rank:], want[..., rank:], rtol=bound, atol=bound)
    if num_tokens:
        nope = given[0][..., :128].double()
        wide = torch.einsum("thd,hdc->thc", nope, given[6][:, :128].double())
        assert (got[..., :rank].double() - wide).norm() <= TOLERANCE * wide.norm()


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_reference(rng: torch.Generator, num_tokens: int) -> None:
    heads, nope, rope, rank = SMALL
    *given, norm = operands(rng, SMALL, num_tokens, "cpu", torch.float32)
    query, latent, key, rotation, slots, cache, kv_b = given
    before = cache.clone()
    got = absorb_query_in_parts(*given, latent_norm=norm, eps=EPS)
    assert got.shape == (num_tokens, heads, rank + rope)
    for token in range(num_tokens):
        pairs = query[token, :, nope:].unflatten(-1, (-1, 2)).contiguous()
        turn = torch.view_as_complex(pairs)
        turned = torch.view_as_real(turn * rotation[token]).flatten(1)
        torch.testing.assert_close(got[token, :, rank:], turned)
        for head in range(heads):
            want = query[token, head, :nope] @ kv_b[head, :nope]
            torch.testing.assert_close(got[token, head, :rank], want, rtol=1e-4, atol=1e-4)
        if slots[token] >= 0:
            line = cache.flatten(0, 1)[slots[token]]
            scaled = latent[token] * (latent[token].square().mean() + EPS).rsqrt() * norm
            torch.testing.assert_close(line[:rank], scaled)
            before.flatten(0, 1)[slots[token]] = line
    assert torch.equal(cache, before)
