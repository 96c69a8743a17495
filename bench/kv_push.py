"""What sending KV adds to a prefill: `python -m bench.kv_push --record`.

A prompt of 4,096 tokens through ten layers of DeepSeek-V3's size with made-up weights, one rank's
share of eight (`bench.ranks.emulated_rank`), in the chunks and by the code of prefill workers. With
the layers pushed into the pool of a decode GPU as they are computed, and without, in turn. Records
the time to the first token, which a request sees once all is submitted, and until the last byte has
landed. What has arrived is compared with what was sent. On a single GPU both pools are on it, which
the case says; without GPUs the same on the host, with a small model.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench.kv_transfer import (
    RECEIVER,
    Size,
    add_size,
    check,
    meet,
    pages_of_prompt,
    wait_for,
)
from bench.ranks.deepseek_v3_config import SMALL, write_config
from bench.ranks.emulated_rank import PAGE_TOKENS, EmulatedRank
from bench.ranks.ep_ranks import on_all_ranks
from bench.records import bench_parser, path_of, report
from core.clock import SystemClock
from engine.kv.pages import pages_of
from engine.link.kv_notice import decode_notices
from engine.sampling.sampler import SampleRow
from engine.sampling.sampling_params import Sampling
from engine.step.runner import Runner
from engine.step.sequence_chunk import SequenceChunk
from ep.group.group import EpGroup
from loadgen.records import BenchRun, Record
from model.batch import AttentionForm
from model.config import ModelConfig
from model.known_models import WeightFormat
from prefill_worker.kv_target import KvGeometry, TargetPages
from prefill_worker.push import PageRange, Pusher
from transfer.nixl_agent import NixlTransfer

BENCH = "kv_push"
PEER = "without transfer"
AGES = ("new", "used")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    weights: WeightFormat
    chunk_tokens: int
    small: bool
    size: Size  # whose page_bytes each rank finds out


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Median seconds over repeats."""

    age: str
    alone: float
    first_token: float
    landed: float


def measure(group: EpGroup, device: torch.device, prefill: Prefill) -> list[Times]:
    """On both ranks at once; the sender knows the times."""
    num_layers, num_pages = prefill.size.num_layers, prefill.size.num_pages
    with tempfile.TemporaryDirectory() as name:
        sizes = SMALL if prefill.small else None
        if group.rank == RECEIVER:
            write_config(Path(name), weights=prefill.weights, num_layers=num_layers, sizes=sizes)
            kv_dim = ModelConfig.from_folder(Path(name)).kv_dim
            shape = (num_layers, num_pages, PAGE_TOKENS, kv_dim)
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
            rank, cache = None, torch.zeros(shape, dtype=dtype, device=device)
        else:
            rank = EmulatedRank.load(
                Path(name),
                weights=prefill.weights,
                device=device,
                max_tokens=1,
                num_pages=num_pages,
                num_layers=num_layers,
                sizes=sizes,
            )
            cache = rank.kv_cache
    transfer = NixlTransfer(f"{BENCH}-{group.rank}-{time.time_ns()}")
    transfer.register(cache)
    size = replace(prefill.size, page_bytes=cache[0, 0].nbytes)
    found = []
    for age in AGES:
        runs = pages_of_prompt(age, group.rank, size)
        goal = meet(group, transfer, runs)
        if rank is None:
            receive(transfer, size)
        else:
            target = TargetPages(
                peer=goal.agent, num_pool_pages=size.num_pages, pages=tuple(pages_of(goal.runs))
            )
            sender = Sender(rank, transfer, prefill, pages_of(runs), target)
            found.append(sender.times(age))
        group.exchange([0])
        check(group, cache.flatten(2).view(torch.uint8), runs, size)
    transfer.close()
    return found


