"""The comparison's arithmetic, and the peer's own process on a tiny model."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import DeepseekV3ForCausalLM

from bench.against_transformers import Plan, throughput_records, ttft_records
from bench.serving.work import Measured, Prefilled, Work
from loadgen.load import Outcome
from loadgen.records import BenchRun
from tests.tiny_checkpoint import make_tiny_checkpoint

RUN = BenchRun(date="2026-01-01", commit="abc", gpu="cpu", bench="against_transformers")
PLAN = Plan(
    model=Path("/m"),
    num_prompts=2,
    output_tokens=10,
    concurrency=2,
    ttft_lengths=(8, 16),
    ttft_repeats=3,
)


def outcome(index: int, ttft_seconds: float, num_output_tokens: int) -> Outcome:
    return Outcome(
        index=index,
        started_at_seconds=0.0,
        ttft_seconds=ttft_seconds,
        e2e_seconds=2.0,
        num_output_tokens=num_output_tokens,
    )


def test_throughput_is_compared_in_tokens_a_second() -> None:
    peer = Measured(generate_seconds=4.0, token_ids=[[0] * 10, [0] * 10], prefill=[])
    busy = [outcome(index, 0.5, 10) for index in range(2)]
    records = {each.metric: each for each in throughput_records(RUN, PLAN, busy, 1.0, peer)}
    compared = records["output_throughput"]
    assert (compared.value, compared.peer, compared.peer_value) == (20.0, "transformers", 5.0)
    assert compared.case == "concurrency 2, 2 requests of 128 + 10 tokens"
    assert [metric for metric, record in records.items() if record.peer] == ["output_throughput"]


def test_ttft_is_compared_with_prefill_and_a_step_at_each_length() -> None:
    lone = [outcome(index, seconds, 2) for index, seconds in enumerate([1, 9, 2, 5, 4, 6])]
    prefill = [
        Prefilled(num_tokens=8, prefill_seconds=seconds, step_seconds=0.5)
        for seconds in [1.0, 1.0, 3.0, 10.0, 20.0, 30.0]
    ]
    peer = Measured(generate_seconds=1.0, token_ids=[[0]], prefill=prefill)
    records = ttft_records(RUN, PLAN, lone, peer)
    assert [(each.case, each.value, each.peer_value) for each in records] == [
        ("concurrency 1, prompt of 8 tokens", 2.0, 1.5),
        ("concurrency 1, prompt of 16 tokens", 5.0, 20.5),
    ]


def test_ttft_prompts_are_grouped_by_length() -> None:
    assert [len(prompt) for prompt in PLAN.ttft_prompts()] == [8] * 3 + [16] * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_checkpoint(folder)
    return folder


@pytest.mark.slow
def test_the_reference_process_is_transformers(model: Path) -> None:
    prompt = [20, 30, 40, 50]
    work = Work(model=str(model), output_tokens=6, generate=[prompt], prefill=[prompt * 3])
    answer = subprocess.run(
        [sys.executable, "-m", "bench.serving.transformers_reference"],
        input=msgspec.json.encode(work),
        stdout=subprocess.PIPE,
        check=True,
        cwd=Path(__file__).parents[2],
    ).stdout
    measured = msgspec.json.decode(answer, type=Measured)
    expected = DeepseekV3ForCausalLM.from_pretrained(model, dtype=torch.float32).generate(
        torch.tensor([prompt]),
        max_new_tokens=6,
        min_new_tokens=6,
        do_sample=False,
        pad_token_id=0,
    )
    assert measured.token_ids == [expected[0, 4:].tolist()]
    assert measured.generate_seconds > 0
    (prefilled,) = measured.prefill
    assert prefilled.num_tokens == 12
    assert prefilled.step_seconds > 0
    assert prefilled.prefill_seconds > 0
