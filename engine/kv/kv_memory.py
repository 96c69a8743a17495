"""How many KV pages a rank gets, and where they lie."""

from dataclasses import dataclass

import numpy as np
import torch

from engine.process.settings import WorkerSettings
from model.config import ModelConfig

LEAST_PAGES = 256
# A host serves other things too: more than this is only taken when it is asked for.
HOST_KV_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPlan:
    """`num_pages` of `page_bytes` each (all layers); no request may exceed `max_model_len`."""

    num_pages: int
    page_bytes: int
    max_model_len: int


def plan_kv(
    settings: WorkerSettings, config: ModelConfig, *, itemsize: int, memory_bytes: int
) -> KvPlan:
    """As many pages as `max_running` full contexts can use, within the rank's share of memory.

    `memory_bytes` is what everything else leaves; `kv_fraction` of it is used. A context
    that was not asked for explicitly shrinks to what the pages hold. ValueError when an explicit
    one does not fit.
    """
    page_tokens = settings.page_tokens
    page_bytes = config.num_kv_layers * page_tokens * config.kv_dim * itemsize
    max_model_len = min(settings.max_model_len or config.max_position, config.max_position)
    num_pages = settings.kv_pages
    if not num_pages:
        pages_each = -(-max_model_len // page_tokens)
        affordable = int(memory_bytes * settings.kv_fraction) // page_bytes
        if settings.device == "cpu":
            affordable = min(affordable, max(HOST_KV_BYTES // page_bytes, pages_each))
        num_pages = min(max(LEAST_PAGES, settings.max_running * pages_each), affordable)
    if settings.max_model_len and num_pages * page_tokens < max_model_len:
        raise ValueError(
            f"{num_pages} KV pages of {page_tokens} tokens cannot hold one request of "
            f"max-model-len {max_model_len}; a page takes {page_bytes} bytes"
        )
    if num_pages < 1:
        raise ValueError(f"no memory for KV: a page takes {page_bytes} bytes")
    return KvPlan(
        num_pages=num_pages,
        page_bytes=page_bytes,
        max_model_len=min(max_model_len, num_pages * page_tokens),
    )


def make_kv_cache(
    settings: WorkerSettings,
    config: ModelConfig,
    plan: KvPlan,
    device: torch.device,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[L, pages, page_tokens, kv_dim] of zeros. On the host the kernel hands out the memory
    page by page at first use: a large pool costs neither start-up time nor idle memory."""
    shape = (config.num_kv_layers, plan.num_pages, settings.page_tokens, config.kv_dim)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    untouched = np.zeros(plan.num_pages * plan.page_bytes, dtype=np.uint8)
    return torch.from_numpy(untouched).view(dtype).view(shape)
