from collections.abc import Callable

import pytest
import torch

from kernels.silu_mul import silu_mul_quantise_masked, silu_mul_quantise_masked_reference
from kernels.w4a8_grouped_gemm import (
    TOLERANCE,
    w4a8_grouped_gemm_contiguous,
    w4a8_grouped_gemm_contiguous_reference,
    w4a8_grouped_gemm_gated,
    w4a8_grouped_gemm_masked,
    w4a8_grouped_gemm_masked_reference,
)
from kernels.w4a8_grouped_gemm_packing import (
    DATA_BYTES,
    SIGNED_FACTOR,
    ZIGZAG_FACTOR,
    PackedWeights,
    dequantise_weights,
    pack_weights,
    unpack_weights,
)
from tests.kernels.tensors import generator
from tests.kernels.triton_device import assert_same_fp8

Experts = tuple[torch.Tensor, torch.Tensor]
Make = Callable[[torch.Generator, int, int, int], Experts]


def experts(rng: torch.Generator, num: int, n: int, k: int) -> Experts:
    """As a checkpoint holds them: every nibble occurs, -8 too."""
    weight = torch.randint(-128, 128, (num, n, k // 2), generator=rng, dtype=torch.int8)
    scale = torch.rand(num, n, k // 128, generator=rng) * 0.01 + 0.001
    return weight, scale


def symmetric(rng: torch.Generator, num: int, n: int, k: int) -> Experts:
    """Without a -8."""
    weight, scale = experts(rng, num, n, k)
    for smallest, one in ((0x08, 0x01), (0x80, 0x10)):
        weight ^= (weight.view(torch.uint8) & 15 * one == smallest).to(torch.int8) * one
    return weight, scale


def mixed(rng: torch.Generator, num: int, n: int, k: int) -> Experts:
    """Every third 128 rows have every nibble, the rest no -8."""
    weight, scale = symmetric(rng, num, n, k)
    other = weight.view(-1, 128, k // 2)[::3]
    other.copy_(torch.randint(-128, 128, other.shape, generator=rng, dtype=torch.int8))
    return weight, scale


def plain(weight: torch.Tensor) -> torch.Tensor:
    """Values of packed nibbles, by Python arithmetic on each byte."""
    signed = torch.tensor([v - 16 if v > 7 else v for v in range(16)], dtype=torch.int8)
    bits = weight.view(torch.uint8).int()
    return torch.stack((signed[bits % 16], signed[bits // 16]), dim=-1).flatten(-2)


def rows(rng: torch.Generator, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(*shape, generator=rng).clamp(-4, 4) * 100
    scales = torch.rand(*shape[:-1], shape[-1] // 128, generator=rng) * 0.02 + 0.001
    return x.to(torch.float8_e4m3fn), scales


def product(x: torch.Tensor, scales: torch.Tensor, experts: Experts, expert: int) -> torch.Tensor:
    """float64, group by group."""
    weight, weight_scale = experts
    out = torch.zeros(x.shape[0], weight.shape[1], dtype=torch.float64)
    values = plain(weight[expert]).double()
    for group in range(values.shape[1] // 128):
        part = slice(128 * group, 128 * group + 128)
        sum_of_group = x[:, part].double() @ values[:, part].T
        out += sum_of_group * scales[:, group, None] * weight_scale[expert, :, group]
    return out


def relative_error(out: torch.Tensor, want: torch.Tensor) -> float:
    return float((out.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("make", [experts, symmetric, mixed])
def test_unpack_is_the_inverse_of_pack(request: pytest.FixtureRequest, make: Make) -> None:
    weight, scale = make(generator(request.node.nodeid), 3, 256, 384)
    packed = pack_weights(weight, scale)
    values, scales = unpack_weights(packed)
    assert torch.equal(values, plain(weight))
    assert torch.equal(scales, scale)
    want = plain(weight).float() * scale.repeat_interleave(128, dim=-1)
    assert torch.equal(dequantise_weights(packed), want)
    # A block says itself how to read it: what one expert's say does not hang on the others.
    assert torch.equal(dequantise_weights(PackedWeights(packed.blocks[1:2])), want[1:2])


def test_negative_scales(request: pytest.FixtureRequest) -> None:
    weight, scale = symmetric(generator(request.node.nodeid), 1, 128, 256)
    scale[:, ::2] *= -1
    want = plain(weight).float() * scale.repeat_interleave(128, dim=-1)
    assert torch.equal(dequantise_weights(pack_weights(weight, scale)), want)
    weight[0, 4, 5] = -128
    with pytest.raises(ValueError, match="-8 with a negative scale"):
        pack_weights(weight, scale)


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
            row = half * 64 + warp * 16 + high * 8 + lane // 4
            step = 2 * pair + word // 2
            column = group * 128 + step * 32 + word % 2 * 16 + lane % 4 * 4 + byte
            factor = SIGNED_FACTOR if signed else ZIGZAG_FACTOR
            assert made.view(torch.float8_e4m3fn).float() * factor == values[row, column]


@pytest.mark.parametrize("counts", [[5, 0, 8, 1], [0, 0, 0, 0]])
def test_masked_reference(request: pytest.FixtureRequest, counts: list[int]) -> None:
    rng = generator(request.node.nodeid)
    checkpoint = experts(rng, 4, 128, 256)
    x, scales = rows(rng, 4, 8, 256)
    out = torch.full((4, 8, 128), 7.0, dtype=torch.bfloat16)
    given = torch.tensor(counts, dtype=torch.int32)
    w4a8_grouped_gemm_masked(x, scales, pack_weights(*checkpoint), given, out=out)
    for expert, count in enumerate(counts):
        assert (out[expert, count:] == 7).all()
        if count:
            want = product(x[expert, :count], scales[expert, :count], checkpoint, expert)
            assert relative_error(out[expert, :count], want) < TOLERANCE


def test_contiguous_reference(request: pytest.FixtureRequest) -> None:
    rng = generator(request.node.nodeid)
    checkpoint = experts(rng, 4, 128, 256)
    x, scales = rows(rng, 12, 256)
    counts = torch.tensor([5, 0, 6, 1], dtype=torch.int32)
    out = w4a8_grouped_gemm_contiguous(x, scales, pack_weights(*checkpoint), counts)
    start = 0
    for expert, count in enumerate(counts.tolist()):
        where = slice(start, start + count)
        if count:
            want = product(x[where], scales[where], checkpoint, expert)
            assert relative_error(out[where], want) < TOLERANCE
        start += count


def test_one_static_scale(request: pytest.FixtureRequest) -> None:
    rng = generator(request.node.nodeid)
    weights = pack_weights(*experts(rng, 2, 128, 128))
    x, _ = rows(rng, 2, 4, 128)
    counts = torch.tensor([4, 2], dtype=torch.int32)
    one = w4a8_grouped_gemm_masked(x, torch.tensor(0.25), weights, counts)
    each = w4a8_grouped_gemm_masked(x, torch.full((2, 4, 1), 0.25), weights, counts)
    assert torch.equal(one[0], each[0])
    assert torch.equal(one[1, :2], each[1, :2])


def arguments() -> dict[str, object]:
    return {
        "activations": torch.zeros(2, 4, 256).to(torch.float8_e4m3fn),
        "activation_scales": torch.ones(2, 4, 2),
        "weights": PackedWeights(torch.zeros(2, 1, 2, 8704, dtype=torch.uint8)),
        "counts": torch.zeros(2, dtype=torch.int32),
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("activations", torch.zeros(2, 4, 256), "float8_e4m3fn"),
        ("activations", torch.zeros(8, 256).to(torch.float8_e4m3fn), r"\[E, C, K\]"),
        ("activations", torch.zeros(2, 4, 128).to(torch.float8_e4m3fn), "K = 128"),
        ("activations", torch.zeros(3, 4, 256).to(torch.float8_e4m3fn), "scales"),
        ("activation_scales", torch.ones(2, 4, 1), "scales"),
        ("activation_scales", torch.ones(2, 4, 2).double(), "float64"),
        ("counts", torch.zeros(2, dtype=torch.int64), "int64"),
        ("counts", torch.zeros(3, dtype=torch.int32), "counts"),
        ("counts", torch.zeros(2, dtype=torch.int32, device="meta"), "meta"),
        ("out", torch.zeros(2, 4, 128), "bfloat16"),
    ],
)
def test_arguments_that_do_not_fit(name: str, value: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        w4a8_grouped_gemm_masked(**(arguments() | {name: value}))


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


COUNTS = {
    "few": [1, 0, 3, 8, 2, 0, 5, 7],
    "edges": [8, 9, 16, 17, 32, 33, 64, 65],
    "many": [0, 128, 129, 200, 256, 577, 300, 1],
    "none": [0] * 8,
}
# Outputs: odd and even multiples of 128 take different tiles. Inputs: an odd number of groups.
SHAPES = [(512, 256), (1024, 384), (768, 2048), (384, 1152), (4096, 7168)]


@pytest.mark.gpu
@pytest.mark.parametrize("expected_rows", [1, 1000])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_kernel(
    request: pytest.FixtureRequest, n: int, k: int, counts: str, expected_rows: int
) -> None:
    rng = generator(request.node.nodeid)
    given = torch.tensor(COUNTS[counts], dtype=torch.int32, device="cuda")
    weights = pack_weights(*mixed(rng, len(given), n, k), device="cuda")
    capacity = max(8, int(given.max()))
    x, scales = (each.cuda() for each in rows(rng, len(given), capacity, k))
    # What lies behind the rows of an expert must not matter.
    behind = torch.arange(capacity, device="cuda") >= given[:, None]
    x.view(torch.uint8)[behind] = 0x7F
    scales[behind] = torch.nan
    out = torch.full((len(given), capacity, n), -777.0, dtype=torch.bfloat16, device="cuda")
    want = out.clone()
    w4a8_grouped_gemm_masked_reference(x, scales, weights, given, out=want)
    # As a dispatcher delivers them: rows of a group next to each other.
    turned = scales.transpose(1, 2).contiguous().transpose(1, 2)
    for own in (scales, turned):
        out.fill_(-777.0)
        w4a8_grouped_gemm_masked(x, own, weights, given, out=out, expected_rows=expected_rows)
        assert (out[behind] == -777).all()
        if counts != "none":
            assert relative_error(out[~behind], want[~behind]) < TOLERANCE

    x, scales = x[~behind], scales[~behind]
    packed = torch.full((len(x), n), torch.nan, dtype=torch.bfloat16, device="cuda")
    w4a8_grouped_gemm_contiguous(x, scales, weights, given, out=packed, expected_rows=expected_rows)
    # Which rows share a tile changes no bits.
    assert torch.equal(packed, out[~behind])


@pytest.mark.gpu
def test_kernel_in_a_graph_with_one_static_scale(request: pytest.FixtureRequest) -> None:
    rng = generator(request.node.nodeid)
    weights = pack_weights(*experts(rng, 4, 512, 512), device="cuda")
    x, _ = rows(rng, 64, 512)
    x, scale = x.cuda(), torch.tensor(0.125, device="cuda")
    counts = torch.tensor([10, 20, 0, 34], dtype=torch.int32, device="cuda")
    out = torch.empty(64, 512, dtype=torch.bfloat16, device="cuda")
    w4a8_grouped_gemm_contiguous(x, scale, weights, counts, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        w4a8_grouped_gemm_contiguous(x, scale, weights, counts, out=out)
    for given in ([10, 20, 0, 34], [0, 0, 64, 0], [64, 0, 0, 0]):
        counts.copy_(torch.tensor(given))
        out.fill_(torch.nan)
        graph.replay()
        want = w4a8_grouped_gemm_contiguous_reference(x, scale, weights, counts)
        assert relative_error(out, want) < TOLERANCE


def test_gated_is_the_product_and_its_activation(request: pytest.FixtureRequest) -> None:
    rng = generator(request.node.nodeid)
    weights = pack_weights(*experts(rng, 3, 256, 128))
    counts = torch.tensor([2, 0, 5], dtype=torch.int32)
    x, scales = rows(rng, 3, 5, 128)
    values, value_scales = w4a8_grouped_gemm_gated(x, scales, weights, counts)
    inner = w4a8_grouped_gemm_masked(x, scales, weights, counts)
    want, want_scales = silu_mul_quantise_masked_reference(inner, counts)
    for expert, count in enumerate(counts.tolist()):
        assert torch.equal(values[expert, :count].float(), want[expert, :count].float())
        assert torch.equal(value_scales[expert, :count], want_scales[expert, :count])
    odd = pack_weights(*experts(rng, 3, 384, 128))
    with pytest.raises(ValueError, match="multiple of 256"):
        w4a8_grouped_gemm_gated(x, scales, odd, counts)
    with pytest.raises(ValueError, match=r"\[E, C, K\]"):
        w4a8_grouped_gemm_gated(x[0], scales[0], weights, counts)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [experts, mixed])
@pytest.mark.parametrize("expected_rows", [1, 64, 256])
@pytest.mark.parametrize("counts", ["few", "edges", "none"])
def test_gated_kernel(
    request: pytest.FixtureRequest, counts: str, expected_rows: int, make: Make
) -> None:
    rng = generator(request.node.nodeid)
    given = torch.tensor(COUNTS[counts], dtype=torch.int32, device="cuda")
    weights = pack_weights(*make(rng, len(given), 768, 640), device="cuda")
    x, scales = (each.cuda() for each in rows(rng, len(given), max(COUNTS[counts]) + 1, 640))
    for scale in (scales, torch.tensor(0.01, device="cuda")):
        values, value_scales = w4a8_grouped_gemm_gated(
            x, scale, weights, given, expected_rows=expected_rows
        )
        inner = w4a8_grouped_gemm_masked(x, scale, weights, given, expected_rows=expected_rows)
        want, want_scales = silu_mul_quantise_masked_reference(inner, given)
        for expert, count in enumerate(COUNTS[counts]):
            if count:
                found = values[expert, :count], value_scales[expert, :count]
                assert_same_fp8(found, (want[expert, :count], want_scales[expert, :count]))


@pytest.mark.gpu
@pytest.mark.parametrize("counts", ["few", "edges", "none"])
@pytest.mark.parametrize("is_gated", [False, True])
def test_kernel_that_begins_early(
    request: pytest.FixtureRequest, counts: str, is_gated: bool
) -> None:
    """Behind the activation, as in a step: the same bits."""
    rng = generator(request.node.nodeid)
    given = torch.tensor(COUNTS[counts], dtype=torch.int32, device="cuda")
    up = pack_weights(*experts(rng, len(given), 4096, 1024), device="cuda")
    down = pack_weights(*experts(rng, len(given), 1024, 2048), device="cuda")
    x, scales = (each.cuda() for each in rows(rng, len(given), max(COUNTS[counts]) + 1, 1024))
    filled = torch.arange(x.shape[1], device="cuda") < given[:, None]

    def products(*, early: bool) -> list[torch.Tensor]:
        """Of layers, each behind the last one."""
        outs: list[torch.Tensor] = []
        for _ in range(6):
            given_x = x
            if outs:
                given_x = (x.float() + outs[-1].nan_to_num().clamp(-1, 1)).to(x.dtype)
            if is_gated:
                activated = w4a8_grouped_gemm_gated(
                    given_x, scales, up, given, expected_rows=8, leads=early
                )
            else:
                inner = w4a8_grouped_gemm_masked(given_x, scales, up, given, expected_rows=8)
                activated = silu_mul_quantise_masked(inner, given, expected_rows=8)
            outs.append(
                w4a8_grouped_gemm_masked(*activated, down, given, expected_rows=8, early=early)
            )
        return outs

    want = products(early=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = products(early=True)
    for _ in range(3):
        for each in got:
            each.zero_()
        graph.replay()
        for mine, other in zip(got, want, strict=True):
            assert torch.equal(mine[filled], other[filled])
