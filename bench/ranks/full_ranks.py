"""The ranks of a real group with a full-size model, as workers build them: what `bench.decode_full`
and `bench.prefill_full` have in common."""

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.ranks.deepseek_v3_config import SMALL, write_config
from bench.ranks.emulated_rank import PAGE_TOKENS
from bench.ranks.ep_ranks import on_all_ranks
from bench.records import bench_parser, path_of, report, say
from engine.process.settings import WorkerSettings
from engine.sampling.sampler import SampleRow
from engine.sampling.sampling_params import Sampling
from engine.start.rank_model import RankModel
from engine.start.start_clock import StartClock
from engine.step.sequence_chunk import SequenceChunk
from ep.group.group import EpGroup
from loadgen.records import Record
from model.batch import AttentionForm
from model.config import ModelConfig
from model.known_models import WeightFormat

PEER = "SGLang on 96 H100"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What every rank is told. `lengths`: batches of decode, tokens of a prompt of prefill."""

    folder: Path
    weights: WeightFormat
    form: AttentionForm
    lengths: tuple[int, ...]
    context: int
    steps: int
    dispatcher: str

    def settings(self, num_ranks: int, device: torch.device) -> WorkerSettings:
        decodes = self.form is AttentionForm.ABSORBED
        most = max(self.lengths)
        rows, tokens = (most, self.context + PAGE_TOKENS) if decodes else (2, most)
        told = {
            "model": self.folder,
            "load_format": "dummy",
            "ranks": num_ranks,
            "device": device.type,
            "ep_dispatcher": self.dispatcher,
            "page_tokens": PAGE_TOKENS,
            "kv_pages": rows * -(-tokens // PAGE_TOKENS),
            "max_model_len": -(-tokens // PAGE_TOKENS) * PAGE_TOKENS,
            "max_running": most if decodes else 1,
            "cuda_graph_batch_sizes": self.lengths if decodes else (),
            "chunk_tokens": max(most, PAGE_TOKENS),
        }
        return WorkerSettings.model_validate(told)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Of one length on one rank, seconds a step: `device` as the device alone needs, `whole` as
    they follow each other with what the host does."""

    length: int
    device: float
    whole: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What a rank repeats of one length: `step` with all that the host does, `replay` what the
    device alone does of it. None: the device waits for no host."""

    step: Callable[[], object]
    replay: Callable[[], object] | None = None


# On a rank of a group, of one length.
Begin = Callable[[RankModel, EpGroup, Asked, int], Begun]


def build_rank(group: EpGroup, device: torch.device, asked: Asked) -> RankModel:
    settings = asked.settings(group.size, device)
    config = ModelConfig.from_folder(asked.folder)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    built = RankModel.build(
        settings, config, group, form=asked.form, device=device, dtype=dtype, clock=StartClock()
    )
    for layer in built.kv_cache:
        layer.normal_()
    return built


def measure_rank(
    group: EpGroup, device: torch.device, begin: Begin, asked: Asked
) -> tuple[str, int, list[Times]]:
    """On every rank at once; the dispatcher's name and the layers, and times."""
    built = build_rank(group, device, asked)
    times = [measured(built, group, asked, begin, length) for length in asked.lengths]
    group.exchange([0])
    built.dispatchers.close()
    return built.dispatchers.choice.name, built.model.config.num_layers, times


def measured(built: RankModel, group: EpGroup, asked: Asked, begin: Begin, length: int) -> Times:
    device = built.kv_cache.device
    begun = begin(built, group, asked, length)
    begun.step()
    group.exchange([0])
    whole = alone = timed(begun.step, asked.steps, device)
    if begun.replay is not None:
        group.exchange([0])
        alone = timed(begun.replay, asked.steps, device)
    return Times(length=length, device=alone, whole=whole)


