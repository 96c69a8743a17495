"""Splits of latents that are joined as they are multiplied, and before."""

import pytest
import torch

from kernels.attention import absorb_splits_cuda, absorb_splits_triton, mla_decode_triton
from kernels.attention.mla_decode_splits import TOKENS, Splits, join_reference
from tests.kernels.tensors import generator, randn
from tests.kernels.triton_device import DEVICES, INTERPRETED

HEADS, NOPE, RANK = (2, 16, 128) if INTERPRETED else (128, 128, 512)
# lengths of rows, parts
CASES = [
    ([300, 0, 64, 1000, 1, 70], 5),
    ([64] * 16, 7),
    ([1000], 9),
    ([2000, 1], 3),
    ([0, 0], 4),
    ([4000] * 20, 66),
]


def make_splits(test_id: str, device: str, lengths: list[int], num_parts: int) -> Splits:
    """What is at places of no split is not a number."""
    rng, dtype = generator(test_id), torch.float32 if INTERPRETED else torch.bfloat16
    num_tiles = [-(-length // TOKENS) for length in lengths]
    per_part = max(-(-sum(num_tiles) // num_parts), 2)
    num_places = len(lengths) + num_parts
    values, lse = randn(rng, num_places, HEADS, RANK), 3 * randn(rng, num_places, HEADS)
    is_used, begin = torch.zeros(num_places, dtype=torch.bool), 0
    for row, count in enumerate(num_tiles):
        if count:
            is_used[row + begin // per_part : row + (begin + count - 1) // per_part + 1] = True
        begin += count
    values[~is_used], lse[~is_used] = torch.nan, torch.nan
    return Splits(
        values=values.to(device, dtype),
        lse=lse.to(device),
        kv_lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
        num_parts=num_parts,
        min_tiles=2,
        num_queries=1,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("lengths", "num_parts"), CASES)
def test_against_the_reference(
    request: pytest.FixtureRequest, device: str, lengths: list[int], num_parts: int
) -> None:
    splits = make_splits(request.node.nodeid, device, lengths, num_parts)
    joined = join_reference(splits).float()
    got = mla_decode_triton.join_splits(splits)
    assert float((got.float() - joined).norm()) <= 5e-3 * float(joined.norm())

    kv_b = randn(generator(request.node.nodeid), HEADS, NOPE + 128, RANK).to(got.device, got.dtype)
    values, scales = absorb_splits_triton.launch(splits, kv_b, NOPE)
    assert scales.shape == (len(lengths), HEADS)
    want = torch.einsum("thc,hvc->thv", joined, kv_b[:, NOPE:].float())
    found = values.float().view(want.shape) * scales.unsqueeze(-1)
    bound = 4e-2
    assert float((found - want).norm()) <= bound * float(want.norm())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("lengths", "num_parts"),
    [
        ([300, 0, 64, 1000, 1, 70], 5),
        ([100000] + [5] * 30, 66),
        ([2049] * 64, 66),
        ([0] * 3 + [7000] * 90 + [0] * 7, 66),
        ([2049, 1, 0, 500, 64] * 30, 66),
    ],
)
def test_many_rows_against_the_reference(
    request: pytest.FixtureRequest, lengths: list[int], num_parts: int
) -> None:
    """Up to a tile of 64 rows, two of them, more than one block has."""
    splits = make_splits(request.node.nodeid, "cuda", lengths, num_parts)
    kv_b = randn(generator(request.node.nodeid), HEADS, NOPE + 128, RANK)
    kv_b = kv_b.to("cuda", torch.bfloat16)
    assert absorb_splits_cuda.is_possible(splits, kv_b, NOPE)
    values, scales = absorb_splits_cuda.launch(splits, kv_b, NOPE)
    joined = join_reference(splits).float()
    want = torch.einsum("thc,hvc->thv", joined, kv_b[:, NOPE:].float())
    found = values.float().view(want.shape) * scales.unsqueeze(-1)
    assert float((found - want).norm()) <= 4e-2 * float(want.norm())
    again, _ = absorb_splits_cuda.launch(splits, kv_b, NOPE)
    assert torch.equal(values.view(torch.uint8), again.view(torch.uint8))


@pytest.mark.gpu
def test_a_graph_follows_the_lengths(request: pytest.FixtureRequest) -> None:
    """Captured with other lengths, and splits, than it is replayed with."""
    first = make_splits(request.node.nodeid, "cuda", [2049] * 40, 66)
    kv_b = randn(generator(request.node.nodeid), HEADS, NOPE + 128, RANK)
    kv_b = kv_b.to("cuda", torch.bfloat16)
    absorb_splits_cuda.launch(first, kv_b, NOPE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values, scales = absorb_splits_cuda.launch(first, kv_b, NOPE)
    for lengths in ([100, 4000] * 20, [0, 1, 64, 9000] * 10):
        other = make_splits(str(lengths), "cuda", lengths, 66)
        for name in ("values", "lse", "kv_lengths"):
            getattr(first, name).copy_(getattr(other, name))
        graph.replay()
        want = absorb_splits_cuda.launch(other, kv_b, NOPE)
        assert torch.equal(values.view(torch.uint8), want[0].view(torch.uint8))
        assert torch.equal(scales, want[1])
