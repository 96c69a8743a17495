"""Compiles what a rank needs by many processes: CUDA libraries while weights are loaded, DeepGEMM's
kernels behind that, while most of the memory is free. What a start before has compiled is there.

    libraries = LibraryBuilds(settings, rank, device)
    ...load...
    libraries.wait()
    compile_products(model, form, settings, group, lengths, sizes)

Passes through a short model tell which products there will be, and compile all Triton kernels.
"""

import os
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from core.log import get_logger
from engine.decode_buffers import DecodeBuffers
from engine.settings import WorkerSettings
from engine.warm_up import pass_lengths, short_model
from ep.group import EpGroup
from kernels import cuda_build
from kernels.deep_gemm_ahead import Product, compile_ahead, noted_products, shares
from kernels.paths import path_of
from model.batch import AttentionForm
from model.deepseek import DeepseekV3

# Each holds a context on the device, half a GB, and the operands of a product.
MOST_PROCESSES = 16

log = get_logger("engine.compile_ahead")


class LibraryBuilds:
    """All of `kernels.cuda_build`, by one rank of each machine; nothing on a CPU."""

    def __init__(self, settings: WorkerSettings, rank: int, device: torch.device) -> None:
        builds = path_of("w4a8_grouped_gemm", device) == "cuda" and rank % settings.ranks == 0
        sources = cuda_build.sources() if builds else ()
        self._threads = ThreadPoolExecutor(max(1, len(sources)), "library-build")
        self._builds = [self._threads.submit(cuda_build.build, source) for source in sources]

    def wait(self) -> None:
        """What could not be built fails whoever needs it, if anybody does; logged."""
        for build in self._builds:
            try:
                build.result()
            except RuntimeError as error:
                log.warning("library not built", reason=str(error))
        self._threads.shutdown()


def compile_products(
    model: DeepseekV3,
    form: AttentionForm,
    settings: WorkerSettings,
    group: EpGroup,
    lengths: Sequence[int],
    sizes: Sequence[int],
) -> None:
    """On all ranks at once; those of a machine share the work. `lengths` are tokens of passes,
    `sizes` of decode steps that will be recorded."""
    device = model.embedding.device
    if path_of("fp8_gemm", device) != "deep_gemm":
        return
    group.exchange([0])  # libraries are there
    products = noted(model, form, lengths, sizes, settings.page_tokens, group.size)
    parts = shares(products, settings.ranks)
    local_rank = group.rank % settings.ranks
    cores = len(os.sched_getaffinity(0))
    compile_ahead(
        parts[local_rank] if local_rank < len(parts) else [],
        device,
        num_processes=max(1, min(MOST_PROCESSES, cores // settings.ranks)),
    )
    group.exchange([0])  # nobody needs what another still compiles


@torch.inference_mode()
def noted(
    model: DeepseekV3,
    form: AttentionForm,
    lengths: Sequence[int],
    sizes: Sequence[int],
    page_tokens: int,
    num_ranks: int,
) -> Collection[Product]:
    """What DeepGEMM will be asked for."""
    short = short_model(model)
    config, device = model.config, model.embedding.device
    num_pages = 1 + -(-max(lengths) // page_tokens)
    shape = (len(short.layers), num_pages, page_tokens, config.kv_dim)
    kv_cache = torch.zeros(shape, dtype=model.embedding.dtype, device=device)
    with noted_products() as products:
        pass_lengths(short, kv_cache, form, lengths, num_ranks)
        if sizes:
            buffers = DecodeBuffers(
                max_rows=max(sizes), max_pages=1, page_tokens=page_tokens, device=device
            )
            for size in sizes:
                buffers.fill((), size)
                short.decode(buffers.batch(size), kv_cache)
    torch.cuda.empty_cache()
    return products
