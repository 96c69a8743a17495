"""Prefill passes of a whole model over its ranks, a GPU each: `python -m bench.prefill_full`.

As `bench.decode_full`: each rank computes a prompt of its own, in one pass, as prefill workers do,
while experts serve all ranks. Prints and records the time of a pass on the slowest rank and input
tokens a second and GPU. SGLang's public figure of 96 H100 is the peer.
"""

import sys
from collections.abc import Sequence
from functools import partial

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
from ep.group.group import EpGroup
from loadgen.records import BenchRun, Record
from model.batch import AttentionForm

BENCH = "prefill_full"
# Tokens a second and GPU by length.
PEER_RATES = {4096: 6540.0}


def begin(built: RankModel, group: EpGroup, asked: Asked, num_tokens: int) -> Begun:
    runner = Runner(built.model, built.kv_cache, asked.form)
    pages = pages_of_rank(built, group.rank)[: -(-num_tokens // PAGE_TOKENS)]
    pieces = [piece_of(built, group.rank, range(num_tokens), 0, pages)]
    step = partial(
        runner.forward, pieces, (num_tokens,) * group.size, rows_per_rank=(1,) * group.size
    )
    return Begun(step=step)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser_of(__doc__ or "", [512, 4096], "tokens of a prompt").parse_args(argv)
    run = BenchRun.begin(BENCH, on_cpu=arguments.small)

    def records_of(where: str, times: list[Times]) -> list[Record]:
        records = []
        for each in times:
            case = f"{where}, {each.length} tokens"
            records += [
                run.record(case, "pass", "ms", 1000 * each.whole),
                run.record(
                    case, "input tokens a second and GPU", "tokens/s", each.length / each.whole,
                    peer=PEER, peer_value=peer_rate(PEER_RATES, each.length, arguments),
                ),
            ]  # fmt: skip
        return records

    return measure_group(BENCH, AttentionForm.PLAIN, begin, arguments, records_of)


if __name__ == "__main__":
    sys.exit(main())
