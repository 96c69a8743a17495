import pytest
import torch

from kernels.moe.w4a8_grouped_gemm_packing import (
    BLOCK_BYTES,
    DATA_BYTES,
    SIGNED_FACTOR,
    TRITON_SIZES,
    ZIGZAG_FACTOR,
    PackedWeights,
    dequantise_weights,
    pack_weights,
)
from kernels.moe.w4a8_grouped_gemm_packing_triton import launch
from tests.kernels.tensors import generator
from tests.kernels.triton_device import DEVICES
from tests.kernels.w4a8_cases import Make, experts, mixed, plain, symmetric, unpack_weights


@pytest.mark.parametrize("make", [experts, symmetric, mixed])
def test_unpack_is_the_inverse_of_pack(request: pytest.FixtureRequest, make: Make) -> None:
    weight, scale = make(generator(request.node.nodeid), 3, 256, 384)
    scale = scale.bfloat16()
    packed = pack_weights(weight, scale)
    values, scales = unpack_weights(packed)
    assert torch.equal(values, plain(weight))
    assert torch.equal(scales, scale.float())
    want = plain(weight).float() * scale.float().repeat_interleave(128, dim=-1)
    assert torch.equal(dequantise_weights(packed), want)
    # A block says itself how to read it: what one expert's say does not hang on the others.
    assert torch.equal(dequantise_weights(PackedWeights(packed.blocks[1:2])), want[1:2])


@pytest.mark.parametrize("size", [1e-33, 1e-3, 1.0, 1e30])
def test_scales_of_any_size(request: pytest.FixtureRequest, size: float) -> None:
    """Rounded to 11 bits, and the less of them, the less one is of its row's largest."""
    rng = generator(request.node.nodeid)
    weight, scale = experts(rng, 1, 128, 1280)
    shares = torch.rand(1, 128, 10, generator=rng) + 0.01
    rows = torch.logspace(-1, 1, 128)[None, :, None]
    scale = shares * rows * size
    scale[0, 5] = 0.0
    scale[0, 6, 3] = 1e-6 * scale[0, 6].max()
    _, scales = unpack_weights(pack_weights(weight, scale))
    torch.testing.assert_close(scales[:, 7:], scale[:, 7:], rtol=2.0**-11, atol=0)
    assert (scales[0, 5] == 0).all()
    torch.testing.assert_close(
        scales[0, 6], scale[0, 6], rtol=2.0**-11, atol=2.0**-21 * float(scale[0, 6].max())
    )


def test_negative_scales(request: pytest.FixtureRequest) -> None:
    weight, scale = symmetric(generator(request.node.nodeid), 1, 128, 256)
    scale = scale.bfloat16()
    scale[:, ::2] *= -1
    want = plain(weight).float() * scale.float().repeat_interleave(128, dim=-1)
    assert torch.equal(dequantise_weights(pack_weights(weight, scale)), want)
    weight[0, 4, 5] = -128
    with pytest.raises(ValueError, match="-8 with a negative scale"):
        pack_weights(weight, scale)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [experts, symmetric, mixed])
def test_the_triton_path_packs_the_same_bits(
    request: pytest.FixtureRequest, make: Make, device: str
) -> None:
    weight, scale = make(generator(request.node.nodeid), 2, 256, 384)
    scale[:, ::3] *= -1 if make is symmetric else 1
    scale[0, 5], scale[0, 6, 1], scale[0, 7] = 0.0, 1e-38, 1e-40
    want = pack_weights(weight, scale).blocks[..., :DATA_BYTES]
    weight, scale = weight.to(device), scale.to(device)
    blocks = torch.zeros(2, 2, 3, BLOCK_BYTES, dtype=torch.uint8, device=device)
    _, is_unfit = launch(blocks, weight, scale, **TRITON_SIZES)
    assert torch.equal(blocks[..., :DATA_BYTES].cpu(), want)
    assert not bool(is_unfit.any())
    weight[1, 130, 5], scale[1, 130] = -128, -1
    _, is_unfit = launch(blocks, weight, scale, **TRITON_SIZES)
    assert is_unfit.tolist() == [[False, False], [False, True]]


def e4m3(word: list[int], high: int, byte: int, signed: bool) -> int:
    """A byte of one of the two registers that the kernel makes of four bytes."""
    if signed:
        whole = int.from_bytes(bytes(word), "little")
        turned = (whole << 4 | whole >> 28) if high else whole
        return turned >> 8 * byte & 0x87
    nibble = word[byte] >> 4 * high & 15
    return (nibble & 1) * 0x82 + (nibble & 14)


@pytest.mark.parametrize("make", [experts, symmetric])
def test_blocks_hold_the_operands_of_wgmma(request: pytest.FixtureRequest, make: Make) -> None:
    """Follows the kernel: thread, word, register, byte of e4m3 to row and column."""
    weight, scale = make(generator(request.node.nodeid), 1, 128, 256)
    signed = make is symmetric
    data = pack_weights(weight, scale).blocks[0, 0, :, :DATA_BYTES].view(2, 2, 2, 128, 4, 4)
    values = plain(weight[0])
    for group, half, pair, thread, word, byte in torch.randint(
        0, 2**30, (500, 6), generator=generator(request.node.nodeid + "places")
    ).tolist():
        group, half, pair, thread, word, byte = (
            group % 2, half % 2, pair % 2, thread % 128, word % 4, byte % 4,
        )  # fmt: skip
        codes = data[group, half, pair, thread, word].tolist()
        for high in (0, 1):
            made = torch.tensor([e4m3(codes, high, byte, signed)], dtype=torch.uint8)
            warp, lane = divmod(thread, 32)
            row = warp * 32 + lane // 4 * 4 + half * 2 + high
            step = 2 * pair + word // 2
            column = group * 128 + step * 32 + word % 2 * 16 + lane % 4 * 4 + byte
            factor = SIGNED_FACTOR if signed else ZIGZAG_FACTOR
            assert made.view(torch.float8_e4m3fn).float() * factor == values[row, column]


@pytest.mark.parametrize("shape", [(128, 192), (100, 256)])
def test_weights_off_the_grid_are_refused(shape: tuple[int, int]) -> None:
    n, k = shape
    weight = torch.zeros(1, n, k // 2, dtype=torch.int8)
    with pytest.raises(ValueError, match="multiples of 128"):
        pack_weights(weight, torch.ones(1, n, k // 128))


def test_scales_of_the_wrong_shape_are_refused() -> None:
    weight = torch.zeros(1, 128, 128, dtype=torch.int8)
    with pytest.raises(ValueError, match="weight_scale_inv of expert 0"):
        pack_weights(weight, torch.ones(1, 128, 1))
