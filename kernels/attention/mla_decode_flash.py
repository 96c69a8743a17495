"""FlashMLA as the path of `mla_decode`: dense decoding of its 64-line tiles on Hopper.

Its plan of who does what is made on the device from the lengths, by the first call of a step, and
kept in `Schedule` for the others. It can be captured in a CUDA graph: a new `Schedule` each step.
"""

import inspect
from functools import cache

import flash_mla
import torch

PAGE_TOKENS, WIDTH, VALUE_DIM, LINES = 64, 576, 512, 64


class Schedule:
    """Of one step: all calls with the same `kv_lengths`, queries a row and heads."""

    def __init__(self, kv_lengths: torch.Tensor, num_queries: int, num_heads: int) -> None:
        # Newer versions ignore the arguments and fill in what they return at its first use.
        self.metadata, self.num_splits = flash_mla.get_mla_metadata(
            kv_lengths, num_queries * num_heads, 1
        )


def suits(query: torch.Tensor, cache: torch.Tensor, value_dim: int, num_queries: int) -> bool:
    """Whether it has a kernel for this, and no more than a little of its tiles is wasted."""
    return (
        _options() is not None
        and query.dtype == torch.bfloat16
        and cache.shape[1:] == (PAGE_TOKENS, WIDTH)
        and value_dim == VALUE_DIM
        and query.shape[1] * num_queries % LINES == 0
    )


def launch(
    query: torch.Tensor,  # [B * Q, heads, C + R]
    cache: torch.Tensor,  # [pages, 64, C + R]
    block_table: torch.Tensor,  # [B, P] int32
    kv_lengths: torch.Tensor,  # [B] int32
    schedule: Schedule,
    *,
    scale: float,
) -> torch.Tensor:
    """[B * Q, heads, C]."""
    num_rows = len(kv_lengths)
    out, _ = flash_mla.flash_mla_with_kvcache(
        query.view(num_rows, -1, *query.shape[1:]),
        cache.unsqueeze(2),
        block_table,
        kv_lengths,
        VALUE_DIM,
        schedule.metadata,
        schedule.num_splits,
        softmax_scale=scale,
        causal=True,
        **(_options() or {}),
    )
    return out.flatten(0, 1)


@cache
def _options() -> dict[str, bool] | None:
    """What else to say to this version for dense decoding; None: it has none."""
    if "use_legacy" not in inspect.signature(flash_mla.flash_mla_with_kvcache).parameters:
        return {}
    return {"use_legacy": True} if flash_mla.has_legacy() else None
