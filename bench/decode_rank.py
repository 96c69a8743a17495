"""A decode step of one rank of eight, at the size of DeepSeek-V3: `make bench-decode`.

All layers with weights of their own, made up, FP8 or W4A8, the latter also with static scales of
activations; requests of 2,048 tokens each; perfect balance of experts and nothing sent
(`bench.ranks.emulated_rank`). The step is the recorded one that decode workers replay. Records its
time on the device, its time with what the host does before, and by `--profile` where the time goes.
SGLang 0.5.16 on the same GPU is the peer: its step without dispatch and combine.

`--speculative 0 1 2 3`: also steps that verify so many drafts a request and make as many, two
recordings; tokens of a step by synthetic acceptance (`engine.step.synthetic_acceptance`).
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from bench.kernel_cases.gpu_timing import copy_bytes_per_second
from bench.ranks.emulated_rank import PAGE_TOKENS, EmulatedRank, pages_for
from bench.ranks.rank_runs import measure_all, parser_of
from bench.ranks.step_breakdown import Kernel, by_purpose, profile_step, write_breakdown
from engine.step.decode_graphs import DecodeGraphs
from engine.step.graph_capture import CudaCapture, RepeatedCall
from engine.step.sequence_chunk import SequenceChunk
from engine.step.speculative_steps import SpeculativeSteps
from engine.step.synthetic_acceptance import mean_length
from kernels.moe.w4a8_grouped_gemm_packing import BLOCK_BYTES, READ_BYTES
from loadgen.records import BenchRun, Record
from model.batch import AttentionForm
from model.known_models import WeightFormat
from model.weight_bytes import EXPERTS, VOCABULARY, held_weights

BENCH = "decode_rank"
PEER = "SGLang 0.5.16"
# Milliseconds by format and batch.
PEER_STEP: dict[WeightFormat, dict[int, float]] = {
    "fp8": {1: 16.6, 32: 34.3, 64: 35.8, 128: 43.7},
    "w4afp8": {128: 54.0},
    "w4afp8-static": {128: 54.0},
}
NUM_STEPS = 30
# In a row, before the host waits for them.
STEPS_IN_A_ROW = 10
# Of steps before those that are timed: clocks follow the load, and the power limit.
SETTLING_SECONDS = 1.0
# An H200 at its power limit lowers its clock and raises it again every 0.9 s: two of these times.
MEASURED_SECONDS = 1.82
CPU_BYTES_PER_SECOND = 1e10


def measure(rank: EmulatedRank, run: BenchRun, arguments: argparse.Namespace) -> Iterator[Record]:
    device = rank.kv_cache.device
    on_gpu = device.type == "cuda"
    batches = sorted(set(arguments.batches))
    capture = CudaCapture(device) if on_gpu else RepeatedCall()
    max_pages = arguments.context // PAGE_TOKENS + 1
    for num_drafts in sorted(set(arguments.speculative) - {0}):
        steps = SpeculativeSteps(
            rank.model,
            rank.kv_cache,
            most_drafts=num_drafts,
            max_batch=batches[-1],
            max_rows=batches[-1] * (1 + num_drafts),
            max_pages=max_pages,
            sizes={num_drafts: batches},
            capture=CudaCapture(device) if on_gpu else RepeatedCall(),
            synthetic=True,
        )
        yield from measure_drafting(rank, run, arguments, steps, num_drafts)
    if 0 not in arguments.speculative:
        return
    graphs = DecodeGraphs(
        rank.model.decode,
        rank.kv_cache,
        sizes=batches,
        max_pages=max_pages,
        vocab_size=rank.model.config.vocab_size,
        capture=capture,
    )
    began = time.monotonic()
    graphs.capture_all()
    rate = copy_bytes_per_second() if on_gpu else CPU_BYTES_PER_SECOND
    num_layers = rank.model.config.num_layers
    where = f"{rank.format_name}, {num_layers} layers, context {arguments.context}"
    yield run.record(where, "time to record all steps", "s", time.monotonic() - began)
    for batch in batches:
        case = f"{where}, batch {batch}"
        chunks = rank.decode_pieces(batch, arguments.context)
        is_peer_case = on_gpu and num_layers == 61 and arguments.context == 2048
        peer = PEER_STEP.get(rank.weights, {}).get(batch) if is_peer_case else None
        graphs.run(chunks, batch)
        yield run.record(
            case, "step", "ms", replay_ms(graphs, batch, device, arguments.steps),
            peer=PEER, peer_value=peer,
        )  # fmt: skip
        launched = 1000 * steps_seconds(partial(greedy_step, graphs, chunks), arguments.steps)
        yield run.record(case, "step with its launch", "ms", launched)
        least = memory_bytes(rank, batch, arguments.context) / rate
        yield run.record(case, "step if memory were all", "ms", 1000 * least)
        if batch in arguments.profile:
            kernels = profile_step(partial(graphs.replay, batch), device)
            file = arguments.results / "details" / f"{BENCH}_{rank.weights}_{batch}.json"
            yield from broken_down(run, case, kernels, file)


def broken_down(run: BenchRun, case: str, kernels: list[Kernel], file: Path) -> Iterator[Record]:
    write_breakdown(file, case, kernels)
    yield run.record(case, "kernels", "count", sum(kernel.count for kernel in kernels))
    for purpose, microseconds in by_purpose(kernels).items():
        yield run.record(case, f"time in {purpose}", "us", microseconds)


def measure_drafting(
    rank: EmulatedRank,
    run: BenchRun,
    arguments: argparse.Namespace,
    steps: SpeculativeSteps,
    num_drafts: int,
) -> Iterator[Record]:
    device, length = rank.kv_cache.device, mean_length(num_drafts)
    num_layers = rank.model.config.num_layers
    where = f"{rank.format_name}, {num_layers} layers, context {arguments.context}"
    where += f", {num_drafts} drafts, {length:.2f} tokens a step"
    began = time.monotonic()
    steps.capture_all()
    yield run.record(where, "time to record all steps", "s", time.monotonic() - began)
    for batch in sorted(set(arguments.batches)):
        case = f"{where}, batch {batch}"
        chunks = rank.decode_pieces(batch, arguments.context, num_drafts)
        step = partial(whole_step, steps, chunks, num_drafts)
        step()
        milliseconds = replay_ms(steps, batch, device, arguments.steps)
        yield run.record(case, "step", "ms", milliseconds)
        yield run.record(case, "step a token of a request", "ms", milliseconds / length)
        tokens_per_second = 1000 * batch * length / milliseconds
        yield run.record(case, "tokens a second", "1/s", tokens_per_second)
        launched = 1000 * steps_seconds(step, arguments.steps)
        yield run.record(case, "step with its launch and its wait", "ms", launched)
        if batch in arguments.profile:
            kernels = profile_step(partial(steps.replay, batch), device)
            name = f"{BENCH}_{rank.weights}_{batch}_drafts{num_drafts}.json"
            yield from broken_down(run, case, kernels, arguments.results / "details" / name)


def greedy_step(graphs: DecodeGraphs, chunks: Sequence[SequenceChunk]) -> torch.Tensor:
    return graphs.run(chunks, len(chunks)).argmax(-1)


def whole_step(
    steps: SpeculativeSteps, chunks: Sequence[SequenceChunk], num_drafts: int
) -> torch.Tensor:
    """As a decode worker does it: which drafts were right is known before the next step."""
    sampled = steps.choose(steps.verify(chunks, (len(chunks),), num_drafts), chunks=chunks)
    sampled.wait()
    return sampled.token_ids


def memory_bytes(rank: EmulatedRank, batch: int, context: int) -> float:
    """That a step must read: weights, of experts those that get rows, and latents."""
    model, config = rank.model, rank.model.config
    held = {term.name: term.num_bytes for term in held_weights(model)}
    num_rows = batch * config.experts_per_token
    held[EXPERTS] = round(held[EXPERTS] * min(1.0, num_rows / rank.num_slots))
    if rank.weights.startswith("w4afp8"):  # units of int4 rows are not read
        held[EXPERTS] = held[EXPERTS] * READ_BYTES // BLOCK_BYTES
    # A row each of the embedding, which is as large as the head.
    held[VOCABULARY] //= 2
    latents = config.num_layers * batch * (context + 1) * config.kv_dim
    return float(sum(held.values()) + latents * rank.kv_cache.itemsize)


def replay_ms(
    graphs: DecodeGraphs | SpeculativeSteps, batch: int, device: torch.device, steps: int
) -> float:
    """Median over at least `steps`. On a GPU by its clock, of steps that are begun while others
    run, as decode workers begin them: what the host needs to launch one is no part of it."""
    times: list[float] = []
    if device.type != "cuda":
        for _ in range(steps):
            began = time.perf_counter()
            graphs.replay(batch)
            times.append(1000 * (time.perf_counter() - began))
        return statistics.median(times)
    settled = time.monotonic() + SETTLING_SECONDS
    while time.monotonic() < settled:
        ms_in_a_row(graphs, batch)
    measured = time.monotonic() + MEASURED_SECONDS
    while len(times) < steps or time.monotonic() < measured:
        times += ms_in_a_row(graphs, batch)
    return statistics.median(times)


def ms_in_a_row(graphs: DecodeGraphs | SpeculativeSteps, batch: int) -> list[float]:
    """Without the first, which an idle device has waited for."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS_IN_A_ROW + 1)]
    events[0].record()
    for end in events[1:]:
        graphs.replay(batch)
        end.record()
    events[-1].synchronize()
    return [begin.elapsed_time(end) for begin, end in pairwise(events)][1:]


def steps_seconds(step: Callable[[], torch.Tensor], steps: int) -> float:
    """A step among many that are begun one after the other, with their inputs copied and the
    likeliest tokens taken."""
    tokens: torch.Tensor | None = None
    began = time.perf_counter()
    for _ in range(steps):
        tokens = step()
    assert tokens is not None
    tokens.tolist()
    return (time.perf_counter() - began) / steps


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 64, 128])
    parser.add_argument("--context", type=int, default=2048, help="tokens of a request")
    parser.add_argument("--speculative", type=int, nargs="+", default=[0], help="drafts a step")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="at least")
    parser.add_argument("--profile", type=int, nargs="*", default=[], help="batches to break down")
    arguments = parser.parse_args(argv)
    return measure_all(
        BENCH,
        measure,
        arguments,
        form=AttentionForm.ABSORBED,
        max_tokens=max(arguments.batches) * (1 + max(arguments.speculative)),
        num_pages=pages_for(arguments.batches, arguments.context),
        mtp=max(arguments.speculative) > 0,
    )


if __name__ == "__main__":
    sys.exit(main())
