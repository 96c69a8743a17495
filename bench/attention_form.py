"""Plain against absorbed attention of one row by cached prefix and new tokens, on a GPU.

    python -m bench.attention_form [--heads 128]

Prints both times and, for each prefix, from how many new tokens on the plain form wins: the table
that `model.attention_form` keeps. What both have in common is left out.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch

from bench.gpu_timing import microseconds
from bench.kernel_case import LATENT, NOPE, ROPE, Tensors
from kernels.head_linear import head_linear
from kernels.mla_decode import mla_decode_paged
from kernels.mla_prefill import mla_prefill_grouped
from kernels.mla_prefill_plan import max_keys, plan_groups
from kernels.paged_rows import split_rows

PREFIXES = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
NEW_TOKENS = (1, 4, 16, 32, 64, 96, 128, 160, 192, 256)
PAGE_TOKENS, CALLS, SCALE = 64, 5, 192**-0.5


def ways(
    make: Tensors, heads: int, prefix: int, new: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """(plain, absorbed)."""
    length = prefix + new
    num_pages = -(-length // PAGE_TOKENS)
    query = make.rows(new, heads, NOPE + ROPE)
    cache = make.rows(num_pages, PAGE_TOKENS, LATENT + ROPE)
    kv_b = make.rows(heads, 2 * NOPE, LATENT)
    starts = torch.tensor([0, new], dtype=torch.int32)
    lengths = torch.tensor([length], dtype=torch.int32)
    table = torch.arange(num_pages, dtype=torch.int32)[None]
    rows = split_rows(starts, lengths, table, PAGE_TOKENS)
    most = max_keys(heads, 2 * NOPE, query.itemsize)
    groups = plan_groups(rows, PAGE_TOKENS, most, query.device)
    plain = partial(mla_prefill_grouped, query, cache, kv_b, groups, scale=SCALE)
    on_device = (table.to(query.device), lengths.to(query.device))

    def absorbed() -> torch.Tensor:
        both = query.new_empty(new, heads, LATENT + ROPE)
        both[..., LATENT:] = query[..., NOPE:]
        head_linear(query[..., :NOPE], kv_b[:, :NOPE].transpose(1, 2), out=both[..., :LATENT])
        latents = mla_decode_paged(both, cache, *on_device, value_dim=LATENT, scale=SCALE)
        return head_linear(latents, kv_b[:, NOPE:])

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
