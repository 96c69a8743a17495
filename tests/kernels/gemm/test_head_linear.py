import pytest
import torch

from kernels.gemm import head_linear_triton
from kernels.gemm.head_linear import TOLERANCE as FP8_TOLERANCE
from kernels.gemm.head_linear import head_linear, head_linear_reference
from tests.kernels.tensors import TOLERANCE, generator, randn
from tests.kernels.triton_device import DEVICES, INTERPRETED


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 10])
def test_against_float64(request: pytest.FixtureRequest, num_tokens: int) -> None:
    rng = generator(request.node.nodeid)
    x, weight = randn(rng, num_tokens, 3, 13), randn(rng, 3, 7, 13)
    want = torch.einsum("thk,hnk->thn", x.double(), weight.double()).float()
    torch.testing.assert_close(head_linear(x, weight), want, **TOLERANCE)
    strided = weight.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(head_linear(x, strided), want, **TOLERANCE)
    place = torch.full((num_tokens, 3, 9), 5.0)
    head_linear(x, weight, out=place[..., :7])
    assert torch.equal(place[..., :7], head_linear(x, weight))
    assert bool((place[..., 7:] == 5).all())


def fp8(rng: torch.Generator, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    weight = (randn(rng, *shape) * 60).clamp(-400, 400).to(torch.float8_e4m3fn)
    heads, rows, columns = shape
    return weight, torch.rand(heads, -(-rows // 128), -(-columns // 128), generator=rng) + 0.01


def test_fp8_reference_against_float64(request: pytest.FixtureRequest) -> None:
    rng = generator(request.node.nodeid)
    x, (weight, scale) = randn(rng, 5, 2, 256), fp8(rng, 2, 200, 256)
    whole = scale.double().repeat_interleave(128, 1)[:, :200].repeat_interleave(128, 2)
    want = torch.einsum("thk,hnk->thn", x.double(), weight.double() * whole).float()
    out = head_linear(x, weight, scale=scale)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-2)
    place = torch.full((5, 2, 201), 5.0)
    head_linear(x, weight, out=place[..., :200], scale=scale)
    assert torch.equal(place[..., :200], out)
    assert bool((place[..., 200] == 5).all())


# The key half of a projection and its value half.
@pytest.mark.parametrize(
    ("n", "k"), [(256, 128), (128, 256)] if INTERPRETED else [(512, 128), (128, 512)]
)
@pytest.mark.parametrize("num_tokens", [0, 1, 19, 70])
@pytest.mark.parametrize("device", DEVICES)
def test_fp8_triton(
    request: pytest.FixtureRequest, device: str, num_tokens: int, n: int, k: int
) -> None:
    rng = generator(request.node.nodeid)
    heads = 2 if INTERPRETED else 128
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    x = randn(rng, num_tokens, heads, k + 64).to(device, dtype)[..., :k]
    weight, scale = (each.to(device) for each in fp8(rng, heads, n, k))
    want = head_linear_reference(x, weight, scale=scale)
    place = torch.full((num_tokens, heads, n + 64), 5.0, device=device, dtype=dtype)
    bound = 1e-5 if INTERPRETED else FP8_TOLERANCE
    for out in (
        head_linear_triton.launch(x, weight, scale, None),
        head_linear(x, weight, out=place[..., :n], scale=scale),
    ):
        assert out.dtype == dtype
        assert (out.float() - want.float()).norm() <= bound * want.float().norm()
    assert bool((place[..., n:] == 5).all())


def test_scales_that_do_not_fit_are_refused(request: pytest.FixtureRequest) -> None:
    rng = generator(request.node.nodeid)
    x, (weight, scale) = randn(rng, 2, 2, 128), fp8(rng, 2, 128, 128)
    with pytest.raises(ValueError, match="scale must be"):
        head_linear(x, weight)
    with pytest.raises(ValueError, match="scale must be"):
        head_linear(x, weight, scale=scale[:, :, 0])
    with pytest.raises(ValueError, match="float8"):
        head_linear(x, weight.float(), scale=scale)