class Sender:
    """A prefill rank that computes the same prompt again and again."""

    def __init__(
        self,
        rank: EmulatedRank,
        transfer: NixlTransfer,
        prefill: Prefill,
        pages: Sequence[int],
        target: TargetPages,
    ) -> None:
        cache = rank.kv_cache
        geometry = KvGeometry(
            num_layers=cache.shape[0],
            page_tokens=PAGE_TOKENS,
            page_bytes=cache[0, 0].nbytes,
            kv_fingerprint="",
        )
        self._runner = Runner(rank.model, cache, AttentionForm.PLAIN)
        self._pusher = Pusher(transfer, cache, geometry, SystemClock())
        self._prefill = prefill
        self._pages = list(pages)
        self._target = target
        vocab_size = rank.model.config.vocab_size
        self._token_ids = [
            7 * position % vocab_size for position in range(prefill.size.prompt_tokens)
        ]

    def times(self, age: str) -> Times:
        """With and without in turn, the first of each apart: it compiles and connects."""
        alone, pushed = [], []
        for attempt in range(1 + self._prefill.size.repeats):
            alone.append(self._alone())
            pushed.append(self._pushed(f"{age}-{attempt}"))
        return Times(
            age=age,
            alone=statistics.median(alone[1:]),
            first_token=statistics.median(first for first, _ in pushed[1:]),
            landed=statistics.median(landed for _, landed in pushed[1:]),
        )

    def _alone(self) -> float:
        began = time.perf_counter()
        for piece in self._pieces():
            self._runner.step([piece], (len(piece.token_ids),))
        return time.perf_counter() - began

    def _pushed(self, attempt_id: str) -> tuple[float, float]:
        """Seconds until the token is there and everything submitted, and until it has landed."""
        pusher = self._pusher
        began = time.perf_counter()
        pusher.open(attempt_id, self._target, self._pages)
        for piece in self._pieces():
            end = -(-(piece.start + len(piece.token_ids)) // PAGE_TOKENS)
            push = pusher.begin_step([PageRange(attempt_id, piece.start // PAGE_TOKENS, end)])
            self._runner.step([piece], (len(piece.token_ids),), push.on_layer, push.finish)
        first_token = time.perf_counter() - began

        def has_landed() -> bool:
            errors = [ended.error for ended in pusher.poll() if ended.error]
            if errors:
                raise RuntimeError(f"a push failed: {errors[0]}")
            return not pusher.num_outstanding

        wait_for(has_landed)
        pusher.close(attempt_id)
        return first_token, time.perf_counter() - began

    def _pieces(self) -> Iterator[SequenceChunk]:
        num_tokens, chunk = self._prefill.size.prompt_tokens, self._prefill.chunk_tokens
        row = SampleRow(sampling=Sampling(), position=num_tokens)
        for begin in range(0, num_tokens, chunk):
            end = min(begin + chunk, num_tokens)
            yield SequenceChunk(
                token_ids=self._token_ids[begin:end],
                start=begin,
                pages=self._pages,
                sample=row if end == num_tokens else None,
            )


def receive(transfer: NixlTransfer, size: Size) -> None:
    """Looks until all pages of all layers have arrived, each time."""
    left = (1 + size.repeats) * size.num_layers * size.prompt_pages

    def all_there() -> bool:
        nonlocal left
        for arrived in transfer.notifications():
            left -= sum(notice.num_layer_pages for notice in decode_notices(arrived.message))
        return left <= 0

    wait_for(all_there, 300.0)


def records(
    run: BenchRun, prefill: Prefill, found: Sequence[Times], where: str = ""
) -> list[Record]:
    """After the times of each pool, how much longer the first token took, in per cent."""
    made = []
    for one in found:
        case = (
            f"{prefill.weights}, {prefill.size.num_layers} layers, "
            f"{prefill.size.prompt_tokens} tokens, {one.age} pools{where}"
        )
        for metric, seconds in (("first token", one.first_token), ("KV landed", one.landed)):
            made.append(
                run.record(
                    case, metric, "ms", 1000 * seconds, peer=PEER, peer_value=1000 * one.alone
                )
            )
        more = 100 * (one.first_token / one.alone - 1)
        made.append(run.record(case, "first token later by", "%", more))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    num_gpus = torch.cuda.device_count()
    on_gpu = num_gpus > 0
    parser = bench_parser(__doc__)
    parser.add_argument("--weights", nargs="+", default=["fp8", "w4afp8"] if on_gpu else ["fp8"],
                        choices=["fp8", "w4afp8", "bf16"])  # fmt: skip
    parser.add_argument("--chunk-tokens", type=int, default=2048 if on_gpu else 256)
    add_size(parser, layers=10 if on_gpu else 3, tokens=4096 if on_gpu else 512, on_gpu=on_gpu)
    arguments = parser.parse_args(argv)
    run = BenchRun.begin(BENCH)
    for weights in arguments.weights:
        prefill = Prefill(
            weights=weights,
            chunk_tokens=arguments.chunk_tokens,
            small=not on_gpu,
            size=Size.of(arguments, page_bytes=0),
        )
        _, found = on_all_ranks(measure, 2, prefill, may_share=True)
        where = ", on one GPU" if num_gpus == 1 else ""
        report(records(run, prefill, found, where), path_of(BENCH, arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
