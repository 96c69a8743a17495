"""Compiles what a rank needs by many processes and threads: CUDA libraries while weights are
loaded, Triton's and DeepGEMM's kernels after that, while most of the memory is free. What a start
before has compiled is there.

    libraries = LibraryBuilds(settings, rank, device)
    ...load...
    libraries.wait()
    compile_kernels(model, form, settings, group, Passes(lengths=..., sizes=..., max_pages=...))

Passes through a short model, which compute next to nothing, tell what there will be to compile;
DeepGEMM's kernels are compiled for all lengths up to theirs.
"""

import os
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from core.log import get_logger
from engine.process.settings import WorkerSettings
from engine.start.warm_up import pass_lengths, short_model
from engine.step.decode_buffers import DecodeBuffers
from ep.group.group import EpGroup
from kernels.ahead.deep_gemm_ahead import (
    Product,
    compile_ahead,
    noted_products,
    of_all_lengths,
    shares,
)
from kernels.build import cuda_build
from kernels.build.paths import best_path
from model.batch import AttentionForm
from model.deepseek import DeepseekV3

# Each holds a context on the device, half a GB, and the operands of a product.
MOST_PROCESSES = 16

# Computed also where nothing else is: the host and other ranks' memory are addressed by the experts
# that they give and send.
COMPUTED = ("kernels.moe.gate_triton", "kernels.moe.pack_tokens_triton")

log = get_logger("engine.compile_ahead")


class LibraryBuilds:
    """All of `kernels.build.cuda_build`, by one rank of each machine; nothing on a CPU."""

    def __init__(self, settings: WorkerSettings, rank: int, device: torch.device) -> None:
        builds = best_path("w4a8_grouped_gemm", device) == "cuda" and rank % settings.ranks == 0
        sources = cuda_build.sources() if builds else ()
        self._threads = ThreadPoolExecutor(max(1, len(sources)), "library-build")
        self._builds = [self._threads.submit(cuda_build.build, source) for source in sources]

    def wait(self) -> None:
        """What could not be built fails whoever needs it, if anybody does; logged."""
        for build in self._builds:
            try:
                build.result()
            except (OSError, RuntimeError) as error:
                log.warning("library not built", reason=str(error))
        self._threads.shutdown()


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """`lengths` are tokens of passes, `sizes` rows of decode steps that will be recorded, with
    block tables of `max_pages`."""

    lengths: Sequence[int]
    sizes: Sequence[int]
    max_pages: int


def compile_kernels(
    model: DeepseekV3,
    form: AttentionForm,
    settings: WorkerSettings,
    group: EpGroup,
    passes: Passes,
) -> None:
    """On all ranks at once; those of a machine share DeepGEMM's products."""
    device = model.embedding.device
    if best_path("rms_norm", device) != "triton":
        return
    from kernels.ahead.triton_ahead import compiled_ahead

    group.exchange([0])  # libraries are there
    began = time.monotonic()
    cores = len(os.sched_getaffinity(0))
    at_once = max(1, min(MOST_PROCESSES, cores // settings.ranks))
    with compiled_ahead(device, num_threads=at_once, launched=COMPUTED) as compilers:
        products = asked_for(model, form, passes, settings.page_tokens, group.size)
        seconds = round(time.monotonic() - began, 1)
        log.info("kernels asked for", kernels=len(compilers.names), seconds=seconds)
        compilers.begin()
        parts = shares(of_all_lengths(products, device), settings.ranks)
        local_rank = group.rank % settings.ranks
        compile_ahead(
            parts[local_rank] if local_rank < len(parts) else [], device, num_processes=at_once
        )
    seconds = round(time.monotonic() - began, 1)
    log.info("kernels compiled ahead", threads=at_once, seconds=seconds)
    group.exchange([0])  # no rank needs what another still compiles


@torch.inference_mode()
def asked_for(
    model: DeepseekV3, form: AttentionForm, passes: Passes, page_tokens: int, num_ranks: int
) -> Collection[Product]:
    """Runs them; gives what DeepGEMM will be asked for."""
    short = short_model(model)
    config, device = model.config, model.embedding.device
    num_pages = 1 + -(-max(passes.lengths) // page_tokens)
    shape = (short.num_kv_layers, num_pages, page_tokens, config.kv_dim)
    kv_cache = torch.zeros(shape, dtype=model.embedding.dtype, device=device)
    is_noted = best_path("fp8_gemm", device) == "deep_gemm"
    products: set[Product] = set()
    with noted_products() if is_noted else nullcontext(products) as products:
        pass_lengths(short, kv_cache, form, passes.lengths, num_ranks)
        if passes.sizes:
            decode_sizes(short, kv_cache, passes)
    torch.cuda.empty_cache()
    return products


def decode_sizes(short: DeepseekV3, kv_cache: torch.Tensor, passes: Passes) -> None:
    """As `engine.step` does it."""
    buffers = DecodeBuffers(
        max_rows=max(passes.sizes),
        max_pages=passes.max_pages,
        page_tokens=kv_cache.shape[2],
        device=kv_cache.device,
    )
    shape = (max(passes.sizes), short.config.vocab_size)
    logits = torch.zeros(shape, dtype=torch.float32, device=kv_cache.device)
    for size in passes.sizes:
        buffers.fill((), size)
        batch = buffers.batch(size)
        short.decode(batch, kv_cache, logits[:size])
        if short.mtp is not None:
            short.mtp.decode(batch, short.embedding[batch.token_ids], kv_cache[-1])
