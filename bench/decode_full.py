"""Decode steps of a whole model over its ranks, a GPU each: `python -m bench.decode_full`.

DeepSeek-V3 with made-up weights, its experts spread over the ranks, attention data-parallel, each
rank with a batch of its own after 2,048 tokens each. Ranks are built as decode workers build them;
experts are chosen by the gate and tokens travel. Prints and records the time of a recorded step on
the slowest rank, that of steps that follow each other with their inputs and samples, the share of
it in which devices wait, and output tokens a second and GPU. SGLang's public figure of 96 H100 is
the peer. `--small`: processes on the CPU, which tells nothing.
"""

import sys
from collections.abc import Sequence
from functools import partial

import torch

from bench.ranks.emulated_rank import PAGE_TOKENS
from bench.ranks.full_ranks import (
    PEER,
    Asked,
    Begun,
    Times,
    measure_group,
    pages_of_rank,
    parser_of,
    peer_rate,
    piece_of,
)
from engine.start.rank_model import RankModel
from engine.step.runner import Runner
from engine.step.sequence_chunk import SequenceChunk
from ep.group.group import EpGroup
from loadgen.records import BenchRun, Record
from model.batch import AttentionForm

BENCH = "decode_full"
# Tokens a second and GPU by length.
PEER_RATES = {128: 2790.0}


def begin(built: RankModel, group: EpGroup, asked: Asked, batch: int) -> Begun:
    graphs = built.graphs
    runner = Runner(built.model, built.kv_cache, asked.form)
    chunks = pieces_of(built, group.rank, batch, asked.context)
    tokens_per_rank = (batch,) * group.size

    def step() -> torch.Tensor:
        if graphs is None:
            logits = runner.forward(chunks, tokens_per_rank)
        else:
            logits = graphs.run(chunks, batch)
        best: torch.Tensor = logits.argmax(-1)
        return best

    return Begun(step=step, replay=None if graphs is None else partial(graphs.replay, batch))


def pieces_of(built: RankModel, rank: int, batch: int, context: int) -> list[SequenceChunk]:
    pages_each = context // PAGE_TOKENS + 1
    pages = pages_of_rank(built, rank)
    return [
        piece_of(built, rank, [row], context, pages[row * pages_each : (row + 1) * pages_each])
        for row in range(batch)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser_of(__doc__ or "", [1, 32, 64, 128], "batches of a rank").parse_args(argv)
    run = BenchRun.begin(BENCH, on_cpu=arguments.small)

    def records_of(where: str, times: list[Times]) -> list[Record]:
        records = []
        for each in times:
            case = f"{where}, context {arguments.context}, batch {each.length}"
            records += [
                run.record(case, "step on the device", "ms", 1000 * each.device),
                run.record(case, "step", "ms", 1000 * each.whole),
                run.record(
                    case, "device waits for the host", "share",
                    max(0.0, 1 - each.device / each.whole),
                ),
                run.record(
                    case, "output tokens a second and GPU", "tokens/s", each.length / each.whole,
                    peer=PEER, peer_value=peer_rate(PEER_RATES, each.length, arguments),
                ),
            ]  # fmt: skip
        return records

    return measure_group(BENCH, AttentionForm.ABSORBED, begin, arguments, records_of)


if __name__ == "__main__":
    sys.exit(main())
