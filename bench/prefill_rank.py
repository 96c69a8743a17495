"""A prefill step of one rank of eight, at the size of DeepSeek-V3: `make bench-prefill`.

As `bench.decode_rank`, for a prompt without a cached prefix, as prefill workers compute it: the
whole forward pass and the token after the prompt, on the host's clock. Prints and records the
median, what the host alone needs to launch it, and by `--profile` where the time goes. SGLang
0.5.16 on the same GPU is the peer: its step without dispatch and combine.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial

from bench.ranks.emulated_rank import PAGE_TOKENS, EmulatedRank
from bench.ranks.rank_runs import measure_all, parser_of
from bench.ranks.step_breakdown import by_purpose, profile_step, write_breakdown
from engine.start.rank_model import record_passes
from engine.step.prefill_graphs import PrefillGraphs, prefill_sizes
from engine.step.runner import Runner
from engine.step.sequence_chunk import SequenceChunk
from loadgen.records import BenchRun, Record
from model.batch import AttentionForm
from model.known_models import WeightFormat

BENCH = "prefill_rank"
PEER = "SGLang 0.5.16"
# Milliseconds by format and prompt; 110 to 130 of up to 512 tokens, whatever their number.
PEER_PASS: dict[WeightFormat, dict[int, float]] = {
    "fp8": {512: 120.0, 4096: 384.0},
    "w4afp8": {512: 120.0, 4096: 589.0},
    "w4afp8-static": {512: 120.0, 4096: 589.0},
}
NUM_PASSES = 7


def measure(rank: EmulatedRank, run: BenchRun, arguments: argparse.Namespace) -> Iterator[Record]:
    device = rank.kv_cache.device
    num_layers = rank.model.config.num_layers
    passes = None
    if device.type == "cuda":
        longest = prefill_sizes(max(arguments.tokens))[-1:]
        sizes = sorted({tokens for tokens in arguments.tokens if tokens <= max(longest, default=0)})
        passes = record_passes(rank.model, rank.kv_cache, sizes)
    for num_tokens in arguments.tokens:
        case = f"{rank.format_name}, {num_layers} layers, {num_tokens} tokens"
        chunks = rank.prefill_pieces(num_tokens)
        times = [one_pass(rank, chunks, passes) for _ in range(1 + arguments.passes)][1:]
        is_peer_case = device.type == "cuda" and num_layers == 61
        peer = PEER_PASS.get(rank.weights, {}).get(num_tokens) if is_peer_case else None
        yield run.record(
            case, "pass", "ms", 1000 * statistics.median(whole for _, whole in times),
            peer=PEER, peer_value=peer,
        )  # fmt: skip
        launched = 1000 * statistics.median(launch for launch, _ in times)
        yield run.record(case, "time until all is launched", "ms", launched)
        if num_tokens in arguments.profile:
            kernels = profile_step(partial(one_pass, rank, chunks, passes), device)
            name = f"{BENCH}_{rank.weights}_{num_tokens}.json"
            write_breakdown(arguments.results / "details" / name, case, kernels)
            for purpose, microseconds in by_purpose(kernels).items():
                yield run.record(case, f"time in {purpose}", "us", microseconds)


def one_pass(
    rank: EmulatedRank, chunks: Sequence[SequenceChunk], passes: PrefillGraphs | None = None
) -> tuple[float, float]:
    """Seconds until it is launched, and until its token is there."""
    num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
    runner = Runner(rank.model, rank.kv_cache, AttentionForm.PLAIN, passes=passes)
    began = time.perf_counter()
    token = runner.forward(chunks, (num_tokens,)).argmax(-1)
    launched = time.perf_counter() - began
    token.tolist()
    return launched, time.perf_counter() - began


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096], help="of a prompt")
    parser.add_argument("--passes", type=int, default=NUM_PASSES)
    parser.add_argument("--profile", type=int, nargs="*", default=[], help="prompts to break down")
    arguments = parser.parse_args(argv)
    most = max(arguments.tokens)
    return measure_all(
        BENCH,
        measure,
        arguments,
        form=AttentionForm.PLAIN,
        max_tokens=1,
        num_pages=2 * -(-most // PAGE_TOKENS),
    )


if __name__ == "__main__":
    sys.exit(main())
