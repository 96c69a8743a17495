"""A local cluster against transformers on the same cores: `python -m bench.against_transformers`.

(a) output tokens a second with 16 requests at once, against `generate` answering the same
    prompts one after another;
(b) time to first token of a lone request, against the single-process prefill plus one step.

The two never run at the same time. Appends records to bench/results/against_transformers.jsonl.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import msgspec

from bench.records import RESULTS, report, say
from bench.serving.local_cluster import local_cluster
from bench.serving.work import Measured, Work
from loadgen.load import LoadOptions, Outcome, run_load
from loadgen.prompts import token_prompts
from loadgen.records import BenchRun, Record
from loadgen.summary import summarize

PEER = "transformers"
RESULTS_FILE = RESULTS / "against_transformers.jsonl"
_MODEL_NAME = "bench"
_REFERENCE_SECONDS = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    model: Path
    num_prompts: int
    output_tokens: int
    concurrency: int = 16
    prompt_tokens: int = 128
    ttft_lengths: tuple[int, ...] = (64, 512, 2048, 3500)
    ttft_repeats: int = 5
    seed: int = 0

    def throughput_prompts(self) -> list[list[int]]:
        return token_prompts(self.seed, self.num_prompts, self.prompt_tokens)

    def ttft_prompts(self) -> list[list[int]]:
        return [
            prompt
            for length in self.ttft_lengths
            for prompt in token_prompts(self.seed, self.ttft_repeats, length)
        ]


class BenchError(Exception):
    """A measurement that is worth nothing; the message says why."""


def measure_cluster(plan: Plan, url: str) -> tuple[list[Outcome], float, list[Outcome]]:
    """Outcomes and seconds of the throughput run, outcomes of the lone requests."""
    lone = LoadOptions(
        url=url, model=_MODEL_NAME, num_prompts=plan.ttft_repeats, output_tokens=2, seed=plan.seed
    )
    busy = replace(
        lone,
        concurrency=plan.concurrency,
        num_prompts=plan.num_prompts,
        prompt_tokens=plan.prompt_tokens,
        output_tokens=plan.output_tokens,
    )
    # Other prompts than the measured ones, so that no prefix cache is warm.
    warm_up = replace(busy, num_prompts=plan.concurrency, output_tokens=8, seed=plan.seed + 1)
    _load(warm_up)
    outcomes, seconds = _load(busy)
    if any(outcome.num_output_tokens != plan.output_tokens for outcome in outcomes):
        raise BenchError("the cluster gave other numbers of tokens than asked for")
    alone = [_load(replace(lone, prompt_tokens=length))[0] for length in plan.ttft_lengths]
    return outcomes, seconds, list(chain.from_iterable(alone))


def _load(options: LoadOptions) -> tuple[list[Outcome], float]:
    """As `run_load`. Raises BenchError where a request fails."""
    outcomes, seconds = asyncio.run(run_load(options))
    for outcome in outcomes:
        if outcome.error:
            raise BenchError(f"request {outcome.index} failed: {outcome.error}")
    return outcomes, seconds


def measure_transformers(plan: Plan) -> Measured:
    """The same prompts in one process. Raises BenchError when it fails."""
    work = Work(
        model=str(plan.model),
        output_tokens=plan.output_tokens,
        generate=plan.throughput_prompts(),
        prefill=plan.ttft_prompts(),
    )
    process = subprocess.run(
        [sys.executable, "-m", "bench.serving.transformers_reference"],
        input=msgspec.json.encode(work),
        stdout=subprocess.PIPE,
        timeout=_REFERENCE_SECONDS,
        check=False,
    )
    if process.returncode != 0:
        raise BenchError(f"bench.serving.transformers_reference: exit status {process.returncode}")
    return msgspec.json.decode(process.stdout, type=Measured)


def throughput_records(
    run: BenchRun, plan: Plan, busy: Sequence[Outcome], seconds: float, peer: Measured
) -> list[Record]:
    """Output tokens a second beside the peer's, and the latencies at that load."""
    case = (
        f"concurrency {plan.concurrency}, {plan.num_prompts} requests of "
        f"{plan.prompt_tokens} + {plan.output_tokens} tokens"
    )
    peer_rate = sum(map(len, peer.token_ids)) / peer.generate_seconds
    peer_values = {"output_throughput": peer_rate}
    return [
        run.record(case, *figure, peer=PEER, peer_value=peer_values.get(figure.metric))
        for figure in summarize(busy, seconds).figures()
    ]


def ttft_records(
    run: BenchRun, plan: Plan, lone: Sequence[Outcome], peer: Measured
) -> list[Record]:
    """Median time to first token of each length; the peer's is prefill plus one step."""
    records = []
    for index, length in enumerate(plan.ttft_lengths):
        chosen = slice(index * plan.ttft_repeats, (index + 1) * plan.ttft_repeats)
        ours = statistics.median(outcome.ttft_seconds for outcome in lone[chosen])
        theirs = statistics.median(
            each.prefill_seconds + each.step_seconds for each in peer.prefill[chosen]
        )
        case = f"concurrency 1, prompt of {length} tokens"
        records.append(run.record(case, "ttft_p50", "s", ours, peer=PEER, peer_value=theirs))
    return records


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.against_transformers", description=__doc__)
    parser.add_argument("--model", type=Path, default=_demo_model())
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--results", type=Path, default=RESULTS_FILE)
    arguments, up_options = parser.parse_known_args(argv)
    plan = Plan(
        model=arguments.model,
        num_prompts=arguments.num_prompts,
        output_tokens=arguments.output_tokens,
    )
    run = BenchRun.begin("against_transformers")
    model_options = ["--model", str(plan.model), "--served-model-name", _MODEL_NAME]
    say(f"starting a cluster on {run.gpu}")
    with local_cluster([*model_options, *up_options]) as url:
        busy, seconds, lone = measure_cluster(plan, url)
    say("the same with transformers")
    peer = measure_transformers(plan)
    records = throughput_records(run, plan, busy, seconds, peer)
    records += ttft_records(run, plan, lone, peer)
    report(records, arguments.results)
    return 0


def _demo_model() -> Path:
    return Path(__file__).parent.parent / "demo_model" / "checkpoint"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
