"""Plain against absorbed attention of one row by cached prefix and new tokens, on a GPU.

    python -m bench.attention_form [--heads 128]

Prints both times and, for each prefix, from how many new tokens on the plain form wins: the table
that `model.attention.form` keeps. What both have in common is left out. The plain form expands by
kv_b in FP8, the absorbed one fills its tokens up to a power of two, as in a model.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch

from bench.kernel_cases.case import LATENT, NOPE, ROPE, Tensors
from bench.kernel_cases.gpu_timing import microseconds
from kernels.attention.mla_decode import mla_decode_paged, mla_decode_schedule
from kernels.attention.mla_prefill import mla_prefill_grouped
from kernels.attention.mla_prefill_plan import max_keys, plan_groups
from kernels.attention.paged_rows import split_rows
from kernels.gemm.block_dequantise import BLOCK, block_dequantise
from kernels.gemm.head_linear import head_linear

PREFIXES = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# Powers of two, to which the absorbed form fills up, and one more.
NEW_TOKENS = (1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256)
PAGE_TOKENS, CALLS, SCALE = 64, 5, 192**-0.5


def ways(
    make: Tensors, heads: int, prefix: int, new: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """(plain, absorbed)."""
    length = prefix + new
    num_pages = -(-length // PAGE_TOKENS)
    query = make.rows(new, heads, NOPE + ROPE)
    cache = make.rows(num_pages, PAGE_TOKENS, LATENT + ROPE)
    stored = make.fp8(heads * 2 * NOPE, LATENT)
    # So that keys are of the size of queries.
    kv_b_scale = make.random(len(stored) // BLOCK, LATENT // BLOCK) / 600
    kv_b = block_dequantise(stored, kv_b_scale, query.dtype).view(heads, 2 * NOPE, LATENT)
    starts = torch.tensor([0, new], dtype=torch.int32)
    lengths = torch.tensor([length], dtype=torch.int32)
    table = torch.arange(num_pages, dtype=torch.int32)[None]
    rows = split_rows(starts, lengths, table, PAGE_TOKENS)
    most = max_keys(heads, 2 * NOPE, query.itemsize)
    groups = plan_groups(rows, PAGE_TOKENS, most, query.device)
    plain = partial(
        mla_prefill_grouped, query, cache, stored.view(kv_b.shape), groups, scale=SCALE,
        kv_b_scale=kv_b_scale,
    )  # fmt: skip
    on_device = (table.to(query.device), lengths.to(query.device))
    filling = min((1 << (new - 1).bit_length()) - new, prefix)
    filled_up = torch.cat((query[:1].expand(filling, -1, -1), query))
    schedule = mla_decode_schedule(on_device[1], num_queries=len(filled_up), num_heads=heads)

    def absorbed() -> torch.Tensor:
        nope, rotated = filled_up.split((NOPE, ROPE), dim=-1)
        folded = head_linear(nope, kv_b[:, :NOPE].transpose(1, 2))
        both = torch.cat((folded, rotated), dim=-1)
        latents = mla_decode_paged(
            both, cache, *on_device, value_dim=LATENT, scale=SCALE, schedule=schedule
        )
        return head_linear(latents, kv_b[:, NOPE:])[filling:]

    return plain, absorbed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--heads", type=int, default=128)
    heads = parser.parse_args(arguments).heads
    make = Tensors()
    for prefix in PREFIXES:
        least = None
        for new in NEW_TOKENS:
            plain, absorbed = (microseconds(way, CALLS) for way in ways(make, heads, prefix, new))
            sys.stdout.write(f"prefix {prefix:6} new {new:4}: plain {plain:9.1f} us")
            sys.stdout.write(f"  absorbed {absorbed:9.1f} us\n")
            if plain >= absorbed:
                least = None
            elif least is None:
                least = new
        sys.stdout.write(f"prefix {prefix:6}: plain from {least}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
