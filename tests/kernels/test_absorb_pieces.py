"""Pieces of latents that are joined as they are multiplied, and before."""

import pytest
import torch

from kernels import absorb_pieces_triton, mla_decode_triton
from kernels.mla_decode_pieces import TOKENS, Pieces, join_reference
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


def make_pieces(test_id: str, device: str, lengths: list[int], num_parts: int) -> Pieces:
    """What is at places of no piece is not a number."""
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
    return Pieces(
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
    pieces = make_pieces(request.node.nodeid, device, lengths, num_parts)
    joined = join_reference(pieces).float()
    got = mla_decode_triton.join_pieces(pieces)
    assert float((got.float() - joined).norm()) <= 5e-3 * float(joined.norm())

    kv_b = randn(generator(request.node.nodeid), HEADS, NOPE + 128, RANK).to(got.device, got.dtype)
    values, scales = absorb_pieces_triton.launch(pieces, kv_b, NOPE)
    assert scales.shape == (len(lengths), HEADS)
    want = torch.einsum("thc,hvc->thv", joined, kv_b[:, NOPE:].float())
    found = values.float().view(want.shape) * scales.unsqueeze(-1)
    # NOTE: the interpreter loses the carry of some values that round up.
    bound = 0.2 if INTERPRETED else 4e-2
    assert float((found - want).norm()) <= bound * float(want.norm())