def slowest(times_by_rank: Sequence[Sequence[Times]]) -> list[Times]:
    """A step is over when all ranks are done with it."""
    return [
        Times(
            length=of_ranks[0].length,
            device=max(times.device for times in of_ranks),
            whole=max(times.whole for times in of_ranks),
        )
        for of_ranks in zip(*times_by_rank, strict=True)
    ]


def pages_of_rank(built: RankModel, rank: int) -> list[int]:
    """All pages, in an order that is no order."""
    return random.Random(rank).sample(range(built.kv_cache.shape[1]), built.kv_cache.shape[1])


def piece_of(
    built: RankModel, rank: int, numbers: Sequence[int], start: int, pages: Sequence[int]
) -> SequenceChunk:
    """Made-up tokens, a different one for each number and rank, and the one after them."""
    vocab_size = built.model.config.vocab_size
    return SequenceChunk(
        token_ids=[(7 * number + 1009 * rank) % vocab_size for number in numbers],
        start=start,
        pages=pages,
        sample=SampleRow(sampling=Sampling(), position=start + len(numbers)),
    )


def timed(step: Callable[[], object], steps: int, device: torch.device) -> float:
    """Seconds a step, of `steps` that are begun one after the other."""
    _wait(device)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    _wait(device)
    return (time.perf_counter() - began) / steps


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def parser_of(description: str, lengths: list[int], meaning: str) -> argparse.ArgumentParser:
    num_gpus = torch.cuda.device_count()
    parser = bench_parser(description)
    parser.add_argument("--ranks", type=int, default=num_gpus or 2)
    parser.add_argument("--weights", default="w4afp8", choices=["w4afp8", "fp8", "bf16"])
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths, help=meaning)
    parser.add_argument("--context", type=int, default=2048, help="tokens of a request")
    parser.add_argument("--layers", type=int, help="fewer of them, for a quick look")
    parser.add_argument(
        "--experts", type=int,
        help="fewer of them: with 128 a rank of two holds, and is sent, what one of four is",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--dispatcher", default="auto", choices=["auto", "collective", "deep_ep"])
    parser.add_argument("--small", action="store_true", help="a small model, on the CPU")
    return parser


def peer_rate(
    rates: Mapping[int, float], length: int, arguments: argparse.Namespace
) -> float | None:
    """Of `rates` of the whole model, by length, the one to compare with."""
    is_whole = not arguments.small and arguments.layers is None and arguments.experts is None
    return rates.get(length) if is_whole else None


def measure_group(
    bench: str,
    form: AttentionForm,
    begin: Begin,
    arguments: argparse.Namespace,
    records_of: Callable[[str, list[Times]], list[Record]],
) -> int:
    """`records_of(what was measured, times of the slowest rank)`."""
    if not arguments.small and torch.cuda.device_count() < max(2, arguments.ranks):
        say(f"{bench} needs {max(2, arguments.ranks)} GPUs: left out")
        return 0
    sizes: dict[str, Any] = dict(SMALL) if arguments.small else {}
    if arguments.experts is not None:
        sizes["n_routed_experts"] = arguments.experts
    with tempfile.TemporaryDirectory() as name:
        folder = write_config(
            Path(name), weights=arguments.weights, num_layers=arguments.layers, sizes=sizes
        )
        asked = Asked(
            folder=folder,
            weights=arguments.weights,
            form=form,
            lengths=tuple(sorted(set(arguments.lengths))),
            context=arguments.context,
            steps=arguments.steps,
            dispatcher=arguments.dispatcher,
        )
        found = on_all_ranks(measure_rank, arguments.ranks, begin, asked)
    dispatcher, num_layers, _ = found[0]
    layers = f"{num_layers} layers"
    if arguments.experts is not None:
        layers += f" of {arguments.experts} experts"
    where = f"{asked.weights}, {layers}, {arguments.ranks} ranks, {dispatcher}"
    records = records_of(where, slowest([times for _, _, times in found]))
    report(records, path_of(bench, arguments))
    return 0
